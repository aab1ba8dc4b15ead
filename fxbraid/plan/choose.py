"""Which schedule to run at given costs, decided by the unit-level simulator; never slower than what it knows.

Candidates are every named schedule (torch's seven among them) as it is, with its braids taken apart and with its
neighbours braided, list schedules made for the costs, and the best of all these changed locally. A clock over whole
steps ranks them; the simulator decides among the first few and torch's. No torch is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, get_args

from fxbraid.schedule import (
    FAMILIES,
    Composite,
    Costs,
    Placement,
    Schedule,
    ScheduleError,
    Step,
    braid,
    build,
    check,
    peak_live,
    unbraid,
)
from fxbraid.schedule.ahead import run_ahead
from fxbraid.schedule.local import EFFORT, ActionTimes, ListClock, improve
from fxbraid.schedule.search import LARGE, starting_points
from fxbraid.schedule.stp_plus import paces
from fxbraid.simulate import BlockClock, Workload, at_clock
from fxbraid.simulate.result import peaks_at
from fxbraid.simulate.steps import BlockTimesOfSteps

UnitOrder = Literal["paper", "costs"]
UNIT_ORDERS: tuple[str, ...] = get_args(UnitOrder)

TORCH = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
"""The schedules of torch.distributed.pipelining, by their names here."""

NEAR = 0.002
"""Candidates within this of the fastest count as equal; among them the one that needs the least memory is taken."""

FINALISTS = 6
"""How many the simulator decides among, for each number of chunks a rank, beside torch's and the searched ones."""

CLIMBERS = 3
"""How many of these the local search starts from."""

CLOSE = 1e-9
"""Relative differences in time below this are rounding."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule at given costs. name: the schedule and what was done to it. order: of units inside blocks.
    step_time: seconds, by the unit-level simulator. peak: the most that a rank holds, in the workload's unit of
    memory. braids: how many steps of each kind of composite it has.
    """

    name: str
    order: UnitOrder
    step_time: float
    peak: float
    braids: Mapping[str, int]


Entry = tuple[Candidate, Schedule]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and against what. asked: the schedule that was asked for. schedule, best: what runs. torch: the
    fastest of torch's schedules on this executor, None if none was looked at. others: the runners-up, fastest first.
    costs: where the costs come from. hides: do collectives take any time, so that braiding could hide some? notes: what
    else is to be said.
    """

    asked: str
    schedule: Schedule
    best: Candidate
    torch: Candidate | None
    others: tuple[Candidate, ...]
    considered: int
    costs: str
    hides: bool = True
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The choice and its reasons, in sentences."""
        best = self.best
        said = [
            f"schedule {self.asked!r}: {best.name}, units in the {_order_name(best.order)} order, predicted "
            f"{best.step_time:.6g} a step ({self.costs}; {self.considered} candidates)"
        ]
        torch = [self.torch] if self.torch is not None else []
        for one in torch:
            if one.name == best.name and one.step_time <= best.step_time * (1 + CLOSE):
                said.append("it is torch's fastest order here, on this executor")
            else:
                said.append(
                    f"against torch's fastest order here, {_apart(one, best)}: {one.step_time:.6g} "
                    f"({_percent(one, best)})"
                )
        said += [
            f"against {_apart(one, best)}: {one.step_time:.6g} ({_percent(one, best)})"
            for one in self.others
            if (one.name, one.order) not in [(other.name, other.order) for other in torch]
        ]
        said.append(_why(best, [*self.others, *torch], self.hides))
        return (*said, *self.notes)


def choose(
    p: int,
    m: int,
    workload: Workload,
    *,
    orders: Sequence[UnitOrder] = ("costs", "paper"),
    max_live: int | None = None,
    effort: int = EFFORT,
) -> Choice:
    """The fastest schedule of ``p`` ranks and ``m`` micro-batches at the costs of ``workload``.

    workload: costs of 2p chunks (two a rank; schedules with one chunk a rank are looked at as well, on merged
    pairs) or of p. orders: how units may be ordered inside blocks. max_live: the most chunk activations, at two
    chunks a rank, that a rank may hold (F to W). effort: steps of the local search. Same arguments, same result.
    Raises ScheduleError if nothing fits.
    """
    v = len(workload.chunks) // p
    if v not in (1, 2) or v * p != len(workload.chunks):
        raise ScheduleError(
            f"a choice for p={p} ranks needs costs of {p} or {2 * p} chunks, got {len(workload.chunks)}"
        )
    if max_live is not None and (not isinstance(max_live, int) or isinstance(max_live, bool) or max_live < 1):
        raise ScheduleError(f"max_live={max_live!r}: give a whole number of chunk activations, 1 or more")
    found: list[Entry] = []
    torch: list[Entry] = []
    considered = 0
    for chunks_a_rank in range(v, 0, -1):
        costs = workload if chunks_a_rank == v else workload.merged()
        limit = None if max_live is None else max_live * chunks_a_rank // 2
        if limit is not None and limit < chunks_a_rank:
            continue
        mine, theirs, count = _of(p, m, chunks_a_rank, costs, orders, limit, effort)
        found += mine
        torch += theirs
        considered += count
    if not found:
        raise ScheduleError(
            f"no known schedule with p={p}, m={m} holds max_live={max_live} activations or fewer; raise max_live"
        )
    return _decide("auto", found, torch, considered, workload)


