"""Part of pass ``units``: the number of every node's unit.

Contract: (split joint graph) -> number by node: in F and I the marks on its longest path, in W the unit of I that it
needs. What no tangent and no boundary value leads to (constants, masks, values computed again) goes to whoever reads
it first. Nodes that are recomputed in a unit of their own (``joint.recomputed``) get the number of the unit of I that
reads it first, which that unit stands before.
"""

from __future__ import annotations

from torch import fx

from .joint import JointGraph, Phase
from .marks import COLLECTIVES, CUT, is_mark
from .reach import descendants

ALONE = -1
"""The number of a chunk's first unit: what follows from inputs alone and several units read."""


def resolve(node: fx.Node, tp_size: int) -> fx.Node:
    """The value behind marks that do nothing: every ``cut``, and all collectives where tp_size is 1."""
    while node.target is CUT or (tp_size == 1 and node.target in COLLECTIVES):
        node = node.args[0]  # type: ignore[assignment]
    return node


def assign(joint: JointGraph) -> dict[fx.Node, int]:
    """See the module's docstring."""
    parameters = [n for n, name in joint.state.items() if name in set(joint.chunk.params)]
    # What follows from inputs alone (masks) or from parameters alone (1 + weight) goes to whoever reads it.
    started = descendants(joint.boundary) | (descendants(parameters) & descendants(joint.inputs.values()))
    driven = descendants(joint.tangents)
    order = [n for n in joint.graph.nodes if n in joint.phase]
    unit: dict[fx.Node, int] = {}
    _longest(joint, [n for n in order if joint.phase[n] is Phase.F and n in started], unit)
    for node in reversed([n for n in order if joint.phase[n] is Phase.F and n not in started]):
        readers = {unit[u] for u in node.users if joint.phase.get(u) is Phase.F and u in unit}
        unit[node] = readers.pop() if len(readers) == 1 else -1
    if len(joint.phase) == len(unit):
        return unit
    _longest(joint, [n for n in order if joint.phase[n] is Phase.I and n in driven], unit)
    loose = [n for n in order if joint.phase[n] is Phase.I and n not in driven]
    _first_readers(joint, loose, unit, Phase.I)
    _longest(joint, [n for n in order if joint.phase[n] is Phase.W and n in driven], unit)
    free = [n for n in order if joint.phase[n] is Phase.W and n not in driven]
    _first_readers(joint, free, unit, Phase.W)
    # What W alone reads: made where the first such W stands.
    _first_readers(joint, [n for n in loose if n not in unit], unit, Phase.W)
    for node in [n for n in (*loose, *free) if n not in unit]:
        unit[node] = 0
    _behind_sources(joint, order, unit)
    return unit


def _longest(joint: JointGraph, nodes: list[fx.Node], unit: dict[fx.Node, int]) -> None:
    for node in nodes:
        phase, depth = joint.phase[node], 0
        for source in node.all_input_nodes:
            same_strand = joint.phase.get(source) is phase or (
                phase is Phase.W and joint.phase.get(source) is Phase.I
            )
            if same_strand and source in unit:
                depth = max(depth, unit[source] + is_mark(source))
        unit[node] = depth


def _first_readers(joint: JointGraph, nodes: list[fx.Node], unit: dict[fx.Node, int], phase: Phase) -> None:
    """Give each of ``nodes`` the number of its first reader in ``phase``, or among ``nodes``; those of one unit that is
    recomputed all get the same. What has no such reader gets none."""
    members = set(nodes)
    groups: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if node in joint.recomputed:
            groups.setdefault(joint.recomputed[node], []).append(node)

    def readers(node: fx.Node) -> set[int]:
        return {unit[u] for u in node.users if u in unit and (joint.phase.get(u) is phase or u in members)}

    def single() -> None:
        for node in reversed(nodes):
            if node not in joint.recomputed and node not in unit and (found := readers(node)):
                unit[node] = min(found)

    single()
    for group in sorted(groups, reverse=True):  # a unit's readers among them stand behind it in F
        found = {number for node in groups[group] for number in readers(node)}
        if found:
            unit.update(dict.fromkeys(groups[group], min(found)))
    single()


def _behind_sources(joint: JointGraph, order: list[fx.Node], unit: dict[fx.Node, int]) -> None:
    """No node of the backward stands before one that it reads."""
    for node in order:
        if joint.phase[node] is Phase.F or node in joint.recomputed:
            continue
        for source in node.all_input_nodes:
            if joint.phase.get(source) in (Phase.I, Phase.W):
                unit[node] = max(unit[node], unit[source])
