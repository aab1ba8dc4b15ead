"""Formulas on the back of an envelope: what tensor parallelism sends and what a pipeline leaves idle."""

from __future__ import annotations

from fxbraid.schedule import ScheduleError
from fxbraid.simulate.kernels import ring


def tp_bytes_per_layer(batch: int, seq: int, hidden: int, tp: int, width: int = 2) -> float:
    """Bytes that one device sends per layer and micro-batch, forward and backward.

    Four all-reduces of batch x seq x hidden (one behind attention and one behind the MLP, in each direction),
    each 2 (t-1)/t of its size on a ring. With sequence parallelism every all-reduce becomes a reduce-scatter
    and an all-gather of (t-1)/t each: the same volume. (Megatron-LM, arXiv 1909.08053 and 2205.05198.)
    """
    if min(batch, seq, hidden, tp, width) < 1:
        raise ScheduleError("the traffic of tensor parallelism needs batch, seq, hidden, tp and width >= 1")
    return 4 * ring(tp) * batch * seq * hidden * width


def bubble_fraction(p: int, m: int, v: int = 1) -> float:
    """Idle share of a step with p ranks, m micro-batches and v chunks a rank: (p-1) / (v m + p - 1).

    GPipe and 1F1B for v = 1, interleaved 1F1B for v > 1; equal chunks, no communication. (Megatron-LM,
    arXiv 2104.04473, section 2.2, as a share of the whole step instead of the ideal one.)
    """
    if min(p, m, v) < 1:
        raise ScheduleError(f"a bubble needs p, m, v >= 1, got p={p}, m={m}, v={v}")
    return (p - 1) / (v * m + p - 1)


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends in a ring all-reduce of ``size`` bytes."""
    return ring(ranks) * size
