"""Grouped matrix products of a mixture of experts: their backward in two, so that the weight's gradient is W.

transformers traces the experts of a layer as one operator, ``grouped_mm_fallback(x, w, offs)``: rows of ``x`` [S, in]
are sorted by expert, ``offs`` [E] says where each expert's rows end, ``w`` is [E, in, out]. How many rows an expert
gets is no shape of the graph: the loop is inside the operator. Its backward gives both gradients at once, which
would put half of the experts' work of W into I; :func:`decompositions` takes them apart::

    dx, dw = grouped_mm_fallback_backward(x, w, offs, dy)    =>    dx = grouped_mm_fallback(dy, w.mT, offs)
                                                                   dw = grouped_mm_weight(x, dy, offs)

(In bfloat16 the trace has ``aten._grouped_mm``, whose derivative is two operators already.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("fxbraid", "FRAGMENT")
_LIBRARY.define("grouped_mm_weight(Tensor x, Tensor dy, Tensor offs) -> Tensor")


def _grouped_mm_weight(x: Tensor, dy: Tensor, offs: Tensor) -> Tensor:
    """[E, in, out]: for each expert, the product of its rows of ``x`` [S, in] and ``dy`` [S, out]."""
    out = x.new_zeros(offs.shape[0], x.shape[1], dy.shape[1])
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), dy[start:end], out=out[expert])
        start = end
    return out


_LIBRARY.impl("grouped_mm_weight", _grouped_mm_weight, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fxbraid::grouped_mm_weight",
    lambda x, dy, offs: x.new_empty(offs.shape[0], x.shape[1], dy.shape[1]),
    lib=_LIBRARY,
)
GROUPED_MM_WEIGHT = torch.ops.fxbraid.grouped_mm_weight.default
_PRODUCTS = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default", str(GROUPED_MM_WEIGHT))


def is_grouped_product(node: fx.Node) -> bool:
    """True for a product of all experts at once."""
    return node.op == "call_function" and str(node.target) in _PRODUCTS


def grouped_flops(node: fx.Node) -> int:
    """2 x rows x in x out, whichever experts the rows belong to."""
    left, right = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    return 2 * int(left.shape[0]) * int(left.shape[1]) * int(right.shape[-1])


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What AOTAutograd's trace puts in place of the fused backward; empty where transformers has none."""
    namespace = getattr(torch.ops, "transformers", None)
    fused = getattr(namespace, "grouped_mm_fallback_backward", None)
    if fused is None:
        return {}

    def backward(x: Tensor, weight: Tensor, offs: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        dx = torch.ops.transformers.grouped_mm_fallback(dy, weight.transpose(-2, -1), offs)
        return dx, torch.ops.fxbraid.grouped_mm_weight(x, dy, offs)

    return {fused.default: backward}
