"""Does an engine give the unsplit model's loss and gradients? Compared shard by shard.

Rank 0 runs the unsplit model and alone keeps its gradients; each parameter's is broadcast, compared by the
ranks that hold a part of it, and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fxbraid.runtime.ranks import gather


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count`` equal parts along ``dim`` of the gradient of Hugging Face's ``name``."""

    name: str
    grad: Tensor | None
    dim: int | None = None
    index: int = 0
    count: int = 1

    def of(self, full: Tensor) -> Tensor:
        return full if self.dim is None else full.chunk(self.count, self.dim)[self.index]


@dataclass(frozen=True, slots=True)
class Reference:
    """The unsplit model's loss on every rank; its gradients on rank 0, empty elsewhere."""

    loss: float
    grads: Mapping[str, Tensor] = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Difference:
    """``grad`` is max over parameters of max|g - ref| / max|ref|; ``worst`` names the parameter."""

    loss: float
    grad: float
    worst: str

    def within(self, loss_tol: float, grad_tol: float) -> bool:
        return self.loss <= loss_tol and self.grad <= grad_tol


def run_reference(model: nn.Module, batch: Mapping[str, Tensor]) -> Reference:
    """Forward and backward of the unsplit ``model`` on rank 0; every rank learns the loss. Collective."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    grads: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        out = model(**batch, use_cache=False).loss
        out.backward()
        loss.copy_(out.detach())
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    dist.broadcast(loss, src=0)
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    return Reference(float(loss), grads, shapes, next(iter(parameters.values())).dtype)


def dtensor_part(name: str, parameter: nn.Parameter) -> Part:
    """The part that a DTensor parameter on a one-axis mesh (or a plain parameter) holds here."""
    grad = parameter.grad
    if not isinstance(parameter, DTensor):
        return Part(name, grad)
    placement = parameter.placements[0]
    if isinstance(grad, DTensor):
        grad = grad.redistribute(placements=parameter.placements).to_local()
    if not isinstance(placement, Shard):
        return Part(name, grad)
    mesh = parameter.device_mesh
    return Part(name, grad, placement.dim, mesh.get_local_rank(), mesh.size())


def compare(loss: Tensor, parts: Iterable[Part], reference: Reference) -> Difference:
    """The difference to ``reference``, the same on every rank. Collective.

    Raises where a parameter has no gradient on some rank, or where its parts do not make up the whole.
    """
    mine = {part.name: part for part in parts}
    _check_cover(mine, reference)
    device = loss.device
    errors = []
    for name, shape in reference.shapes.items():
        empty = torch.empty(shape, dtype=reference.dtype, device=device)
        full = reference.grads[name].contiguous() if reference.grads else empty
        dist.broadcast(full, src=0)
        part = mine.get(name)
        if part is None or part.grad is None:
            errors.append(torch.zeros((), device=device))
            continue
        scale = full.abs().max().clamp_min(torch.finfo(full.dtype).tiny)
        errors.append((part.grad - part.of(full)).abs().max() / scale)
    worst = torch.stack([error.double() for error in errors]).nan_to_num(nan=torch.inf)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    loss_error = (loss.detach().double() - reference.loss).abs() / abs(reference.loss)
    loss_error = loss_error.nan_to_num(nan=torch.inf)
    dist.all_reduce(loss_error, op=dist.ReduceOp.MAX)
    at = int(worst.argmax())
    return Difference(float(loss_error), float(worst[at]), list(reference.shapes)[at])


def _check_cover(mine: Mapping[str, Part], reference: Reference) -> None:
    facts = {name: (part.index, part.count, part.grad is not None) for name, part in mine.items()}
    gathered: list[dict[str, tuple[int, int, bool]]] = gather(facts)
    for rank, found in enumerate(gathered):
        for name, (_, _, has_grad) in found.items():
            if name not in reference.shapes:
                raise ValueError(f"rank {rank} has a parameter {name}, which the unsplit model does not have")
            if not has_grad:
                raise ValueError(f"parameter {name} has no gradient on rank {rank} after a step")
    for name in reference.shapes:
        held = [found[name][:2] for found in gathered if name in found]
        count = held[0][1] if held else 1
        if set(held) != {(index, count) for index in range(count)}:
            raise ValueError(
                f"the ranks hold parts {sorted(set(held))} of parameter {name}, which is not the whole"
            )