def settle(
    schedule: Schedule, workload: Workload, *, orders: Sequence[UnitOrder] = ("costs", "paper")
) -> Choice:
    """``schedule`` with braiding left out where it does not pay at the costs of ``workload``.

    Braids are taken apart by kind (all F&W, all F&F, ...), in every combination, and the paper's order of units is
    tried beside the one from costs. The schedule as it came stays unless something else is faster by more than
    ``NEAR``.
    """
    kinds = sorted(braids(schedule))
    clock = {order: _clock(workload, order) for order in orders}
    tried: list[Entry] = []
    for count in range(len(kinds) + 1):
        for some in combinations(kinds, count):
            apart = unbraid(schedule, some)
            name = schedule.name + (f" without braiding {', '.join(map(_shown, some))}" if some else "")
            tried += [_entry(name, apart, order, clock[order]) for order in orders]
    as_it_is = tried[0]
    best = min(tried, key=lambda one: one[0].step_time)
    if best[0].step_time >= as_it_is[0].step_time * (1 - NEAR):
        equal = [one for one in tried if one[0].step_time <= as_it_is[0].step_time * (1 + CLOSE)]
        plain = min(equal, key=lambda one: (sum(one[0].braids.values()), one[0].peak))
        best = as_it_is if hides(workload) else plain
    others = [one[0] for one in sorted(tried, key=lambda one: one[0].step_time) if one is not best]
    return Choice(
        schedule.name, best[1], best[0], None, tuple(others[:3]), len(tried), workload.label, hides(workload)
    )


