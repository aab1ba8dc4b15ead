"""The optimizer's state shared out over data-parallel replicas (ZeRO stage 1, Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    ``state_dict``, which travels by pickle, nothing is needed: :class:`fxbraid.Checkpointer` saves and loads its state.
    With one replica it is the plain optimizer.

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


def inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds this rank's state: of a :func:`zero_optimizer` the parameters that this replica updates,
    else everything."""
    found = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    assert isinstance(found, Optimizer)
    return found
