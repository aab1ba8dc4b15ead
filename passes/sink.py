"""Part of pass ``settle``: sums of all-reduced values become one all-reduce of a sum.

Contract: (graph) -> the same function of its inputs, with fewer ``tp_reduce``: wherever terms of one sum are
``tp_reduce`` of something, up to operators that are linear in it, the sum comes first::

    y = tp_reduce(a) + b1 + s * tp_reduce(m) + x     =>     y = tp_reduce(a + s * m) + b1 + x

One term alone is left as it is.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, fx

from .marks import TP_REDUCE

aten = torch.ops.aten
_ADD = aten.add.Tensor
#: Operators that only arrange the elements of their first input.
_ARRANGE = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.permute.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.alias.default,
    }
)
_CASTS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default})


def sink_reduces(graph: fx.Graph, local: Container[fx.Node]) -> None:
    """See the module's docstring; ``graph`` is changed in place. ``local``: values that differ by rank, which no
    sum over ranks may move behind."""
    for node in list(graph.nodes):
        if node.target is _ADD and not any(_continues(node, user) for user in node.users):
            _merge(graph, node, local)
    graph.eliminate_dead_code()


def _continues(node: fx.Node, user: fx.Node) -> bool:
    """Is ``node`` a term of the sum that ``user`` is part of?"""
    return len(node.users) == 1 and _is_sum(user) and _shape(user) == _shape(node)


def _is_sum(node: fx.Node) -> bool:
    return node.target is _ADD and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args)


def _shape(node: fx.Node) -> object:
    val = node.meta.get("val")
    return tuple(val.shape) if isinstance(val, Tensor) else None


def _terms(node: fx.Node, shape: object) -> list[fx.Node]:
    found: list[fx.Node] = []
    for arg in node.args:
        inner = isinstance(arg, fx.Node) and len(arg.users) == 1 and _is_sum(arg) and _shape(arg) == shape
        found += _terms(arg, shape) if inner else [arg]  # type: ignore[arg-type, list-item]
    return found


def _merge(graph: fx.Graph, root: fx.Node, local: Container[fx.Node]) -> None:
    if not _is_sum(root):
        return
    shape = _shape(root)
    terms = _terms(root, shape)
    reduces = {t: r for t in terms if _shape(t) == shape and (r := _behind(t, local)) is not None}
    if len(reduces) < 2:
        return
    for term, mark in reduces.items():
        if term is mark:  # the term itself: its input takes its place
            continue
        mark.replace_all_uses_with(mark.args[0])  # type: ignore[arg-type]
        graph.erase_node(mark)
    with graph.inserting_before(root):
        values = [mark.args[0] if term is mark else term for term, mark in reduces.items()]
        total = values[0]
        for value in values[1:]:
            total = _call(graph, _ADD, (total, value), root)  # type: ignore[arg-type]
        total = _call(graph, TP_REDUCE, (total,), root)  # type: ignore[arg-type]
        done = False
        result: fx.Node | None = None
        for term in terms:
            if term in reduces:
                if done:
                    continue
                done, term = True, total  # type: ignore[assignment]
            result = term if result is None else _call(graph, _ADD, (result, term), root)
    root.replace_all_uses_with(result)  # type: ignore[arg-type]


def _call(graph: fx.Graph, target: object, args: tuple[fx.Node, ...], like: fx.Node) -> fx.Node:
    made = graph.call_function(target, args)  # type: ignore[arg-type]
    made.meta = dict(like.meta)
    return made


def _behind(term: fx.Node, local: Container[fx.Node]) -> fx.Node | None:
    """The ``tp_reduce`` that ``term`` is linear in, where nothing else reads what lies between."""
    node: object = term
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        if node.target is TP_REDUCE:
            return node
        node = _linear_in(node, local)
    return None


def _linear_in(node: fx.Node, local: Container[fx.Node]) -> object:
    """The input that ``node`` is linear in, with every other input the same on all ranks; None if there is none."""
    if node.target in _ARRANGE or (node.target is aten.sum.dim_IntList and not node.kwargs):
        return node.args[0]
    if node.target in _CASTS:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        return source if source.meta["val"].dtype == node.meta["val"].dtype else None
    if node.target is aten.linear.default and (len(node.args) < 3 or node.args[2] is None):
        return node.args[0] if node.args[1] not in local else None
    if node.target is aten.mul.Tensor:
        marked = [a for a in node.args if isinstance(a, fx.Node) and _behind(a, local) is not None]
        others = [a for a in node.args if a not in marked]
        return marked[0] if len(marked) == 1 and all(a not in local for a in others) else None
    if node.target is aten.div.Tensor and not isinstance(node.args[1], fx.Node):
        return node.args[0]
    return None
