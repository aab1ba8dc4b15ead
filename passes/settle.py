"""Pass ``settle``: every mark where it has to be, and as few of them as there can be.

Contract: (captured graph with the plan's marks, plan) -> the same graph with marks so that every gradient is right
whatever the model does between its parallel linears, and the names of the parameters whose gradients are parts.

``shard`` puts marks around modules, as a plan says. This pass looks at the values. Each has a :class:`Kind`; a
whole value that meets local ones needs a ``tp_copy`` (the router's weights of a mixture of experts, the rotary half
of a compressed key), and marks that serve the same sum become one::

    a = tp_reduce(attn(tp_copy(ln1(x))))          c = tp_copy(x)
    m = tp_reduce(mlp(tp_copy(ln2(x))))     =>    y = tp_reduce(attn(ln1(c)) + mlp(ln2(c))) + x
    y = m + a + x                                 # gradients of ln1 and ln2 are parts: summed once per step

Three rewrites in this order: sums of ``tp_reduce`` become a ``tp_reduce`` of the sum; a missing ``tp_copy`` is put
in and a doubled one taken out; the ``tp_copy`` of one region move up to the value that dominates them all.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from enum import IntEnum

import torch
from torch import Tensor, fx

from .capture import Captured
from .errors import PlanError
from .layout import TpPlan
from .marks import TP_COPY, TP_MAX, TP_REDUCE, TP_SHARE
from .reach import ancestors, descendants
from .sink import sink_reduces

#: The buffer of the traced copy that holds this rank's TP rank, int64 [1].
TP_RANK = "fxbraid_tp_rank"


class Kind(IntEnum):
    """What a value is to the tensor-parallel ranks. An operator's result has the largest kind of its inputs."""

    #: no gradient, the same on all ranks: inputs, masks, tables, indices
    FREE = 0
    #: follows from whole parameters alone
    WEIGHT = 1
    #: the same on all ranks, and so is its gradient
    WHOLE = 2
    #: the same on all ranks, its gradient on each the part of what that rank computes from it
    PART = 3
    #: other values on other ranks: features, heads or partial sums
    LOCAL = 4


def settle(captured: Captured, plan: TpPlan, canonical: Mapping[str, str]) -> tuple[Captured, TpPlan]:
    """See the module's docstring. Changes ``captured`` in place; ``canonical`` gives the first name of every
    parameter, under which ``plan`` has it. Raises :class:`PlanError` where a plan leaves a
    value sharded that the model goes on to use as a whole."""
    graph = captured.graph_module.graph
    cut = frozenset(name for name, first in canonical.items() if plan.params[first].dim is not None)
    sink_reduces(graph, {n for n, kind in infer(graph, cut).items() if kind is Kind.LOCAL})
    _complete(graph, cut)
    _hoist(graph, infer(graph, cut))
    partial = _share(graph, cut, plan.tp_size)
    graph.eliminate_dead_code()
    graph.lint()
    captured.graph_module.recompile()
    return captured, replace(plan, partial=partial)


# -- kinds -----------------------------------------------------------------------------------------------------


def infer(graph: fx.Graph, cut: Container[str]) -> dict[fx.Node, Kind]:
    """The kind of every node. ``cut``: names of the parameters that are sharded."""
    kinds: dict[fx.Node, Kind] = {}
    given: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "output":
            kinds[node] = _kind(node, kinds, given, cut)
    return kinds


def _kind(node: fx.Node, kinds: Mapping[fx.Node, Kind], given: set[fx.Node], cut: Container[str]) -> Kind:
    """``given``: nodes that depend on an input; ``node`` is added where it does."""
    if node.op == "placeholder":
        given.add(node)
        return Kind.FREE
    if node.op == "get_attr":
        if not node.meta.get("is_parameter"):
            return Kind.LOCAL if node.target == TP_RANK else Kind.FREE
        if str(node.target) in cut:
            return Kind.LOCAL
        return Kind.WEIGHT if node.meta["val"].requires_grad else Kind.FREE
    sources = node.all_input_nodes
    if any(n in given for n in sources):
        given.add(node)
    largest = max((kinds[n] for n in sources), default=Kind.FREE)
    if node.target is TP_REDUCE:
        return Kind.WHOLE
    if node.target is TP_MAX:
        return Kind.FREE
    if node.target is TP_COPY and largest < Kind.LOCAL:
        return Kind.PART
    if largest is Kind.LOCAL:
        return Kind.LOCAL
    if not _carries_gradient(node):
        return Kind.FREE
    if largest is Kind.WEIGHT and node in given:
        return Kind.WHOLE
    return largest


