"""Pass ``compile="block"``, first half: a block with its units inlined, cut into pieces at its sends.

Contract: (block) -> :class:`Cut`: one FX graph per piece, which ``passes.compile`` gives to Inductor, and how the
pieces follow each other. A send is a side effect that no compiled graph can hold, and it must not wait for the units
behind it; so a block with k sends has at most k + 1 pieces, and what the plan put between a launch and its wait
stays there, across a cut as well::

    block                             pieces
    attn0_F = self.attn0_F(x)         [y, launch, ...] = self.piece_0([x, dy, ...])    # attn0_F ... mlp1_F
    launch = all_reduce(attn0_F)      send_F0 = self.send_F0(y)
    ...                               [dx, ...] = self.piece_1([launch, ...])          # wait ... norm0_W
    y = self.mlp1_F(...)              return [box(...), ...]
    send_F0 = self.send_F0(y)
    ...

Parameters become inputs of a piece and gradients of parameters its last results. A piece takes its values as one
list, which it empties, so that each is freed behind the last kernel that reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, fx, nn

from .block import Block, box
from .boxes import unpack_tuples
from .launches import ALL_REDUCE, LAUNCHES, WAIT
from .units import Unit, canonical_key


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a block's units and collectives as one graph.

    ``graph_module`` takes ``state`` (parameters and buffers by name), then values; it returns values, then the
    gradients that ``grads`` names as (chunk, parameter), in the order in which they are added.
    """

    name: str
    graph_module: fx.GraphModule
    key: str
    state: tuple[str, ...]
    grads: tuple[tuple[int, str], ...]
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """What replaces a block's graph: its pieces, and ``bind``, which connects them."""

    pieces: tuple[Piece, ...]
    graph: fx.Graph
    modules: dict[str, nn.Module]

    def bind(self, bound: Callable[[Piece], nn.Module]) -> fx.GraphModule:
        """The graph that runs: sends and pieces, each piece called through ``bound(piece)``."""
        root = nn.Module()
        for name, module in self.modules.items():
            root.add_module(name, module)
        for index, piece in enumerate(self.pieces):
            root.add_module(f"piece_{index}", bound(piece))
        return fx.GraphModule(root, self.graph, class_name="CompiledBlock")


def cut(block: Block) -> Cut:
    """See the module's docstring."""
    return _Cutter(block).build()


