"""How the parts of a dimension that lie on the tensor-parallel ranks become one tensor, and back.

An all-gather puts the ranks' tensors one behind the other in dim 0, and a reduce-scatter takes them so. Where tokens
are the first dimension of more than one element, that is a view; else it is one copy::

    gathered [t * b, s/t, h]   view [t, b, s/t, h]   permute [b, t, s/t, h]   reshape [b, s, h]

Each function is written in operators of aten that ``op(operator, *arguments)`` applies: to tensors (:func:`run`), or
to nodes of a graph, which it then appends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Apply = Callable[..., Any]


def run(operator: Any, *args: Any) -> Any:
    """Apply an operator to tensors."""
    return operator(*args)


def from_parts(op: Apply, x: Any, shape: Sequence[int], tp_size: int, dim: int) -> Any:
    """``x``: parts of ``shape`` behind each other in dim 0. Returns the whole, ``tp_size`` times as long in ``dim``."""
    whole = [tp_size * n if d == dim else n for d, n in enumerate(shape)]
    if all(n == 1 for n in shape[:dim]):
        return op(aten.view.default, x, whole)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
    apart = op(aten.permute.default, op(aten.view.default, x, [tp_size, *shape]), order)
    return op(aten.reshape.default, apart, whole)


def to_parts(op: Apply, x: Any, shape: Sequence[int], tp_size: int, dim: int) -> Any:
    """``x``: a whole of ``shape``. Returns its parts along ``dim``, behind each other in dim 0."""
    part = [n // tp_size if d == dim else n for d, n in enumerate(shape)]
    behind = [tp_size * part[0], *part[1:]]
    if all(n == 1 for n in shape[:dim]):
        return op(aten.reshape.default, x, behind)
    split = [*shape[:dim], tp_size, part[dim], *shape[dim + 1 :]]
    order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
    apart = op(aten.permute.default, op(aten.reshape.default, x, split), order)
    return op(aten.reshape.default, apart, behind)


def rank_part(op: Apply, x: Any, shape: Sequence[int], rank: Any, tp_size: int, dim: int) -> Any:
    """Part number ``rank`` (a tensor [1]) of ``x``, a whole of ``shape``, along ``dim``."""
    split = [*shape[:dim], tp_size, shape[dim] // tp_size, *shape[dim + 1 :]]
    chosen = op(aten.index_select.default, op(aten.reshape.default, x, split), dim, rank)
    return op(aten.squeeze.dim, chosen, dim)
