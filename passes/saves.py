"""Pass ``saves``: what of the forward is kept for I and for W, and what they compute again.

Contract: (split joint graph, units of F that are checkpointed) -> the same graph, in which the backward reads, of the
forward, what is saved, and copies of the rest::

    F:  g = x @ Wg; a = silu(g); h = a * u          F:  g = x @ Wg; a = silu(g); h = a * u     # saved: g, u
    I:  du = dh * a                             =>  I:  a1 = silu(g); du = dh * a1; h1 = a1 * u
    W:  dW = h.T @ dy   # saved: g, a, u, h         W:  dW = h1.T @ dy                         # handed on: h1

A minimum cut decides (as torch's ``min_cut_rematerialization_partition`` does for one backward): each storage is worth
its bytes, between F and I and again between I and W; a value may be made again by operators that cost little (pointwise
ones, casts, copies) from others of its unit of F, at a price that is a fraction of its bytes. Matrix products,
attention, reductions and what crosses a unit's end, first of all a collective's result, are never made again, except in
units of F that are checkpointed: there everything is that the backward needs, once, in I; W gets it from there.

Views keep what they view: one storage is saved once, as the view that a phase reads, or whole where it reads several.
Parameters and the chunk's inputs are there anyway and cost nothing. The same operators on the same values give the same
bits.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .aliases import is_view
from .assign import ALONE, assign, resolve
from .cost import nbytes
from .joint import JointGraph, Phase
from .marks import CUT, is_collective, is_mark
from .mincut import INFINITE, Network
from .reach import descendants

aten = torch.ops.aten

#: What a byte costs that lives from F to I; what it costs from I to W, where fewer micro-batches wait; and what it
#: costs to make it again, for the time that this takes.
SAVED, HANDED, AGAIN = 64, 16, 1

#: Beside what torch calls pointwise: copies, casts, constants.
_CHEAP = frozenset(
    {
        aten.clone.default,
        aten._to_copy.default,
        aten.cat.default,
        aten.stack.default,
        aten.constant_pad_nd.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.full.default,
        aten.full_like.default,
        aten.zeros.default,
        aten.zeros_like.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.repeat.default,
        torch.ops.prims.convert_element_type.default,
    }
)


def is_cheap(node: fx.Node) -> bool:
    """Does ``node`` cost about as much as reading and writing its values?"""
    if node.target is operator.getitem:
        return is_cheap(node.args[0])  # type: ignore[arg-type]
    tags = getattr(node.target, "tags", ())
    return _repeatable(node) and (torch.Tag.pointwise in tags or node.target in _CHEAP)


def _repeatable(node: fx.Node) -> bool:
    """Does ``node`` give the same values each time, and change nothing?"""
    if node.op != "call_function" or is_mark(node):
        return False
    if node.target is operator.getitem:
        return _repeatable(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags or _drops_nothing(node)  # type: ignore[union-attr]


def _drops_nothing(node: fx.Node) -> bool:
    """An attention kernel, which says that it is random, without dropout: then it is not."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return bool(node.kwargs.get("dropout_p", node.args[at] if len(node.args) > at else 0.0) == 0.0)


def _is_float(val: object) -> bool:
    return isinstance(val, Tensor) and val.is_floating_point()


def _repeats(node: fx.Node) -> bool:
    """Does ``node`` view elements more than once?"""
    val = node.meta["val"]
    return any(size > 1 and stride == 0 for size, stride in zip(val.shape, val.stride(), strict=True))


def choose_saves(joint: JointGraph, *, tp_size: int, checkpointed: Collection[int] = ()) -> None:
    """See the module's docstring; changes ``joint`` in place. ``checkpointed``: numbers of units of F, as
    :func:`passes.assign.assign` gives them."""
    values = _Values(joint, tp_size, frozenset(checkpointed))
    _Rewriter(joint, values, _cut(values)).run()


