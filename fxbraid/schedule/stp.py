"""STP: the braided schedule of "Synergistic Tensor and Pipeline Parallelism" (arXiv 2510.27257)."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Composite, Step
from fxbraid.schedule.generate import makers, pick
from fxbraid.schedule.hand import Hand
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule


def stp(p: int, m: int) -> Schedule:
    """The published order for m >= 3p - 1, and below that one made by list scheduling.

    V, two chunks a rank. With T_F, T_I, T_W and T_AR per chunk and micro-batch, for m >= 3p - 1 and T_F = T_I
    = T_W: bubble (p-1)(T_F + T_AR + T_I - T_W), exposed TP (2p+1) T_AR (2p T_AR for even p, where rank p - 1
    pairs all its forwards of step 3), peak 3p activations from F to I (and p - 1 more wait for their W: 4p -
    1 live). Everything else runs braided. With unequal times the bubble is larger than that: for T_W <= T_F
    <= T_I and T_AR = 0 it is (p-1)(2 T_F + 2 T_I - 3 T_W).

    m < 3p - 1 has no closed form. The list scheduler's result keeps to 3p activations from F to I and 4p - 1
    live; at T_F = T_I = T_W, T_AR = 0 its makespan is the least possible, 6m + p - 1, wherever m >= p.
    """
    if m >= 3 * p - 1:
        return closed_form(p, m)
    return pick(makers("stp", Placement("v", p, 2), 3 * p, max(2, 4 * p - 1)), m, m)


def below_closed_form(p: int, m: int) -> list[str]:
    """For people: that ``stp`` is no published order at these sizes, and what to take; empty where it is one."""
    if m >= 3 * p - 1:
        return []
    return [
        f"stp: m = {m} is below 3p - 1 = {3 * p - 1}, where the published order does not exist; what ran is a list "
        "schedule under its memory limit, and its published bound does not hold. auto chooses among more orders "
        "by the costs of the run, and stp_plus is often faster for more memory."
    ]


def closed_form(p: int, m: int) -> Schedule:
    """The published order; m >= 3p - 1."""
    rows = tuple(tuple(_rank(p, m, rank)) for rank in range(p))
    return Schedule("stp", Placement("v", p, 2), m, rows)


def _rank(p: int, m: int, r: int) -> list[Step]:
    """DESIGN section 5, step by step."""
    hand, row = Hand(p, r), list[Step]()
    f, b, i, w = hand.f, hand.b, hand.i, hand.w

    def braid(*both: Action) -> None:
        row.append(Composite(both))

    for _ in range(2 * (p - 1 - r)):  # 1
        row.append(f(0))
    for _ in range(r + 1):  # 2
        row += f(0), f(1)
    if (r + 1) % 2:  # 3
        row.append(f(0))
    for _ in range((r + 1) // 2):
        braid(f(0), f(0))
    for _ in range(p - 1 - r):  # 4
        braid(f(1), i(1))
        braid(f(0), w())
    blocks = 2 * (m - 3 * p + 1) + 1 + 2 * r  # 5
    for at in range(blocks):
        local = (at + 1) % 2
        braid(f(local), i(local) if at >= blocks - r else b(local))
    for _ in range(2 * p - 2 - r):  # 6
        row.append(b(0))
        braid(f(1), i(1))
    for _ in range(r + 1):  # 7
        row += b(0), b(1)
    for at in range(2 * (p - 1 - r) + 1):  # 8
        row += (w(), w()) if at % 2 else (b(0),)
    for _ in range(2 * r):  # 9
        row.append(w())
    return row
