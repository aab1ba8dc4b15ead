"""Which boxes of which full tensors this rank holds, and which of them it writes.

A checkpoint knows full tensors under their Hugging Face names and nothing of layouts. A rank's shard is one box of the
full tensor, or, where a weight is fused, a box per section; padding is in no box. What several ranks hold (a norm, a
shared key-value head, a tied embedding, everything along a data-parallel axis) is written by one of them, chosen on
every rank alike, so that each writes about as much::

    qkv [12 rows: 8 q | 2 k | 2 v], tp_size 4, rank 1
    local rows    0 1 | 2 | 3
    boxes         q [2, 4) | k [8, 9) | v [10, 11)      k and v are on ranks 0 and 1: one of the two writes them
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..passes.layout import ParamShard
from ..passes.shard import canonical_names
from ..state import aliases

if TYPE_CHECKING:
    from ..model import BraidedModel
    from ..runtime.mesh import Mesh

#: a box's identity among those of one tensor: where it begins along the dimension that is cut
Start = int


@dataclass(frozen=True, slots=True)
class Box:
    """``shape`` elements from ``offset`` in the full tensor; in the rank's own they begin at ``local`` along ``dim``
    (None: the rank's tensor is the box). ``writes``: this rank writes it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int | None
    local: int
    writes: bool

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this box in the rank's tensor."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.local, self.shape[self.dim])


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of this rank: ``full`` is the shape that the checkpoint has, ``boxes`` lie over it (none where the rank
    has padding only). ``cut``: over tensor-parallel ranks. ``first``: of the replicas of this shard, along the pipeline
    (tied) and data-parallel axes, this rank has the one that counts."""

    name: str
    tensor: Tensor
    full: tuple[int, ...]
    boxes: tuple[Box, ...]
    cut: bool = False
    first: bool = True

    def like(self, tensor: Tensor, name: str) -> Held:
        """The same boxes of another tensor that is cut as this one is, such as an optimizer's state."""
        return replace(self, tensor=tensor, name=name)


def whole(name: str, tensor: Tensor, *, writes: bool) -> Held:
    """A tensor that is a box by itself."""
    shape = tuple(tensor.shape)
    return Held(name, tensor, shape, (Box((0,) * len(shape), shape, None, 0, writes),))


def replicas(mesh: Mesh) -> tuple[int, int]:
    """(ranks that hold this rank's whole model part, this one's place among them): the data-parallel axis."""
    return mesh.dp_size, mesh.dp_rank


def held(model: BraidedModel, *, alone: bool = False) -> dict[str, Held]:
    """What this rank holds of every parameter (under its first name) and every saved buffer. Local. ``alone``: of what
    no other replica has, so that none writes in its place."""
    mesh, shards = model._mesh, model.plan.tp.params
    place = model.schedule.placement
    skeleton = structure(model)
    known = aliases(skeleton)
    readers = {
        name: sorted({place.rank_of(chunk) for chunk, _ in model._uses.get(name, [(0, name)])})
        for name in known
    }
    # A tied parameter is on several pipeline ranks; the first of them writes it.
    mine = {name: shards[name] for name, ranks in readers.items() if ranks[0] == mesh.pp_rank}
    copies, copy = (1, 0) if alone else replicas(mesh)
    writers = _writers(mine, mesh.tp_size, copies)
    found: dict[str, Held] = {}
    for name, names in known.items():
        parameter = next((p for alias in names if (p := _parameter(model, alias)) is not None), None)
        if parameter is None:
            continue
        shard, me = shards[name], (mesh.tp_rank, copy)
        boxes = tuple(
            replace(box, writes=writers.get((name, start)) == me)
            for start, box in _boxes(shard, mesh.tp_rank)
        )
        counts = readers[name][0] == mesh.pp_rank and copy == 0
        found[name] = Held(name, parameter.detach(), shard.shape, boxes, shard.dim is not None, counts)
    first = mesh.pp_rank == place.rank_of(0)  # it has all saved buffers; others have those that they read
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter):
            found[name] = whole(name, value.detach(), writes=first and mesh.tp_rank == 0 and copy == 0)
    return found


def structure(model: BraidedModel) -> nn.Module:
    """The user's model on the meta device."""
    return model.source


def names_of(model: BraidedModel) -> dict[int, str]:
    """id of each parameter of this rank -> the name that the checkpoint has for it. Behind ``torch.compile`` also of
    those that are empty here, since other ranks hold them: :func:`held` has none of these."""
    first = canonical_names(structure(model))
    elsewhere = {id(p): first[name] for p, name in model._elsewhere.items()}
    return elsewhere | {id(p): first[name] for name, p in model.named_parameters(remove_duplicate=False)}


def _parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    module: nn.Module | None = model
    *path, leaf = name.split(".")
    for part in path:
        module = module._modules.get(part) if module is not None else None
    return module._parameters.get(leaf) if module is not None else None


def _boxes(shard: ParamShard, tp_rank: int) -> list[tuple[Start, Box]]:
    if shard.dim is None:
        return [(0, Box((0,) * len(shard.shape), shard.shape, None, 0, False))]
    found = []
    for piece in shard.pieces(tp_rank):
        if piece.length == 0:  # nothing but padding
            continue
        offset = tuple(piece.start if d == shard.dim else 0 for d in range(len(shard.shape)))
        shape = tuple(piece.length if d == shard.dim else n for d, n in enumerate(shard.shape))
        found.append((piece.start, Box(offset, shape, shard.dim, piece.local, False)))
    return found


def _writers(
    shards: Mapping[str, ParamShard], tp_size: int, copies: int
) -> Mapping[tuple[str, Start], tuple[int, int]]:
    """Who of a pipeline rank's tensor-parallel ranks and their ``copies`` writes which box: the largest boxes first,
    each to the one with the least so far. The same on all of them."""
    holders: dict[tuple[str, Start], list[int]] = {}
    sizes: dict[tuple[str, Start], int] = {}
    for name, shard in shards.items():
        for rank in range(tp_size):
            for start, box in _boxes(shard, rank):
                holders.setdefault((name, start), []).append(rank)
                sizes[name, start] = math.prod(box.shape)
    load = {(rank, copy): 0 for rank in range(tp_size) for copy in range(copies)}
    chosen = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        among = [(rank, copy) for rank in holders[key] for copy in range(copies)]
        chosen[key] = min(among, key=lambda place: (load[place], place))
        load[chosen[key]] += sizes[key]
    return chosen
