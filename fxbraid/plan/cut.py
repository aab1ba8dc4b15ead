"""Where to cut a model: the shortest step on the clock of the unit-level simulator, at what its layers cost.

A quick clock over whole actions (``schedule.uneven``) looks at many cuts; the best of these, and what lies next to
them, are timed by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise

from fxbraid.schedule import Placement, Schedule, ScheduleError
from fxbraid.schedule.cut import NEAR, TRIALS, At, Row, balance, search
from fxbraid.schedule.listorder import Orders
from fxbraid.schedule.uneven import PhaseTimes, stand_in, total, uneven_makespan
from fxbraid.simulate import BlockClock, ChunkCost, Workload, at_clock, constants
from fxbraid.simulate.block import BlockTimes
from fxbraid.simulate.workload import joined

EFFORT = 400_000
"""Steps that quick guesses may run through, over all cuts; the simulator may run through a quarter of it."""

LEAST = 16
"""Cuts that are looked at however long a schedule is."""


@dataclass(slots=True)
class CutClock:
    """``clock(bounds)``: seconds of a step of ``schedule``, its chunks made of ``pieces`` (layers and what lies between
    them, in order); ``bounds``: the first piece of every chunk but the first. What two cuts have in common is timed
    once. by_costs: units inside of blocks are ordered by what they cost, not as in the paper.
    """

    schedule: Schedule
    pieces: Workload
    braided: bool = True
    by_costs: bool = False
    chunks: dict[tuple[int, int], ChunkCost] = field(default_factory=dict)
    known: dict[tuple[tuple[object, int], ...], BlockTimes] = field(default_factory=dict)
    orders: Orders | None = None

    def workload(self, bounds: Sequence[int]) -> Workload:
        """The costs of the chunks of a cut."""
        ends = list(pairwise((0, *bounds, len(self.pieces.chunks))))
        if len(ends) != self.schedule.n_chunks:
            raise ScheduleError(
                f"{self.schedule.name} has {self.schedule.n_chunks} chunks, and a cut at {list(bounds)} makes "
                f"{len(ends)}"
            )
        for a, b in ends:
            if (a, b) not in self.chunks:
                self.chunks[a, b] = reduce(joined, self.pieces.chunks[a:b])
        return replace(self.pieces, chunks=tuple(self.chunks[end] for end in ends), static=())

    def __call__(self, bounds: Sequence[int]) -> float:
        load = self.workload(bounds)
        clock = BlockClock(load, self.braided, load if self.by_costs else None, known=self.known)  # type: ignore[arg-type]
        if self.by_costs:
            self.orders = clock.orders = self.orders or clock.orders
        return at_clock(self.schedule, clock).step_time


def fastest_cut(clock: CutClock, row: Row, *, near: float = NEAR, trials: int = TRIALS) -> At:
    """The cut of the shortest step, of all or, with many, of those that a search looks at. ``clock``: over pieces that
    are the stretches of ``row``, or its layers, each with the gap in front of it (the last one with all behind it)."""
    chunks, schedule = clock.pieces.chunks, clock.schedule
    layers = len(chunks) == row.layers  # a piece per layer
    times: list[PhaseTimes] = [(0.0, 0.0, 0.0)] * row.count
    for index, piece in enumerate(chunks):
        times[2 * index + 1 if layers else index] = tuple(piece.seconds(phase) for phase in "FIW")  # type: ignore[assignment]
    forward = sum(chunk.seconds("F") for chunk in chunks)
    share = sum(chunk.collective("F") for chunk in chunks) / forward if forward else 0.0
    steps = sum(map(len, schedule.actions))

    def step_time(at: At) -> float:
        return clock([one // 2 for one in at] if layers else at)

    def guess(at: At) -> float:
        sums = [total(times[a:b]) for a, b in pairwise((0, *at, row.count))]
        return uneven_makespan(schedule, sums, share)

    return search(
        [sum(time) for time in times],
        Row(row.layers) if layers else row,
        schedule.n_chunks,
        step_time,
        guess=guess,
        trials=min(trials, max(LEAST, EFFORT // 4 // steps)),
        guesses=min(4 * trials, max(LEAST, EFFORT // steps)),
        near=near,
    )


@dataclass(frozen=True)
class ForPlacement:
    """Looks for the shortest step where chunks lie as ``placement`` says, at what each stretch costs in F, I and W.
    ``collectives``: T_AR over T_F of every layer, as long as nothing has been measured."""

    placement: Placement
    collectives: float = 0.0

    @cached_property
    def schedule(self) -> Schedule | None:
        """What a cut is timed with."""
        return stand_in(self.placement)

    def __call__(self, costs: Sequence[PhaseTimes], row: Row, n_chunks: int) -> At:
        schedule = self.schedule
        if schedule is None:
            return balance([sum(cost) for cost in costs], row, n_chunks)
        pieces = [
            constants(1, *cost, self.collectives * cost[0] if k % 2 else 0.0).chunks[0]
            for k, cost in enumerate(costs)
        ]
        return fastest_cut(CutClock(schedule, Workload(tuple(pieces))), row)


__all__ = ["CutClock", "ForPlacement", "fastest_cut"]
