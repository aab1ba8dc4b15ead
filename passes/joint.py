"""Passes ``joint`` and ``split``: forward and backward of one chunk in one graph, every node in F, I or W.

``joint``: (chunk) -> :class:`JointGraph`, AOTAutograd's joint graph with its inputs and outputs named.

``split``: (joint) -> a phase per node::

    F   what the forward computes
    I   the closure of the gradients of the boundary inputs and of every backward all-reduce
    W   the rest of the backward: gradients of parameters

    y = x @ W                 F:  y = x @ W
    dx = dy @ W.T        =>   I:  dx = dy @ W.T
    dW = x.T @ dy             W:  dW = x.T @ dy

I holds the collectives also where nothing asks for an input gradient (the first chunk), so no W has one. Views of
parameters (a transposed weight) belong to no phase: they are made again where they are read and never saved.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from .. import compat
from . import experts
from .errors import UnsupportedError
from .marks import CARRY, CUT, TP_COPY, TP_GATHER, TP_JOIN, TP_SCATTER, TP_SHARE, is_collective, is_mark
from .partition import Chunk
from .reach import ancestors, descendants

aten = torch.ops.aten

#: Views: they share their input's storage, cost nothing, and are safe to make twice.
VIEWS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
    }
)
_NO_OPS = frozenset(
    {aten.detach.default, aten.alias.default, aten.lift_fresh.default, TP_COPY, TP_SHARE, CARRY}
)


class Phase(StrEnum):
    """Phase of a node of the joint graph (words of DESIGN section 2)."""

    F = "F"
    I = "I"
    W = "W"


@dataclass(slots=True)
class JointGraph:
    """Forward and backward of one chunk.

    Placeholders are keyed by what they are; ``outputs`` are the forward's (boundary values, or the model's),
    ``tangents`` the gradients of the outputs, in the same order; ``param_grads`` and ``input_grads`` (by
    boundary index) the backward's results.
    """

    chunk: Chunk
    graph: fx.Graph
    state: dict[fx.Node, str]
    inputs: dict[str, fx.Node]
    boundary: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    param_grads: dict[str, fx.Node]
    input_grads: list[fx.Node]
    phase: dict[fx.Node, Phase]
    #: views of parameters and buffers
    free: set[fx.Node]
    #: nodes of I that compute again what F did, in units of their own (pass ``saves``) -> the number of F's unit
    recomputed: dict[fx.Node, int] = field(default_factory=dict)

    def copy(self) -> JointGraph:
        """The same in a graph of its own; passes change graphs in place."""
        to: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, to))
        return JointGraph(
            chunk=self.chunk,
            graph=graph,
            state={to[node]: name for node, name in self.state.items()},
            inputs={name: to[node] for name, node in self.inputs.items()},
            boundary=[to[node] for node in self.boundary],
            tangents=[to[node] for node in self.tangents],
            outputs=[to[node] for node in self.outputs],
            param_grads={name: to[node] for name, node in self.param_grads.items()},
            input_grads=[to[node] for node in self.input_grads],
            phase={to[node]: phase for node, phase in self.phase.items()},
            free={to[node] for node in self.free},
            recomputed={to[node]: number for node, number in self.recomputed.items()},
        )


def joint(chunk: Chunk, *, outputs: Iterable[str] | None, fake_mode: compat.FakeTensorMode) -> JointGraph:
    """Differentiate one chunk. ``outputs``: which of the model's outputs the last chunk returns (training wants
    the loss alone); None elsewhere."""
    module = _select_outputs(chunk, outputs)
    args: list[torch.Tensor] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        with fake_mode:
            val = node.meta["val"]
            fake = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
        at = len(args) - len(chunk.inputs)
        args.append(fake.requires_grad_(at >= 0 and chunk.boundary_grads[at]))
    with contextlib.ExitStack() as stack:
        exported = compat.aot_export_joint_with_descriptors(
            stack, module, tuple(args), decompositions=_decompositions()
        )
    graph = compat.fx_graph_cse(exported.graph_module.graph)
    result = _describe(chunk, graph)
    _keep_layouts(result.graph)
    _drop_no_ops(result)
    _dense_gradients(result)
    _gathers(result.graph)
    return result


def _select_outputs(chunk: Chunk, outputs: Iterable[str] | None) -> fx.GraphModule:
    module = fx.GraphModule(chunk.graph_module, _copy_graph(chunk.graph_module.graph))
    if outputs is not None and chunk.outputs:
        out = module.graph.output_node()
        values = dict(zip(chunk.outputs, out.args[0], strict=True))  # type: ignore[arg-type]
        out.args = (tuple(values[name] for name in outputs),)
        module.graph.eliminate_dead_code()
        module.recompile()
    return module


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _decompositions() -> dict[Any, Any]:
    """Only what hides a weight gradient inside an input gradient, fused backwards of norms and of experts, and what
    lies in memory otherwise than its fake says: softplus' gradient takes the strides of what it is given."""
    from torch._decomp import get_decompositions

    plain = get_decompositions(
        [
            aten.native_layer_norm_backward,
            aten.native_group_norm_backward,
            aten._fused_rms_norm_backward,
            aten.softplus_backward,
        ]
    )
    return {**plain, **experts.decompositions()}


