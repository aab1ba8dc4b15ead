"""Part of pass ``follow``: which node of one trace is which of another.

Contract: (graph on local shapes, graph of the same code on full shapes, both as traced) -> pairs of nodes that the
same call made. Both have the same marks, so that they differ only where the model's code looks at sizes.
"""

from __future__ import annotations

import difflib

from torch import fx

from .cuts import place, read


def twins(graph: fx.Graph, full: fx.Graph) -> dict[fx.Node, fx.Node]:
    """See the module's docstring."""
    ours, theirs = ([n for n in g.nodes if not is_copy(n)] for g in (graph, full))
    a, b = [_key(n) for n in ours], [_key(n) for n in theirs]
    if a == b:
        return dict(zip(ours, theirs, strict=True))
    found: dict[fx.Node, fx.Node] = {}
    numbers: dict[tuple[str, ...], int] = {}  # which compare faster than the keys
    first, second = ([numbers.setdefault(key, len(numbers)) for key in keys] for keys in (a, b))
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    for i, j, size in matcher.get_matching_blocks():
        found |= dict(zip(ours[i : i + size], theirs[j : j + size], strict=True))
    return found


#: Operators that only lay a value out: whether a trace has them depends on strides.
_COPIES = frozenset({"clone", "contiguous", "alias", "lift_fresh_copy"})
_VIEWS = frozenset({"view", "reshape", "_unsafe_view"})


def is_copy(node: fx.Node) -> bool:
    """Is it the same value once more?"""
    return node.op == "call_function" and getattr(node.target, "_opname", "") in _COPIES


def bare(node: fx.Node) -> fx.Node:
    """What ``node`` is a copy of."""
    while is_copy(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def inputs(node: fx.Node) -> list[fx.Node]:
    """What a call reads, in the order of its arguments, once for each, copies left out."""
    return [bare(n) for n in read(node)]


def _key(node: fx.Node) -> tuple[str, ...]:
    """What was called where."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = str(stack[-1][0]) if stack else ""
    what = str(node.target) if node.op != "output" else ""
    what = "view" if getattr(node.target, "_opname", "") in _VIEWS else what
    return node.op, what, where, place(node)
