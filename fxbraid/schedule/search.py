"""``auto``: a schedule found by search, never slower than any named one that fits in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fxbraid.schedule.braid import TYPICAL, braid, pair_neighbours
from fxbraid.schedule.check import check
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.generate import makers
from fxbraid.schedule.local import EFFORT, ActionTimes, improve
from fxbraid.schedule.makespan import Costs, makespan
from fxbraid.schedule.memory import peak_live
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.transform import merge_backward

LARGE = 20_000
"""Chunks times micro-batches above which only the best named schedule is braided, nothing else tried."""


def search(
    named: Iterable[Callable[[], Schedule]],
    p: int,
    m: int,
    v: int,
    *,
    costs: Costs = TYPICAL,
    max_live: int | None = None,
    effort: int = EFFORT,
) -> Schedule:
    """The fastest schedule found at ``costs`` with at most ``max_live`` activations (F to W) on any rank.

    Starts from every schedule of ``named`` as it is and braided and from list schedules made under
    ``max_live`` (on the V for v = 2, else on the loop); then changes the fastest of them locally for as long
    as it gets faster and ``effort`` lasts. Same arguments, same result. Raises ScheduleError if nothing fits,
    with the least that would.
    """
    if max_live is not None and max_live < v:
        raise ScheduleError(
            f"max_live={max_live} is below v={v}, what one micro-batch needs alone; raise it to {v}"
        )
    starts = list(starting_points(named, p, m, v, costs, max_live))
    fitting = [one for one in starts if max_live is None or max(peak_live(one)) <= max_live]
    if not fitting:
        least = min(starts, key=lambda one: max(peak_live(one)))
        raise ScheduleError(
            f"no known schedule with p={p}, m={m}, v={v} holds max_live={max_live} activations or fewer; "
            f"{least.name} holds {max(peak_live(least))}, the least: raise max_live to that"
        )
    best = min(fitting, key=lambda one: makespan(one, *costs))
    if p * v * m > LARGE:
        braided = braid(best, costs)
        best = braided if max_live is None or max(peak_live(braided)) <= max_live else best
    best = improve(best, ActionTimes(costs), max_live=max_live, effort=effort)
    best = Schedule("auto", best.placement, best.m, best.actions)
    check(best, max_live=max_live)
    return best


def starting_points(
    named: Iterable[Callable[[], Schedule]], p: int, m: int, v: int, costs: Costs, max_live: int | None
) -> Iterator[Schedule]:
    """What a search starts from: every schedule of ``named`` as it is and braided at ``costs``, and list schedules
    made under ``max_live`` (on the V for v = 2, else on the loop).
    """
    for make in named:
        one = make()
        yield one
        if p * v * m <= LARGE:
            yield braid(one, costs)
    if p * v * m <= LARGE // 10:
        placement = Placement("v" if v == 2 else "loop", p, v)
        caps = {v * p, v * p + 2, (v + 1) * p} if max_live is None else {max_live, max_live - 1}
        for cap in sorted(cap for cap in caps if cap >= v):
            for maker in makers("auto", placement, cap, max_live or cap + p - 1):
                one = merge_backward(maker(m))
                yield one
                yield pair_neighbours(one, 0.0, costs, forwards=True)
