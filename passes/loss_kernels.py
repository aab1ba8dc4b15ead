"""Triton kernels of ``passes.loss_shards``: one program per token, one pass over its logits, forward and backward.

The forward keeps a running maximum and rescales the running sum where it rises (Milakov and Gimelshein 2018, section
3), so that maximum, sum of exponentials, the label's logit and (for label smoothing) the sum come from one reading of
the logits. The backward reads them once more and writes their gradient beside them. Sums are float32, for float64
logits float64.

Importing this module needs Triton; ``loss_shards`` does it where there is a CUDA tensor or ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

#: Columns that a program reads at a time: 4 elements a thread and more, and no more registers than it has.
BLOCK = 4096
WARPS = 8


@triton.jit
def stats_kernel(  # type: ignore[no-untyped-def]
    logits,
    labels,
    rank,
    out,
    stride,
    columns,
    vocab,
    tokens,
    LOWEST: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out`` [3 or 4, tokens] of ``logits`` [tokens, columns] with rows ``stride`` elements apart."""
    kind = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(rank) * columns
    real = tl.minimum(vocab - first, columns)
    top = tl.full((), LOWEST, kind)
    exponentials = tl.full((), 0.0, kind)
    total = tl.full((), 0.0, kind)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < real
        x = tl.load(logits + row * stride + column, mask=mask, other=float("-inf")).to(kind)
        risen = tl.maximum(top, tl.max(x, 0))
        exponentials = exponentials * tl.exp(top - risen) + tl.sum(tl.exp(x - risen), 0)
        top = risen
        if TOTAL:
            total += tl.sum(tl.where(mask, x, 0.0), 0)
    label = tl.load(labels + row) - first
    inside = (label >= 0) & (label < real)
    target = tl.load(logits + row * stride + label, mask=inside, other=0.0).to(kind)
    tl.store(out + row, top)
    tl.store(out + tokens + row, exponentials)
    tl.store(out + 2 * tokens + row, target)
    if TOTAL:
        tl.store(out + 3 * tokens + row, total)


@triton.jit
def grad_kernel(  # type: ignore[no-untyped-def]
    logits,
    labels,
    rank,
    stats,
    grads,
    out,
    stride,
    columns,
    vocab,
    tokens,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out`` [tokens, columns]: exp(logits - max) * grads[1], plus grads[2] at the label, plus grads[3]."""
    kind = stats.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(rank) * columns
    real = tl.minimum(vocab - first, columns)
    label = tl.load(labels + row) - first
    top = tl.load(stats + row)
    by_sum = tl.load(grads + tokens + row)
    by_target = tl.load(grads + 2 * tokens + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < real
        x = tl.load(logits + row * stride + column, mask=mask, other=float("-inf")).to(kind)
        grad = tl.exp(x - top) * by_sum + tl.where(column == label, by_target, 0.0)
        if TOTAL:
            grad += tl.load(grads + 3 * tokens + row)
        grad = tl.where(mask, grad, 0.0)
        tl.store(out + row * columns + column, grad.to(out.dtype.element_ty), mask=column < columns)


@triton_op("fxbraid::shard_stats_triton", mutates_args={})
def stats(logits: Tensor, labels: Tensor, rank: Tensor, vocab: int, total: bool) -> Tensor:
    """As ``loss_shards.plain_stats``."""
    logits, labels = rows_of(logits), labels.contiguous()
    tokens, columns = logits.shape
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    out = torch.empty((4 if total else 3, tokens), dtype=dtype, device=logits.device)
    if tokens:
        wrap_triton(stats_kernel)[(tokens,)](
            logits,
            labels,
            rank,
            out,
            logits.stride(0),
            columns,
            vocab,
            tokens,
            LOWEST=torch.finfo(dtype).min,
            TOTAL=total,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


@triton_op("fxbraid::shard_grad_triton", mutates_args={})
def grad(logits: Tensor, labels: Tensor, rank: Tensor, vocab: int, stats: Tensor, grads: Tensor) -> Tensor:
    """As ``loss_shards.plain_grad``."""
    logits, labels = rows_of(logits), labels.contiguous()
    tokens, columns = logits.shape
    out = torch.empty((tokens, columns), dtype=logits.dtype, device=logits.device)
    if tokens:
        wrap_triton(grad_kernel)[(tokens,)](
            logits,
            labels,
            rank,
            stats.contiguous(),
            grads.contiguous(),
            out,
            logits.stride(0),
            columns,
            vocab,
            tokens,
            TOTAL=stats.shape[0] > 3,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


def rows_of(logits: Tensor) -> Tensor:
    """``logits`` with the elements of a row side by side."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


#: Element types in the words of Triton's signatures.
_TYPES: Mapping[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def ptx(kernel: Any, dtype: torch.dtype, *, capability: int = 90, total: bool = False) -> str:
    """PTX of one of the kernels for logits of ``dtype``, compiled ahead of time: no GPU is needed.

    ``capability``: of the GPU, 90 is Hopper (sm_90), with warps of 32.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sums = torch.float64 if dtype is torch.float64 else torch.float32
    constants: dict[str, Any] = {"TOTAL": total, "BLOCK": BLOCK}
    if kernel is stats_kernel:
        constants["LOWEST"] = torch.finfo(sums).min
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("labels", "rank"):
            signature[name] = "*i64"
        elif name in ("stats", "grads") or (name == "out" and kernel is stats_kernel):
            signature[name] = f"*{_TYPES[sums]}"
        elif name in ("logits", "out"):
            signature[name] = f"*{_TYPES[dtype]}"
        else:
            signature[name] = "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS})
    return str(compiled.asm["ptx"])