@dataclass(slots=True)
class _Values:
    """The forward and the inputs of W as storages: what makes which, and what may be made again."""

    joint: JointGraph
    tp_size: int
    checkpointed: frozenset[int]
    unit: dict[fx.Node, int] = field(default_factory=dict)
    #: storages that a unit of F (or of I) reads of another one
    crossing: set[fx.Node] = field(default_factory=set)
    #: numbers that follow from the chunk's inputs alone (rotary tables, masks that are added), and what leads to them
    tables: set[fx.Node] = field(default_factory=set)
    #: storages that W gathers over TP ranks, which may start before any unit of the backward
    gathered: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        joint = self.joint
        self.unit = assign(joint)
        parameters = [n for n, name in joint.state.items() if name in set(joint.chunk.params)]
        driven = descendants([*joint.boundary, *parameters])
        for node in reversed(
            [n for n in joint.graph.nodes if joint.phase.get(n) is Phase.F and n not in driven]
        ):
            if _is_float(node.meta.get("val")) or not self.tables.isdisjoint(node.users):
                self.tables.add(node)
        linked = {
            frozenset((self.unit[node], self.unit[user]))
            for node in joint.graph.nodes
            # Of F alone: made again in W, what I's units hand to each other would be one W unit's for another.
            if node.target is CUT and joint.phase.get(node) is Phase.F
            for user in node.users
            if joint.phase.get(user) is Phase.F
        }
        for node, phase in joint.phase.items():
            if phase is Phase.W and is_collective(node):
                self.gathered |= {self.base(source) for source in self.reads(node)}
            for source in self.reads(node):
                base = self.base(source)
                if base in self.unit and joint.phase.get(base) is phase:
                    ends = frozenset((self.unit[base], self.unit[node]))
                    if len(ends) > 1 and -1 not in ends and not (phase is Phase.F and ends in linked):
                        self.crossing.add(base)

    def reads(self, node: fx.Node) -> Iterator[fx.Node]:
        """What ``node`` reads, marks resolved, that no parameter gives."""
        for source in node.all_input_nodes:
            value = resolve(source, self.tp_size)
            if value not in self.joint.state and value not in self.joint.free:
                yield value

    def base(self, node: fx.Node) -> fx.Node:
        """The node whose storage ``node`` is."""
        node = resolve(node, self.tp_size)
        while is_view(node):
            node = resolve(node.args[0], self.tp_size)  # type: ignore[arg-type]
        return node

    def parents(self, base: fx.Node) -> list[fx.Node]:
        """The storages that ``base`` is made from."""
        return list(dict.fromkeys(self.base(source) for source in self.reads(base)))

    def needed(self, *phases: Phase) -> list[fx.Node]:
        """Storages of earlier phases that ``phases`` read."""
        joint = self.joint
        found: dict[fx.Node, None] = {}
        for node in joint.graph.nodes:
            phase = joint.phase.get(node)
            if phase in phases:
                for source in self.reads(node):
                    if joint.phase.get(source) is not phase:
                        found[self.base(source)] = None
        # A view that a phase makes of what an earlier one has: its storage is of the earlier one.
        return [base for base in found if joint.phase.get(base) not in phases]

    def again(self, base: fx.Node, phase: Phase) -> bool:
        """May ``phase`` make ``base``, of an earlier phase, again?"""
        if base not in self.joint.phase or self.joint.phase[base] is Phase.W or base in self.crossing:
            return False
        if base in self.gathered:
            return False
        if is_cheap(base):
            return True
        own = phase is Phase.I and self.unit[base] in self.checkpointed
        return own and self.joint.phase[base] is Phase.F and _repeatable(base)

    def worth(self, base: fx.Node) -> int:
        """Bytes of a storage; 0 for what is there anyway."""
        if base in self.joint.inputs.values():
            return 0
        val = base.meta.get("val")
        return nbytes(val) if isinstance(val, Tensor) else INFINITE

    def time(self, base: fx.Node) -> int:
        """Bytes that are written where it is made again."""
        val = base.meta.get("val")
        return 1 + (nbytes(val) if isinstance(val, Tensor) else 0)


@dataclass(slots=True)
class _Cut:
    """Storages that I makes again, and that W does."""

    in_I: set[fx.Node]
    in_W: set[fx.Node]


