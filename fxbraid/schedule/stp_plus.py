"""STP that runs further ahead: fewer exposed collectives than the published bound, for more activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fxbraid.schedule.ahead import NEVER, Pace, run_ahead
from fxbraid.schedule.local import ActionTimes, ListClock, StepTimes, improve
from fxbraid.schedule.makespan import Costs
from fxbraid.schedule.memory import peak_live
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.stp import stp
from fxbraid.schedule.uniform import UniformTimes
from fxbraid.schedule.weave import weave

REFERENCE = Costs(1, 1, 1, 0.37)
"""The costs that ``stp_plus`` is made for unless it is told others."""

LAYERS = 4
"""Layers of a chunk at which it is judged."""

SMALL = 2_000
"""Chunks times micro-batches up to which it is changed locally in the end."""

EFFORT = 60_000

CLOSE = 1e-9
"""Relative differences in time below this are rounding."""


def stp_plus(
    p: int, m: int, costs: Costs = REFERENCE, *, order: Literal["paper", "costs"] | None = None
) -> Schedule:
    """The fastest, at ``costs``, of ``stp`` and of orders on the same V that run up to 6p micro-batches ahead.

    In ``stp`` (2p+1) T_AR stay exposed and (p-1) T_AR are in its bubble, 3p T_AR in all: the collectives of the
    warm-up's lone F's, which the first micro-batch meets on its way down the ranks and back. Here two F's of the
    warm-up hide each other's (also of one chunk), and a rank goes on with further F's until the first I comes. The
    price is memory: up to 7p chunk activations live (about 6p where m = 4p), where ``stp`` holds 4p - 1. Made for its
    ratio with units ordered by costs, m = 4p and T_F = T_I = T_W, the step takes less than 6m + p - 1 + (2p+1) T_AR
    for p = 2, 4, 8 and T_AR / T_F from 0.2 to 1: bubble and exposed TP together are below the published exposed TP
    alone. ``python -m fxbraid.bench.bound`` prints by how much, and what is left of it for shorter steps.

    Made by list scheduling on unit-level clocks (``ahead``): there is no closed form. ``order``: of units in blocks
    that it is made for; None is one that does well in both. Same arguments, same result; never slower than ``stp`` at
    ``costs`` (in the sum of both orders for None).
    """
    placement = Placement("v", p, 2)
    clocks = [UniformTimes(costs, LAYERS)] if order != "paper" else []
    clocks += [UniformTimes(costs, LAYERS, weave)] if order != "costs" else []
    tried = min(m, 4 * p)

    def makespan(one: Schedule) -> float:
        found = [ListClock(one, clock).run(one.actions) for clock in clocks]
        return sum(NEVER if one is None else one[0] for one in found)

    models: list[StepTimes] = [*clocks, ActionTimes(costs)]
    made = [
        (run_ahead("stp_plus", placement, tried, pace, times), pace, times)
        for times in models
        for pace in paces(p)
    ]
    best, pace, times = min(made, key=lambda one: (round(makespan(one[0]), 9), max(peak_live(one[0]))))
    if tried < m:
        best = run_ahead("stp_plus", placement, m, pace, times)
    known = stp(p, m)
    if makespan(known) <= makespan(best) * (1 + CLOSE):
        best = known
    if placement.n_chunks * m <= SMALL and len(clocks) == 1:
        best = improve(best, clocks[0], effort=EFFORT)
    return Schedule("stp_plus", placement, m, best.actions)


def paces(p: int) -> Iterator[Pace]:
    """What is tried: how far ahead, and whether the very first F's may pair."""
    for together in ("later", "always"):
        for ranks in (4, 5) if p > 8 else (3, 4, 5, 6):
            for patience in (0.0,) if p > 8 else (0.0, 0.5):
                for keep in (2 * p,) if p > 4 else (p, 2 * p):
                    yield Pace(max(2, ranks * p), max(3, (ranks + 1) * p), keep, together, patience=patience)
