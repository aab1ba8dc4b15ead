"""Generated orders for where no closed form exists: the best of a few list schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

from fxbraid.schedule.braid import TYPICAL, pair_neighbours
from fxbraid.schedule.greedy import Policy, list_schedule
from fxbraid.schedule.makespan import UNIT, Costs, makespan
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule

Maker = Callable[[int], Schedule]
"""A function of m."""


def makers(name: str, placement: Placement, max_activations: int, max_live: int) -> list[Maker]:
    """List schedules with at most ``max_activations`` held from F to I and ``max_live`` from F to W."""
    made = list[Maker]()
    for deep, braid in product((True, False), (True, False)):
        policy = Policy(
            max_activations, max_live, deep_backward=deep, braid=braid, first="I" if braid else "F"
        )

        def plain(m: int, policy: Policy = policy) -> Schedule:
            return list_schedule(name, placement, m, policy)

        def paired(m: int, policy: Policy = policy) -> Schedule:
            return pair_neighbours(list_schedule(name, placement, m, policy), 0.0)

        made += plain, paired
    return made


def pick(
    makers: Iterable[Maker], m: int, sample: int, costs: tuple[Costs, ...] = (UNIT, TYPICAL)
) -> Schedule:
    """What the best maker makes for ``m``: least makespan at the first of ``costs``, then at the next.

    They are compared at min(m, ``sample``) micro-batches: past the warm-up and cool-down they repeat
    themselves.
    """
    tried = min(m, sample)
    made = [(maker(tried), maker) for maker in makers]
    best, maker = min(made, key=lambda one: [makespan(one[0], *cost) for cost in costs])
    return best if tried == m else maker(m)
