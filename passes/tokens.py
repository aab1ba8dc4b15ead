"""Part of pass ``sequence``: through which operators a dimension of tokens can be followed, and what changes in them.

An operator that treats tokens one by one gives the same on a part of the tokens as on all of them, where its sizes
are the part's. :func:`follow` says in which dimension of the result the tokens lie, None for an operator that mixes
tokens or that is not known; :func:`localise` puts the part's sizes in::

    view(x [b, s, h], [b, s, 4, h/4])    follow: 1    localise: view(x, [b, s/t, 4, h/4])
    mean(x, -1), layer_norm(x, [h])      follow: 1    localise: as it is
    softmax(x, 1), view(x, [b*s, h])     follow: None
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Dims = Mapping[fx.Node, int]
_Rule = Callable[[fx.Node, int, int], "int | None"]

_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
#: Not tagged as pointwise, yet they are.
_SAME = frozenset(
    {
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.to.other,
        aten._to_copy.default,
        aten.type_as.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
    }
)


def follow(node: fx.Node, dims: Dims) -> int | None:
    """The dimension of tokens in the result of ``node``, some of whose inputs have tokens in ``dims``."""
    if is_pointwise(node):
        return _pointwise(node, dims)
    rule = _RULES.get(node.target)  # type: ignore[arg-type]
    first = node.args[0] if node.args else None
    if isinstance(first, list | tuple):
        return _together(node, dims) if node.target is aten.cat.default else None
    if rule is None or not isinstance(first, fx.Node) or first not in dims:
        return None
    if any(n in dims for n in node.all_input_nodes if n is not first):
        return None
    return rule(node, dims[first], _ndim(first))


def is_pointwise(node: fx.Node) -> bool:
    """Does every element of the result depend on one element of each input?"""
    target = node.target
    return target in _SAME or (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    )


def aligned(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Which dimension of ``operand`` of a pointwise ``node`` lies along dimension ``dim`` of the result; None where it
    has none or one element there, which goes with every token."""
    at = dim - (_ndim(node) - _ndim(operand))
    return None if at < 0 or operand.meta["val"].shape[at] == 1 else at


def localise(node: fx.Node, dim: int, length: int) -> None:
    """Put ``length`` where ``node`` says how many tokens its result has, in its dimension ``dim``."""
    if node.target in _VIEWS or node.target is aten.expand.default:
        sizes = list(node.args[1])  # type: ignore[arg-type]
        if sizes[dim] != -1:
            sizes[dim] = length
        node.args = (node.args[0], sizes, *node.args[2:])


# -- operators, one kind each


def _ndim(node: fx.Node) -> int:
    val = node.meta.get("val")
    return val.ndim if isinstance(val, Tensor) else 0


def _dim(node: fx.Node, position: int) -> int:
    """An argument that is a dimension."""
    return int(node.args[position])  # type: ignore[arg-type]


def _pointwise(node: fx.Node, dims: Dims) -> int | None:
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    found = {dims[n] + _ndim(node) - _ndim(n) for n in node.all_input_nodes if n in dims}
    return found.pop() if len(found) == 1 else None


def _together(node: fx.Node, dims: Dims) -> int | None:
    """``cat`` of values that all have their tokens in one dimension, along another."""
    parts = node.all_input_nodes
    found = {dims.get(n) for n in parts}
    along = _argument(node, 1, "dim", 0)
    if len(found) != 1 or None in found:
        return None
    dim = found.pop()
    return None if along % _ndim(parts[0]) == dim else dim


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _view(node: fx.Node, dim: int, ndim: int) -> int | None:
    """The output dimension with as many elements before it and as many in it."""
    source = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    target = node.meta["val"].shape
    before = math.prod(source[:dim])
    for d, size in enumerate(target):
        if math.prod(target[:d]) == before and size == source[dim]:
            return d
    return None