def _of(
    p: int,
    m: int,
    v: int,
    workload: Workload,
    orders: Sequence[UnitOrder],
    max_live: int | None,
    effort: int,
) -> tuple[list[Entry], list[Entry], int]:
    """With ``v`` chunks a rank: finalists, torch's, and how many there were."""
    clocks = {order: _clock(workload, order) for order in orders}
    first = orders[0]
    ranked: list[tuple[float, int, str, Schedule]] = []
    torch: list[tuple[str, Schedule]] = []
    seen: set[tuple[tuple[Step, ...], ...]] = set()
    for number, (name, schedule) in enumerate(_candidates(p, m, v, clocks[first], max_live)):
        if name in TORCH:
            torch.append((name, schedule))
        if schedule.actions in seen or (max_live is not None and max(peak_live(schedule)) > max_live):
            continue
        seen.add(schedule.actions)
        times = BlockTimesOfSteps(clocks[first], schedule.placement)
        time = ListClock(schedule, times).run(schedule.actions)
        if time is not None:
            ranked.append((time[0], number, name, schedule))
    ranked.sort(key=lambda one: one[:2])
    finalists = [(name, schedule) for _, _, name, schedule in ranked[:FINALISTS]]
    if p * v * m <= LARGE and effort:
        for _, _, name, schedule in ranked[:CLIMBERS]:
            times = BlockTimesOfSteps(clocks[first], schedule.placement)
            better = improve(schedule, times, max_live=max_live, effort=effort // CLIMBERS)
            check(better, max_live=max_live)
            finalists.append((f"{name} changed by search", replace(better, name="auto")))
    known = [_entry(name, one, order, clocks[order]) for name, one in finalists for order in orders]
    theirs = [_entry(name, one, order, clocks[order]) for name, one in torch for order in orders]
    fitting = [one for one in theirs if max_live is None or max(peak_live(one[1])) <= max_live]
    return known + fitting, theirs, len(ranked)


def _candidates(
    p: int, m: int, v: int, clock: BlockClock, max_live: int | None
) -> Iterator[tuple[str, Schedule]]:
    """Named schedules and their variants, then what list scheduling makes; each with a name for the report."""
    costs = mean_costs(clock.workload)
    small = p * v * m <= LARGE
    names = [name for name, family in FAMILIES.items() if family.any_v or family.v == v]
    for name in names:
        one = build(name, p=p, m=m, v=v)
        plain = unbraid(one)
        if name in TORCH:
            yield name, plain
        if plain != one:
            yield (f"{name}, unbraided", plain) if name not in TORCH else (f"{name}, braided", one)
        if name not in TORCH:
            yield name, one
        if small:
            together = braid(one, costs)
            if together != one:
                yield f"{name}, neighbours braided", together
    if small:
        for one in starting_points((), p, m, v, costs, max_live):
            yield "list schedule", one
    if small and v == 2:
        place = Placement("v", p, v)
        most = max_live or 2 * p * m
        for pace in (one for one in paces(p) if one.max_live <= most):
            for times in (BlockTimesOfSteps(clock, place), ActionTimes(costs)):
                yield "running ahead", run_ahead("auto", place, m, pace, times)


def mean_costs(workload: Workload) -> Costs:
    """T_F, T_I, T_W and T_AR of the mean chunk, with T_F = 1: what action-level heuristics need."""
    count = len(workload.chunks)
    f, i, w = (sum(chunk.seconds(phase) for chunk in workload.chunks) / count for phase in "FIW")
    ar = sum(chunk.collective() for chunk in workload.chunks) / (2 * count)
    unit = f or 1.0
    return Costs(f / unit, i / unit, w / unit, ar / unit)


def _clock(workload: Workload, order: UnitOrder) -> BlockClock:
    return BlockClock(workload, ordered_by=workload if order == "costs" else None)


def _entry(name: str, schedule: Schedule, order: UnitOrder, clock: BlockClock) -> Entry:
    time = at_clock(schedule, clock).step_time
    return Candidate(name, order, time, max(peaks_at(schedule, clock)), braids(schedule)), schedule


def braids(schedule: Schedule) -> dict[str, int]:
    """Composites by kind."""
    steps = (step for row in schedule.actions for step in row if isinstance(step, Composite))
    return dict(Counter("".join(action.phase for action in step.parts) for step in steps))


def _decide(
    asked: str, found: Sequence[Entry], torch: Sequence[Entry], considered: int, workload: Workload
) -> Choice:
    fastest = min(one.step_time for one, _ in found)
    near = [entry for entry in found if entry[0].step_time <= fastest * (1 + NEAR)]
    best, schedule = min(
        near, key=lambda entry: (entry[0].peak, sum(entry[0].braids.values()), entry[0].step_time)
    )
    rivals: list[Candidate] = []
    for one, made in sorted(found, key=lambda entry: entry[0].step_time):
        if (
            one.name not in (best.name, *(other.name for other in rivals))
            and made.actions != schedule.actions
        ):
            rivals.append(one)
    fastest_torch = min((one for one, _ in torch), key=lambda one: one.step_time, default=None)
    return Choice(
        asked,
        schedule,
        best,
        fastest_torch,
        tuple(rivals[:3]),
        considered,
        workload.label,
        hides(workload),
    )


def hides(workload: Workload) -> bool:
    """Is there anything that braiding could hide?"""
    return any(chunk.collective() > 0 for chunk in workload.chunks)


def _why(best: Candidate, others: Sequence[Candidate], hides: bool) -> str:
    if not hides:
        reason = "collectives take no time here, so that there is nothing to hide"
        reason += "; its braids change nothing in that" if best.braids else ", and nothing is braided"
    elif not best.braids:
        reason = "nothing is braided: at these costs waiting for a partner costs more than hiding collectives gains"
    else:
        kinds = ", ".join(f"{count} x {_shown(kind)}" for kind, count in sorted(best.braids.items()))
        reason = f"braided: {kinds}, which hide each other's collectives"
    slower = [one for one in others if one.step_time < best.step_time]
    if slower:
        reason += f"; within {100 * NEAR:g} % of the fastest, it needs the least memory"
    return reason


def _apart(one: Candidate, best: Candidate) -> str:
    """The name of ``one``, told apart from ``best`` where it differs from it in the order of units alone."""
    return (
        one.name if one.name != best.name else f"{one.name} with units in the {_order_name(one.order)} order"
    )


def _shown(kind: str) -> str:
    return "&".join(kind)


def _order_name(order: UnitOrder) -> str:
    return "paper's" if order == "paper" else "measured costs'"


def _percent(other: Candidate, best: Candidate) -> str:
    if not best.step_time:
        return "no time at all"
    share = 100 * (other.step_time / best.step_time - 1)
    return f"{abs(share):.1f} % {'slower' if share >= 0 else 'faster'}"
