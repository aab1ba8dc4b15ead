"""Local search: small changes of one rank's list, kept when nothing gets worse."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fxbraid.schedule.action import COMPOSITES, Action, Composite, Phase, Step, parts
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.makespan import Costs
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.transform import with_rows

EFFORT = 400_000
"""Steps that the local search may run through, over all its trials: a second or so."""


class StepTimes(Protocol):
    """What a clock over lists of steps must be told. All times from the same origin: the start of the step."""

    def duration(self, step: Step) -> float:
        """Until the rank goes on."""

    def leaves(self, step: Step) -> Sequence[float]:
        """Per part, when its result leaves; for a W anything."""

    def delay(self, action: Action) -> float:
        """From when a result leaves to when its reader has it."""


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """One cost per phase; results leave when a step ends, and messages take no time."""

    costs: Costs

    def duration(self, step: Step) -> float:
        return self.costs.duration(step)

    def leaves(self, step: Step) -> Sequence[float]:
        return [self.costs.duration(step)] * len(parts(step))

    def delay(self, action: Action) -> float:
        return 0.0


def improve(
    start: Schedule, times: StepTimes, *, max_live: int | None = None, effort: int = EFFORT
) -> Schedule:
    """``start``, changed for as long as it gets faster at ``times`` and ``effort`` lasts; never slower.

    Same arguments, same result. Raises ScheduleError if ``start`` deadlocks.
    """
    return _LocalSearch(start, times, max_live, effort).run()


class _LocalSearch:
    """Hill climbing on one schedule.

    Better means: less makespan, then a smaller sum over ranks of the time at which they end.
    """

    def __init__(self, start: Schedule, times: StepTimes, max_live: int | None, effort: int) -> None:
        self.schedule, self.max_live = start, max_live
        self.rows = [list(row) for row in start.actions]
        self.left = effort
        self.clock = ListClock(start, times)
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


Coded = tuple[float, tuple[int, ...], tuple[tuple[int, float], ...]]
"""A step as numbers: its duration, the cells that it waits for, and those that it fills, each with when its reader
has it, counted from the step's start."""


class ListClock:
    """``makespan`` for many lists that differ a little: steps become numbers once."""

    def __init__(self, schedule: Schedule, times: StepTimes) -> None:
        self.m, self.n_chunks, self.times = schedule.m, schedule.n_chunks, times
        self.size = schedule.n_chunks * schedule.m
        self.known: dict[Step, Coded] = {}

    def code(self, step: Step) -> Coded:
        known = self.known.get(step)
        if known is not None:
            return known
        waits: list[int] = []
        fills: list[tuple[int, float]] = []
        for action, leaves in zip(parts(step), self.times.leaves(step), strict=True):
            cell = action.chunk * self.m + action.microbatch
            match action.phase:
                case Phase.F:
                    if action.chunk:
                        waits.append(cell - self.m)
                    fills.append((cell, leaves + self.times.delay(action)))
                case Phase.W:
                    waits.append(self.size + cell)
                case _:
                    waits.append(cell)
                    if action.chunk + 1 < self.n_chunks:
                        waits.append(self.size + cell + self.m)
                    fills.append((self.size + cell, leaves + self.times.delay(action)))
        coded = self.times.duration(step), tuple(waits), tuple(fills)
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
                start = now
                for cell in waits:
                    if cell not in done:
                        waiting.setdefault(cell, []).append(rank)
                        break
                    start = max(start, done[cell])
                else:
                    now = start + duration
                    for cell, leaves in fills:
                        done[cell] = start + leaves
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
