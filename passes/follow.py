"""Pass ``follow``: is what the ranks compute between column- and row-parallel linears what the model computes?

Contract: (graph on local shapes, plan) -> :class:`Finding` for every operator that mixes features or heads which the
plan spreads over the ranks; none means that every value is the unsplit model's, or a part of it, or a sum that is
still to be made, and that every such sum is made::

    h = linear(tp_copy(x), Wup)       # [b, s, 12 of 24]
    h.softmax(-1)                     # a finding: each rank would have its own
    h.unflatten(-1, (4, -1))          # a finding: 3 features of each head, but unsplit 6 of 12 are a rank's two heads
    y = tp_reduce(linear(h, Wdown))   # whole again

``full`` is the trace of the same code, marks included, on full shapes. With it every size, count and number that the
model's code derives from shapes is compared, and no finding is a proof. Without it sizes are taken to be what a plan
means (the cut dimension outermost, unknown operators right), which is what a model's own plan is trusted in.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from . import cut_sums as sums
from . import cut_views as views
from .cut_rules import POINTWISE, Rule, rules
from .cuts import (
    LOST,
    WHOLE,
    Broken,
    Call,
    Finding,
    Laid,
    Odd,
    Partial,
    Placed,
    State,
    constants,
    for_each,
    lengths,
    module_of,
    place,
    shape_of,
)
from .layout import Section, TpPlan
from .marks import TP_COPY, TP_REDUCE
from .twins import bare, inputs, is_copy, twins

#: The buffer of the traced copy with this rank's TP rank (``settle.TP_RANK``).
_RANK = "fxbraid_tp_rank"


#: Whose inputs' shapes alone matter.
_FACTORIES = frozenset(
    ["new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"]
)


def follow(
    graph: fx.Graph,
    plan: TpPlan,
    canonical: Mapping[str, str],
    *,
    full: fx.Graph | None = None,
    held: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> list[Finding]:
    """See the module's docstring. ``canonical``: first names of parameters, by which ``plan`` has them; ``held``:
    tensors that the two traces hold outside of parameters and buffers."""
    return _Follower(plan, canonical, rules(), twins(graph, full) if full is not None else None, held).run(
        graph
    )


class _Follower:
    def __init__(
        self,
        plan: TpPlan,
        canonical: Mapping[str, str],
        rules: Mapping[str, Rule],
        pairs: Mapping[fx.Node, fx.Node] | None,
        held: tuple[Mapping[str, Any], Mapping[str, Any]],
    ) -> None:
        self.plan, self.canonical, self.rules, self.pairs, self.held = plan, canonical, rules, pairs, held
        self.states: dict[fx.Node, Any] = {}
        self.findings: list[Finding] = []

    def run(self, graph: fx.Graph) -> list[Finding]:
        for node in graph.nodes:
            if node.op == "get_attr":
                self.states[node] = self._held(node)
            elif node.op == "call_function":
                self.states[node] = self._called(node)
            elif node.op == "output":
                self._output(node)
        return self.findings

    def _held(self, node: fx.Node) -> State:
        name = str(node.target)
        if name == _RANK:
            return Placed(-1)
        if name in self.canonical:
            shard = self.plan.params[self.canonical[name]]
            if shard.dim is None:
                return WHOLE
            sections = shard.sections or (Section(shard.shape[shard.dim], self.plan.tp_size),)
            return Laid(shard.dim, tuple(sections), shard.name)
        if self.pairs is not None and name in self.held[0]:
            twin = self.pairs.get(node)
            ours, theirs = (
                self.held[0][name],
                self.held[1].get(str(twin.target)) if twin is not None else None,
            )
            if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor) and _equal(ours, theirs)):
                return Odd("numbers that the model's code has made from shapes, unsplit from others")
        return WHOLE

    def _called(self, node: fx.Node) -> Any:
        twin = self.pairs.get(node) if self.pairs is not None else None
        call = Call(node, twin, ChainMap({}, self.states), self.plan.tp_size)
        given = [self.states.get(n, WHOLE) for n in node.all_input_nodes]
        if is_copy(node):
            return given[0]
        if any(state is LOST for state in given):
            return WHOLE if node.target is TP_REDUCE else LOST
        try:
            self._paired(call)
            result = self._ruled(call, given)
            self._fits(call, result)
            return result
        except (Broken, IndexError, KeyError, TypeError, ValueError) as error:
            # Arguments that a rule does not know are no reason to end here.
            unknown = Broken("has arguments that can't be followed", call.owner, definite=False)
            broken = error if isinstance(error, Broken) else unknown
            shared = all(isinstance(s, Odd) or (isinstance(s, Laid) and s.whole) for s in given)
            if shared and node.target is not TP_REDUCE:
                first = next((s for s in given if isinstance(s, Odd)), None)
                return first or Odd(f"what {call.name}{place(node)} makes, which {broken}")
            if self.pairs is not None or broken.definite:
                self._find(call, broken)
            return WHOLE if node.target is TP_REDUCE else LOST

    def _paired(self, call: Call) -> None:
        """Raise unless the twin reads the twins of what the node reads."""
        if self.pairs is None:
            return
        ours, theirs = inputs(call.node), inputs(call.twin) if call.twin is not None else []
        fits = call.twin is not None and len(ours) == len(theirs)
        for node, twin in zip(ours, theirs, strict=False):
            if self.pairs.get(node) is not twin:
                state = self._repeated(call, node, twin)
                fits = fits and state is not None
                call.states |= {n: state for n in call.node.all_input_nodes if bare(n) is node}  # type: ignore[operator]
        if not fits:
            raise Broken(
                "is not what the unsplit model computes here: the code looks at sizes",
                call.owner,
                definite=False,
            )

    def _repeated(self, call: Call, node: fx.Node, twin: fx.Node) -> State | None:
        """``repeat_kv`` does nothing on a rank with as many key-value heads as queries: the state of ``node`` as what
        the unsplit model makes of it, ``twin``."""
        source, names = twin, list[str]()
        while source is not self.pairs.get(node) and len(names) < 4 and source.args:  # type: ignore[union-attr]
            names.append(getattr(source.target, "_opname", ""))
            last, source = source, bare(source.args[0])  # type: ignore[arg-type]
        state, full, given = call.state(node), shape_of(twin), shape_of(source)
        names = ["reshape" if name in ("view", "_unsafe_view") else name for name in names]
        if (
            names != ["reshape", "expand", "unsqueeze"]
            or not isinstance(state, Laid)
            or len(full) != len(given)
        ):
            return None
        dim: int = last.args[1] - 1  # type: ignore[operator, assignment]
        sections = state.sections or (Section(given[dim], 1),)
        if state.dim not in (None, dim) or len(sections) != 1 or state.even or full[dim] % given[dim]:
            return None
        section = views.repeated(sections[0], 1, full[dim] // given[dim], call.tp_size)
        return None if section is None else Laid(dim, (section,), state.owner)

    def _ruled(self, call: Call, given: list[Any]) -> Any:
        node = call.node
        if node.target is TP_COPY:
            return given[0]
        if node.target is TP_REDUCE:
            return self._summed(call, given[0])
        if call.name == "eq" and Placed(-1) in given:
            return Placed(0)
        odd = next((s for s in given if isinstance(s, Odd)), None)
        if odd is not None and call.name == "getitem":
            return odd
        if odd is not None and call.name not in _FACTORIES and Placed(-1) not in given:
            raise Broken(f"reads {odd.why}", call.owner)
        whole = all(isinstance(s, Laid) and s.whole for s in given)
        if (
            whole
            and call.twin is not None
            and call.shape == call.twin_shape
            and constants(node) == constants(call.twin)
        ):
            return for_each(call, WHOLE)
        placed = [s for s in given if isinstance(s, Placed) and s != Placed(-1)]
        if placed and (found := _place_of(call, placed)) is not None:
            return found
        rule = self.rules.get(call.name)
        if getattr(node.target, "_overloadname", "") == "other":
            rule = None  # the larger or smaller of two
        if rule is not None:
            return rule(call)
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags or call.name in POINTWISE:
            return sums.pointwise(call)
        if whole:
            call.same_constants()
            return WHOLE
        raise Broken("is an operator that cut features can't be followed through", call.owner, definite=False)

    def _summed(self, call: Call, state: Any) -> State:
        if isinstance(state, Partial):
            if self.pairs is not None and state.factor != 1:
                raise Broken(
                    f"sums over the ranks what then is {state.factor} times the unsplit value", state.owner
                )
            return WHOLE
        if isinstance(state, Odd):
            raise Broken(f"sums {state.why}")
        if isinstance(state, Laid) and not state.whole:
            raise Broken(
                f"sums different features of the ranks (each has {lengths(state.sections)})", state.owner
            )
        if self.pairs is not None:
            raise Broken("sums what every rank has whole")
        return WHOLE

    def _fits(self, call: Call, result: Any) -> None:
        """A rule's result must have the unsplit shape that the twin has: a last check of the rules."""
        if call.twin is None:
            return
        ours, theirs = call.node.meta.get("val"), call.twin.meta.get("val")
        results = result if isinstance(result, tuple) else (result,)
        values = ours if isinstance(ours, tuple | list) else (ours,)
        wholes = theirs if isinstance(theirs, tuple | list) else (theirs,)
        for state, value, whole in zip(results, values, wholes, strict=False):
            if (
                not isinstance(value, Tensor)
                or not isinstance(whole, Tensor)
                or isinstance(state, Odd | Placed)
            ):
                continue
            shape = state.unsplit(value.shape) if isinstance(state, Laid) else tuple(value.shape)
            if state is not LOST and shape != tuple(whole.shape):
                owner = state.owner if isinstance(state, Laid | Partial) else ""
                raise Broken(
                    f"makes {list(value.shape)} on a rank and {list(whole.shape)} unsplit, which does not fit",
                    owner,
                )

    def _output(self, node: fx.Node) -> None:
        twin = self.pairs.get(node) if self.pairs is not None else None
        if self.pairs is not None and (
            twin is None or [self.pairs.get(n) for n in inputs(node)] != inputs(twin)
        ):
            why = Broken(
                "returns something else than the unsplit model: the code looks at sizes", definite=False
            )
            self._find(Call(node, None, self.states, self.plan.tp_size), why)
        for source in node.all_input_nodes:
            state = self.states.get(source, WHOLE)
            call = Call(source, None, self.states, self.plan.tp_size)
            if isinstance(state, Partial):
                self._find(call, call.pending(state))
            elif isinstance(state, Odd):
                self._find(call, Broken(f"returns {state.why}"))

    def _find(self, call: Call, broken: Broken) -> None:
        by = f", cut by {broken.owner}" if broken.owner else ""
        text = f"module {module_of(call.node)!r}{place(call.node)} calls {call.name}, which {broken}{by}"
        self.findings.append(Finding(text, broken.owner, broken.definite))


def _place_of(call: Call, placed: list[Placed]) -> State | None:
    """What ``styles.gather`` does: a one in the rank's place, and the rank's part times that."""
    if call.name in ("to", "_to_copy"):
        return placed[0]
    if call.name != "mul":
        return None
    one, value = call.node.args[:2] if call.state(call.node.args[0]) in placed else call.node.args[1::-1]
    laid, ndim = call.laid(value), len(call.shape)
    at = ndim - (len(shape_of(one)) - placed[0].at)
    if laid.dim == ndim - 1 and at == ndim - 2 and shape_of(value)[at] == 1:
        return Placed(at, laid)
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    from ..compat import FakeTensor

    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
        return a.shape == b.shape and a.dtype == b.dtype and type(a) is type(b)
    return a.shape == b.shape and torch.equal(a, b)


__all__ = ["Finding", "constants", "follow"]
