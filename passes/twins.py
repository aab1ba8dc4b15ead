"""Part of pass ``follow``: which node of one trace is which of another.

Contract: (graph on local shapes, graph of the same code on full shapes, both as traced) -> pairs of nodes that the
same call made. Both have the same marks, so that they differ only where the model's code looks at sizes.
"""

from __future__ import annotations

import difflib
from torch import fx


def twins(graph: fx.Graph, full: fx.Graph) -> dict[fx.Node, fx.Node]:
    """See the module's docstring."""
    ours, theirs = list(graph.nodes), list(full.nodes)
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


def _key(node: fx.Node) -> tuple[str, ...]:
    """What was called where."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = str(stack[-1][0]) if stack else ""
    what = str(node.target) if node.op != "output" else ""
    return node.op, what, where, str(node.meta.get("stack_trace") or "")
