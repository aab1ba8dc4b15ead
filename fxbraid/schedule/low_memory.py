"""STP with a short warm-up: braided throughout at little more than ZB-V's memory."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Composite, Step
from fxbraid.schedule.braid import TYPICAL, braid
from fxbraid.schedule.dualpipev import dualpipev
from fxbraid.schedule.generate import Maker, makers, pick
from fxbraid.schedule.hand import Hand
from fxbraid.schedule.makespan import UNIT
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.zbv import zbv


def stp_low_memory(p: int, m: int) -> Schedule:
    """V, two chunks a rank; the warm-up ends as soon as the first backward can come back.

    Peak 2p + 1 chunk activations live, where ``stp`` holds 4p - 1 (3p of them not waiting for their W). For
    m >= 2p and p >= 3 the makespan at T_F = T_I = T_W = 1 is 6m + 2p - 3 without T_AR (``stp``: 6m + p - 1),
    and at T_AR = 1/4 it is 6m + (13p - 15) / 4, which is 1.5 less than DualPipeV's in the same memory.

    The order was found by ``auto`` and written down. For m < 2p: the fastest, at T_AR = 1/4, of list
    schedules in that memory, DualPipeV and a braided ZB-V.
    """
    if m >= 2 * p > 2:
        return _closed_form(p, m)
    tried: list[Maker] = [lambda m: dualpipev(p, m), lambda m: braid(zbv(p, m))]
    tried += makers("stp", Placement("v", p, 2), 2 * p + 1, 2 * p + 1) + makers(
        "stp", Placement("v", p, 2), 2 * p, 2 * p
    )
    best = pick(tried, m, 4 * p, (TYPICAL, UNIT))
    return Schedule("stp_low_memory", best.placement, best.m, best.actions)


def _closed_form(p: int, m: int) -> Schedule:
    rows = tuple(tuple(_rank(p, m, rank)) for rank in range(p))
    return Schedule("stp_low_memory", Placement("v", p, 2), m, rows)


def _rank(p: int, m: int, r: int) -> list[Step]:
    hand, row = Hand(p, r), list[Step]()
    f, b, i, w = hand.f, hand.b, hand.i, hand.w

    def both(*actions: Action) -> None:
        row.append(Composite(actions))

    pairs = m - 2 * p + r + 1
    if r == p - 1:  # 1-3 on the turn: the way back starts at once, beside the next on the way down
        row.append(f(0))
        for _ in range(p):
            both(f(1), f(0))
        row.append(b(1))
        both(f(1), b(0))
        pairs -= 1
    else:
        for _ in range(2 * (p - 1 - r)):  # 1
            row.append(f(0))
        for _ in range(r + 1):  # 2
            row += f(0), f(1)
        for _ in range(p - 1 - r):  # 3
            row.append(i(1))
            both(f(1), w())
    for _ in range(pairs):  # 4
        both(f(0), b(1))
        both(f(1), b(0))
    for left in range(p - 1 - r, 0, -1):  # 5
        row.append(b(1))
        both(f(1), i(0) if left == 1 else b(0))
    split = False
    for at in range(r + 1):  # 6: the second half keeps its W's
        for local in (1, 0):
            split = split or (at == (r + 1) // 2 and local == r % 2)
            row.append(i(local) if split else b(local))
    for _ in range(p - 1 - r):  # 7
        row += w(), i(0)
    row += [w() for _ in range(len(hand.owed))]  # 8
    return row
