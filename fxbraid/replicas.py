"""What data-parallel replicas settle with each other beside gradients: that they start from the same weights, that
their batches fit, how many tokens count, and the loss.

With one replica nothing here communicates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import describe, disagreement
from .passes.errors import BraidError
from .passes.settle import TP_RANK
from .runtime import ranks
from .runtime.mesh import Mesh
from .runtime.record import quiet_group

T = TypeVar("T")

#: Of an input: it is the number of tokens of the whole step, so all replicas must give the same.
GLOBAL_COUNT = "num_items_in_batch"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """The replicas of ``mesh``, seen from this rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def compare(self, state: Mapping[str, Tensor]) -> None:
        """Raise :class:`BraidError` on every rank where parameters or buffers differ between replicas: they would
        train different models, and nothing would show it. Collective over all ranks."""
        if self._mesh.dp_group is None:
            return
        names = sorted(state.keys() - {TP_RANK})
        mine = torch.stack([_bits(state[name]) for name in names])
        found = [torch.empty_like(mine) for _ in range(self._mesh.dp_size)]
        dist.all_gather(found, mine, group=self._mesh.dp_group)
        why = None
        for replica, other in enumerate(found):
            if different := (other != found[0]).nonzero().flatten().tolist():
                name = names[different[0]]
                why = (
                    f"{name} of replica {replica} has not the values that it has in replica 0 ({len(different)} of "
                    f"{len(names)} parameters and buffers differ); give all ranks the same model: seed before it is "
                    "made, or load it from one checkpoint"
                )
                break
        if said := next(filter(None, ranks.gather(why)), None):
            raise BraidError(said)

    def together(self, prepare: Callable[[], T], batch: Mapping[str, Any]) -> T:
        """``prepare()``, which looks at ``batch`` and communicates nothing. Where it raises BraidError on one rank, or
        batches have other shapes than elsewhere, every rank raises. Collective over all ranks: one small message."""
        group = quiet_group(self._mesh, world=True) if self._mesh.dp_group is not None else None
        if group is None:
            return prepare()
        error: BraidError | None = None
        result: T | None = None
        try:
            result = prepare()
        except BraidError as raised:
            error = raised
        told = {name: _told(name, batch[name]) for name in sorted(batch)}
        mine = torch.tensor([zlib.crc32(repr(told).encode()), error is not None])
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([rows], [mine]).wait()
        if error is not None or any(int(row[1]) or int(row[0]) != int(mine[0]) for row in rows):
            raise BraidError(self._why(told, error)) from error
        return result  # type: ignore[return-value]

    def _why(self, told: Mapping[str, Any], error: BraidError | None) -> str:
        """The same sentence on every rank: what the first rank that refused its batch said, or how batches differ."""
        found = ranks.gather((dict(told), None if error is None else str(error)))
        for rank, (_, words) in enumerate(found):
            if words is not None:
                return f"{words} (on rank {rank}, so no rank runs this batch)"
        names = sorted({name for one, _ in found for name in one})
        rows = [{f"input {name!r}": (one.get(name, "absent"),) * 2 for name in names} for one, _ in found]
        return disagreement(rows) or "batches differ between ranks; give all ranks the same shapes"

    def counts(self, own: Sequence[Tensor]) -> list[Tensor]:
        """0-d counts of this replica -> those of all together. Collective over this place's ranks."""
        if self._mesh.dp_group is None:
            return list(own)
        total = torch.stack([count.double() for count in own])  # exact up to 2^53
        dist.all_reduce(total, group=self._mesh.dp_group)
        return list(total)

    def total(self, loss: Tensor) -> Tensor:
        """0-d loss of this replica -> the sum over all, added up in their order. Collective over this place's ranks."""
        if self._mesh.dp_group is None:
            return loss
        parts = [torch.empty_like(loss) for _ in range(self._mesh.dp_size)]
        dist.all_gather(parts, loss, group=self._mesh.dp_group)
        first, *others = parts
        for part in others:
            first = first + part
        return first


def _told(name: str, value: Any) -> str:
    """What must be the same everywhere of an input: shape and type, or the value of what is no tensor."""
    if name == GLOBAL_COUNT and (not isinstance(value, Tensor) or value.device.type == "cpu"):
        return f"{float(value):g} tokens of all replicas together"
    return describe(value)


def _bits(value: Tensor) -> Tensor:
    """The sum of a tensor's elements as integers, 0-d int64: other values, another number, but for rare chance."""
    flat = value.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
