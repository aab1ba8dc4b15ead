"""The optimizer's state shared out over data-parallel replicas (ZeRO stage 1, Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from .model import BraidedModel
from .passes.errors import BraidError


def zero_optimizer(
    model: BraidedModel,
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None = None,
    **defaults: Any,
) -> Optimizer:
    """``optimizer_class(params, **defaults)`` whose state lies once over all replicas, not once on each.

    ``params``: parameters or groups of them; default: all of ``model``'s that want a gradient. Each replica updates
    about 1 / dp_size of them, by elements, and sends them to the others: the parameters are to the bit those of the
    plain optimizer. It is torch's ``ZeroRedundancyOptimizer``, so learning rate schedulers work on it; of its own
    ``state_dict``, which travels by pickle, nothing is needed: see :func:`optimizer_state`. With one replica it is the
    plain optimizer.

    Every rank calls it, and its ``step``. Raises :class:`BraidError` for parameters of several types.
    """
    chosen: Any = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
    group = model._mesh.dp_group
    if group is None:
        return optimizer_class(chosen, **defaults)
    flat = [p for one in chosen for p in (one["params"] if isinstance(one, Mapping) else [one])]
    kinds = sorted({str(p.dtype) for p in flat})
    if len(kinds) > 1:
        raise BraidError(
            f"zero_optimizer shares out parameters of one type, and these are {', '.join(kinds)}; make one optimizer "
            "for each type, or use the plain one"
        )
    return ZeroRedundancyOptimizer(chosen, optimizer_class, process_group=group, **defaults)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Parameter name -> what the optimizer keeps of it (``exp_avg``, ``step``, ...) on this rank: of a plain optimizer
    everything, of a :func:`zero_optimizer` the parameters that this replica updates; no two replicas have the same.
    The tensors themselves, not copies: what is copied into them is loaded. Local; empty before the first ``step``.
    """
    kept = inner(optimizer).state
    return {name: kept[p] for name, p in model.named_parameters() if p in kept}


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Replace the optimizer's state by ``state``, of which names whose parameters are not updated on this rank are left
    out: so every rank may be given everything. Tensors are copied, to the parameter's device where they have its shape.
    Local. Groups (learning rate, ...) stay as they are.
    """
    own = inner(optimizer)
    mine = {p for group in own.param_groups for p in group["params"]}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in state and parameter in mine:
                own.state[parameter] = {key: _copied(value, parameter) for key, value in state[name].items()}


def owned(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the parameters that ``optimizer`` updates on this rank, before any step as well."""
    mine = {p for group in inner(optimizer).param_groups for p in group["params"]}
    return [name for name, p in model.named_parameters() if p in mine]


def inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds this rank's state."""
    found = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    assert isinstance(found, Optimizer)
    return found


def _copied(value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Adam's count of steps is a number on the host.
    return value.detach().clone().to(parameter.device if value.shape == parameter.shape else value.device)
