"""Softmax cross entropy where every tensor-parallel rank holds the logits of its part of the vocabulary.

Contract: rank r of t has ``logits`` [N, C], the columns ``r C`` to ``(r + 1) C`` of all; columns of ``vocab`` and
beyond are padding and count as nothing. What is summed over ranks are numbers per token, never logits (Shoeybi et al.
2019, section 3)::

    max_r, sum_r, target_r = shard_stats(logits, labels, rank)      # one pass over the logits
    top = all-reduce, maximum, of max_r
    S, T = all-reduce of (sum_r * exp(max_r - top), target_r)
    loss = log S + top - T                                          # of one token
    d logits = exp(logits - max_r) * dsum + onehot * dtarget        # shard_grad, one pass again

``sum_r`` is the sum of ``exp(logits - max_r)``, ``target_r`` the label's logit on the rank that has its column and 0 on
the others. With ``total`` there is a fourth number, the sum of the rank's logits: label smoothing needs their mean. The
gradient of ``max_r`` is left out: it cancels, since the loss does not depend on what is subtracted.

Both are operators that a graph holds as one node each: on CUDA (and in Triton's interpreter) a Triton kernel
(``passes.loss_kernels``), elsewhere the plain operators below, in blocks of rows, so that no second copy of the logits
is ever made. They are opaque to Inductor on purpose: a Triton kernel inside a graph is known by a number that every
process counts for itself, and the keys of units must be the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

#: Elements of logits that the plain operators work on at a time: 8 MB of float32.
BLOCK_ELEMENTS = 2**21

_LIBRARY = torch.library.Library("fxbraid", "FRAGMENT")
_LIBRARY.define("shard_stats(Tensor logits, Tensor labels, Tensor rank, int vocab, bool total) -> Tensor")
_LIBRARY.define(
    "shard_grad(Tensor logits, Tensor labels, Tensor rank, int vocab, Tensor stats, Tensor grads) -> Tensor"
)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over logits of ``dtype`` are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def plain_stats(logits: Tensor, labels: Tensor, rank: Tensor, vocab: int, total: bool) -> Tensor:
    """``logits`` [N, C], ``labels`` [N] and ``rank`` [1] int64 -> [3, N]: max, sum, target; with ``total`` [4, N].

    A rank without any real column, or whose logits are all -inf, has the lowest finite number for its max and 0 for
    its sum.
    """
    dtype = accumulated(logits.dtype)
    out = logits.new_empty((4 if total else 3, logits.shape[0]), dtype=dtype)
    for rows in _blocks(logits):
        x = logits[rows].to(dtype)
        padding, column, inside = _columns(x, labels[rows], rank, vocab)
        if padding is not None:
            x = x.masked_fill(padding, -torch.inf)
        top = x.amax(1).clamp(min=torch.finfo(dtype).min)
        out[0, rows] = top
        out[1, rows] = (x - top.unsqueeze(1)).exp_().sum(1)
        out[2, rows] = x.gather(1, column).squeeze(1).masked_fill(~inside, 0)
        if total:
            out[3, rows] = (x if padding is None else x.masked_fill(padding, 0)).sum(1)
    return out


def plain_grad(
    logits: Tensor, labels: Tensor, rank: Tensor, vocab: int, stats: Tensor, grads: Tensor
) -> Tensor:
    """Gradient of ``logits``, in their type, from ``grads``, the gradients of ``stats`` (the max's is not read)."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows in _blocks(logits):
        x = logits[rows].to(stats.dtype)
        padding, column, inside = _columns(x, labels[rows], rank, vocab)
        grad = (x - stats[0, rows].unsqueeze(1)).exp_().mul_(grads[1, rows].unsqueeze(1))
        if len(grads) > 3:
            grad += grads[3, rows].unsqueeze(1)
        grad.scatter_add_(1, column, grads[2, rows].masked_fill(~inside, 0).unsqueeze(1))
        out[rows] = grad if padding is None else grad.masked_fill_(padding, 0)
    return out


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


def _columns(x: Tensor, labels: Tensor, rank: Tensor, vocab: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Which columns are padding (None where no rank has any), each label's column here [rows, 1], and whether this
    rank has it."""
    columns = x.shape[1]
    first = rank * columns
    real = (vocab - first).clamp(0, columns)
    padding = None if vocab % columns == 0 else torch.arange(columns, device=x.device) >= real
    column = labels - first
    inside = (column >= 0) & (column < real)
    return padding, column.clamp(0, columns - 1).unsqueeze(1), inside


# -- which of the two runs ---------------------------------------------------------------------------------------


@cache
def _kernels() -> ModuleType | None:
    """``passes.loss_kernels``, where Triton is installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from . import loss_kernels

    return loss_kernels


def _compiled(logits: Tensor) -> ModuleType | None:
    """The kernels, where they can run on ``logits``."""
    if logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        return _kernels()
    return None


def _stats(logits: Tensor, labels: Tensor, rank: Tensor, vocab: int, total: bool) -> Tensor:
    kernels = _compiled(logits)
    run = plain_stats if kernels is None else kernels.stats
    return run(logits, labels, rank, vocab, total)


def _grad(logits: Tensor, labels: Tensor, rank: Tensor, vocab: int, stats: Tensor, grads: Tensor) -> Tensor:
    kernels = _compiled(logits)
    run = plain_grad if kernels is None else kernels.grad
    return run(logits, labels, rank, vocab, stats, grads)


_LIBRARY.impl("shard_stats", _stats, "CompositeExplicitAutograd")
_LIBRARY.impl("shard_grad", _grad, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fxbraid::shard_stats",
    lambda logits, labels, rank, vocab, total: logits.new_empty(
        (4 if total else 3, logits.shape[0]), dtype=accumulated(logits.dtype)
    ),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "fxbraid::shard_grad",
    lambda logits, labels, rank, vocab, stats, grads: logits.new_empty(logits.shape),
    lib=_LIBRARY,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, labels, rank, ctx.vocab, _ = inputs
    ctx.save_for_backward(logits, labels, rank, output)


def _backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None, None, None]:
    logits, labels, rank, stats = ctx.saved_tensors
    return SHARD_GRAD(logits, labels, rank, ctx.vocab, stats, grads), None, None, None, None


torch.library.register_autograd("fxbraid::shard_stats", _backward, setup_context=_keep, lib=_LIBRARY)
SHARD_STATS = torch.ops.fxbraid.shard_stats.default
SHARD_GRAD = torch.ops.fxbraid.shard_grad.default
