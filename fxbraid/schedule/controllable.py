"""V-Min and V-Half: schedules on the V from one repeated block (Qi et al., "Pipeline Parallelism with
Controllable Memory", NeurIPS 2024).

A block is one micro-batch's way down and up the V and back, with fixed times; the next micro-batch starts 6
steps (its work on each rank: 2 F, 2 I, 2 W) later. The times are such that a rank's F's and I's never fall on
the same step modulo 6. How slowly the block moves from rank to rank sets the memory: an activation lives as
long as its micro-batch takes from there to the end of the V and back, and every 6 steps of life cost one
chunk activation.
"""

from __future__ import annotations

from typing import NamedTuple

from fxbraid.schedule.action import Action, Phase, Step
from fxbraid.schedule.fill import fill_weights
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule


class Block(NamedTuple):
    """Steps per rank on the four passes (F down, F up, I down, I up), and from each pass to the next.

    rank 0 of p, F down     starts at 0, rank r at r * pace[0]
    rank p-1, F up          turns[0] after F down has come to rank p-1; and so on
    """

    pace: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def starts(self, p: int, rank: int) -> tuple[int, int, int, int]:
        """When the first micro-batch's F0, F1, I1 and I0 start on ``rank``."""
        down, up = rank, p - 1 - rank
        begin = 0
        times = []
        for index, (pace, way) in enumerate(zip(self.pace, (down, up, down, up), strict=True)):
            times.append(begin + pace * way)
            begin += pace * (p - 1) + (self.turns[index] if index < 3 else 0)
        return times[0], times[1], times[2], times[3]


def v_min(p: int, m: int) -> Schedule:
    """The least memory on the V: 2 ceil((p-1)/3) + 2 chunk activations, a third of 1F1B's in the limit.

    Bubble at T_F = T_I = T_W = 1: 4p - 5 (p >= 2), so makespan 6m + 4p - 5 for any m; two thirds of 1F1B's
    6(p-1) in the limit.
    """
    block = Block((1, 1, 1, 1), (1, 1, 1) if p % 3 else (3, 1, 3))
    return _repeated("v_min", p, m, block, 2 * (-(-(p - 1) // 3)) + 2)


def v_half(p: int, m: int) -> Schedule:
    """Half of 1F1B's memory: p + 2 chunk activations for even p, p + 1 for odd p.

    Bubble at T_F = T_I = T_W = 1 and m > p/2: 3p - 5 for even p, 3p - 4 for odd p >= 3, so makespan 6m plus
    that; half of 1F1B's 6(p-1) in the limit.
    """
    if p % 2:
        return _repeated("v_half", p, m, Block((1, 2, 1, 2), (1, 1, 2)), p + 1)
    if p == 2:
        return _repeated("v_half", p, m, Block((2, 2, 1, 1), (3, 4, 1)), 4)
    return _repeated("v_half", p, m, Block((1, 2, 1, 2), (4, 2, 4)), p + 2)


def _repeated(name: str, p: int, m: int, block: Block, max_live: int) -> Schedule:
    """The block once per micro-batch, 6 steps apart; the W's fill the gaps, under the block's memory."""
    rows = []
    for rank in range(p):
        f0, f1, i1, i0 = block.starts(p, rank)
        kinds = (
            (f0, Phase.F, rank),
            (f1, Phase.F, 2 * p - 1 - rank),
            (i1, Phase.I, 2 * p - 1 - rank),
            (i0, Phase.I, rank),
        )
        timed = [(start + 6 * j, Action(phase, chunk, j)) for start, phase, chunk in kinds for j in range(m)]
        row: list[Step] = [action for _, action in sorted(timed)]
        rows.append(tuple(row))
    return fill_weights(Schedule(name, Placement("v", p, 2), m, tuple(rows)), max_live)
