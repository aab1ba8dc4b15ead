"""Passes ``shard`` and ``capture`` together: from a model to its graph on local shapes, with a plan that fits it.

Once is enough where the model has a plan and the plan says all. Where it has none, the model is traced at full size
first and a plan inferred from that graph (``passes.infer``); where the graph shows that a weight must be cut in
sections, it is cut anew (``passes.apart``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import compat
from .apart import taken_apart
from .capture import Captured, capture
from .errors import BraidError, CaptureError, PlanError
from .infer import Inferred, infer_plan
from .shard import Sharded, has_plan, shard

Plan = str | Mapping[str, str]
Traced = tuple[Sharded, Captured]


@dataclass(frozen=True, slots=True)
class _Tracer:
    """What every trace of one model has in common."""

    model: nn.Module
    inputs: Mapping[str, Any]
    fake_mode: compat.FakeTensorMode
    device: torch.device

    def once(self, tp_size: int, plan: Plan, packed: Mapping[str, int]) -> Traced:
        """Shard and capture; ``packed``: into how many equal sections to cut a parameter."""
        sharded = shard(
            self.model,
            tp_size=tp_size,
            tp_plan=plan,
            fake_mode=self.fake_mode,
            device=self.device,
            packed=packed,
        )
        return sharded, capture(sharded.module, self.inputs, fake_mode=self.fake_mode)

    def traces_whole(self) -> bool:
        try:
            self.once(1, {}, {})
        except BraidError:
            return False
        return True


def trace(
    model: nn.Module,
    inputs: Mapping[str, Any],
    tp_size: int,
    tp_plan: Plan,
    fake_mode: compat.FakeTensorMode,
    device: torch.device,
) -> Traced:
    """See the module's docstring. ``inputs``: keyword arguments, tensors as fake ones."""
    tracer = _Tracer(model, inputs, fake_mode, device)
    if tp_size == 1:
        return tracer.once(1, tp_plan, {})
    if tp_plan != "auto" or has_plan(model):
        return _planned(tracer, tp_size, tp_plan)
    return _inferred(tracer, tp_size)


def _planned(tracer: _Tracer, tp_size: int, plan: Plan) -> Traced:
    try:
        return _in_sections(tracer, tp_size, plan)
    except CaptureError as error:
        if not tracer.traces_whole():
            raise
        raise PlanError(
            f"the tensor-parallel plan of {type(tracer.model).__name__} does not fit its forward, which traces whole "
            f"but not on the local shapes of tp_size={tp_size}: {error}; correct it with tp_plan={{...}}, or use "
            "tp_size=1"
        ) from error


def _in_sections(tracer: _Tracer, tp_size: int, plan: Plan) -> Traced:
    """Trace, and trace anew as long as the graph shows that a weight needs more sections than the plan gives it."""
    packed: dict[str, int] = {}
    whole: dict[str, int] | None = None
    while True:
        sharded, captured = tracer.once(tp_size, plan, packed)
        found = taken_apart(captured.graph_module.graph, sharded.plan, sharded.canonical)
        if not found:
            break
        whole = _apart_whole(tracer, sharded) if whole is None else whole
        for name, count in found.items():
            # A rank's own features in as many parts as all of them: else a size was meant, not a number of parts.
            if name in packed or whole.get(name) != count:
                raise PlanError(
                    f"the model takes the features of {name} apart in a way that no equal sections fit; leave the "
                    "module out of tp_plan, or use tp_size=1"
                )
        packed |= found
    kinds = {re.sub(r"\.\d+\.", ".*.", name): count for name, count in packed.items()}
    notes = [f"{name} is cut in {count} sections, as the model reads it" for name, count in kinds.items()]
    return _noted(sharded, notes), captured


def _apart_whole(tracer: _Tracer, sharded: Sharded) -> dict[str, int]:
    """Into how many equal parts the model takes the features of each weight at full size."""
    plan = sharded.plan
    params = {name: replace(shard, tp_size=1, sections=()) for name, shard in plan.params.items()}
    graph = tracer.once(1, {}, {})[1].graph_module.graph
    return taken_apart(graph, replace(plan, params=params), sharded.canonical, strict=False)


def _noted(sharded: Sharded, notes: list[str]) -> Sharded:
    return replace(sharded, plan=replace(sharded.plan, notes=(*sharded.plan.notes, *notes)))


# -- models without a plan ---------------------------------------------------------------------------------------


def _inferred(tracer: _Tracer, tp_size: int) -> Traced:
    """With the plan that follows from the graph; where that fails for what lies in attention, without attention."""
    name = type(tracer.model).__name__
    found = infer_plan(tracer.once(1, {}, {})[1].graph_module.graph)
    if not found.patterns:
        raise PlanError(
            f"{name} has no tensor-parallel plan (model._tp_plan), and none follows from its graph "
            f"({'; '.join(found.left) or 'no linears in numbered layers'}); pass tp_plan={{...}}, or use tp_size=1"
        )
    try:
        return _with(tracer, tp_size, found)
    except BraidError as error:
        rest = found.without_attention(_first_sentence(error))
        if not rest.patterns:
            raise _does_not_run(name, found, error) from error
        try:
            return _with(tracer, tp_size, rest)
        except BraidError:
            raise _does_not_run(name, found, error) from error


def _with(tracer: _Tracer, tp_size: int, found: Inferred) -> Traced:
    sharded, captured = _in_sections(tracer, tp_size, found.patterns)
    return _noted(sharded, [*found.notes, *found.left]), captured


def _does_not_run(name: str, found: Inferred, error: BraidError) -> PlanError:
    plan = ", ".join(f"{pattern}: {style}" for pattern, style in found.patterns.items())
    return PlanError(
        f"{name} has no tensor-parallel plan (model._tp_plan), and the one that follows from its graph ({plan}) "
        f"does not run: {error}; pass tp_plan={{...}}, or use tp_size=1"
    )


def _first_sentence(error: BraidError) -> str:
    cause = re.search(r"Cause: (.*)", str(error))
    return (cause[1] if cause else str(error)).split(". ")[0]
