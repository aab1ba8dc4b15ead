"""DualPipeV: the V form of DualPipe (DeepSeek-AI, 2025), forwards braided with backwards."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Composite, Step
from fxbraid.schedule.braid import TYPICAL
from fxbraid.schedule.generate import Maker, makers, pick
from fxbraid.schedule.hand import Hand
from fxbraid.schedule.makespan import UNIT
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.transform import truncate


def dualpipev(p: int, m: int) -> Schedule:
    """V, two chunks a rank; torch's order for m >= 2p, else the fastest of a few orders in the same memory.

    Peak 2p + 1 chunk activations. At T_F = T_I = T_W = 1, T_AR = 0 and m >= 2p the makespan is 6m + 2(p - 1)
    as braided and 6m + p - 1 unbraided (a braided pair starts when both inputs are there).
    """
    if m >= 2 * p:
        return closed_form(p, m)
    cut: list[Maker] = [lambda m: truncate(closed_form(p, 2 * p), m)]
    return pick(cut + makers("dualpipev", Placement("v", p, 2), 2 * p + 1, 2 * p + 1), m, m, (TYPICAL, UNIT))


def closed_form(p: int, m: int) -> Schedule:
    """torch's order; m >= 2p."""
    rows = tuple(tuple(_rank(p, m, rank)) for rank in range(p))
    return Schedule("dualpipev", Placement("v", p, 2), m, rows)


def _rank(p: int, m: int, r: int) -> list[Step]:
    hand, row = Hand(p, r), list[Step]()
    f, b, i, w = hand.f, hand.b, hand.i, hand.w

    def braid(forward: Action, backward: Action) -> None:
        row.append(Composite((forward, backward)))

    for _ in range(2 * (p - 1 - r)):  # 1
        row.append(f(0))
    for _ in range(r + 1):  # 2
        row += f(0), f(1)
    for _ in range(p - 1 - r):  # 3
        row += i(1), w(), f(1)
    for at in range(m - 2 * p + r + 1):  # 4
        if at == 0 and r == p - 1:
            row += f(0), b(1)  # apart: rank p - 1 could not start the pair before F0 comes back to it
        else:
            braid(f(0), b(1))
        braid(f(1), b(0))
    for _ in range(p - 1 - r):  # 5
        row.append(b(1))
        braid(f(1), b(0))
    split = False
    for at in range(r + 1):  # 6: the second half keeps its W's
        for local in (1, 0):
            split = split or (at == (r + 1) // 2 and local == r % 2)
            row.append(i(local) if split else b(local))
    for _ in range(p - 1 - r):  # 7
        row += w(), i(0)
    row += [w() for _ in range(len(hand.owed))]  # 8
    return row
