"""What a node of a graph is made from, and what is made from it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """``roots`` and everything that they are computed from."""
    found: set[fx.Node] = set()
    todo = [n for n in roots if n is not None]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """``roots`` and everything that is computed from them."""
    found: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.users
    return found