def _carries_gradient(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.detach.default:
        return False
    val = node.meta.get("val")
    return not isinstance(val, Tensor) or val.is_floating_point() or val.is_complex()


# -- missing and doubled copies ----------------------------------------------------------------------------------


def _complete(graph: fx.Graph, cut: Container[str]) -> None:
    """A ``tp_copy`` on every edge from a whole value to a local or partial one, one per value; none elsewhere."""
    kinds: dict[fx.Node, Kind] = {}
    given: set[fx.Node] = set()
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "output":
            continue
        if node.target is TP_COPY:
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            if kinds[source] is not Kind.WHOLE:
                _refuse_local(node, source, kinds)
                node.replace_all_uses_with(source)
                graph.erase_node(node)
                continue
            if source in copies:
                node.replace_all_uses_with(copies[source])
                graph.erase_node(node)
                continue
            copies[source] = node
        elif node.op == "call_function" and node.target not in (TP_REDUCE, TP_MAX):
            sources = node.all_input_nodes
            if max((kinds[n] for n in sources), default=Kind.FREE) >= Kind.PART:
                for n in sources:
                    if kinds[n] is Kind.WHOLE:
                        if n not in copies:
                            copies[n] = _copy_after(graph, n, node)
                            kinds[copies[n]] = Kind.PART
                        node.replace_input_with(n, copies[n])
        kinds[node] = _kind(node, kinds, given, cut)


def _copy_after(graph: fx.Graph, source: fx.Node, reader: fx.Node) -> fx.Node:
    """``tp_copy(source)``, in the layer of its reader: it must not lie in the chunk before."""
    with graph.inserting_after(source):
        mark = graph.call_function(TP_COPY, (source,))
    mark.meta = {**reader.meta, "val": source.meta["val"]}
    return mark


def _refuse_local(node: fx.Node, source: fx.Node, kinds: Mapping[fx.Node, Kind]) -> None:
    if kinds[source] is not Kind.LOCAL:
        return
    raise PlanError(
        f"the tensor-parallel plan makes module {_module(node)} column-parallel, but its input is already sharded by "
        f"{_sharded_by(source, kinds)}; end that with a row-parallel linear first, or leave one of the two out"
    )


def _module(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else node.name


def _sharded_by(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> str:
    """The sharded parameter that made ``node`` local."""
    todo, seen = [node], set()
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op == "get_attr":
            return str(n.target)
        todo += [s for s in n.all_input_nodes if kinds[s] is Kind.LOCAL]
    return node.name


# -- one copy per region -----------------------------------------------------------------------------------------


def _hoist(graph: fx.Graph, kinds: Mapping[fx.Node, Kind]) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    dominator = _dominators(graph, kinds)
    for copies in _regions(graph):
        if len(copies) < 2:
            continue
        sources: list[fx.Node] = [c.args[0] for c in copies]  # type: ignore[misc]
        top = _common(sources, dominator, order)
        while top is not None and not isinstance(top.meta["val"], Tensor):
            top = dominator[top]
        if top is None:
            # Behind frozen weights (LoRA in the first layer) there is no gradient, and nothing to sum.
            top = _common(sources, _dominators(graph, kinds, Kind.FREE), order)
        if top is None or kinds[top] not in (Kind.WHOLE, Kind.FREE) or not _carries_gradient(top):
            continue
        between = _between(top, sources)
        if any(n.target in (TP_COPY, TP_REDUCE) for n in between):
            continue
        with graph.inserting_after(top):
            mark = graph.call_function(TP_COPY, (top,))
        mark.meta = {**copies[0].meta, "val": top.meta["val"]}
        for node in between:
            node.replace_input_with(top, mark)
        for copy, source in zip(copies, sources, strict=True):
            copy.replace_all_uses_with(mark if source is top else source)
            graph.erase_node(copy)


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The copies that lead to the same ``tp_reduce``, in the order of the graph."""
    owner: dict[fx.Node, int] = {}
    regions: list[list[fx.Node]] = []
    for copy in [n for n in graph.nodes if n.target is TP_COPY]:
        reached: set[fx.Node] = set()
        todo, seen = list(copy.users), set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.target is TP_REDUCE:
                reached.add(node)
            else:
                todo += node.users
        joined = sorted({owner[r] for r in reached if r in owner})
        index = joined[0] if joined else len(regions)
        if not joined:
            regions.append([])
        for other in joined[1:]:
            regions[index] += regions[other]
            regions[other] = []
            owner = {r: index if i == other else i for r, i in owner.items()}
        regions[index].append(copy)
        owner |= dict.fromkeys(reached, index)
    return regions


def _dominators(
    graph: fx.Graph, kinds: Mapping[fx.Node, Kind], least: Kind = Kind.WHOLE
) -> dict[fx.Node, fx.Node | None]:
    """Immediate dominator of every activation of kind ``least`` or more (Cooper, Harvey and Kennedy 2001; one sweep is
    enough without loops). None stands for the inputs of the model."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    given: set[fx.Node] = set()
    found: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in given for n in node.all_input_nodes):
            given.add(node)
        if node.op == "call_function" and node in given and kinds.get(node, Kind.FREE) >= least:
            found[node] = _common([n for n in node.all_input_nodes if n in found], found, order)
    return found


def _common(
    nodes: Iterable[fx.Node], dominator: Mapping[fx.Node, fx.Node | None], order: Mapping[fx.Node, int]
) -> fx.Node | None:
    """The nearest node that dominates all of ``nodes`` (one of them, perhaps)."""
    common: fx.Node | None = None
    for i, node in enumerate(nodes):
        if i == 0:
            common = node
            continue
        other: fx.Node | None = node
        while common is not other:
            if common is None or other is None:
                return None
            if order[common] > order[other]:
                common = dominator[common]
            else:
                other = dominator[other]
    return common


def _between(top: fx.Node, ends: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes on the paths from ``top`` (left out) to ``ends`` (with them)."""
    on_paths = ancestors(ends) & descendants([top]) - {top}
    return [n for n in top.graph.nodes if n in on_paths]


# -- where a part becomes whole again, and whose gradients are parts ---------------------------------------------


def _share(graph: fx.Graph, cut: Container[str], tp_size: int) -> frozenset[str]:
    """Put ``tp_share`` where a value leaves a region without a ``tp_reduce``; return the partial parameters."""
    kinds = infer(graph, cut)
    inner = _inner(graph, kinds)
    shares: dict[fx.Node, fx.Node] = {}
    reads: dict[bool, dict[str, list[tuple[fx.Node, fx.Node]]]] = {True: {}, False: {}}
    for node in list(graph.nodes):
        if node.op == "output":
            if tp_size > 1:
                _check_outputs(node, kinds)
            continue
        if kinds[node] is Kind.FREE:
            continue
        inside = kinds[node] is Kind.LOCAL or node in inner
        for source in node.all_input_nodes:
            if source in inner and not inside and node.target is not TP_REDUCE:
                if source not in shares and isinstance(source.meta["val"], Tensor):
                    with graph.inserting_after(source):
                        shares[source] = graph.call_function(TP_SHARE, (source, tp_size))
                    shares[source].meta = dict(source.meta)
                if source in shares:
                    node.replace_input_with(source, shares[source])
            if kinds[source] is Kind.WEIGHT and kinds[node] is not Kind.WEIGHT:
                for name in names_of(source):
                    reads[inside].setdefault(name, []).append((source, node))
    for name in sorted(reads[True].keys() & reads[False].keys()):
        # Read inside and outside of regions: its parts are summed at every reading inside, micro-batch by
        # micro-batch, since one gradient can't be both.
        for source, node in reads[True].pop(name):
            node.replace_input_with(source, _copy_after(graph, source, node))
    return frozenset(reads[True])


def _inner(graph: fx.Graph, kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    """Partial values that something local is computed from."""
    inner: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if kinds.get(node) is Kind.PART and any(kinds.get(u) is Kind.LOCAL or u in inner for u in node.users):
            inner.add(node)
    for node in graph.nodes:
        # A result of several is inner with its node: only tensors can be shared.
        if node.target is operator.getitem and node.args[0] in inner and kinds[node] is Kind.PART:
            inner.add(node)
    return inner


def names_of(node: fx.Node) -> list[str]:
    """The parameters that a weight follows from."""
    if node.op == "get_attr":
        return [str(node.target)] if node.meta.get("is_parameter") else []
    return [name for source in node.all_input_nodes for name in names_of(source)]


def _check_outputs(output: fx.Node, kinds: Mapping[fx.Node, Kind]) -> None:
    for source in output.all_input_nodes:
        if kinds[source] is Kind.LOCAL:
            raise PlanError(
                f"with this tensor-parallel plan the model's output {source.name} is sharded (by "
                f"{_sharded_by(source, kinds)}) and never summed over the ranks: a column-parallel linear needs a "
                "row-parallel one behind it; correct tp_plan, or use tp_size=1"
            )
