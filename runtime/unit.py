"""What a block calls: a unit bound to this rank's parameters, and the gradients that a W unit adds to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..passes.compile import Artefact
from ..passes.errors import VerifyError
from ..passes.joint import Phase
from ..passes.products import Product, SumArtefact
from .boxed import Boxed, boxed

if TYPE_CHECKING:
    from ..passes.units import Unit


class GradSlot:
    """Where one chunk's gradient of one parameter is summed, in ``dtype``.

    A parameter that one chunk uses sums straight into its gradient. A tied one, used by several chunks, sums per
    chunk and is put together at the end of the step: then the order of additions is that of micro-batches within
    each chunk, whatever the schedule, and equal to the bit between schedules. With data parallelism every parameter
    is: what goes over the replicas is this step's sum alone. ``home``: gives the memory in which it is made.
    """

    __slots__ = ("dtype", "home", "parameter", "shared", "total")

    def __init__(self, parameter: nn.Parameter, *, shared: bool, dtype: torch.dtype | None = None) -> None:
        self.parameter = parameter
        self.shared = shared
        self.dtype = dtype or parameter.dtype
        self.total: Tensor | None = None
        self.home: Callable[[], Tensor] | None = None

    def add(self, grad: Tensor) -> None:
        """Add ``grad`` (shape of the parameter)."""
        if not self.shared:
            accumulate(self.parameter, grad, self.dtype)
        elif self.total is None:
            self.total = self._empty().copy_(grad)
        else:
            self.total.add_(grad)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right`` (shape of the parameter) where the gradient lies."""
        total = self.total if self.shared else gradient(self.parameter, self.dtype)
        if total is None and left.dtype is self.dtype:
            total = torch.mm(left, right, out=self._empty())
            if self.shared:
                self.total = total
            else:
                put(self.parameter, total, self.dtype)
        elif total is not None and left.dtype is total.dtype:
            total.addmm_(left, right)
        else:
            self.add(torch.mm(left, right))

    def _empty(self) -> Tensor:
        """Memory for a step's first contribution."""
        if self.home is not None:
            return self.home()
        return torch.empty_like(self.parameter, dtype=self.dtype, requires_grad=False)


def gradient(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
    """What gradients of ``dtype`` add up in: ``.grad``, or, where the parameter's own type is another one,
    ``.main_grad`` (Megatron-LM's name for it)."""
    return parameter.grad if dtype is parameter.dtype else getattr(parameter, "main_grad", None)


def accumulate(parameter: nn.Parameter, grad: Tensor, dtype: torch.dtype) -> None:
    """Add ``grad`` to the parameter's gradient of ``dtype``."""
    total = gradient(parameter, dtype)
    if total is None:
        # A copy, laid out as the parameter is: fused optimizers want it so, and an artefact's result may be a view
        # that keeps a larger buffer alive or shares it with another parameter's gradient.
        put(parameter, torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(grad), dtype)
    else:
        total.add_(grad)


def put(parameter: nn.Parameter, total: Tensor | None, dtype: torch.dtype) -> None:
    """Make ``total`` (of ``dtype``) the parameter's gradient."""
    if dtype is parameter.dtype:
        parameter.grad = total
    else:
        parameter.main_grad = total  # type: ignore[attr-defined]


class BoundUnit(nn.Module):
    """``forward(*args)``: the artefact on this rank's parameters and buffers; ``forward([args])``: the same, and the
    list is emptied, so that an argument that nobody else holds is freed during the call.

    A W unit returns only its values; its gradients go to their slots. ``around`` wraps the whole call, for a clock.
    """

    def __init__(
        self,
        unit: Unit,
        artefact: Artefact,
        state: Mapping[str, Tensor],
        slots: Mapping[str, GradSlot],
        around: Callable[[Unit, Boxed], Boxed] = lambda unit, call: call,
    ) -> None:
        super().__init__()
        # A tuple, not attributes: these are the model's parameters, not the block's.
        self._state = tuple(state[name] for name in unit.state)
        call = boxed(artefact)
        if unit.phase is Phase.W:
            own = [slots[name] if name is not None else None for name in unit.grads]
            call = _Sums(artefact, own) if isinstance(artefact, SumArtefact) else _adding(call, own)
        self._call = around(unit, call)

    def forward(self, *args: Tensor | list[Tensor]) -> Sequence[Tensor]:
        first = args[0] if args else None
        return self.boxed(first if isinstance(first, list) else list(args))  # type: ignore[arg-type]

    def boxed(self, args: list[Tensor]) -> Sequence[Tensor]:
        """Run on ``args``, which are taken out of the list."""
        if self._state:
            args[:0] = self._state
        return self._call(args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _adding(call: Boxed, slots: Sequence[GradSlot | None]) -> Boxed:
    """``call``, with its gradients added into their slots and left out of its outs."""

    def run(inputs: list[Tensor]) -> list[Tensor]:
        values = []
        for slot, out in zip(slots, call(inputs), strict=True):
            if slot is None:
                values.append(out)
            else:
                slot.add(out)
        return values

    return run


@dataclass(frozen=True, slots=True)
class _Addition:
    """One product of a W unit: ``slot`` += ``held[left] @ held[right]``, transposed as said; ``drops``: what of
    ``held`` nothing reads afterwards."""

    slot: GradSlot
    left: int
    left_transposed: bool
    right: int
    right_transposed: bool
    drops: tuple[int, ...]


class _Sums:
    """A W unit whose weight gradients are products: each is added where its gradient lies, and an operand is let go of
    behind the last product that reads it. In boxed form; returns the unit's values."""

    def __init__(self, artefact: SumArtefact, slots: Sequence[GradSlot | None]) -> None:
        plan = artefact.plan
        sides = [side for product in plan.products for side in (product.left, product.right)]
        own = [slots[k] for k in plan.kept]
        computed = sorted({side.index for side in sides if side.computed})
        self._reads = plan.reads
        self._rest = None
        if artefact.rest is not None:
            self._rest = _adding(boxed(artefact.rest), [*own, *(None for _ in computed)])
        self._values = own.count(None)
        self._operands = tuple(sorted({side.index for side in sides if not side.computed}))
        places = [(False, k) for k in self._operands] + [(True, k) for k in computed]
        self._additions = _additions(plan.products, slots, {place: k for k, place in enumerate(places)})

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        held: list[Tensor | None] = [inputs[k] for k in self._operands]
        values: Sequence[Tensor] = ()
        if self._rest is not None:
            reads = [inputs[k] for k in self._reads]
            inputs.clear()
            values = self._rest(reads)
            held += values[self._values :]
            values = values[: self._values]
        inputs.clear()
        for addition in self._additions:
            left, right = held[addition.left], held[addition.right]
            if addition.left_transposed:
                left = left.t()  # type: ignore[union-attr]
            if addition.right_transposed:
                right = right.t()  # type: ignore[union-attr]
            addition.slot.add_product(left, right)  # type: ignore[arg-type]
            left = right = None
            for k in addition.drops:
                held[k] = None
        return values


def _additions(
    products: Sequence[Product], slots: Sequence[GradSlot | None], place: Mapping[tuple[bool, int], int]
) -> list[_Addition]:
    made: list[_Addition] = []
    later: set[int] = set()
    for product in reversed(products):
        left, right = (place[side.computed, side.index] for side in (product.left, product.right))
        slot = slots[product.out]
        if slot is None:
            raise VerifyError(f"out {product.out} of a W unit is a weight gradient, but has no slot")
        drops = tuple({left, right} - later)
        later |= {left, right}
        made.append(_Addition(slot, left, product.left.transposed, right, product.right.transposed, drops))
    return made[::-1]
