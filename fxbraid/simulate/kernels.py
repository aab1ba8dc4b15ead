"""Seconds of a matrix product, of attention, of a pass over memory, of a collective: the roofline of one
device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxbraid.simulate.device import Device
from fxbraid.simulate.workload import Link

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.85))
"""Rows, columns, share of the best rate: what a matrix library chooses from."""

EDGE = 128
"""A tile's start and end take as long as this many columns of the inner dimension (an assumption)."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Times on ``device`` at ``width`` bytes per element. efficiency: what is left of the roofline in
    practice, for compute only (host gaps, kernels that are not fused, clocks); 1 is a lower bound for any
    time.
    """

    device: Device
    width: int = 2
    efficiency: float = 1.0

    def matmul(self, rows: int, inner: int, columns: int) -> float:
        """Seconds of (rows x inner) times (inner x columns): compute in whole waves of tiles, or memory."""
        d = self.device
        best = 0.0
        for high, wide, rate in TILES:
            tiles = math.ceil(rows / high) * math.ceil(columns / wide)
            waves = math.ceil(tiles / d.processors)
            full = rows * columns / (waves * d.processors * high * wide)
            best = max(best, full * rate)
        rate = d.peak * d.gemm * best * inner / (inner + EDGE)
        moved = self.width * (rows * inner + inner * columns + rows * columns)
        compute = 2.0 * rows * inner * columns / rate
        return max(compute, moved / (d.bandwidth * d.stream)) / self.efficiency

    def attention(self, tokens: int, seq: int, width: int, *, backward: bool = False) -> float:
        """Seconds of causal flash attention over ``width`` = local heads x head size; backward does 2.5 times
        the work of forward (five products for two).
        """
        d = self.device
        work = 2.0 * tokens * seq * width  # half of 4: the mask
        share = d.attention_b if backward else d.attention_f
        return work * (2.5 if backward else 1.0) / (d.peak * share) / self.efficiency

    def passes(self, elements: float) -> float:
        """Seconds of reading or writing that many elements."""
        return elements * self.width / (self.device.bandwidth * self.device.stream) / self.efficiency

    def all_reduce(self, elements: float, ranks: int) -> float:
        """Seconds of a ring all-reduce: 2 (t-1)/t of the bytes over the slower link of its group."""
        if ranks == 1:
            return 0.0
        d = self.device
        inside = ranks <= d.node
        speed = (d.nvlink if inside else d.network) * d.wire
        return ring(ranks) * elements * self.width / speed + (d.latency if inside else d.network_latency)

    def gather(self, elements: float, ranks: int) -> float:
        """Seconds of a ring all-gather or reduce-scatter: (t-1)/t of the whole's bytes, half of an all-reduce."""
        if ranks == 1:
            return 0.0
        latency = self.device.latency if ranks <= self.device.node else self.device.network_latency
        return (self.all_reduce(elements, ranks) - latency) / 2 + latency


def ring(ranks: int) -> float:
    """Bytes that each rank of a ring all-reduce sends, per byte of the message: 2 (t-1)/t."""
    return 2 * (ranks - 1) / ranks


def pipeline_links(
    device: Device, p: int, stride: int, kind: str
) -> tuple[Link, dict[tuple[int, int], Link]]:
    """The link between neighbours (and, for the loop placement, around), with ``stride`` = tp x dp devices a
    rank.

    Pipeline ranks are the outermost axis: rank r's devices start at r x stride. Two ranks share a node if all
    their devices do.
    """
    inside = Link(device.latency, device.nvlink * device.wire)
    outside = Link(device.network_latency, device.network * device.wire)
    links: dict[tuple[int, int], Link] = {}
    pairs = [(r, r + 1) for r in range(p - 1)] + ([(p - 1, 0)] if kind == "loop" and p > 1 else [])
    for a, b in pairs:
        first, last = min(a, b) * stride, (max(a, b) + 1) * stride - 1
        link = inside if first // device.node == last // device.node else outside
        links[a, b] = links[b, a] = link
    return outside, links
