"""Counting from the graph: FLOPs of a node, bytes of a value."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from .experts import grouped_flops, is_grouped_product
from .marks import TP_GATHER, TP_SCATTER

#: As they are traced, before they are one operator.
_CONVOLUTIONS = frozenset(getattr(torch.ops.aten, f"conv{n}d") for n in (1, 2, 3))


def flops(node: fx.Node) -> int:
    """Floating-point operations of one node (2 per multiply-add of a matrix product or a convolution, 0 for
    anything else)."""
    if node.op != "call_function":
        return 0
    out = node.meta.get("val")
    if node.target is torch.ops.aten.linear.default:
        return 2 * math.prod(out.shape) * int(node.args[1].meta["val"].shape[1])  # type: ignore[union-attr]
    if node.target is torch.ops.aten.matmul.default:
        return 2 * math.prod(out.shape) * int(node.args[0].meta["val"].shape[-1])  # type: ignore[union-attr]
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        query, key = (a.meta["val"] for a in node.args[:2])  # type: ignore[union-attr]
        return 4 * math.prod(query.shape) * int(key.shape[-2])
    if getattr(node.target, "overloadpacket", None) in _CONVOLUTIONS:
        return 2 * math.prod(out.shape) * math.prod(node.args[1].meta["val"].shape[1:])  # type: ignore[union-attr]
    if is_grouped_product(node):
        return grouped_flops(node)
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0

    def value(arg: Any) -> Any:
        return arg.meta["val"] if isinstance(arg, fx.Node) else arg

    args = fx.map_arg(node.args, value)
    kwargs = fx.map_arg(node.kwargs, value)
    try:
        return int(count(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError, NotImplementedError):
        # A cost that can't be counted must not stop a trace: the node counts as free.
        return 0


class StretchCost(NamedTuple):
    """What a stretch of a model costs in F, in I and in W: FLOPs, or seconds."""

    f: float = 0.0
    i: float = 0.0
    w: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.f + self.i + self.w

    def __add__(self, other: tuple[float, ...]) -> StretchCost:  # type: ignore[override]
        return StretchCost(*(a + b for a, b in zip(self, other, strict=True)))


def phase_flops(node: fx.Node, moved: Container[fx.Node], live: Container[fx.Node]) -> StretchCost:
    """Floating-point operations of one node of a forward, and of its part of the backward.

    ``moved``: what depends on a trained parameter; ``live``: activations. A product has as many operations again for
    each operand that has a gradient: those of weights are W. An attention kernel's backward computes its scores again:
    two and a half times (Dao et al. 2022).
    """
    count = flops(node)
    if not count:
        return StretchCost()
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return StretchCost(count, 2.5 * count * any(n in moved for n in node.all_input_nodes), 0.0)
    wide = [
        n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor) and n.meta["val"].ndim > 1
    ]
    trained = [n for n in wide if n in moved]
    through = sum(n in live for n in trained)
    return StretchCost(count, count * min(through, 2), count * (through < len(trained)))


def training_flops(graph: fx.Graph) -> int:
    """Floating-point operations of forward and backward of ``graph``, a forward: thrice each matrix product, twice
    where the weight is frozen."""
    return sum(flops(node) * (2 if _frozen(node) else 3) for node in graph.nodes)


def _frozen(node: fx.Node) -> bool:
    """A product with a parameter that is not trained, so that W has none for it."""
    return any(
        n.op == "get_attr" and n.meta.get("is_parameter") and not n.meta["val"].requires_grad
        for n in node.all_input_nodes
    )


def reduce_bytes(node: fx.Node) -> int:
    """Bytes of the all-reduce that moves as much as the collective that mark ``node`` becomes.

    A ring's all-reduce sends 2 (t-1)/t of its tensor, an all-gather and a reduce-scatter (t-1)/t of the whole one
    (Korthikanti et al. 2022, section 4.2.2), which is the all-reduce of half of it.
    """
    if node.target is TP_GATHER:
        return nbytes(node.meta["val"]) // 2
    if node.target is TP_SCATTER:
        return nbytes(node.args[0].meta["val"]) // 2  # type: ignore[union-attr]
    return nbytes(node.meta["val"])


def nbytes(val: Any) -> int:
    """Bytes of a (fake) tensor's elements; 0 for anything else."""
    return val.numel() * val.element_size() if isinstance(val, Tensor) else 0