def _describe(chunk: Chunk, graph: fx.Graph) -> JointGraph:
    state: dict[fx.Node, str] = {}
    plain: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        desc = node.meta["desc"]
        if isinstance(desc, compat.ParamAOTInput | compat.BufferAOTInput):
            state[node] = desc.target
        elif isinstance(desc, compat.PlainAOTInput):
            plain[desc.idx] = node
        elif isinstance(desc, compat.TangentAOTInput) and isinstance(desc.output, compat.PlainAOTOutput):
            tangents[desc.output.idx] = node
        else:
            raise UnsupportedError(f"the chunk's graph has an input that fxbraid does not know: {desc}")
    outputs: dict[int, fx.Node] = {}
    param_grads: dict[str, fx.Node] = {}
    grads: dict[int, fx.Node] = {}
    out = graph.output_node()
    for node, desc in zip(out.args[0], out.meta["desc"], strict=True):  # type: ignore[arg-type]
        if node is None:
            continue  # the gradient of an input or parameter that wants none
        if isinstance(desc, compat.PlainAOTOutput):
            outputs[desc.idx] = node  # type: ignore[assignment]
        elif isinstance(desc, compat.GradAOTOutput) and isinstance(desc.grad_of, compat.ParamAOTInput):
            param_grads[desc.grad_of.target] = node  # type: ignore[assignment]
        elif isinstance(desc, compat.GradAOTOutput) and isinstance(desc.grad_of, compat.PlainAOTInput):
            grads[desc.grad_of.idx] = node  # type: ignore[assignment]
        else:
            raise UnsupportedError(f"the chunk's graph has an output that fxbraid does not know: {desc}")
    first = len(chunk.inputs)
    inputs = {name: plain[i] for i, name in enumerate(chunk.inputs) if i in plain}
    boundary = [plain[first + i] for i in range(chunk.boundary_in)]
    return JointGraph(
        chunk=chunk,
        graph=graph,
        state=state,
        inputs=inputs,
        boundary=boundary,
        tangents=[tangents[i] for i in sorted(tangents)],
        outputs=[outputs[i] for i in sorted(outputs)],
        param_grads=param_grads,
        input_grads=[
            grads[first + i] if first + i in grads else _zeros(graph, boundary[i])
            for i in range(chunk.boundary_in)
            if chunk.boundary_grads[i]
        ],
        phase={},
        free=set(),
    )


def _zeros(graph: fx.Graph, boundary: fx.Node) -> fx.Node:
    """The gradient of a boundary value that this chunk reads and its outputs do not depend on: the chunk before
    expects one."""
    with graph.inserting_before(graph.output_node()):
        zeros = graph.call_function(aten.zeros_like.default, (boundary,))
    zeros.meta = {"val": boundary.meta["val"], "partitioner_tag": "is_backward"}
    return zeros


