"""The marks that the passes look for: identity operators of torch.library with autograd.

``shard`` puts them into the traced model; ``units`` cuts the graph at them and ``braid`` turns them into
collectives. Nothing else in a graph is ever searched for by name.

========== ================================== ===================================
``tp_copy`` and ``tp_reduce`` are f and g of Megatron-LM (Shoeybi et al. 2019, section 3). The backward of
``funcol.all_reduce`` is another all-reduce, which would multiply gradients by t; hence operators of our own.
``tp_share`` stands where a value that all ranks hold leaves a region whose gradients are parts (the router's
logits on their way to the auxiliary loss): every rank then adds an equal part of the gradient that follows.
``tp_gather`` and ``tp_scatter`` are g and g-bar of sequence parallelism (Korthikanti et al. 2022, section 4.2.2),
``tp_join`` and ``tp_slice`` lead to and from values that all ranks hold whole, with whole gradients: the last four
stand where pass ``sequence`` cuts tokens.
``tp_max`` is the maximum that a softmax over a sharded vocabulary subtracts (pass ``vocab``).
``carry`` stands where a chunk hands a boundary value on as it came; once autograd has seen it, nothing is left of it.
All but ``tp_share`` and ``tp_slice`` never run: the passes replace every one of them before anything is executed. The
eager kernels of the others exist for fake tensors and for reading a marked graph in one process, where t = 1 makes
them the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from .experts import is_grouped_product
from .parts import from_parts, rank_part, run

_LIBRARY = torch.library.Library("fxbraid", "DEF")
for _name in ("tp_copy", "tp_reduce", "tp_max", "cut", "carry"):
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
_register("carry", "carry")

TP_COPY = torch.ops.fxbraid.tp_copy.default
TP_REDUCE = torch.ops.fxbraid.tp_reduce.default
CUT = torch.ops.fxbraid.cut.default
CARRY = torch.ops.fxbraid.carry.default
TP_SHARE = torch.ops.fxbraid.tp_share.default
TP_MAX = torch.ops.fxbraid.tp_max.default


# -- sequence parallelism


_LIBRARY.define("tp_gather(Tensor x, int tp_size) -> Tensor")
_LIBRARY.define("tp_scatter(Tensor x, int tp_size) -> Tensor")
_LIBRARY.define("tp_join(Tensor x, Tensor rank, int tp_size) -> Tensor")
_LIBRARY.define("tp_slice(Tensor x, Tensor rank, int tp_size, int dim) -> Tensor")


def _gathered(x: Tensor, tp_size: int) -> Tensor:
    return x.new_empty((tp_size * x.shape[0], *x.shape[1:]))


def _scattered(x: Tensor, tp_size: int) -> Tensor:
    return x.new_empty((x.shape[0] // tp_size, *x.shape[1:]))


def _part(x: Tensor, rank: Tensor, tp_size: int, dim: int) -> Tensor:
    return rank_part(run, x, x.shape, rank, tp_size, dim)  # type: ignore[no-any-return]


def _alone(x: Tensor, *_: Any) -> Tensor:
    raise RuntimeError(
        "a mark that moves tokens between ranks was run; the passes replace it by a collective"
    )


_LIBRARY.impl("tp_gather", _alone, "CompositeExplicitAutograd")
_LIBRARY.impl("tp_scatter", _alone, "CompositeExplicitAutograd")
_LIBRARY.impl("tp_join", _alone, "CompositeExplicitAutograd")
_LIBRARY.impl("tp_slice", _part, "CompositeExplicitAutograd")
torch.library.register_fake("fxbraid::tp_gather", _gathered, lib=_LIBRARY)
torch.library.register_fake("fxbraid::tp_scatter", _scattered, lib=_LIBRARY)
torch.library.register_fake("fxbraid::tp_join", lambda x, rank, tp_size: _gathered(x, tp_size), lib=_LIBRARY)
torch.library.register_fake(
    "fxbraid::tp_slice",
    lambda x, rank, tp_size, dim: x.new_empty(
        [n // tp_size if d == dim else n for d, n in enumerate(x.shape)]
    ),
    lib=_LIBRARY,
)

TP_GATHER = torch.ops.fxbraid.tp_gather.default
TP_SCATTER = torch.ops.fxbraid.tp_scatter.default
TP_JOIN = torch.ops.fxbraid.tp_join.default
TP_SLICE = torch.ops.fxbraid.tp_slice.default


def _whole(x: Tensor, tp_size: int, dim: int) -> Tensor:
    return from_parts(run, TP_GATHER(x, tp_size), x.shape, tp_size, dim)  # type: ignore[no-any-return]


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.tp_size = inputs[1]


def _keep_rank(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.tp_size, ctx.dim = inputs[2], inputs[3] if len(inputs) > 3 else 0


torch.library.register_autograd(
    "fxbraid::tp_gather",
    lambda ctx, grad: (TP_SCATTER(grad, ctx.tp_size), None),
    setup_context=_keep_size,
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "fxbraid::tp_scatter",
    lambda ctx, grad: (TP_GATHER(grad, ctx.tp_size), None),
    setup_context=_keep_size,
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "fxbraid::tp_join",
    lambda ctx, grad: (_part(grad, ctx.saved_tensors[0], ctx.tp_size, 0), None, None),
    setup_context=_keep_rank,
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "fxbraid::tp_slice",
    lambda ctx, grad: (_whole(grad, ctx.tp_size, ctx.dim), None, None, None),
    setup_context=_keep_rank,
    lib=_LIBRARY,
)

#: Every mark that becomes a collective, and what it is called.
COLLECTIVES: Mapping[Any, str] = {
    TP_REDUCE: "all-reduce",
    TP_MAX: "all-reduce",
    TP_GATHER: "all-gather",
    TP_SCATTER: "reduce-scatter",
}
#: Every mark at which a unit may end; no unit may contain one.
MARKS = frozenset({TP_COPY, CUT, *COLLECTIVES})


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
