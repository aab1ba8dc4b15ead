"""Passes ``shard`` and ``capture`` together: from a model to its graph on local shapes, with a plan that fits it.

Once is enough where the model has a plan and the plan says all. Where it has none, the model is traced at full size
first and a plan inferred from that graph (``passes.infer``); where the graph shows that a weight must be cut in
sections, it is cut anew (``passes.apart``). What ranks then compute is followed (``passes.follow``): a user's plan and
an inferred one are compared with a trace on full shapes, a model's own plan only where sizes tell that it is wrong.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from .. import compat
from . import adapters
from .apart import taken_apart
from .capture import Captured, capture, merge
from .cuts import Finding
from .errors import BraidError, CaptureError, PlanError
from .follow import follow
from .infer import Inferred, infer_plan
from .shard import Sharded, covers, has_plan, matching, own_plan, shard
from .static import InputValues
from .towers import PIXELS, cost_of_whole, tower
from .values import Needed

Plan = str | Mapping[str, str]
Traced = tuple[Sharded, Captured]


@dataclass(frozen=True, slots=True)
class _Tracer:
    """What every trace of one model has in common."""

    model: nn.Module
    inputs: Mapping[str, Any]
    fake_mode: compat.FakeTensorMode
    device: torch.device
    values: InputValues

    def _capture(self, module: nn.Module) -> Captured:
        """With the static inputs that are known of, and those that it turns out to need."""
        while True:
            given = self.values.given(self.device)
            try:
                return capture(module, self.inputs, fake_mode=self.fake_mode, given=given)
            except Needed as error:
                self.values.add(error)

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
        return sharded, self._capture(sharded.module)

    def without_adapters(self) -> Captured:
        """The graph at full size, each adapted module running what it adapts alone."""
        sharded = shard(self.model, tp_size=1, tp_plan={}, fake_mode=self.fake_mode, device=self.device)
        adapters.set_aside(sharded.module)
        return self._capture(sharded.module)

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
    values: InputValues | None = None,
    inferred: Mapping[str, str] | None = None,
) -> Traced:
    """See the module's docstring. ``inputs``: keyword arguments, tensors as fake ones. ``values``: of those; the static
    ones are added to it. ``inferred``: what an earlier trace of this model has inferred, and shards lie by. Raises
    :class:`PlanError` for a plan with which the ranks would compute something else than the model."""
    values = InputValues() if values is None else values
    tracer = _Tracer(model, inputs, fake_mode, device, values)
    if tp_size == 1:
        sharded, captured = tracer.once(1, tp_plan, {})
    elif tp_plan != "auto":
        sharded, captured = _planned(tracer, tp_size, tp_plan)
    elif inferred:
        sharded, captured = _with(tracer, tp_size, Inferred(inferred), _own(model), exactly=True)
    elif has_plan(model):
        sharded, captured = _with_towers(tracer, tp_size)
    else:
        sharded, captured = _inferred(tracer, tp_size)
    return _noted(sharded, values.notes), merge(captured)


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


def _compared(
    tracer: _Tracer, plan: Plan, sharded: Sharded, captured: Captured, own: Mapping[str, str] | None = None
) -> list[Finding]:
    """What the ranks would compute otherwise than the model on full shapes, with the same marks. ``own``: patterns of
    the model's own plan, whose authors say that it is right."""
    _, full = tracer.once(sharded.plan.tp_size, plan, {}, whole=True)
    findings = follow(
        captured.graph_module.graph,
        sharded.plan,
        sharded.canonical,
        full=full.graph_module.graph,
        held=(captured.constants, full.constants),
    )
    return [f for f in findings if f.definite or not own or not covers(own, f.owner)]


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
    full = merge(tracer.without_adapters())
    nodes = tower(full)
    found = _wrapped(infer_plan(full.graph_module.graph, tower=nodes))
    if not found.patterns:
        raise PlanError(
            f"{name} has no tensor-parallel plan (model._tp_plan), and none follows from its graph "
            f"({'; '.join(found.left) or 'no linears in numbered layers'}); pass tp_plan={{...}}, or use tp_size=1"
        )
    try:
        traced = _as_far_as_it_runs(tracer, tp_size, found, {})
    except _Nothing as nothing:
        raise _does_not_run(name, found, nothing.error) from nothing.error
    return _with_cost(traced, full, nodes)