def _gathers(graph: fx.Graph) -> None:
    """Forward and backward of a ``tp_join`` differ; once autograd has seen it, it is a ``tp_gather``. And what an
    all-gather or a reduce-scatter takes is contiguous."""
    for node in list(graph.nodes):
        if node.target is TP_JOIN:
            node.target, node.args = TP_GATHER, (node.args[0], node.args[2])
        if node.target not in (TP_GATHER, TP_SCATTER):
            continue
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        val = source.meta["val"]
        given = source
        while is_mark(given) and not is_collective(given):
            given = given.args[0]  # type: ignore[assignment]
        if val.is_contiguous() and given.op == "call_function" and not is_collective(given):
            continue
        with graph.inserting_before(node):
            if val.is_contiguous():  # no unit makes it, and this view is the one that launches the collective
                made = graph.call_function(aten.view.default, (source, list(val.shape)))
            else:
                made = graph.call_function(
                    aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
        made.meta = {k: v for k, v in node.meta.items() if k == "partitioner_tag"}
        made.meta["val"] = val.contiguous()
        node.replace_input_with(source, made)


def _keep_layouts(graph: fx.Graph) -> None:
    """A mark is a copy while the model is traced: of a slice with gaps it is dense, and what follows may view it as
    such. Where a mark goes that lay otherwise in memory than its source, a copy stays."""
    for node in list(graph.nodes):
        if node.target not in (TP_COPY, TP_SHARE, CUT):
            continue
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        given, wanted = (_layout(n.meta["val"]) for n in (source, node))
        if given == wanted:
            continue
        with graph.inserting_before(node):
            dense = graph.call_function(aten.clone.default, (source,))
        dense.meta = dict(node.meta)
        node.replace_input_with(source, dense)


def _layout(val: torch.Tensor) -> list[int]:
    """The strides that say where an element lies."""
    return [step for size, step in zip(val.shape, val.stride(), strict=True) if size != 1]


def _drop_no_ops(result: JointGraph) -> None:
    """Identity nodes vanish: detach, alias, and tp_copy, whose work is done once autograd has seen it."""

    def source(node: Any) -> Any:
        while isinstance(node, fx.Node) and node.target in _NO_OPS:
            node = node.args[0]
        return node

    # Only roots are kept by hand: the graph's own output is rebuilt from them at the end.
    result.outputs = [source(n) for n in result.outputs]
    result.input_grads = [source(n) for n in result.input_grads]
    result.param_grads = {k: source(n) for k, n in result.param_grads.items()}
    out = result.graph.output_node()
    out.args = ((*result.outputs, *result.input_grads, *result.param_grads.values()),)
    out.meta = {}
    for node in list(result.graph.nodes):
        if node.op == "call_function" and node.target in _NO_OPS:
            node.replace_all_uses_with(source(node))
    # Anything that nothing reads goes, unused placeholders stay (they are the calling convention).
    for node in reversed(list(result.graph.nodes)):
        if node.op == "call_function" and not node.users:
            result.graph.erase_node(node)


def _dense_gradients(result: JointGraph) -> None:
    """What goes back over a boundary is laid out as the value that came over it, as the other chunk takes it."""
    for k, node in enumerate(result.input_grads):
        if not node.meta["val"].is_contiguous():
            with result.graph.inserting_before(result.graph.output_node()):
                dense = result.graph.call_function(
                    aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            dense.meta = {"val": node.meta["val"].contiguous(), "partitioner_tag": "is_backward"}
            result.input_grads[k] = dense
    out = result.graph.output_node()
    out.args = ((*result.outputs, *result.input_grads, *result.param_grads.values()),)


def split(result: JointGraph, *, training: bool = True) -> JointGraph:
    """Give every node its phase. ``training=False`` keeps the forward alone (for ``eval``)."""
    graph = result.graph
    if not training:
        result.input_grads, result.param_grads = [], {}
        out = graph.output_node()
        out.args = (tuple(result.outputs),)
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and not node.users:
                graph.erase_node(node)
    held = set(result.state)
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target in VIEWS
            and all(n in held for n in node.all_input_nodes)
        ):
            held.add(node)
            result.free.add(node)
    calls = [n for n in graph.nodes if n.op == "call_function" and n not in result.free]
    from_tangents = descendants(result.tangents)
    forward = ancestors(result.outputs)
    for node in calls:
        tag = node.meta.get("partitioner_tag")
        if node in forward or (tag != "is_backward" and node not in from_tangents):
            result.phase[node] = Phase.F
    backward = [n for n in calls if n not in result.phase]
    closure = ancestors(
        [*(g for g in result.input_grads if g is not None), *(n for n in backward if is_collective(n))]
    )
    for node in backward:
        result.phase[node] = Phase.I if node in closure else Phase.W
    for node in calls:
        # One kernel with several results is one node of work: its parts never lie in different phases.
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            result.phase[node] = result.phase[node.args[0]]
    _own_gradients(result)
    return result


def _own_gradients(result: JointGraph) -> None:
    """Give every parameter's gradient a node of W of its own.

    The gradient of ``x + b`` is what I hands on anyway, and two such parameters share one node: copied here, each
    is a result of W that nothing else owns.
    """
    taken: set[fx.Node] = set()
    for name, node in result.param_grads.items():
        if node in taken or result.phase.get(node) is not Phase.W or is_mark(node):
            with result.graph.inserting_before(result.graph.output_node()):
                copied = result.graph.call_function(aten.clone.default, (node,))
            copied.meta = {"val": node.meta["val"], "partitioner_tag": "is_backward"}
            result.phase[copied] = Phase.W
            result.param_grads[name] = node = copied
        taken.add(node)
    out = result.graph.output_node()
    out.args = ((*result.outputs, *result.input_grads, *result.param_grads.values()),)
