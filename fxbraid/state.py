"""What a braided model takes from the user's: structure, names, shards' places, tensors of every kind."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .compat import FakeTensor
from .passes.errors import BraidError
from .passes.pipeline import Lowered
from .passes.settle import TP_RANK
from .passes.shard import canonical_names

if TYPE_CHECKING:
    from .precision import Masters
    from .runtime.mesh import Mesh
    from .source import Source


def uses(lowered: Lowered) -> dict[str, list[tuple[int, str]]]:
    """Where each parameter is read: (chunk, name there), in chunk order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for chunk in lowered.partition.chunks:
        for name in chunk.params:
            found.setdefault(lowered.canonical[name], []).append((chunk.index, name))
    return found


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """First name -> all names of each parameter."""
    found: dict[str, list[str]] = {}
    for name, first in canonical_names(model).items():
        found.setdefault(first, []).append(name)
    return found


def register(root: nn.Module, name: str, value: Tensor, *, persistent: bool = True) -> None:
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value, persistent=persistent)


def skeleton(model: nn.Module) -> nn.Module:
    """The model's structure with meta tensors for weights: what a later shape is traced from."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    skeleton: nn.Module = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        # Recomputation is a pass of its own here; Hugging Face's wraps layers in what export does not trace.
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    return skeleton


def constant(model: nn.Module, lowered: Lowered, name: str) -> Tensor:
    """A tensor that the forward reads and that is neither parameter nor buffer."""
    value: Any = lowered.constants.get(name)
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        value = model
        for part in name.split("."):
            value = getattr(value, part, None)
    if not isinstance(value, Tensor):
        raise BraidError(
            f"the forward reads a tensor ({name}) that is no parameter, buffer or tensor attribute of its own; "
            "register it as a buffer"
        )
    return value


def constants_of(lowered: Lowered, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """What this trace made of values and reads as tensors, by name: another trace may have others of the same name."""
    known = dict(model.named_buffers(remove_duplicate=False))
    read = {name for chunk in lowered.chunks.values() for name in chunk.joint.state.values()}
    return {
        name: value.detach().to(device, copy=True)
        for name, value in lowered.constants.items()
        if name in read
        and name not in known
        and isinstance(value, Tensor)
        and not isinstance(value, FakeTensor)
    }


def take(
    root: nn.Module,
    source: Source,
    lowered: Lowered,
    read_by: Mapping[str, Sequence[tuple[int, str]]],
    here: Collection[int],
    mesh: Mesh,
    masters: Masters | None = None,
) -> dict[str, Tensor]:
    """Copy this rank's parameters and buffers out of ``source`` and register them in ``root`` under their names;
    returns every tensor that the program reads, by name. ``read_by``: see :func:`uses`; ``here``: this rank's
    chunks; ``masters``: register a float32 parameter in place of each narrower one that is trained."""
    model, plan, device = source.model, lowered.plan, mesh.device
    full = dict(model.named_parameters())
    state: dict[str, Tensor] = {TP_RANK: torch.tensor([mesh.tp_rank], device=device)}
    for name, names in aliases(model).items():
        # A parameter that the loss does not read stays with the first chunk, so that nothing is lost.
        users = {chunk for chunk, _ in read_by.get(name, [(0, name)])}
        if users.isdisjoint(here):
            continue
        shard = source.shard(name, plan.params[name], mesh.tp_rank)
        trained, dtype = full[name].requires_grad, full[name].dtype
        mastered = masters is not None and trained and masters.serve(dtype)
        value = shard.to(device, torch.float32 if mastered else dtype, copy=True).contiguous()
        parameter = source.parameter(name, value, requires_grad=trained)
        local: Tensor = parameter
        if masters is not None and mastered:
            local = masters.copy_of(parameter, dtype)
        for alias in names:
            state[alias] = local
            register(root, alias, parameter)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    read = {n for c in lowered.chunks.values() for n in c.joint.state.values()} - set(state)
    # A saved buffer that the trace does not read goes with the first chunk: nothing is lost from state_dict.
    kept = {n for n in buffers if 0 in here and n in model.state_dict()}
    for name in sorted(read | kept):
        if name in buffers:
            value = source.buffer(name).to(device, copy=True)
            owner, _, leaf = name.rpartition(".")
            persistent = leaf not in model.get_submodule(owner)._non_persistent_buffers_set
            register(root, name, value, persistent=persistent)
        else:
            value = constant(model, lowered, name).detach().to(device, copy=True)
        state[name] = value
    return state
