"""The marks that the passes look for: identity operators of torch.library with autograd.

``shard`` puts them into the traced model; ``units`` cuts the graph at them and ``braid`` turns them into
collectives. Nothing else in a graph is ever searched for by name.

========== ============================= =============================
mark       forward                       backward
========== ============================= =============================
tp_copy    identity                      all-reduce over TP (tp_reduce)
tp_reduce  all-reduce over TP            identity (tp_copy)
tp_max     all-reduce over TP, maximum   none: it has no gradient
cut        identity, a unit ends here    identity, a unit ends here
tp_share   identity                      divided by the TP size
========== ============================= =============================

``tp_copy`` and ``tp_reduce`` are f and g of Megatron-LM (Shoeybi et al. 2019, section 3). The backward of
``funcol.all_reduce`` is another all-reduce, which would multiply gradients by t; hence operators of our own.
``tp_share`` stands where a value that all ranks hold leaves a region whose gradients are parts (the router's
logits on their way to the auxiliary loss): every rank then adds an equal part of the gradient that follows.
``tp_max`` is the maximum that a softmax over a sharded vocabulary subtracts (pass ``vocab``).
All but ``tp_share`` never run: the passes replace every one of them before anything is executed. The eager kernels
exist for fake tensors and for reading a marked graph in one process, where t = 1 makes all of them the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .experts import is_grouped_product

_LIBRARY = torch.library.Library("fxbraid", "DEF")
for _name in ("tp_copy", "tp_reduce", "tp_max", "cut"):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    # A clone and not the input itself: an operator of torch.library must not return an alias.
    _LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxbraid::{_name}", lambda x: torch.empty_like(x), lib=_LIBRARY)


def _register(name: str, backward: str) -> None:
    def run(ctx: object, grad: Tensor) -> Tensor:
        op = getattr(torch.ops.fxbraid, backward)
        return op(grad)  # type: ignore[no-any-return]

    torch.library.register_autograd(f"fxbraid::{name}", run, lib=_LIBRARY)


_LIBRARY.define("tp_share(Tensor x, int tp_size) -> Tensor")
_LIBRARY.impl("tp_share", lambda x, tp_size: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fxbraid::tp_share", lambda x, tp_size: torch.empty_like(x), lib=_LIBRARY)


def _share_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.tp_size = inputs[1]


torch.library.register_autograd(
    "fxbraid::tp_share",
    lambda ctx, grad: (grad / ctx.tp_size, None),
    setup_context=_share_setup,
    lib=_LIBRARY,
)
_register("tp_copy", "tp_reduce")
_register("tp_reduce", "tp_copy")
_register("cut", "cut")

TP_COPY = torch.ops.fxbraid.tp_copy.default
TP_REDUCE = torch.ops.fxbraid.tp_reduce.default
CUT = torch.ops.fxbraid.cut.default
TP_SHARE = torch.ops.fxbraid.tp_share.default
TP_MAX = torch.ops.fxbraid.tp_max.default

#: Every mark that becomes a collective.
COLLECTIVES = frozenset({TP_REDUCE, TP_MAX})
#: Every mark at which a unit may end; no unit may contain one.
MARKS = frozenset({TP_COPY, CUT}) | COLLECTIVES


def tp_copy(x: Tensor) -> Tensor:
    """Mark ``x`` as the input of column-parallel linears: its gradient is all-reduced over TP."""
    return TP_COPY(x)  # type: ignore[no-any-return]


def tp_reduce(x: Tensor) -> Tensor:
    """Mark ``x`` as a partial sum of a row-parallel linear: it is all-reduced over TP."""
    return TP_REDUCE(x)  # type: ignore[no-any-return]


def is_collective(node: fx.Node) -> bool:
    """True for a node that becomes a collective."""
    return node.op == "call_function" and node.target in COLLECTIVES


def is_mark(node: fx.Node) -> bool:
    """True for any mark of :data:`MARKS`."""
    return node.op == "call_function" and node.target in MARKS


#: Matrix products: what FLOPs are counted on, and what hides a collective.
MATMULS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.matmul.default,
    }
)


def is_matmul(node: fx.Node) -> bool:
    """True for a matrix product (attention kernels are counted apart, by :func:`passes.cost.flops`)."""
    return node.op == "call_function" and (node.target in MATMULS or is_grouped_product(node))
