"""Part of pass ``follow``: which rule an operator has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import cut_along as along
from . import cut_layers as layers
from . import cut_moves as moves
from . import cut_sums as sums
from . import cut_views as views
from .cuts import Call

Rule = Callable[[Call], Any]


def rules() -> dict[str, Rule]:
    """By the name of the operator."""
    move = views.movement
    return {
        **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"),
                        move(views.view)),
        **dict.fromkeys(("transpose", "swapaxes", "swapdims", "mT"), moves.moved(moves.swapped)),
        **dict.fromkeys(("t", "numpy_T"), moves.moved(moves.reversed_dims)),
        "permute": moves.moved(moves.permuted),
        **dict.fromkeys(("movedim", "moveaxis"), moves.moved(moves.movedim)),
        "unsqueeze": move(moves.unsqueeze),
        "squeeze": move(moves.squeeze),
        **dict.fromkeys(("expand", "expand_as", "broadcast_to"), move(moves.expand)),
        **dict.fromkeys(("repeat", "tile"), move(moves.repeat)),
        "repeat_interleave": move(moves.repeat_interleave),
        "slice": move(moves.slice_),
        "select": move(moves.select),
        **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), move(moves.split)),
        **dict.fromkeys(("cat", "concat", "concatenate"), moves.cat),
        "stack": moves.stack,
        "getitem": moves.getitem,
        "linear": sums.linear,
        **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), sums.matmul),
        **dict.fromkeys(("addmm", "baddbmm"), sums.addmm),
        **dict.fromkeys(("outer", "ger"), sums.outer),
        "einsum": sums.einsum,
        **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), sums.grouped),
        "embedding": sums.embedding,
        **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "cummax", "cummin",
                         "logcumsumexp"), along.at(1)),
        **dict.fromkeys(("argsort", "sort"), along.at(1)),
        "topk": along.at(2),
        **dict.fromkeys(("flip", "roll"), along.all_dims),
        **dict.fromkeys(("tril", "triu"), along.last(2)),
        **dict.fromkeys(("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d"), along.last(1)),
        **dict.fromkeys(("avg_pool2d", "max_pool2d", "adaptive_avg_pool2d"), along.last(2)),
        **dict.fromkeys(("pad", "constant_pad_nd"), along.padded),
        **dict.fromkeys(("layer_norm", "rms_norm", "_fused_rms_norm"), along.normalised),
        **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "std",
                         "var", "norm", "linalg_vector_norm", "logsumexp"), along.reduced),
        "glu": along.gated,
        **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss"), along.loss),
        "scaled_dot_product_attention": layers.attention,
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), layers.conv),
        "group_norm": layers.group_norm,
        "view_as_complex": layers.to_complex,
        "view_as_real": layers.to_real,
        **dict.fromkeys(("slice_scatter", "select_scatter"), layers.put),
        "index": layers.index,
        "index_select": layers.index_select,
        **dict.fromkeys(("gather", "take_along_dim"), layers.gather),
        **dict.fromkeys(("scatter", "scatter_add"), layers.scatter),
        **dict.fromkeys(("index_add", "index_copy"), layers.index_add),
        **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
                         "zeros_like", "ones_like", "full_like", "empty_like"), layers.filled),
    }  # fmt: skip


#: Pointwise operators that torch does not tag as such.
POINTWISE = frozenset(
    [
        "to",
        "_to_copy",
        "type_as",
        "contiguous",
        "alias",
        "detach",
        "lift_fresh_copy",
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "floor_divide",
        "masked_fill",
        "hardswish",
        "log_sigmoid",
        "__and__",
        "__or__",
        "__xor__",
        "where",
        "negative",
        "relu6",
        "logical_and",
        "logical_or",
        "gelu",
        "silu",
        "square",
        "float_power",
        "dropout",
        "complex",
        "polar",
        "real",
        "imag",
        "conj",
    ]
)
