"""This rank's gradients beyond one chunk's sums: those of other replicas, parts of other tensor-parallel ranks,
parameters with several uses, and the norm over all ranks.

A parameter that is whole on every tensor-parallel rank but read on each one's own features (a norm over heads, a
router, a key-value head that several ranks hold) has on each rank the part of its gradient that comes from there.
The parts are summed once per step, all in one message: what each rank sends is gathered, and every rank adds it up
in rank order, so that the sum of a parameter does not depend on what else is in the message.

Replicas come first: every chunk's sums go over them while the program runs (``runtime.buckets``), and what is put
together at the end of the step is made of sums over all replicas, the same on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .passes.errors import BraidError
from .passes.layout import Piece
from .passes.pipeline import Lowered
from .precision import MainGrads, accumulated_in
from .runtime.buckets import DEFAULT_MB, Reducer
from .runtime.mesh import Mesh
from .runtime.unit import GradSlot, accumulate, gradient, put
from .schedule import Schedule

#: Elements of a message of :func:`sum_in_rank_order`, of which every rank holds its group's at once.
LARGEST = 2**24

Nonfinite = Literal["scale", "skip", "raise"]
#: What clipping does about a norm that is not finite.
NONFINITE: tuple[str, ...] = get_args(Nonfinite)

#: parameter -> where it is read: (chunk, name there), in chunk order
Uses = Mapping[str, Sequence[tuple[int, str]]]


class Gradients:
    """The gradient slots of this rank's chunks, what is summed at the end of a step, and clipping.

    ``slots[chunk][name]``: where the W units of a chunk add up a parameter's gradient. Making one is collective
    over all ranks where parameters are tied across them or rows are shared between some of a TP group.
    """

    def __init__(
        self,
        lowered: Lowered,
        uses: Uses,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        schedule: Schedule,
        grad_dtype: torch.dtype | None = None,
        *,
        bucket_mb: float = DEFAULT_MB,
    ) -> None:
        self._uses, self._mesh, self._plan = uses, mesh, lowered.plan
        self._place = schedule.placement
        self.slots = _slots(lowered, uses, parameters, grad_dtype, every=mesh.dp_size > 1)
        self._main = MainGrads((slot.parameter, slot.dtype) for _, slot in self._ordered())
        #: what sums over replicas, where there are several
        self.reducer = _reducer(lowered, self.slots, mesh.dp_group, bucket_mb) if mesh.dp_group else None
        # In an order that is the same on all ranks.
        self._tied = sorted(name for name, where in uses.items() if len(where) > 1)
        self._groups = {
            name: mesh.tie_group(self._place.rank_of(chunk) for chunk, _ in uses[name]) for name in self._tied
        }

        self._canonical = lowered.canonical
        shared = {p.parts for s in self._plan.params.values() for p in s.pieces(0)} - {self._plan.tp_size}
        #: by number of parts: the ranks that hold the same rows; 1 is the whole TP group
        self._sharers = {parts: mesh.share_group(parts) for parts in sorted(shared | {1})}

    def begin(self) -> None:
        """At the beginning of a step: take up what ``.grad`` holds, and drop the sums of a step that an exception cut
        short."""
        self._main.resume()
        self.forget()

    def forget(self) -> None:
        """Drop the sums of a step."""
        if self.reducer is not None:
            self.reducer.forget()
        for slots in self.slots.values():
            for slot in slots.values():
                slot.total = None

    def finish(self) -> None:
        """At the end of a step: wait for the sums over replicas, then sum the parts of a TP group, then a tied
        parameter's uses, into ``.grad``."""
        if self.reducer is not None:
            self.reducer.wait()
        self._sum_parts()
        for name in self._tied:
            self._combine(name)
        for _, slot in self._ordered():
            if slot.total is not None:
                _hand_over(slot)
                slot.total = None
        self._main.publish()

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What is added up inside is dropped."""
        self._main.resume()
        parameters = {slot.parameter: slot.dtype for _, slot in self._ordered()}
        before = {p: total.clone() if (total := self._main.of(p)) is not None else None for p in parameters}
        try:
            yield
            if self.reducer is not None:
                self.reducer.wait()
        finally:
            self.forget()
            for parameter, total in before.items():
                put(parameter, total, parameters[parameter])
            self._main.publish()

    @contextmanager
    def aside(self) -> Iterator[dict[nn.Parameter, Tensor]]:
        """What is added up inside is in the mapping afterwards, in the types that it adds up in, and in no gradient:
        those are as they were. Nothing is copied."""
        self._main.resume()
        parameters = {slot.parameter: slot.dtype for _, slot in self._ordered()}
        before = {p: (p.grad, self._main.of(p)) for p in parameters}
        taken: dict[nn.Parameter, Tensor] = {}
        with self._main.aside():
            try:
                for parameter in parameters:
                    parameter.grad = None
                self._main.resume()
                yield taken
                taken |= {p: total for p in parameters if (total := self._main.of(p)) is not None}
            finally:
                self.forget()
                for parameter, (grad, total) in before.items():
                    parameter.grad = grad
                    put(parameter, total, parameters[parameter])

    def add(self, taken: Mapping[nn.Parameter, Tensor], scale: Tensor) -> None:
        """Add what :meth:`aside` has taken to the gradients, times ``scale`` (0-d). Its tensors are given away."""
        self._main.resume()
        for parameter, total in taken.items():
            total.mul_(scale)
            if gradient(parameter, total.dtype) is None:
                put(parameter, total, total.dtype)
            else:
                accumulate(parameter, total, total.dtype)
        self._main.publish()

    def _ordered(self) -> list[tuple[str, GradSlot]]:
        """Every slot with its parameter's name there, in an order that is the same on all ranks of a TP group."""
        return [
            (name, slots[name])
            for chunk in sorted(self.slots)
            for slots in (self.slots[chunk],)
            for name in sorted(slots)
        ]

    def _sum_parts(self) -> None:
        parts: dict[int, list[Tensor]] = {}
        for name, slot in self._ordered():
            if slot.total is None:
                continue
            shard = self._plan.params[self._canonical[name]]
            if name in self._plan.partial:
                parts.setdefault(1, []).append(slot.total)
            for piece in shard.pieces(self._mesh.tp_rank):
                if piece.parts < self._plan.tp_size:
                    parts.setdefault(piece.parts, []).append(_rows(slot.total, shard.dim, piece))
        for count in sorted(parts):
            group = self._sharers[count]
            if group is not None:
                sum_in_rank_order(parts[count], group)

    def _combine(self, name: str) -> None:
        """Sum a tied parameter's gradients over its uses, here and on other ranks."""
        here = [self.slots[c][alias] for c, alias in self._uses[name] if c in self.slots]
        if not here or not here[0].parameter.requires_grad:
            return
        total: Tensor | None = None
        for slot in here:
            if slot.total is not None:
                total = slot.total if total is None else total + slot.total
            slot.total = None
        if total is None:
            total = torch.zeros_like(here[0].parameter, dtype=here[0].dtype)
        group = self._groups[name]
        if group is not None:
            total = total.contiguous()
            dist.all_reduce(total, group=group)
        accumulate(here[0].parameter, total, here[0].dtype)

    def clip(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        max_norm: float,
        norm_type: float,
        nonfinite: Nonfinite,
    ) -> Tensor:
        """See ``BraidedModel.clip_grad_norm_``."""
        if norm_type <= 0:
            raise BraidError(f"norm_type={norm_type} must be above 0")
        if nonfinite not in NONFINITE:
            raise BraidError(f"nonfinite={nonfinite!r} is not one of {', '.join(map(repr, NONFINITE))}")
        named = list(parameters)
        self._main.resume()
        norm = self._norm(named, norm_type)
        if not any(p.dtype is torch.float64 for _, p in named):
            norm = norm.float()
        # The norm is the same on every rank, to the bit, so all of them decide the same.
        if nonfinite != "scale" and not bool(torch.isfinite(norm)):
            if nonfinite == "raise":
                raise RuntimeError(f"the gradient norm is {float(norm)}; no gradient was scaled")
            for _, parameter in named:
                parameter.grad = None
            return norm
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, parameter in named:
            grad = self._main.of(parameter)
            if grad is not None:
                grad.mul_(scale.to(grad.dtype))
        self._main.publish()
        return norm

    def _norm(self, parameters: Sequence[tuple[str, nn.Parameter]], norm_type: float) -> Tensor:
        """Over the whole model. What each parameter and TP rank adds to it has a place of its own, and the places are
        added up in the plan's order: to the bit the same however chunks lie over the ranks."""
        infinite = math.isinf(norm_type)
        place = {name: i for i, name in enumerate(self._plan.params)}
        terms = torch.zeros(len(place), self._mesh.tp_size, dtype=torch.float64, device=self._mesh.device)
        for name, parameter in parameters:
            for grad in self._counted(name, parameter):
                term = terms[place[name], self._mesh.tp_rank]
                if infinite:
                    torch.maximum(term, grad.abs().max().double(), out=term)
                else:
                    term += torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) ** norm_type
        if self._mesh.model_group is not None:
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(terms, operation, group=self._mesh.model_group)
        return terms.max() if infinite else terms.sum() ** (1.0 / norm_type)

    def _counted(self, name: str, parameter: nn.Parameter) -> list[Tensor]:
        """What of the parameter's gradient this rank counts in a norm over the model: each row counts once."""
        grad = self._main.of(parameter)
        where = self._uses.get(name, [])
        if grad is None or (
            len(where) > 1 and self._mesh.pp_rank != min(self._place.rank_of(chunk) for chunk, _ in where)
        ):
            return []
        shard = self._plan.params[name]
        if shard.dim is None:
            return [grad] if self._mesh.tp_rank == 0 else []
        if not shard.shared:
            return [grad]
        return [_rows(grad, shard.dim, piece) for piece in shard.pieces(self._mesh.tp_rank) if piece.first]