def _cut(values: _Values) -> _Cut:
    """Two layers: what is there in I, of the forward, and what is there in W, of the forward and of I. A storage has an
    inner node where it may be made again (from parents that are there), and an outer one: with the sink if it is
    there. What is there in W must have been there in I: the way from F to W leads past it."""
    net = Network()
    joint = values.joint
    need = {Phase.I: values.needed(Phase.I), Phase.W: values.needed(Phase.W)}
    layers: dict[Phase, dict[fx.Node, tuple[int, int]]] = {}
    for phase, worth in ((Phase.I, SAVED), (Phase.W, HANDED)):
        wanted = need[phase]
        if phase is Phase.I:  # of I's own values nothing is needed to be there in I
            wanted = [*wanted, *(b for b in need[Phase.W] if joint.phase.get(b) is not Phase.I)]
            wanted = [b for b in wanted if b not in joint.tangents]
        nodes: dict[fx.Node, tuple[int, int]] = {}
        todo = list(dict.fromkeys(wanted))
        while todo:
            base = todo.pop()
            if base in nodes:
                continue
            outer = net.add()
            inner = net.add() if values.again(base, phase) else net.SOURCE
            nodes[base] = inner, outer
            net.join(inner, outer, min(values.worth(base) * worth, INFINITE))
            if inner != net.SOURCE:
                net.join(net.SOURCE, inner, values.time(base) * AGAIN)
                todo += values.parents(base)
        for base, (inner, _) in nodes.items():
            if inner != net.SOURCE:
                for parent in values.parents(base):
                    net.join(nodes[parent][1], inner, INFINITE)
        for base in need[phase]:
            if base in nodes:
                net.join(nodes[base][1], net.SINK, INFINITE)
        layers[phase] = nodes
    for base, (_, outer) in layers[Phase.W].items():
        if base in layers[Phase.I]:
            net.join(layers[Phase.I][base][1], outer, INFINITE)
    there = net.sink_side()
    in_I, in_W = (
        {base for base, (inner, _) in layers[phase].items() if inner in there} for phase in (Phase.I, Phase.W)
    )
    return _Cut(in_I, in_W)