def _reduced(node: fx.Node, dim: int, ndim: int) -> int | None:
    over = _argument(node, 1, "dim", None)
    if over is None:
        return None
    over = {d % ndim for d in (over if isinstance(over, list | tuple) else [over])}
    if not over or dim in over:
        return None
    keep = _argument(node, 2, "keepdim", False)
    return dim if keep else dim - sum(d < dim for d in over)


def _varied(node: fx.Node, dim: int, ndim: int) -> int | None:
    over = {d % ndim for d in _argument(node, 1, "dim", None) or ()}
    if not over or dim in over:
        return None
    return dim if node.kwargs.get("keepdim", False) else dim - sum(d < dim for d in over)


def _along(position: int, default: int) -> _Rule:
    """Operators along one dimension, which must not be that of tokens."""

    def rule(node: fx.Node, dim: int, ndim: int) -> int | None:
        return None if _argument(node, position, "dim", default) % ndim == dim else dim

    return rule


def _normed(node: fx.Node, dim: int, ndim: int) -> int | None:
    return dim if dim < ndim - len(node.args[1]) else None  # type: ignore[arg-type]


def _linear(node: fx.Node, dim: int, ndim: int) -> int | None:
    """Features of each token. Where they become more (the head's logits), tokens are put together before."""
    if dim == ndim - 1 or node.meta["val"].shape[-1] > node.args[0].meta["val"].shape[-1]:  # type: ignore[union-attr]
        return None
    return dim


def _matmul(node: fx.Node, dim: int, ndim: int) -> int | None:
    return _linear(node, dim, ndim) if _ndim(node.args[1]) == 2 else None  # type: ignore[arg-type]


def _slice(node: fx.Node, dim: int, ndim: int) -> int | None:
    along = _argument(node, 1, "dim", 0) % ndim
    whole = node.meta["val"].shape == node.args[0].meta["val"].shape  # type: ignore[union-attr]
    # x[:, :] of a model that keeps all logits: it says 0 to the end, whatever the length.
    start, end = _argument(node, 2, "start", None), _argument(node, 3, "end", None)
    open_ended = start in (None, 0) and (end is None or end >= 2**62)
    return dim if along != dim or (whole and open_ended) else None


def _select(node: fx.Node, dim: int, ndim: int) -> int | None:
    along = _dim(node, 1) % ndim
    return None if along == dim else dim - (along < dim)


def _unsqueeze(node: fx.Node, dim: int, ndim: int) -> int | None:
    return dim + (_dim(node, 1) % (ndim + 1) <= dim)


def _squeeze(node: fx.Node, dim: int, ndim: int) -> int | None:
    along = _dim(node, 1) % ndim
    if along == dim:
        return None
    return dim - (along < dim and node.args[0].meta["val"].shape[along] == 1)  # type: ignore[union-attr]


def _transpose(node: fx.Node, dim: int, ndim: int) -> int | None:
    a, b = (_dim(node, k) % ndim for k in (1, 2))
    return {a: b, b: a}.get(dim, dim)


def _permute(node: fx.Node, dim: int, ndim: int) -> int | None:
    return [d % ndim for d in node.args[1]].index(dim)  # type: ignore[union-attr, operator, misc]


def _expand(node: fx.Node, dim: int, ndim: int) -> int | None:
    return dim + _ndim(node) - ndim


def _item(node: fx.Node, dim: int, ndim: int) -> int | None:
    return dim


_RULES: Mapping[Any, _Rule] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.flatten.using_ints: _view,
    aten.mean.dim: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.amax.default: _reduced,
    aten.var.correction: _varied,
    aten.softmax.int: _along(1, -1),
    aten.log_softmax.int: _along(1, -1),
    aten.cumsum.default: _along(1, 0),
    aten.layer_norm.default: _normed,
    aten.rms_norm.default: _normed,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _along(2, 0),
    aten.split_with_sizes.default: _along(2, 0),
    aten.chunk.default: _along(2, 0),
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    operator.getitem: _item,
}