def _hand_over(slot: GradSlot) -> None:
    """Add ``total`` to the gradient; where there is none yet, what lies in a bucket becomes it without a copy."""
    total, parameter = slot.total, slot.parameter
    assert total is not None
    if slot.home is not None and gradient(parameter, slot.dtype) is None:
        put(parameter, total, slot.dtype)
    else:
        accumulate(parameter, total, slot.dtype)


def _rows(tensor: Tensor, dim: int | None, piece: Piece) -> Tensor:
    """A view of the rows of ``piece`` in a local tensor."""
    return tensor.narrow(dim or 0, piece.local, piece.length)


def sum_in_rank_order(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over ``group``, added up in rank order; one gather per dtype, in pieces of at most
    ``LARGEST`` elements (an embedding's gradient may be a part). Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for _, same in sorted(by_dtype.items(), key=lambda item: str(item[0])):
        mine = torch.cat([t.reshape(-1) for t in same])
        for piece in mine.split(LARGEST):
            gathered = piece.new_empty(group.size() * piece.numel())
            dist.all_gather_into_tensor(gathered, piece, group=group)
            total, *others = gathered.chunk(group.size())
            for part in others:
                total.add_(part)
            piece.copy_(total)
        for tensor, value in zip(same, mine.split([t.numel() for t in same]), strict=True):
            tensor.copy_(value.view(tensor.shape))


def _reducer(
    lowered: Lowered, slots: Mapping[int, Mapping[str, GradSlot]], group: dist.ProcessGroup, bucket_mb: float
) -> Reducer:
    read_in, canonical = lowered.partition.read_in, lowered.canonical
    readers: dict[str, set[int]] = {}
    for name, layers in read_in.items():
        readers.setdefault(canonical[name], set()).update(layers)
    return Reducer(
        slots,
        {name: min(layers) for name, layers in read_in.items() if layers},
        group,
        apart={name for name in read_in if len(readers[canonical[name]]) > 1},
        bucket_mb=bucket_mb,
    )


def _slots(
    lowered: Lowered,
    uses: Uses,
    parameters: Mapping[str, nn.Parameter],
    grad_dtype: torch.dtype | None,
    *,
    every: bool,
) -> dict[int, dict[str, GradSlot]]:
    """``every``: with replicas, all parameters are summed apart from their gradients."""
    plan = lowered.plan

    def summed_later(name: str) -> bool:
        first = lowered.canonical[name]
        return every or len(uses[first]) > 1 or name in plan.partial or plan.params[first].shared

    return {
        index: {
            name: GradSlot(
                parameters[name],
                shared=summed_later(name),
                dtype=accumulated_in(parameters[name].dtype, grad_dtype),
            )
            for name in lowered.partition.chunks[index].params
            if name in parameters
        }
        for index in lowered.chunks
    }
