"""Pass ``braid``: the FX graph of one block, from the units of one to three actions.

Contract: (parts, context) -> :class:`Block`. The order comes from :func:`fxbraid.schedule.weave.weave`, or from costs
(:mod:`fxbraid.schedule.listorder`); a collective is launched right behind the unit that makes its input and waited for
right before the first unit that reads its result; a boundary value is sent as soon as it exists::

    F4 beside B1:   attn4_F = self.attn4_F(F_x0)
                    ar = _c10d_functional.all_reduce(attn4_F)       # launch ARf
                    mlp1_I = self.mlp1_I(I_dy0, ...)                # hides ARf
                    ar_1 = _c10d_functional.all_reduce(mlp1_I)      # launch ARb
                    mlp1_W = self.mlp1_W(...)                       # hides ARb
                    wait = _c10d_functional.wait_tensor(ar)
                    mlp4_F = self.mlp4_F(wait, ...)

``collectives`` says what becomes of them; units and their order are the same in all three, so that hiding can be
measured (``fxbraid.metrics.eta``):

``overlap``   as above.
``blocking``  waited for right behind every launch: nothing is hidden. The same results.
``free``      left out: the local value passes on as if it were the sum. For timing only: the results are wrong.

Inputs and outputs of a block, in the order of its parts (phase F, then I, then W):

====== ============================================================ ==========================================
phase  inputs                                                       outputs
====== ============================================================ ==========================================
F      user inputs, boundary values                                 boundary values that stay on this rank (or the
                                                                    model's outputs), ``for_I``, ``for_W``
I, B   ``for_I``, gradients of outputs (B also ``for_W``)           gradients that stay here (I also ``handed``)
W      ``for_W``, ``handed``                                        none: it adds to the gradients
====== ============================================================ ==========================================

``for_I``, ``for_W`` and ``handed`` travel as lists that the block empties as it starts, so that a tensor is freed
behind the last unit that reads it and not at the block's end.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from ..schedule import Action
from ..schedule import Phase as Do
from ..schedule.listorder import CostOrder
from ..schedule.weave import Strand, fetch_points, weave
from .boxes import Lines, box_calls, unpack_tuples
from .cost import reduce_bytes
from .joint import Phase
from .launches import WAIT, call_of, ends_with_mark, fetched, launched, left_out
from .units import ChunkUnits, Unit

Collectives = Literal["overlap", "blocking", "free"]
COLLECTIVES: tuple[str, ...] = get_args(Collectives)
#: What everything that reports a run without collectives says.
TIMING_ONLY = "timing only: TP collectives are left out, so losses and gradients are wrong"


def box(*values: torch.Tensor) -> list[torch.Tensor]:
    """Tensors on their way from one block to another."""
    return list(values)


def unbox(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Move the tensors out of ``values``: the caller's list is left empty and keeps nothing alive."""
    taken = list(values)
    values.clear()
    return taken


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What a block's graph refers to by name.

    ``modules``: the callable of every unit by label, and of every send by ``send_F{chunk}`` / ``send_I{chunk}``
    for boundaries that lead to another rank. ``order``: of units by costs; None is the paper's.
    """

    chunks: Mapping[int, ChunkUnits]
    modules: Mapping[str, nn.Module]
    tp_group: str
    collectives: Collectives = "overlap"
    order: CostOrder | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """What ``node.meta["launch"]`` of a collective says: behind which unit it goes out, and how large it is: bytes of
    the all-reduce that moves as much (:func:`passes.cost.reduce_bytes`)."""

    unit: Unit
    nbytes: int


@dataclass(slots=True)
class Part:
    """One action of a block: ``own_W`` for B, whose W is its own."""

    action: Action

    @property
    def phases(self) -> tuple[Phase, ...]:
        do = self.action.phase
        return (Phase.I, Phase.W) if do is Do.B else (Phase(do.value),)


@dataclass(slots=True)
class Block:
    """A block's graph and, per part, the names of what goes in and out (``passes.program`` connects them).

    ``plan``: where ``graph_module`` is compiled pieces (``compile="block"``), the graph of units that they were made
    of; else None.
    """

    name: str
    graph_module: fx.GraphModule
    inputs: list[list[str]]
    outputs: list[list[str]]
    plan: fx.GraphModule | None = None

    @property
    def code(self) -> str:
        """The Python that runs."""
        return self.graph_module.code


def block_name(parts: Sequence[Action]) -> str:
    """``F0&B3``: phases and chunks; a W of another micro-batch than the I beside it says so by being there."""
    return "&".join(f"{a.phase.value}{a.chunk}" for a in parts)


def block_kind(parts: Sequence[Action]) -> str:
    """``F&B``: phases alone."""
    return "&".join(a.phase.value for a in parts)


def braid(parts: Sequence[Action], context: BlockContext) -> Block:
    """Build the block of ``parts``, given in the order in which the schedule names them."""
    return _Builder(parts, context).build()


@dataclass(slots=True)
class _Line:
    """One strand while its block is built: where each value of its chunk lives in the block's graph."""

    part: int
    phase: Phase
    units: list[Unit]
    chunk: ChunkUnits
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    pending: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Builder:
    def __init__(self, parts: Sequence[Action], context: BlockContext) -> None:
        self.parts = list(parts)
        self.context = context
        self.graph = fx.Graph()
        self.lines: list[_Line] = []
        self.inputs: list[list[str]] = []
        self.used: dict[str, nn.Module] = {}
        self.sent: set[tuple[int, str]] = set()

    def build(self) -> Block:
        for i, action in enumerate(self.parts):
            self._open(i, action)
        order = self._order()
        fetches = fetch_points(self._strands(), order)
        for position, (s, u) in enumerate(order):
            for line, unit in ((self.lines[a], self.lines[a].units[b]) for a, b in fetches.get(position, ())):
                for gather in fetched(line.chunk, unit):
                    if gather in line.env or gather in line.pending:
                        continue  # another unit of W reads it as well
                    self._launch(line, unit, line.chunk.resolve(gather.args[0]), gather)  # type: ignore[arg-type]
            self._run(self.lines[s], self.lines[s].units[u])
        outputs: list[list[str]] = []
        values: list[Any] = []
        for i, action in enumerate(self.parts):
            names, results = self._results(i, action)
            outputs.append(names)
            values += results
        self.graph.output(tuple(values))
        self.graph.on_generate_code(lambda _: self._code())
        module = fx.GraphModule(_root(self.used), self.graph, class_name="Block")
        return Block(block_name(self.parts), module, self.inputs, outputs)

    def _code(self) -> Lines:
        box = box_calls({str(n.target) for n in self.graph.nodes if "unit" in n.meta})
        return lambda body: box(unpack_tuples(body))

    # -- inputs

    def _open(self, i: int, action: Action) -> None:
        chunk = self.context.chunks[action.chunk]
        prefix = action.phase.value if self._alone(action) else f"{action.phase.value}{i}"
        lines = [
            _Line(i, phase, chunk.units[phase], chunk)
            for phase in ((Phase.I, Phase.W) if action.phase is Do.B else (Phase(action.phase.value),))
        ]
        if len(lines) == 2:
            lines[1].env = lines[0].env  # a B's W reads what its I made
            lines[1].pending = lines[0].pending
        env = lines[0].env
        joint = chunk.joint
        named: list[tuple[str, fx.Node | list[fx.Node]]] = []
        if action.phase is Do.F:
            named += list(joint.inputs.items())
            named += [(f"x{k}", node) for k, node in enumerate(joint.boundary)]
        if action.phase in (Do.I, Do.B):
            named += [("for_I", chunk.for_I)]
            named += [(f"dy{k}", node) for k, node in enumerate(joint.tangents)]
        if action.phase in (Do.W, Do.B):
            named += [("for_W", chunk.for_W)]
        if action.phase is Do.W:
            named += [("handed", chunk.handed)]
        names = []
        for name, value in named:
            holder = self.graph.placeholder(f"{prefix}_{name}".lower())
            names.append(name)
            if isinstance(value, list):
                boxed = self.graph.call_function(unbox, (holder,))
                for k, node in enumerate(value):
                    item = self._item(boxed, k, f"{prefix}_{name}_{k}".lower())
                    env.setdefault(node, item)
            else:
                env[value] = holder
        self.inputs.append(names)
        self.lines += lines

    def _alone(self, action: Action) -> bool:
        return sum(a.phase is action.phase for a in self.parts) == 1

    def _item(self, source: fx.Node, index: int, name: str) -> fx.Node:
        return self.graph.create_node("call_function", operator.getitem, (source, index), {}, name=name)

    # -- order

    def _strands(self) -> list[Strand]:
        own = {i for i, a in enumerate(self.parts) if a.phase is Do.B}
        return [
            Strand(
                phase=line.phase.value,
                launches=tuple(ends_with_mark(line.chunk, unit) for unit in line.units),
                heavy=tuple(unit.heavy for unit in line.units),
                depth=tuple(unit.index for unit in line.units),
                own=line.phase is Phase.W and line.part in own,
                fetches=tuple(bool(fetched(line.chunk, unit)) for unit in line.units),
                again=tuple(unit.again for unit in line.units),
            )
            for line in self.lines
        ]

    def _order(self) -> list[tuple[int, int]]:
        strands = self._strands()
        order = self.context.order
        if order is None:
            return weave(strands)
        labels = [[unit.label for unit in line.units] for line in self.lines]
        return order([order.timed(strand, names) for strand, names in zip(strands, labels, strict=True)])

    # -- units

    def _run(self, line: _Line, unit: Unit) -> None:
        args = tuple(self._value(line, node) for node in unit.args)
        call = self._call(unit.label, args)
        call.meta["unit"], call.meta["part"] = unit, line.part
        # Gradients of parameters are not among the results: the unit's module adds them up.
        values = [out for out, grad in zip(unit.outs, unit.grads, strict=True) if grad is None]
        for k, out in enumerate(values):
            line.env[out] = self._item(call, k, f"{unit.label}_{k}")
        for out in unit.outs:
            for user in launched(line.chunk, unit, out):
                self._launch(line, unit, out, user)
        self._send(line)

    def _call(self, name: str, args: tuple[fx.Node, ...]) -> fx.Node:
        self.used[name] = self.context.modules[name]
        return self.graph.create_node("call_module", name, args, {}, name=name)

    def _launch(self, line: _Line, unit: Unit, source: fx.Node, collective: fx.Node) -> None:
        value, group = line.env[source], self.context.tp_group
        if self.context.collectives == "free":
            line.env[collective] = left_out(collective, value)
            return
        target, args = call_of(collective, value, line.chunk.tp_size, group)
        launch = self.graph.create_node("call_function", target, args, {}, name=f"launch_{unit.label}")
        launch.meta["part"], launch.meta["launch"] = line.part, Launch(unit, reduce_bytes(collective))
        launch.meta["val"] = collective.meta["val"]
        launch.meta["taken"] = collective.args[0].meta["val"]  # type: ignore[union-attr]
        line.pending[collective] = launch
        if self.context.collectives == "blocking":
            self._value(line, collective)

    def _value(self, line: _Line, node: fx.Node) -> fx.Node:
        """Where ``node`` of the chunk's graph lives in the block; waits for its collective on first use."""
        if node in line.pending:
            launch = line.pending.pop(node)
            name = launch.name.replace("launch", "wait", 1)
            line.env[node] = self.graph.create_node("call_function", WAIT, (launch,), {}, name=name)
        return line.env[node]

    # -- outputs

    def _send(self, line: _Line) -> None:
        """Send what leaves this rank the moment that it is complete."""
        for phase, values in ((Phase.F, line.chunk.outputs), (Phase.I, line.chunk.input_grads)):
            name = f"send_{phase.value}{line.chunk.index}"
            if line.phase is not phase or (line.part, name) in self.sent or name not in self.context.modules:
                continue
            if all(value in line.env for value in values):
                self.sent.add((line.part, name))
                call = self._call(name, tuple(line.env[value] for value in values))
                call.meta["part"] = line.part

    def _results(self, i: int, action: Action) -> tuple[list[str], list[object]]:
        line = next(line for line in self.lines if line.part == i)
        chunk = line.chunk
        for value in (*chunk.outputs, *chunk.input_grads, *chunk.for_I, *chunk.for_W, *chunk.handed):
            if value in line.pending:
                self._value(line, value)
        self._send(line)
        names: list[str] = []
        values: list[object] = []

        def add(prefix: str, nodes: Sequence[fx.Node]) -> None:
            for k, node in enumerate(nodes):
                names.append(f"{prefix}{k}")
                values.append(line.env[node])

        def add_list(name: str, nodes: Sequence[fx.Node]) -> None:
            names.append(name)
            values.append(self.graph.call_function(box, tuple(line.env[node] for node in nodes)))

        if action.phase is Do.F:
            if f"send_F{chunk.index}" not in self.context.modules:
                add("y", chunk.outputs)
            add_list("for_I", chunk.for_I)
            add_list("for_W", chunk.for_W)
        elif action.phase in (Do.I, Do.B):
            if f"send_I{chunk.index}" not in self.context.modules:
                add("dx", chunk.input_grads)
            if action.phase is Do.I:
                add_list("handed", chunk.handed)
        return names, values


def _root(modules: Mapping[str, nn.Module]) -> nn.Module:
    root = nn.Module()
    for name, module in modules.items():
        root.add_module(name, module)
    return root
