"""``auto``: a schedule found by search, never slower than any named one that fits in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from fxbraid.schedule.action import COMPOSITES, Action, Composite, Phase, Step, parts
from fxbraid.schedule.braid import TYPICAL, braid, pair_neighbours
from fxbraid.schedule.check import check
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.generate import makers
from fxbraid.schedule.makespan import Costs, makespan
from fxbraid.schedule.memory import peak_live
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.transform import merge_backward, with_rows

EFFORT = 400_000
"""Steps that the local search may run through, over all its trials: a second or so."""

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
    starts = list(_starts(named, p, m, v, costs, max_live))
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
    best = _LocalSearch(best, costs, max_live, effort).run()
    best = Schedule("auto", best.placement, best.m, best.actions)
    check(best, max_live=max_live)
    return best


def _starts(
    named: Iterable[Callable[[], Schedule]], p: int, m: int, v: int, costs: Costs, max_live: int | None
) -> Iterator[Schedule]:
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


class _LocalSearch:
    """Hill climbing on one schedule: small changes of one rank's list, kept when nothing gets worse.

    Better means: less makespan, then a smaller sum over ranks of the time at which they end.
    """

    def __init__(self, start: Schedule, costs: Costs, max_live: int | None, effort: int) -> None:
        self.schedule, self.costs, self.max_live = start, costs, max_live
        self.rows = [list(row) for row in start.actions]
        self.left = effort
        self.clock = _Clock(start, costs)
        self.random = random.Random(start.m * 1009 + start.p)

    def run(self) -> Schedule:
        best = self.clock.run(self.rows)
        steps = sum(map(len, self.rows))
        if best is None:
            raise ScheduleError(f"{self.schedule} deadlocks; check it before the search")
        while self.left >= steps:
            changed = False
            for rank, at in self.places():
                for new in _changes(self.rows[rank], at, self.random):
                    if self.left < steps:
                        break
                    old = self.rows[rank]
                    if not _ordered(new) or not self.fits(new):
                        continue
                    self.rows[rank] = new
                    self.left -= steps
                    found = self.clock.run(self.rows)
                    if found is None or found > best or (found == best and len(new) >= len(old)):
                        self.rows[rank] = old
                        continue
                    best, changed = found, True
                    break
            if not changed:
                break
        return with_rows(self.schedule, self.rows)

    def places(self) -> list[tuple[int, int]]:
        """Where to try: everywhere, in random order, so that the first ranks don't eat all of the effort."""
        found = [(rank, at) for rank, row in enumerate(self.rows) for at in range(len(row))]
        self.random.shuffle(found)
        return found

    def fits(self, row: Sequence[Step]) -> bool:
        if self.max_live is None:
            return True
        live = 0
        for step in row:
            for action in parts(step):
                live += (action.phase is Phase.F) - (action.phase in (Phase.B, Phase.W))
            if live > self.max_live:
                return False
        return True


def _changes(row: list[Step], at: int, rng: random.Random) -> Iterator[list[Step]]:
    """The list with one change at ``at``: braid with the next, take apart, split a B, or move a step."""
    if at >= len(row):
        return
    here = row[at]
    if at + 1 < len(row):
        together = _composite((*parts(here), *parts(row[at + 1])))
        if together is not None:
            yield [*row[:at], together, *row[at + 2 :]]
    both = parts(here)
    if len(both) > 1:
        yield [*row[:at], *both, *row[at + 1 :]]
        yield [*row[:at], *both[::-1], *row[at + 1 :]]
    if both[-1].phase is Phase.B:
        i, w = (Action(phase, both[-1].chunk, both[-1].microbatch) for phase in (Phase.I, Phase.W))
        first = _composite((*both[:-1], i)) if len(both) > 1 else i
        to = min(len(row), at + rng.choice((2, 3, 5, 9, len(row))))
        if first is not None:
            yield [*row[:at], first, *row[at + 1 : to], w, *row[to:]]
    rest = [*row[:at], *row[at + 1 :]]
    for by in (1, -1, rng.choice((2, 3, 4)), -rng.choice((2, 3, 4))):
        if 0 <= at + by <= len(rest):
            yield [*rest[: at + by], here, *rest[at + by :]]


def _composite(both: tuple[Action, ...]) -> Composite | None:
    ordered = tuple(sorted(both, key=lambda action: "FIBW".index(action.phase)))
    if "".join([action.phase for action in ordered]) not in COMPOSITES:
        return None
    keys = {(action.chunk, action.microbatch) for action in ordered}
    if len(keys) < len(ordered):
        return None  # one part would need another
    first, second = ordered[:2]
    if second.phase is Phase.F and first.microbatch == second.microbatch:
        return None
    return Composite(ordered)


def _ordered(row: Iterable[Step]) -> bool:
    """F's and I's of each chunk in micro-batch order, as the checker wants."""
    forwards: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for step in row:
        for action in parts(step):
            if action.phase is Phase.W:
                continue
            seen = forwards if action.phase is Phase.F else gradients
            if seen.get(action.chunk, 0) != action.microbatch:
                return False
            seen[action.chunk] = action.microbatch + 1
    return True


Coded = tuple[float, tuple[int, ...], tuple[int, ...]]
"""A step as numbers: its duration, the cells that it waits for and those that it fills."""


class _Clock:
    """``makespan`` for many lists that differ a little: steps become numbers once."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.m, self.n_chunks, self.costs = schedule.m, schedule.n_chunks, costs
        self.size = schedule.n_chunks * schedule.m
        self.known: dict[Step, Coded] = {}

    def code(self, step: Step) -> Coded:
        known = self.known.get(step)
        if known is not None:
            return known
        waits: list[int] = []
        fills: list[int] = []
        for action in parts(step):
            cell = action.chunk * self.m + action.microbatch
            match action.phase:
                case Phase.F:
                    if action.chunk:
                        waits.append(cell - self.m)
                    fills.append(cell)
                case Phase.W:
                    waits.append(self.size + cell)
                case _:
                    waits.append(cell)
                    if action.chunk + 1 < self.n_chunks:
                        waits.append(self.size + cell + self.m)
                    fills.append(self.size + cell)
        coded = self.costs.duration(step), tuple(waits), tuple(fills)
        self.known[step] = coded
        return coded

    def run(self, rows: Sequence[Sequence[Step]]) -> tuple[float, float] | None:
        """(makespan, sum of the ranks' ends), None if the lists deadlock."""
        code = self.code
        lists = [[code(step) for step in row] for row in rows]
        done: dict[int, float] = {}
        waiting: dict[int, list[int]] = {}
        at, free = [0] * len(rows), [0.0] * len(rows)
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            now, row = free[rank], lists[rank]
            for index in range(at[rank], len(row)):
                duration, waits, fills = row[index]
                for cell in waits:
                    if cell not in done:
                        waiting.setdefault(cell, []).append(rank)
                        break
                    now = max(now, done[cell])
                else:
                    now += duration
                    for cell in fills:
                        done[cell] = now
                        if cell in waiting:
                            ready += waiting.pop(cell)
                    continue
                at[rank] = index
                break
            else:
                at[rank] = len(row)
            # A blocked rank's clock stands at its last step's end, not at an input that came meanwhile.
            free[rank] = now
        if any(index < len(row) for index, row in zip(at, lists, strict=True)):
            return None
        return max(free), sum(free)
