"""Which values of a graph share a storage: a view is no tensor of its own, and keeps the whole of what it views."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def is_view(node: fx.Node) -> bool:
    """Is the result of ``node`` a view of its first argument? By the operator's schema; ``_unsafe_view`` says that
    it is none, and shares the storage all the same."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if node.target is aten._unsafe_view.default:
        return True
    returns: Any = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def storage(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` is a view of."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node
