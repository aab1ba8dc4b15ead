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
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, fx

from .assign import ALONE, assign, resolve
from .cost import flops
from .joint import JointGraph, Phase
from .marks import COLLECTIVES, is_mark, is_matmul
from .names import unit_name
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
    #: computes again, in I, what F did and did not save
    again: bool = False
    #: a unit of W without a matrix product that one with reads
    ahead: bool = False

    @property
    def kind(self) -> str:
        """ "F", "I", "W", or "R" for what is computed again."""
        return "R" if self.again else self.phase.value

    @property
    def heavy(self) -> bool:
        """Has it a place among those that hide a collective? Light units of W come last, where nothing waits for them;
        one that a heavy one reads (the gradient of a residual stream that no I needs) can't."""
        return self.matmuls > 0 or self.ahead

    @property
    def label(self) -> str:
        """Name in a block: ``attn3_F``."""
        return f"{self.name}_{self.kind}"


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
        return resolve(node, self.tp_size)

    def is_collective(self, node: fx.Node) -> bool:
        """True for a collective that really happens."""
        return self.tp_size > 1 and node.target in COLLECTIVES


def units(joint: JointGraph, *, tp_size: int) -> ChunkUnits:
    """See the module's docstring."""
    unit_of = assign(joint)
    groups: dict[tuple[Phase, int], list[fx.Node]] = {}
    repeated: dict[int, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if node in joint.recomputed:
            repeated.setdefault(joint.recomputed[node], []).append(node)
        elif node in unit_of and not is_mark(node):
            groups.setdefault((joint.phase[node], unit_of[node]), []).append(node)
    result = ChunkUnits(
        joint=joint,
        tp_size=tp_size,
        units={phase: [] for phase in Phase},
        outputs=[resolve(n, tp_size) for n in joint.outputs],
        input_grads=[resolve(n, tp_size) for n in joint.input_grads],
    )
    _hand_over(result)
    names: Counter[str] = Counter()
    for phase, index in sorted(groups, key=lambda key: (list(Phase).index(key[0]), key[1])):
        unit = _build(result, phase, index, groups[phase, index])
        names[unit.label] += 1
        if names[unit.label] > 1:
            unit.name += f"_{names[unit.label]}"
        result.units[phase].append(unit)
    again = [
        _build(result, Phase.I, unit_of[nodes[0]], nodes, again=unit.name)
        for unit in result.units[Phase.F]
        if (nodes := repeated.get(unit.index))
    ]
    if ALONE in repeated and all(unit.index != ALONE for unit in result.units[Phase.F]):
        # In F, where one unit reads them, tables are made there.
        nodes = repeated[ALONE]
        again.append(_build(result, Phase.I, unit_of[nodes[0]], nodes, again="pre"))
    result.units[Phase.I] = _before_readers(result, again)
    read: set[fx.Node] = set()
    for unit in reversed(result.units[Phase.W]):
        unit.ahead = not unit.matmuls and not read.isdisjoint(unit.outs)
        if unit.heavy:
            read.update(unit.args)
    return result


def _before_readers(result: ChunkUnits, again: list[Unit]) -> list[Unit]:
    """The units of I, with those that compute again each before the first that reads it: as late as can be."""
    makers = {out: unit for unit in again for out in unit.outs}
    read = {arg for unit in (*result.units[Phase.I], *again) for arg in unit.args}
    waiting = {unit.label: unit for unit in again}
    order: list[Unit] = []

    def put(unit: Unit) -> None:
        if unit.again and waiting.pop(unit.label, None) is None:
            return
        for maker in (makers[arg] for arg in unit.args if arg in makers):
            put(maker)
        order.append(unit)

    for unit in result.units[Phase.I]:
        for one in again:  # what only W reads stands where that W's unit of I does
            if one.index <= unit.index and not read.intersection(one.outs):
                put(one)
        put(unit)
    for one in again:
        put(one)
    return order


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


def _build(
    result: ChunkUnits, phase: Phase, index: int, nodes: list[fx.Node], again: str | None = None
) -> Unit:
    """``again``: the name of the unit of F that this one repeats."""
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
        name=again or unit_name(joint, phase, index, state, [grads[n] for n in outs if n in grads], nodes),
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
        again=again is not None,
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
