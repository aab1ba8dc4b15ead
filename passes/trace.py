"""Passes ``shard`` and ``capture`` together: from a model to its graph on local shapes, with a plan that fits it.

Once is enough where the model has a plan and the plan says all. Where it has none, the model is traced at full size
first and a plan inferred from that graph (``passes.infer``); where the graph shows that a weight must be cut in
sections, it is cut anew (``passes.apart``). What ranks then compute is followed (``passes.follow``): a user's plan and
an inferred one are compared with a trace on full shapes, a model's own plan only where sizes tell that it is wrong.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import compat
from . import adapters
from .apart import taken_apart
from .capture import Captured, capture, merge
from .cuts import Finding
from .errors import BraidError, CaptureError, PlanError
from .follow import follow
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

    def once(self, tp_size: int, plan: Plan, packed: Mapping[str, int], *, whole: bool = False) -> Traced:
        """Shard and capture; ``packed``: into how many equal sections to cut a parameter. ``whole``: with the marks of
        the plan, but on full shapes."""
        sharded = shard(
            self.model,
            tp_size=tp_size,
            tp_plan=plan,
            fake_mode=self.fake_mode,
            device=self.device,
            packed=packed,
            whole=whole,
        )
        return sharded, capture(sharded.module, self.inputs, fake_mode=self.fake_mode)

    def without_adapters(self) -> Captured:
        """The graph at full size, each adapted module running what it adapts alone."""
        sharded = shard(self.model, tp_size=1, tp_plan={}, fake_mode=self.fake_mode, device=self.device)
        adapters.set_aside(sharded.module)
        return capture(sharded.module, self.inputs, fake_mode=self.fake_mode)

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
    """See the module's docstring. ``inputs``: keyword arguments, tensors as fake ones. Raises :class:`PlanError` for a
    plan with which the ranks would compute something else than the model."""
    tracer = _Tracer(model, inputs, fake_mode, device)
    if tp_size == 1:
        sharded, captured = tracer.once(1, tp_plan, {})
    elif tp_plan != "auto" or has_plan(model):
        sharded, captured = _planned(tracer, tp_size, tp_plan)
    else:
        sharded, captured = _inferred(tracer, tp_size)
    return sharded, merge(captured)


def _planned(tracer: _Tracer, tp_size: int, plan: Plan) -> Traced:
    try:
        sharded, captured = _in_sections(tracer, tp_size, plan)
    except CaptureError as error:
        if not tracer.traces_whole():
            raise
        raise PlanError(
            f"the tensor-parallel plan of {type(tracer.model).__name__} does not fit its forward, which traces whole "
            f"but not on the local shapes of tp_size={tp_size}: {error}; correct it with tp_plan={{...}}, or use "
            "tp_size=1"
        ) from error
    if isinstance(plan, str):
        # Its authors say that it is right: only what can't be is refused.
        graph = captured.graph_module.graph
        findings = [f for f in follow(graph, sharded.plan, sharded.canonical) if f.definite]
    else:
        findings = _compared(tracer, plan, sharded, captured)
    if findings:
        raise PlanError(_sentence(findings))
    return sharded, captured


def _compared(tracer: _Tracer, plan: Plan, sharded: Sharded, captured: Captured) -> list[Finding]:
    """What the ranks would compute otherwise than the model on full shapes, with the same marks."""
    _, full = tracer.once(sharded.plan.tp_size, plan, {}, whole=True)
    return follow(
        captured.graph_module.graph,
        sharded.plan,
        sharded.canonical,
        full=full.graph_module.graph,
        held=(captured.constants, full.constants),
    )


def _sentence(findings: list[Finding]) -> str:
    first = findings[0]
    more = f" (and {len(findings) - 1} more like it)" if len(findings) > 1 else ""
    trust = (
        "would compute something else than the model"
        if first.definite
        else "can't be shown to compute what the model does"
    )
    return (
        f"with this tensor-parallel plan the ranks {trust}: {first.text}{more}. Leave the modules in front of it and "
        "behind it out of tp_plan; or give those in front the style 'colwise_gather_output' and those behind "
        "'rowwise_split_input', so that what lies between is computed whole"
    )


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
    """With the plan that follows from the graph; where that fails for what lies in attention, without attention; else
    with what of it runs."""
    name = type(tracer.model).__name__
    found = _wrapped(infer_plan(merge(tracer.without_adapters()).graph_module.graph))
    if not found.patterns:
        raise PlanError(
            f"{name} has no tensor-parallel plan (model._tp_plan), and none follows from its graph "
            f"({'; '.join(found.left) or 'no linears in numbered layers'}); pass tp_plan={{...}}, or use tp_size=1"
        )
    try:
        return _with(tracer, tp_size, found)
    except BraidError as error:
        rest = found.without_attention(_first_sentence(error))
        with contextlib.suppress(BraidError):
            if rest.patterns:
                return _with(tracer, tp_size, rest)
        rest = _group_by_group(tracer, tp_size, found)
        if not rest.patterns:
            raise _does_not_run(name, found, error) from error
        return _with(tracer, tp_size, rest)


def _group_by_group(tracer: _Tracer, tp_size: int, found: Inferred) -> Inferred:
    """What runs of ``found``: linears that belong together are tried with those that have run before them."""
    kept = replace(found, patterns={}, left=())
    left = list(found.left)
    for group in found.parts():
        tried = {
            name: style for name, style in found.patterns.items() if name in group or name in kept.patterns
        }
        try:
            _with(tracer, tp_size, replace(kept, patterns=tried))
        except BraidError as error:
            left.append(f"{', '.join(sorted(group))} stays whole: {_first_sentence(error)}")
        else:
            kept = replace(kept, patterns=tried)
    return replace(kept, left=tuple(left))


def _wrapped(found: Inferred) -> Inferred:
    """The same for the modules as the model has them, adapters around them or not."""
    patterns = {adapters.without_base(pattern): style for pattern, style in found.patterns.items()}
    return replace(
        found,
        patterns=patterns,
        attention=frozenset(map(adapters.without_base, found.attention)),
        groups=tuple(frozenset(map(adapters.without_base, group)) for group in found.groups),
    )


def _with(tracer: _Tracer, tp_size: int, found: Inferred) -> Traced:
    """Without the linears between which the ranks would compute something else."""
    while True:
        sharded, captured = _in_sections(tracer, tp_size, found.patterns)
        findings = _compared(tracer, found.patterns, sharded, captured)
        if not findings:
            return _noted(sharded, [*found.notes, *found.left]), captured
        rest = found.without({adapters.without_base(f.owner): f.text for f in reversed(findings)})
        if not rest.patterns or rest.patterns == found.patterns:
            raise PlanError(_sentence(findings))
        found = rest


def _does_not_run(name: str, found: Inferred, error: BraidError) -> PlanError:
    plan = ", ".join(f"{pattern}: {style}" for pattern, style in found.patterns.items())
    return PlanError(
        f"{name} has no tensor-parallel plan (model._tp_plan), and the one that follows from its graph ({plan}) "
        f"does not run: {error}; pass tp_plan={{...}}, or use tp_size=1"
    )


def _first_sentence(error: BraidError) -> str:
    cause = re.search(r"Cause: (.*)", str(error))
    return (cause[1] if cause else str(error)).split(". ")[0]