def _own(model: nn.Module) -> dict[str, str]:
    """The model's own plan, without patterns that match nothing; empty where it has none."""
    return matching(model, own_plan(model)) if has_plan(model) else {}


def _with_towers(tracer: _Tracer, tp_size: int) -> Traced:
    """With the model's own plan, and with an inferred one for a tower that it leaves out."""
    if not any(name in PIXELS for name in tracer.inputs):
        return _planned(tracer, tp_size, "auto")
    full = merge(tracer.without_adapters())
    nodes = tower(full)
    own = _own(tracer.model)
    found = _wrapped(infer_plan(full.graph_module.graph, tower=nodes, alone=True))
    found = replace(found, patterns={p: s for p, s in found.patterns.items() if p not in own})
    try:
        if not found.patterns:
            raise _Nothing(found.left)
        traced = _as_far_as_it_runs(tracer, tp_size, found, own)
    except _Nothing as nothing:
        sharded, captured = _planned(tracer, tp_size, "auto")
        traced = _noted(sharded, list(nothing.left)), captured
    return _with_cost(traced, full, nodes)


def _with_cost(traced: Traced, full: Captured, nodes: Collection[fx.Node]) -> Traced:
    """With a note of what the tower ``nodes`` of the graph at full size costs where it stays whole."""
    sharded, captured = traced
    return _noted(
        sharded, cost_of_whole(full, nodes, sharded.plan.styles.keys(), sharded.plan.tp_size)
    ), captured


class _Nothing(Exception):
    """No inferred linear can be cut: ``left`` says why, ``error`` what went wrong first."""

    def __init__(self, left: tuple[str, ...], error: BraidError | None = None) -> None:
        super().__init__()
        self.left, self.error = left, error


def _as_far_as_it_runs(tracer: _Tracer, tp_size: int, found: Inferred, own: Mapping[str, str]) -> Traced:
    """With ``found`` beside ``own``; where that fails for what lies in attention, without attention; else with what of
    it runs."""
    try:
        return _with(tracer, tp_size, found, own)
    except BraidError as error:
        rest = found.without_attention(_first_sentence(error))
        with contextlib.suppress(BraidError):
            if rest.patterns:
                return _with(tracer, tp_size, rest, own)
        rest = _group_by_group(tracer, tp_size, found, own)
        if not rest.patterns:
            raise _Nothing(rest.left, error) from error
        return _with(tracer, tp_size, rest, own)


def _group_by_group(tracer: _Tracer, tp_size: int, found: Inferred, own: Mapping[str, str]) -> Inferred:
    """What runs of ``found``: linears that belong together are tried with those that have run before them."""
    kept = replace(found, patterns={}, left=())
    left = list(found.left)
    for group in found.parts():
        tried = {
            name: style for name, style in found.patterns.items() if name in group or name in kept.patterns
        }
        try:
            _with(tracer, tp_size, replace(kept, patterns=tried), own)
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


def _with(
    tracer: _Tracer, tp_size: int, found: Inferred, own: Mapping[str, str], *, exactly: bool = False
) -> Traced:
    """``found`` beside ``own``, without the linears between which the ranks would compute something else; ``exactly``:
    with all of them, or raise."""
    while True:
        plan = {**own, **found.patterns}
        sharded, captured = _in_sections(tracer, tp_size, plan)
        findings = _compared(tracer, plan, sharded, captured, own)
        if not findings:
            sharded = replace(sharded, plan=replace(sharded.plan, inferred=dict(found.patterns)))
            return _noted(sharded, [*found.notes, *found.left]), captured
        if exactly:
            raise PlanError(_sentence(findings))
        rest = found.without({adapters.without_base(f.owner): f.text for f in reversed(findings)})
        if not rest.patterns or rest.patterns == found.patterns:
            raise PlanError(_sentence(findings))
        found = rest


def _does_not_run(name: str, found: Inferred, error: BraidError | None) -> PlanError:
    plan = ", ".join(f"{pattern}: {style}" for pattern, style in found.patterns.items())
    return PlanError(
        f"{name} has no tensor-parallel plan (model._tp_plan), and the one that follows from its graph ({plan}) "
        f"does not run: {error}; pass tp_plan={{...}}, or use tp_size=1"
    )


def _first_sentence(error: BraidError) -> str:
    cause = re.search(r"Cause: (.*)", str(error))
    return (cause[1] if cause else str(error)).split(". ")[0]
