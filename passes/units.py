"""Pass ``units``: F, I and W of a chunk, each cut where a collective (or a ``cut`` mark) ends a unit.

Contract: (split joint graph) -> :class:`ChunkUnits`. A node's unit is the number of marks on its longest path from
the chunk's inputs (F) or from the gradients of its outputs (I); what depends on neither sinks to the one unit that
reads it, or goes into ``pre``, the unit that comes first. A W node belongs to the unit whose gradients it needs::

    F   pre:   cos, sin, mask            I   mlp:   dy -> partial dh           | all-reduce
        attn:  x -> partial y | all-reduce   attn:  dh -> partial dx           | all-reduce
        mlp:   y -> partial z | all-reduce   tail:  dx -> gradient of boundary
        tail:  z -> boundary             W   mlp, attn, norm: one per unit of I

Every unit is an FX graph of its own with a canonical order of nodes, inputs and outputs: units that compute the
same thing (layer 3's MLP and layer 7's) have the same ``key`` and share one artefact.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, fx

from .cost import flops
from .joint import JointGraph, Phase
from .marks import COLLECTIVES, CUT, is_mark, is_matmul
from .reach import descendants


@dataclass(slots=True)
class Unit:
    """One piece of a chunk between two collectives.

    ``graph_module`` takes ``state`` (parameters and buffers by name) and then ``args`` (nodes of the joint graph)
    and returns ``outs``; in W those that are gradients of parameters are named in ``grads`` (None: a value).
    """

    name: str
    phase: Phase
    chunk: int
    index: int
    graph_module: fx.GraphModule
    key: str
    state: tuple[str, ...]
    args: tuple[fx.Node, ...]
    outs: tuple[fx.Node, ...]
    grads: tuple[str | None, ...]
    matmuls: int
    flops: int

    @property
    def label(self) -> str:
        """Name in a block: ``attn3_F``."""
        return f"{self.name}_{self.phase.value}"


@dataclass(slots=True)
class ChunkUnits:
    """A chunk ready to be woven.

    ``for_I`` and ``for_W``: values of F that I and W read (saved activations); ``handed``: values of I that W
    reads, the memory that lives until W. All three are nodes of the joint graph with marks resolved, and each
    list is what the program passes, in this order.
    """

    joint: JointGraph
    tp_size: int
    units: dict[Phase, list[Unit]]
    outputs: list[fx.Node]
    input_grads: list[fx.Node]
    for_I: list[fx.Node] = field(default_factory=list)
    for_W: list[fx.Node] = field(default_factory=list)
    handed: list[fx.Node] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.joint.chunk.index

    def resolve(self, node: fx.Node) -> fx.Node:
        """The value behind marks that do nothing: every ``cut``, and all-reduces where tp_size is 1."""
        return _resolve(node, self.tp_size)

    def is_collective(self, node: fx.Node) -> bool:
        """True for a collective that really happens."""
        return self.tp_size > 1 and node.target in COLLECTIVES


def _resolve(node: fx.Node, tp_size: int) -> fx.Node:
    while node.target is CUT or (tp_size == 1 and node.target in COLLECTIVES):
        node = node.args[0]  # type: ignore[assignment]
    return node


def units(joint: JointGraph, *, tp_size: int) -> ChunkUnits:
    """See the module's docstring."""
    unit_of = _assign(joint)
    groups: dict[tuple[Phase, int], list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if node in unit_of and not is_mark(node):
            groups.setdefault((joint.phase[node], unit_of[node]), []).append(node)
    result = ChunkUnits(
        joint=joint,
        tp_size=tp_size,
        units={phase: [] for phase in Phase},
        outputs=[_resolve(n, tp_size) for n in joint.outputs],
        input_grads=[_resolve(n, tp_size) for n in joint.input_grads],
    )
    _hand_over(result)
    names: Counter[str] = Counter()
    for phase, index in sorted(groups, key=lambda key: (list(Phase).index(key[0]), key[1])):
        unit = _build(result, phase, index, groups[phase, index])
        names[unit.label] += 1
        if names[unit.label] > 1:
            unit.name += f"_{names[unit.label]}"
        result.units[phase].append(unit)
    return result


def unique_names(chunks: Iterable[ChunkUnits]) -> None:
    """Give units of different chunks different names: a block finds a unit by its name alone."""
    chunks = list(chunks)
    owners: dict[str, set[int]] = {}
    for chunk in chunks:
        for unit in (u for us in chunk.units.values() for u in us):
            owners.setdefault(unit.name, set()).add(chunk.index)
    for chunk in chunks:
        for unit in (u for us in chunk.units.values() for u in us):
            if len(owners[unit.name]) > 1:
                unit.name += f"_c{chunk.index}"


# -- which unit ------------------------------------------------------------------------------------------------


def _assign(joint: JointGraph) -> dict[fx.Node, int]:
    parameters = [n for n, name in joint.state.items() if name in set(joint.chunk.params)]
    # What follows from inputs alone (masks) or from parameters alone (1 + weight) goes to whoever reads it.
    started = descendants(joint.boundary) | (descendants(parameters) & descendants(joint.inputs.values()))
    driven = descendants(joint.tangents)
    order = [n for n in joint.graph.nodes if n in joint.phase]
    unit: dict[fx.Node, int] = {}
    floating: dict[Phase, list[fx.Node]] = {phase: [] for phase in Phase}
    for phase in Phase:
        anchored = started if phase is Phase.F else driven
        for node in order:
            if joint.phase[node] is not phase:
                continue
            if node not in anchored:
                floating[phase].append(node)
                continue
            depth = 0
            for source in node.all_input_nodes:
                same_strand = joint.phase.get(source) is phase or (
                    phase is Phase.W and joint.phase.get(source) is Phase.I
                )
                if same_strand and source in unit:
                    depth = max(depth, unit[source] + is_mark(source))
            unit[node] = depth
    for phase, nodes in floating.items():
        for node in reversed(nodes):
            readers = {unit[u] for u in node.users if joint.phase.get(u) is phase and u in unit}
            if phase is Phase.F:
                unit[node] = readers.pop() if len(readers) == 1 else -1
            else:
                unit[node] = min(readers, default=0)
    return unit


# -- what goes from phase to phase ------------------------------------------------------------------------------


def _hand_over(result: ChunkUnits) -> None:
    """Fill ``for_I``, ``for_W`` and ``handed`` in the order of the joint graph."""
    joint = result.joint
    sources: dict[fx.Node, set[Phase]] = {}
    for node, phase in joint.phase.items():
        for source in _values(result, node):
            own = joint.phase.get(source)
            if own is not phase:
                sources.setdefault(source, set()).add(phase)
    for target in (*result.input_grads,):
        # An input gradient that F or a tangent already holds must reach I as well.
        if joint.phase.get(target) is not Phase.I and target not in joint.tangents:
            sources.setdefault(target, set()).add(Phase.I)
    for name, grad in joint.param_grads.items():
        value = result.resolve(grad)
        if joint.phase.get(value) is not Phase.W:
            sources.setdefault(value, set()).add(Phase.W)
        del name
    tangents = set(joint.tangents)
    for node in joint.graph.nodes:
        readers = sources.get(node, set())
        made_in_backward = node in tangents or joint.phase.get(node) is Phase.I
        if Phase.I in readers and not made_in_backward:
            result.for_I.append(node)
        if Phase.W in readers:
            (result.handed if made_in_backward else result.for_W).append(node)


def _values(result: ChunkUnits, node: fx.Node) -> list[fx.Node]:
    """What ``node`` reads, marks resolved, without parameters, buffers and their views."""
    joint = result.joint
    found = []
    for source in node.all_input_nodes:
        value = result.resolve(source)
        if value not in joint.state and value not in joint.free:
            found.append(value)
    return found


# -- one unit ---------------------------------------------------------------------------------------------------


def _build(result: ChunkUnits, phase: Phase, index: int, nodes: list[fx.Node]) -> Unit:
    joint = result.joint
    members = set(nodes)
    ordered = _canonical_order(joint, nodes, members)
    grads = {result.resolve(n): name for name, n in joint.param_grads.items()}
    wanted = {*result.outputs, *result.input_grads, *result.for_I, *result.for_W, *result.handed}
    outs = [
        n
        for n in ordered
        if n in members
        and not _is_tuple(n)
        and (
            (phase is Phase.W and n in grads)
            or n in wanted
            or any(u not in members and _reads(result, u, n, members) for u in n.users)
        )
    ]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    state, args = _placeholders(result, graph, env, ordered)
    for node in ordered:
        if node not in env:
            env[node] = graph.node_copy(node, lambda n: env[result.resolve(n)])
            env[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
    graph.output(tuple(env[n] for n in outs))
    module = fx.GraphModule({}, graph, class_name="Unit")
    return Unit(
        name=_name(result, phase, index, state, [grads[n] for n in outs if n in grads], nodes),
        phase=phase,
        chunk=result.index,
        index=index,
        graph_module=module,
        key=canonical_key(graph),
        state=tuple(joint.state[n] for n in state),
        args=tuple(args),
        outs=tuple(outs),
        grads=tuple(grads.get(n) if phase is Phase.W else None for n in outs),
        matmuls=sum(is_matmul(n) for n in nodes),
        flops=sum(flops(n) for n in nodes),
    )


def _is_tuple(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), Tensor)


def _reads(result: ChunkUnits, user: fx.Node, node: fx.Node, members: set[fx.Node]) -> bool:
    """Does anything outside the unit read ``node`` through ``user`` (marks are transparent)?"""
    if user.op == "output":
        return False
    if is_mark(user) and not result.is_collective(user):
        return any(u not in members and _reads(result, u, user, members) for u in user.users)
    return True


def _canonical_order(joint: JointGraph, nodes: list[fx.Node], members: set[fx.Node]) -> list[fx.Node]:
    """Trace order, except that what only feeds a later node stands right before it: so the order does not depend
    on where the tracer first met a constant or a transposed weight."""
    anchored = descendants([*joint.tangents, *joint.boundary, *(n for n in joint.state)])
    done: dict[fx.Node, None] = {}

    def emit(node: fx.Node) -> None:
        if node in done:
            return
        for source in node.all_input_nodes:
            if (source in members or source in joint.free) and source not in done:
                emit(source)
        done[node] = None

    for node in nodes:
        if node in anchored:
            emit(node)
    for node in nodes:
        emit(node)
    return list(done)


def _placeholders(
    result: ChunkUnits, graph: fx.Graph, env: dict[fx.Node, fx.Node], ordered: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    inside = set(ordered)
    state: dict[fx.Node, None] = {}
    args: dict[fx.Node, None] = {}
    for node in ordered:
        for source in node.all_input_nodes:
            value = result.resolve(source)
            if value in result.joint.state:
                state[value] = None
            elif value not in inside:
                args[value] = None
    for kind, values in (("p", state), ("x", args)):
        for i, value in enumerate(values):
            env[value] = graph.placeholder(f"{kind}{i}")
            env[value].meta["val"] = value.meta["val"]
    return list(state), list(args)


def canonical_key(graph: fx.Graph) -> str:
    """A hash of operators, arguments, shapes, dtypes, strides, devices and outputs: equal for units that may share
    one artefact, whatever their nodes are called. Tensors must be inputs: one that the graph holds would not show."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            val = node.meta["val"]
            lines.append(f"placeholder {tuple(val.shape)} {val.stride()} {val.dtype} {val.device}")
        elif node.op in ("call_function", "output"):
            text = f"{node.op} {node.target if node.op == 'call_function' else ''}"
            lines.append(text + repr(fx.map_arg((node.args, node.kwargs), lambda n: _Ref(number[n]))))
        else:
            raise ValueError(
                f"{node.op} {node.target} in a unit: tensors and modules must be inputs of the graph"
            )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class _Ref(str):
    """A numbered node inside ``repr`` of arguments."""

    def __new__(cls, number: int) -> _Ref:
        return super().__new__(cls, f"%{number}")


# -- names ------------------------------------------------------------------------------------------------------


def _name(
    result: ChunkUnits,
    phase: Phase,
    index: int,
    state: Iterable[fx.Node],
    grads: list[str],
    nodes: list[fx.Node],
) -> str:
    """After the parameters with the most elements that the unit reads (or, in W, whose gradients it makes)."""
    joint = result.joint
    chunk = result.index
    if index < 0:
        return f"pre_c{chunk}"
    sizes: Counter[str] = Counter()
    by_name = {name: n for n, name in joint.state.items()}
    named = grads if phase is Phase.W else [joint.state[n] for n in state]
    for name in named:
        if name in joint.chunk.params:
            own = short_name(name) or _outside(name, matmul=any(is_matmul(n) for n in nodes))
            sizes[own] += by_name[name].meta["val"].numel()
    if not sizes or not (any(is_matmul(n) for n in nodes) or phase is not Phase.I):
        return f"tail_c{chunk}"
    return max(sizes, key=lambda key: sizes[key])


def _outside(parameter: str, *, matmul: bool) -> str:
    """The same for what lies in no layer: ``matmul``: the unit has a matrix product."""
    if matmul:
        return "head"
    return "norm" if re.search(r"norm|(^|\.)ln", parameter.lower()) else "embed"


def short_name(parameter: str) -> str | None:
    """``model.layers.3.self_attn.q_proj.weight`` -> ``attn3``; None for what lies in no layer."""
    match = re.fullmatch(r"(?:.*?\.)?(\d+)\.(.*?)(?:\.(?:weight|bias))?", parameter)
    if match is None:
        return None
    layer, rest = match.groups()
    first = rest.split(".")[0].lower()
    if "norm" in first or first.startswith("ln"):
        kind = "norm"
    elif "attn" in first or "attention" in first:
        kind = "attn"
    elif "mlp" in first or "ffn" in first or "feed_forward" in first or "moe" in first:
        kind = "mlp"
    else:
        kind = re.sub(r"\W", "_", first)
    return f"{kind}{layer}"