@dataclass(slots=True)
class _Run:
    """Units, collectives and waits between two sends, while their piece is built."""

    nodes: list[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    #: a node of the block -> its value inside the piece
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    state: dict[str, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    grads: list[tuple[tuple[int, str], fx.Node]] = field(default_factory=list)
    units: list[str] = field(default_factory=list)


class _Cutter:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.outer = fx.Graph()
        #: a node of the block -> its value in ``outer``
        self.env: dict[fx.Node, fx.Node] = {}
        self.vals = _values(block.graph_module.graph)
        self.modules: dict[str, nn.Module] = {}
        self.pieces: list[Piece] = []

    def build(self) -> Cut:
        computed: set[fx.Node] = set()
        run: list[fx.Node] = []
        late: list[fx.Node] = []
        for node in self.block.graph_module.graph.nodes:
            if _computes(node, computed):
                computed.add(node)
                run.append(node)
            elif node.target is box:
                late.append(node)  # put together at the end: it must not cut a run
            else:
                if node.op in ("call_module", "output"):
                    self._flush(run)
                    run = []
                for result in late if node.op == "output" else []:
                    self._copy(result)
                self._copy(node)
        self.outer.on_generate_code(lambda _: unpack_tuples)
        return Cut(tuple(self.pieces), self.outer, self.modules)

    def _copy(self, node: fx.Node) -> None:
        """Take a node of the block over as it is."""
        if node.op == "call_module":
            self.modules[str(node.target)] = self.block.graph_module.get_submodule(str(node.target))
        self.env[node] = self.outer.node_copy(node, lambda n: self.env[n])

    # -- one piece

    def _flush(self, nodes: list[fx.Node]) -> None:
        if not nodes:
            return
        run = _Run(nodes)
        self._open(run)
        for node in nodes:
            unit = _unit(node)
            if unit is not None:
                self._inline(run, node, unit)
            elif node.target in LAUNCHES or node.target is WAIT or "local" in node.meta:
                run.env[node] = run.graph.node_copy(node, lambda n: run.env[n])
                run.env[node].meta = {"val": self.vals[node]}
                if "launch" in node.meta:
                    run.env[node].meta["nbytes"] = node.meta["launch"].nbytes
        self._call(run, self._close(run))

    def _open(self, run: _Run) -> None:
        """Placeholders: what the units read of parameters and buffers, then what comes from outside the run."""
        inside = set(run.nodes)
        for unit in filter(None, map(_unit, run.nodes)):
            holders = unit.graph_module.graph.find_nodes(op="placeholder")
            for name, holder in zip(unit.state, holders, strict=False):
                if name not in run.state:
                    run.state[name] = run.graph.placeholder(f"p{len(run.state)}")
                    run.state[name].meta["val"] = holder.meta["val"]
        for node in run.nodes:
            for source in node.all_input_nodes:
                if source not in inside and source not in run.values:
                    run.values[source] = run.graph.placeholder(f"x{len(run.values)}")
                    run.values[source].meta["val"] = self.vals[source]
        run.env.update(run.values)

    def _inline(self, run: _Run, call: fx.Node, unit: Unit) -> None:
        graph = unit.graph_module.graph
        args = [run.env[cast(fx.Node, arg)] for arg in call.args]
        inner = dict(
            zip(graph.find_nodes(op="placeholder"), [*(run.state[n] for n in unit.state), *args], strict=True)
        )
        for node in graph.nodes:
            if node.op == "call_function":
                inner[node] = run.graph.node_copy(node, lambda n: inner[n])
                inner[node].meta = {"val": node.meta.get("val")}
        values: list[fx.Node] = []
        for out, grad in zip(cast(Any, graph.output_node().args[0]), unit.grads, strict=True):
            if grad is None:
                values.append(inner[out])
            else:
                run.grads.append(((unit.chunk, grad), inner[out]))
        for item in call.users:
            run.env[item] = values[cast(int, item.args[1])]
        run.units.append(unit.label)

    def _close(self, run: _Run) -> list[list[fx.Node]]:
        """Give the piece its results; returns, for each, the nodes of the block that it is."""
        inside = set(run.nodes)
        came = {holder: source for source, holder in run.values.items()}
        leaving: dict[fx.Node, list[fx.Node]] = {}
        for node in run.nodes:
            if node in run.env and any(user not in inside for user in node.users):
                value = run.env[node]
                if value in came:  # handed on as it came
                    self.env[node] = self.env[came[value]]
                else:
                    leaving.setdefault(value, []).append(node)
        run.graph.output((*leaving, *(grad for _, grad in run.grads)))
        return list(leaving.values())

    def _call(self, run: _Run, results: list[list[fx.Node]]) -> None:
        index = len(self.pieces)
        piece = Piece(
            name=f"{self.block.name}[{index}]",
            graph_module=fx.GraphModule({}, run.graph, class_name="Piece"),
            key=canonical_key(run.graph),
            state=tuple(run.state),
            grads=tuple(slot for slot, _ in run.grads),
            units=tuple(run.units),
        )
        self.pieces.append(piece)
        values = self.outer.call_function(box, tuple(self.env[source] for source in run.values))
        call = self.outer.create_node("call_module", f"piece_{index}", (values,), {}, name=f"piece_{index}")
        call.meta["piece"] = piece
        for k, nodes in enumerate(results):
            args = (call, k)
            item = self.outer.create_node("call_function", operator.getitem, args, {}, name=nodes[0].name)
            self.env.update(dict.fromkeys(nodes, item))


def _unit(node: fx.Node) -> Unit | None:
    return node.meta.get("unit")


def _computes(node: fx.Node, computed: set[fx.Node]) -> bool:
    """Does the node go into a piece: a unit, one of its results, a launch or a wait?"""
    if _unit(node) is not None or node.target in LAUNCHES or node.target is WAIT or "local" in node.meta:
        return True
    return node.target is operator.getitem and node.args[0] in computed


def _values(graph: fx.Graph) -> dict[fx.Node, Tensor]:
    """The fake tensor of every node of a block that is a tensor and that a unit or a wait reads."""
    vals: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        unit = _unit(node)
        if unit is not None:
            for arg, wanted in zip(node.args, unit.args, strict=True):
                vals.setdefault(arg, wanted.meta["val"])
            outs = [out for out, grad in zip(unit.outs, unit.grads, strict=True) if grad is None]
            for item in node.users:
                vals[item] = outs[item.args[1]].meta["val"]
            continue
        if "taken" in node.meta:
            vals.setdefault(node.args[0], node.meta["taken"])  # where no unit reads it: gathered again in W
        if node.target is ALL_REDUCE:
            vals[node] = vals[node.args[0]].contiguous()  # all_reduce works on a contiguous copy
        elif node.target in LAUNCHES or "local" in node.meta:
            vals[node] = node.meta["val"]
        elif node.target is WAIT:
            vals[node] = vals[node.args[0]]
    return vals