class _Rewriter:
    """Gives the backward copies of what is made again."""

    def __init__(self, joint: JointGraph, values: _Values, cut: _Cut) -> None:
        self.joint, self.values, self.cut = joint, values, cut
        #: copies, by phase and storage
        self.copies: dict[tuple[Phase, fx.Node], fx.Node] = {}
        #: views that a phase reads of a storage that it gets
        self.forms: dict[tuple[Phase, fx.Node], set[fx.Node]] = {}
        self.views: dict[tuple[Any, ...], fx.Node] = {}
        self.reader = joint.graph.output_node()
        #: what nodes of the backward are to read, put in place at the end: until then their arguments say what they
        #: are made from
        self.given: list[tuple[fx.Node, fx.Node, fx.Node]] = []

    def run(self) -> None:
        joint = self.joint
        backward = [n for n in joint.graph.nodes if joint.phase.get(n) in (Phase.I, Phase.W)]
        self._find_forms(backward)
        for node in backward:
            phase = joint.phase[node]
            self.reader = node
            for source in node.all_input_nodes:
                value = resolve(source, self.values.tp_size)
                if self._foreign(value, phase):
                    found = self._value(value, phase, self._group(node))
                    if (
                        found is not value
                    ):  # else it stays as it is, with its marks, which say where a unit ends
                        self.given.append((node, source, found))
        for node, source, value in self.given:
            node.replace_input_with(source, value)
        for node in reversed(list(joint.graph.nodes)):
            if node.op == "call_function" and not node.users and node in joint.phase:
                joint.graph.erase_node(node)
                del joint.phase[node]
                joint.recomputed.pop(node, None)

    def _foreign(self, value: fx.Node, phase: Phase) -> bool:
        """Does ``value`` come from an earlier phase (and not from a parameter)?"""
        joint = self.joint
        if value in joint.state or value in joint.free:
            return False
        return joint.phase.get(value, Phase.F) is not phase

    def _again(self, base: fx.Node, phase: Phase) -> bool:
        return base in (self.cut.in_I if phase is Phase.I else self.cut.in_W)

    # -- which views are read of what is passed on

    def _find_forms(self, backward: list[fx.Node]) -> None:
        todo = [
            (value, self.joint.phase[node])
            for node in backward
            for value in self.values.reads(node)
            if self._foreign(value, self.joint.phase[node])
        ]
        done: set[tuple[fx.Node, Phase]] = set()
        while todo:
            value, phase = todo.pop()
            if (value, phase) in done:
                continue
            done.add((value, phase))
            base = self.values.base(value)
            if self._again(base, phase):
                todo += [(source, phase) for source in self.values.reads(base)]
                continue
            self.forms.setdefault((phase, base), set()).add(value)
            if phase is Phase.W and self._again(base, Phase.I):
                todo += [(source, Phase.I) for source in self.values.reads(base)]

    # -- what a reader gets

    def _group(self, node: fx.Node) -> tuple[Any, ...]:
        """Where ``node`` stands: readers of one place share their views."""
        joint = self.joint
        return joint.phase[node], joint.recomputed.get(node), self.values.unit.get(node)

    def _value(self, value: fx.Node, phase: Phase, group: tuple[Any, ...]) -> fx.Node:
        """What takes the place of ``value`` of an earlier phase where ``group`` of ``phase`` reads it."""
        base = self.values.base(value)
        if self._again(base, phase):
            return self._view(value, base, self._copy(base, phase), group)
        # A view that repeats elements (keys for every query head) is none that compiled code would hand out as it is.
        form = value if len(self.forms[phase, base]) == 1 and not _repeats(value) else base
        if phase is Phase.W and self._again(base, Phase.I) and self.joint.phase.get(base) is Phase.F:
            copy = self._copy(base, Phase.I)
            source = self._view(form, base, copy, self._group(copy))
        else:
            source = form
        return self._view(value, form, source, group)

    def _view(self, value: fx.Node, source: fx.Node, given: fx.Node, group: tuple[Any, ...]) -> fx.Node:
        """``value``, a view of ``source``, made of ``given`` in its place."""
        value = resolve(value, self.values.tp_size)
        if value is source:
            return given
        key = (value, given, *group)
        if key not in self.views:
            viewed = self._view(value.args[0], source, given, group)  # type: ignore[arg-type]
            self.views[key] = self._node(value, {value.args[0]: viewed}, group)  # type: ignore[dict-item]
        return self.views[key]

    def _copy(self, base: fx.Node, phase: Phase) -> fx.Node:
        """``base``, made again in ``phase``."""
        if (phase, base) not in self.copies:
            unit = self.values.unit[base]
            own = phase is Phase.I and (unit in self.values.checkpointed or unit < 0)
            group = (phase, unit if own else None, None)
            if phase is Phase.I and base in self.values.tables:
                # However many layers read a table, it is made in a unit of its own: fused into a layer's kernels, a
                # cosine may have other bits, and chunks of one layer and of two would differ.
                group = (phase, ALONE, None)
            given = {}
            for source in base.all_input_nodes:
                value = resolve(source, self.values.tp_size)
                if self._foreign(value, phase):
                    given[source] = self._value(value, phase, group)
            self.copies[phase, base] = self._node(base, given, group)
        return self.copies[phase, base]

    def _node(self, node: fx.Node, given: dict[fx.Node, fx.Node], group: tuple[Any, ...]) -> fx.Node:
        joint = self.joint
        phase, unit, _ = group

        def read(source: fx.Node) -> fx.Node:
            found = given.get(source, source)
            return source if found is resolve(source, self.values.tp_size) else found

        with joint.graph.inserting_before(self.reader):
            copy = joint.graph.node_copy(node, read)
        copy.meta["partitioner_tag"] = "is_backward"
        joint.phase[copy] = phase
        if unit is not None and phase is Phase.I:
            joint.recomputed[copy] = unit
        return copy
