"""Where to cut a model whose layers' costs are known: step times of cuts, by the unit-level simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise

from fxbraid.schedule import Schedule, ScheduleError
from fxbraid.schedule.listorder import Orders
from fxbraid.simulate import BlockClock, ChunkCost, Workload, at_clock
from fxbraid.simulate.block import BlockTimes
from fxbraid.simulate.workload import joined


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
