"""ZB-V: the zero-bubble schedule on the V (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024)."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Step
from fxbraid.schedule.fill import fill_weights
from fxbraid.schedule.hand import Hand
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.transform import truncate


def zbv(p: int, m: int) -> Schedule:
    """V, two chunks a rank; for m >= 2p - 1 torch's order.

    Peak 2p chunk activations, those that wait for their W included. Counted from each rank's own start the
    bubble is (p-1) 2 (T_I - T_W) for T_W <= T_F <= T_I and T_AR = 0 (the published (p-1)(T_F + T_I - 2 T_W)
    where T_F = T_I), so none at T_F = T_I = T_W: makespan 6m + p - 1, as the last rank starts p - 1 later.

    For m < 2p - 1 torch takes the first m micro-batches of the order for 2p - 1; here the W's then fill the
    gaps, which is as fast or faster in the same memory.
    """
    full = max(m, 2 * p - 1)
    rows = tuple(tuple(_rank(p, full, rank)) for rank in range(p))
    schedule = truncate(Schedule("zbv", Placement("v", p, 2), full, rows), m)
    return schedule if m == full else fill_weights(schedule, 2 * p)


def _rank(p: int, m: int, r: int) -> list[Step]:
    hand, row = Hand(p, r), list[Step]()
    f, i = hand.f, hand.i

    def backward(local: int) -> tuple[Action, Action]:
        return i(local), hand.owed.pop()

    for _ in range(2 * (p - r) - 1):  # 1: down the V
        row.append(f(0))
    for _ in range(r):  # 2: both chunks
        row += f(1), f(0)
    for _ in range(p - r):  # 3: the first backwards come back
        row.append(f(1))
        row += backward(1)
    for at in range(m - p):  # 4: one forward and one backward of each chunk
        if at < m - (2 * p - 1 - r):
            row.append(f(0))
        row += backward(0)
        row.append(f(1))
        row += backward(1)
    for _ in range(r):  # 5: input gradients first
        row += i(0), i(1)
    late = [w for w in hand.owed if w.chunk == r]
    for _ in range(p - r):  # 6: each with the oldest W of its chunk
        row.append(i(0))
        late.append(hand.owed.pop())
        row.append(late.pop(0))
    row += [w for w in hand.owed if w.chunk != r]  # 7
    row += late
    return row
