"""This rank's gradients beyond one chunk's sums: parameters with several uses, and the norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .passes.errors import BraidError
from .passes.pipeline import Lowered
from .runtime.mesh import Mesh
from .runtime.unit import GradSlot, accumulate
from .schedule import Schedule

#: parameter -> where it is read: (chunk, name there), in chunk order
Uses = Mapping[str, Sequence[tuple[int, str]]]


class Gradients:
    """The gradient slots of this rank's chunks, the ties between them, and clipping.

    ``slots[chunk][name]``: where the W units of a chunk add up a parameter's gradient. Making one is collective
    over all ranks where parameters are tied across them.
    """

    def __init__(
        self, lowered: Lowered, uses: Uses, state: Mapping[str, Tensor], mesh: Mesh, schedule: Schedule
    ) -> None:
        self._uses, self._mesh, self._plan = uses, mesh, lowered.plan
        self._place = schedule.placement
        self.slots = _slots(lowered, uses, state)
        # In an order that is the same on all ranks.
        self._tied = sorted(name for name, where in uses.items() if len(where) > 1)
        self._groups = {
            name: mesh.tie_group(self._place.rank_of(chunk) for chunk, _ in uses[name]) for name in self._tied
        }

    def forget(self) -> None:
        """Drop the sums of a step that an exception cut short."""
        for slots in self.slots.values():
            for slot in slots.values():
                slot.total = None

    def combine_ties(self) -> None:
        """Sum a tied parameter's gradients over its uses, here and on other ranks."""
        for name in self._tied:
            here = [self.slots[c][alias] for c, alias in self._uses[name] if c in self.slots]
            if not here or not here[0].parameter.requires_grad:
                continue
            total: Tensor | None = None
            for slot in here:
                if slot.total is not None:
                    total = slot.total if total is None else total + slot.total
                slot.total = None
            if total is None:
                total = torch.zeros_like(here[0].parameter)
            group = self._groups[name]
            if group is not None:
                total = total.contiguous()
                dist.all_reduce(total, group=group)
            accumulate(here[0].parameter, total)

    def clip(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """See ``BraidedModel.clip_grad_norm_``."""
        if norm_type <= 0:
            raise BraidError(f"norm_type={norm_type} must be above 0")
        named = list(parameters)
        norm = self._norm(named, norm_type)
        if not any(p.dtype is torch.float64 for _, p in named):
            norm = norm.float()
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the gradient norm is {float(norm)}; no gradient was scaled")
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm

    def _norm(self, parameters: Sequence[tuple[str, nn.Parameter]], norm_type: float) -> Tensor:
        infinite = math.isinf(norm_type)
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for name, parameter in parameters:
            grad = parameter.grad
            if grad is None or not self._counts(name):
                continue
            if infinite:
                total = torch.maximum(total, grad.abs().max().double())
            else:
                total = total + torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) ** norm_type
        if self._mesh.model_group is not None:
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(total, operation, group=self._mesh.model_group)
        return total if infinite else total ** (1.0 / norm_type)

    def _counts(self, name: str) -> bool:
        """Does this rank count the parameter in a norm over the model?"""
        if self._plan.params[name].dim is None and self._mesh.tp_rank != 0:
            return False
        where = self._uses.get(name, [])
        return len(where) < 2 or self._mesh.pp_rank == min(self._place.rank_of(chunk) for chunk, _ in where)


def _slots(lowered: Lowered, uses: Uses, state: Mapping[str, Tensor]) -> dict[int, dict[str, GradSlot]]:
    return {
        index: {
            name: GradSlot(parameter, shared=len(uses[lowered.canonical[name]]) > 1)
            for name in lowered.partition.chunks[index].params
            if isinstance(parameter := state[name], nn.Parameter)
        }
        for index in lowered.chunks
    }
