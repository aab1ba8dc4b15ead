"""Schedules on the loop with several chunks a rank: interleaved 1F1B, its zero-bubble form, breadth-first."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Phase, Step
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule


def round_sizes(p: int, m: int) -> list[int]:
    """Micro-batches per round: m // p rounds (at least one), as even as can be, the larger ones first.

    Larger first, because a rank runs ahead by (v-1) times the first round's size, and a later and larger
    round would want a backward before its forward. torch allows equal rounds only; then this is the same.
    """
    rounds = max(1, m // p)
    size, larger = divmod(m, rounds)
    return [size + 1] * larger + [size] * (rounds - larger)


def _order(phase: Phase, chunks: tuple[int, ...], sizes: list[int]) -> list[Action]:
    """Round after round; in a round one chunk after the other, each for all of the round's micro-batches."""
    order, start = list[Action](), 0
    for size in sizes:
        order += [Action(phase, chunk, j) for chunk in chunks for j in range(start, start + size)]
        start += size
    return order


def interleaved_1f1b(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., SC 2021), any v and any m; torch's table wherever torch has one.

    Rank r runs (v-1)s + 2(p-1-r) forwards, s the size of the first round (s = p if p divides m), then one
    forward and one backward in turn. With p dividing m: bubble (p-1)(T_F + T_I + T_W) with T per chunk, so
    1/v of 1F1B's; peak (v+1)p - 1 chunk activations on rank 0 (at v = 2 that is 3p - 1; DESIGN section 5's
    3p - 2 leaves out the one whose forward runs just before the backward that frees one).
    """
    placement, sizes = Placement("loop", p, v), round_sizes(p, m)
    rows = []
    for rank in range(p):
        chunks = placement.chunks_of(rank)
        ahead = (v - 1) * sizes[0] + (2 if v > 1 else 1) * (p - 1 - rank)
        forwards, backwards = _order(Phase.F, chunks, sizes), _order(Phase.B, chunks[::-1], sizes)
        rows.append(tuple(_alternate(forwards, backwards, min(ahead, v * m))))
    return Schedule("interleaved_1f1b", placement, m, tuple(rows))


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Step]:
    row: list[Step] = list(forwards[:ahead])
    for at, backward in enumerate(backwards):
        row += forwards[ahead + at : ahead + at + 1]
        row.append(backward)
    return row


def interleaved_zero_bubble(p: int, m: int, v: int) -> Schedule:
    """Interleaved ZB-H1 (ZB1P; Qi et al., ICLR 2024), any v and any m; torch's table wherever torch has one.

    As interleaved 1F1B with half of the run-ahead, (v-1)s + p-1-r, every backward split, and rank r keeping r
    W's queued, which it runs when its I's are done: all ranks hold (v-1)s + p chunk activations at most. With
    p dividing m the bubble is (p-1)(max(T_F, T_W) + T_I - T_W): at T_F = T_I = T_W a third of 1F1B-I's.
    """
    return Schedule("interleaved_zero_bubble", *_zero_bubble(p, m, v))


def zb_h1(p: int, m: int) -> Schedule:
    """ZB-H1 (Qi et al., ICLR 2024): 1F1B with split backwards, no more memory than 1F1B's first rank.

    Bubble (p-1)(max(T_F, T_W) + T_I - T_W); peak min(m, p) chunk activations, those that wait for their W
    included.
    """
    return Schedule("zb_h1", *_zero_bubble(p, m, 1))


def _zero_bubble(p: int, m: int, v: int) -> tuple[Placement, int, tuple[tuple[Step, ...], ...]]:
    placement, sizes = Placement("loop", p, v), round_sizes(p, m)
    rows = []
    for rank in range(p):
        chunks = placement.chunks_of(rank)
        ahead = min((v - 1) * sizes[0] + p - 1 - rank, v * m)
        forwards, gradients = _order(Phase.F, chunks, sizes), _order(Phase.I, chunks[::-1], sizes)
        weights = _order(Phase.W, chunks[::-1], sizes)
        row: list[Step] = list(forwards[:ahead])
        for at, gradient in enumerate(gradients):
            row += forwards[ahead + at : ahead + at + 1]
            row.append(gradient)
            if at >= rank:
                row.append(weights[at - rank])
        row += weights[max(0, len(weights) - rank) :]
        rows.append(tuple(row))
    return placement, m, tuple(rows)


def looped_bfs(p: int, m: int, v: int) -> Schedule:
    """Breadth-first (Lamy-Poirier, MLSys 2023): chunk by chunk, each for all micro-batches.

    Bubble (p-1)(T_F + T_I + T_W) with T per chunk (for m >= p); peak v m chunk activations. torch's table
    runs the backwards from the last micro-batch to the first; here they run in order, as fxbraid's executor
    and sums want, with the same memory and a makespan at least as good.
    """
    placement = Placement("loop", p, v)
    rows = []
    for rank in range(p):
        chunks = placement.chunks_of(rank)
        row: list[Step] = [Action(Phase.F, chunk, j) for chunk in chunks for j in range(m)]
        row += [Action(Phase.B, chunk, j) for chunk in chunks[::-1] for j in range(m)]
        rows.append(tuple(row))
    return Schedule("looped_bfs", placement, m, tuple(rows))
