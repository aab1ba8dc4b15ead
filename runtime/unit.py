"""What a block calls: a unit bound to this rank's parameters, and the gradients that a W unit adds to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..passes.compile import Artefact
from ..passes.joint import Phase
from ..passes.units import Unit


class GradSlot:
    """Where one chunk's gradient of one parameter is summed.

    A parameter that one chunk uses sums straight into ``.grad``. A tied one, used by several chunks, sums per
    chunk and is put together at the end of the step: then the order of additions is that of micro-batches within
    each chunk, whatever the schedule, and equal to the bit between schedules.
    """

    __slots__ = ("parameter", "shared", "total")

    def __init__(self, parameter: nn.Parameter, *, shared: bool) -> None:
        self.parameter = parameter
        self.shared = shared
        self.total: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        """Add ``grad`` (shape of the parameter)."""
        if self.shared:
            self.total = grad.clone() if self.total is None else self.total.add_(grad)
        else:
            accumulate(self.parameter, grad)


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """``parameter.grad += grad``."""
    if parameter.grad is None:
        # A copy, laid out as the parameter is: fused optimizers want it so, and an artefact's result may be a view
        # that keeps a larger buffer alive or shares it with another parameter's gradient.
        parameter.grad = torch.empty_like(parameter).copy_(grad)
    else:
        parameter.grad.add_(grad)


class BoundUnit(nn.Module):
    """``forward(*args)``: the artefact on this rank's parameters and buffers.

    A W unit returns only its values; its gradients go to their slots.
    """

    def __init__(
        self,
        unit: Unit,
        artefact: Artefact,
        state: Mapping[str, Tensor],
        slots: Mapping[str, GradSlot],
    ) -> None:
        super().__init__()
        # A tuple, not attributes: these are the model's parameters, not the block's.
        self._state = tuple(state[name] for name in unit.state)
        self._artefact = artefact
        self._slots: list[GradSlot | None] = []
        self._plain = unit.phase is not Phase.W
        if not self._plain:
            self._slots = [slots[name] if name is not None else None for name in unit.grads]

    def forward(self, *args: Tensor) -> Sequence[Tensor]:
        outs = self._artefact(*self._state, *args)
        if self._plain:
            return outs
        values: list[Tensor] = []
        for slot, out in zip(self._slots, outs, strict=True):
            if slot is None:
                values.append(out)
            else:
                slot.add(out)
        return values

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
