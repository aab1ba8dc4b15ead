"""Do all ranks ask for the same? Compared before the first group is made: ranks that build different programs would
wait for each other for ever.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .passes.errors import BraidError
from .passes.joint import Phase
from .passes.pipeline import Lowered
from .runtime import ranks
from .runtime.profile import Profile, meet
from .schedule import Schedule

SHOWN = 60
"""Characters of a value in the message."""

Facts = dict[str, tuple[str, str]]
"""By argument: what the message shows of its value, and a digest of all of it."""


def agree(arguments: Mapping[str, Any]) -> None:
    """Raise :class:`BraidError` on every rank, with the argument and the values, where one differs between ranks.
    Collective over the default process group; without one nothing is communicated."""
    if ranks.several() and (said := disagreement(ranks.gather(facts(arguments)))):
        raise BraidError(said)


def facts(arguments: Mapping[str, Any]) -> Facts:
    """What ``agree`` compares of each argument."""
    known: Facts = {}
    for name, value in arguments.items():
        text = describe(value)
        shown = f"the schedule {value.name}" if isinstance(value, Schedule) else text
        if not isinstance(value, BraidError):  # why a rank can't go on is shown whole
            shown = shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 3]}..."
        known[name] = shown, hashlib.sha256(text.encode()).hexdigest()
    return known


def disagreement(found: Sequence[Facts]) -> str | None:
    """The sentence about the first argument that differs, None where all ranks say the same."""
    for name in found[0]:
        alike: dict[str, list[int]] = {}
        for rank, said in enumerate(found):
            alike.setdefault(said[name][1], []).append(rank)
        if len(alike) > 1:
            values = "; ".join(
                f"{found[mine[0]][name][0]} on rank{'s' * (len(mine) > 1)} {_listed(mine)}"
                for mine in alike.values()
            )
            return (
                f"{name} differs between ranks ({values}), so they would build programs that wait for each other for "
                "ever; give all ranks the same"
            )
    return None


def agree_on_units(lowered: Lowered) -> None:
    """Raise :class:`BraidError` on every rank where ranks that hold the same chunk compute other units again, as a
    function given as ``checkpoint`` may have answered: their collectives could come in another order. Collective."""
    mine = {
        str(index): sorted(unit.label for unit in chunk.units[Phase.I] if unit.again)
        for index, chunk in lowered.chunks.items()
    }
    said: dict[str, tuple[int, list[str]]] = {}
    for rank, answers in enumerate(meet(mine)):
        for index, labels in answers.items():
            first, known = said.setdefault(index, (rank, labels))
            if known != labels:
                other = ", ".join(sorted(set(known) ^ set(labels)))
                raise BraidError(
                    f"checkpoint answers differently on ranks {first} and {rank}, which both hold chunk {index} "
                    f"({other}); its answer may depend on the unit alone"
                )


def describe(value: Any) -> str:
    """All of ``value`` that a rank's program depends on, as a text that is the same wherever the value is."""
    if isinstance(value, Schedule):
        return f"{value.name} {value.placement} m={value.m}\n{value.to_csv()}"
    if isinstance(value, Profile):
        links = sorted((ends, dataclasses.astuple(link)) for ends, link in value.messages.items())
        reduces = (
            dataclasses.astuple(value.all_reduce),
            dataclasses.astuple(value.replicas),
            dataclasses.astuple(value.host),
        )
        rest = (reduces, value.rendezvous, value.contention)
        return f"times of {len(value)} units {sorted(value.seconds.items())} {links} {rest}"
    if isinstance(value, nn.Module):
        leaves = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in value.named_parameters()]
        mode = "train" if value.training else "eval"
        return f"{type(value).__name__} in {mode} mode with {len(leaves)} parameters {leaves}"
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, DeviceMesh):
        return f"{value.mesh_dim_names} {value.mesh.tolist()} on {value.device_type}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe, value)) + "]"
    if isinstance(value, BraidError):
        return str(value)
    if isinstance(value, FunctionType):  # which function it is; what it answers is compared by agree_on_units
        code = hashlib.sha256(value.__code__.co_code).hexdigest()[:12]
        return f"function {value.__module__}.{value.__qualname__} with code {code}"
    return (
        repr(value)
        if isinstance(value, str | int | float | complex | torch.dtype | None)
        else type(value).__name__
    )


def _listed(found: Sequence[int]) -> str:
    few = ", ".join(map(str, found[:8]))
    return few if len(found) <= 8 else f"{few} and {len(found) - 8} more"
