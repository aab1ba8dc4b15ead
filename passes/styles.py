"""Every plan style of transformers 5: which dimension of a parameter it cuts, and what it does to a module's forward.

======================== ============================== =====================================================
style                    parameters                     forward
======================== ============================== =====================================================
colwise                  last dim but one, in parts     tp_copy before
packed_colwise           the same, each half apart      tp_copy before
rowwise                  last dim, in parts             tp_reduce behind, then the bias
packed_rowwise           the same, each half apart      (parameters of experts)
colwise_gather_output    as colwise                     tp_copy before, gather behind
rowwise_split_input      as rowwise                     this rank's part of the input, tp_reduce behind
moe_tp_experts           (named one by one)             tp_copy before, tp_reduce behind
all_reduce               (named one by one)             tp_reduce behind
moe_identity_expert      none                           input over tp_size: the experts' sum counts it t times
replicate, ...           whole                          as it is
======================== ============================== =====================================================

``replicated_with_grad_allreduce``, ``mla_kv_a_proj`` and ``local_params`` need nothing here: pass ``settle`` finds
from the graph whose gradients are parts and where a value needs a ``tp_copy``. There is no gather among the marks:
it is a ``tp_reduce`` of the rank's part in its place among zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layout import Section
from .marks import tp_copy, tp_reduce

#: Styles that leave a module whole on every TP rank and its forward as it is.
WHOLE = frozenset(
    {
        "replicated",
        "replicate",
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "local_params",
        "sequence_parallel",
    }
)
#: Styles of the embedding and the language-model head: see :func:`vocabulary_style`.
VOCABULARY = frozenset({"embedding_rowwise", "embedding_colwise"})
GATHER = frozenset({"colwise_gather_output", "colwise_rep"})
SPLIT = frozenset({"rowwise_split_input", "rowwise_rep"})
COLUMNS = frozenset({"colwise", "packed_colwise"}) | GATHER
ROWS = frozenset({"rowwise", "packed_rowwise"}) | SPLIT
#: Styles of a module without parameters of its own to cut.
FORWARD_ONLY = frozenset({"moe_tp_experts", "all_reduce", "moe_identity_expert"})
KNOWN = WHOLE | VOCABULARY | COLUMNS | ROWS | FORWARD_ONLY
PACKED = 2


def vocabulary_style(name: str, module: nn.Module, style: str, *, is_head: bool) -> str | None:
    """Is this the embedding or the head? Then the style of a plan does not say how it lies over the ranks: pass
    ``vocab`` cuts it where the traced graph shows that it can, and else it stays whole. None for other modules."""
    if style in VOCABULARY or isinstance(module, nn.Embedding) or is_head:
        return "replicated"
    return None


def is_linear(module: nn.Module) -> bool:
    """``nn.Linear``, or GPT-2's ``Conv1D``, whose weight is the other way round."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def cut_dim(ndim: int, style: str, *, turned: bool = False) -> int:
    """The dimension that a style cuts. ``turned``: the weight is [in, out]."""
    if ndim == 1:
        return 0
    columns = style in COLUMNS
    return ndim - 1 if columns == turned else ndim - 2


def packed_sections(size: int, parts: int) -> tuple[Section, ...]:
    """Gate and up in one weight: two halves."""
    return equal_sections(size, parts, PACKED)


def equal_sections(size: int, parts: int, count: int) -> tuple[Section, ...]:
    """``count`` equally large sections."""
    return tuple(Section(size // count, parts) for _ in range(count))


def apply(module: nn.Module, style: str, *, tp_size: int, rank: Callable[[], Tensor]) -> None:
    """Give ``module``, a copy with local parameters, the forward of its style. ``rank`` gives this rank's TP rank as
    a tensor [1]."""
    if style in ("colwise", "packed_colwise", "moe_tp_experts") or style in GATHER:
        module.register_forward_pre_hook(_copy_inputs, with_kwargs=True)
    if style in ("moe_tp_experts", "all_reduce"):
        module.register_forward_hook(lambda _m, _args, out: tp_reduce(out))
    if style == "moe_identity_expert":
        module.register_forward_pre_hook(lambda _m, args: (args[0] / tp_size, *args[1:]))
    if style in GATHER:
        module.register_forward_hook(lambda _m, _args, out: gather(out, rank(), tp_size))
    if style in ROWS:
        module.forward = _rowwise(module, tp_size if style in SPLIT else None, rank)  # type: ignore[method-assign]
    if is_conv1d(module) and style in COLUMNS:
        module.nf = module.weight.shape[1]  # type: ignore[assignment, index, union-attr]


def _copy_inputs(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first tensor that a module gets is the one that its columns read."""
    if args:
        return (tp_copy(args[0]), *args[1:]), kwargs
    first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, first: tp_copy(kwargs[first])}


def _rowwise(module: nn.Module, split: int | None, rank: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        x = input if split is None else part(tp_copy(input), rank(), split)
        weight: Tensor = module.weight.t() if is_conv1d(module) else module.weight  # type: ignore[assignment, operator]
        # The bias is added once, after the sum over ranks.
        y = tp_reduce(F.linear(x, weight))
        return y if module.bias is None else y + module.bias  # type: ignore[operator]

    return forward


def part(x: Tensor, rank: Tensor, tp_size: int) -> Tensor:
    """This rank's part of the last dimension."""
    return x.unflatten(-1, (tp_size, x.shape[-1] // tp_size)).index_select(-2, rank).squeeze(-2)


def gather(x: Tensor, rank: Tensor, tp_size: int) -> Tensor:
    """All ranks' parts of the last dimension, side by side."""
    mine = (torch.arange(tp_size, device=x.device) == rank).to(x.dtype)
    return tp_reduce((mine.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2))
