"""1F1B: one chunk a rank, as few micro-batches in flight as keep it busy (PipeDream-Flush)."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Phase, Step
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r runs p-1-r forwards, then one forward and one backward in turn, then the backwards left.

    Bubble (p-1)(T_F + T_I + T_W); peak min(m, p - r) activations of rank r's one chunk. Any m: with fewer
    micro-batches than ranks the first ranks run all forwards first.
    """
    rows = []
    for rank in range(p):
        ahead = min(p - 1 - rank, m)
        row: list[Step] = [Action(Phase.F, rank, j) for j in range(ahead)]
        for j in range(m):
            if ahead + j < m:
                row.append(Action(Phase.F, rank, ahead + j))
            row.append(Action(Phase.B, rank, j))
        rows.append(tuple(row))
    return Schedule("1f1b", Placement("loop", p, 1), m, tuple(rows))
