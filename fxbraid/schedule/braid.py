"""Braiding as a transformation: an F next to a B, I or W of the same rank becomes one composite."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from fxbraid.schedule.action import Action, Composite, Phase, Step
from fxbraid.schedule.makespan import UNIT, Costs, makespan
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.transform import merge_backward, with_rows
from fxbraid.schedule.walk import execution_order

NEVER = float("inf")
TYPICAL = Costs(1, 1, 1, 0.25)


def braid(schedule: Schedule, costs: Costs = TYPICAL) -> Schedule:
    """Braids neighbours, an F with a B, I or W, where that keeps the schedule valid and pays at ``costs``.

    A braided pair starts when both of its inputs are there, so every pair that is made also delays something.
    Three degrees are tried (never wait for a partner, wait for as long as an F takes, wait for ever) and the
    fastest of them and of the schedule as it was is returned: braiding never makes it slower at ``costs``.
    """
    merged = merge_backward(schedule)
    tried = [schedule, *(pair_neighbours(merged, patience, costs) for patience in (0.0, costs.f, NEVER))]
    return min(tried, key=lambda one: (makespan(one, *costs), -_braids(one)))


def _braids(schedule: Schedule) -> int:
    return sum(isinstance(step, Composite) for row in schedule.actions for step in row)


def pair_neighbours(
    schedule: Schedule, patience: float = NEVER, costs: Costs = UNIT, *, forwards: bool = False
) -> Schedule:
    """Pairs neighbours greedily while running the schedule on a clock.

    A rank whose next step is ready and whose step after that could join it waits up to ``patience`` for the
    second one's input; then it goes alone. As both have run in some order that is possible on all ranks, the
    result has no deadlock. When nobody can move any more, the rank that has waited longest goes alone. With
    ``forwards`` two F's pair as well.

    before   0F4 1B3      after   (0F4;1B3)OVERLAP_F_B      (if 1B3 doesn't need what 0F4 sets in motion)
    """
    for _ in execution_order(schedule):  # a schedule that deadlocks says so here
        pass
    return with_rows(schedule, _Pairing(schedule, patience, costs, forwards).run())


class _Pairing:
    def __init__(self, schedule: Schedule, patience: float, costs: Costs, forwards: bool) -> None:
        self.schedule, self.patience, self.costs, self.forwards = schedule, patience, costs, forwards
        m, p = schedule.m, schedule.p
        self.activations = [0.0] * m + [NEVER] * (schedule.n_chunks * m)
        self.gradients = [NEVER] * (schedule.n_chunks * m) + [0.0] * m
        self.position, self.free = [0] * p, [0.0] * p
        self.rows: list[list[Step]] = [[] for _ in range(p)]
        self.events = [(0.0, rank) for rank in range(p)]
        self.held: dict[int, float] = {}  # rank -> since when its next step could have run

    def run(self) -> list[list[Step]]:
        while self.events or self.held:
            if self.events:
                now, rank = heapq.heappop(self.events)
                self.visit(rank, now)
            else:
                rank = min(self.held, key=lambda held: (self.held[held], held))
                self.start(rank, 1, self.held[rank])
        return self.rows

    def visit(self, rank: int, now: float) -> None:
        row, at = self.schedule.actions[rank], self.position[rank]
        if self.free[rank] > now or at == len(row):
            return
        ready = max(self.free[rank], self.arrival(row[at]))
        if ready > now:
            if ready != NEVER:
                heapq.heappush(self.events, (ready, rank))
            return
        if at + 1 < len(row) and self.pairable(row[at], row[at + 1]):
            if max(self.arrival(row[at + 1]), ready) <= now:
                return self.start(rank, 2, now)
            if now < ready + self.patience:
                if rank not in self.held and self.patience != NEVER:
                    heapq.heappush(self.events, (ready + self.patience, rank))
                self.held[rank] = ready
                return
        self.start(rank, 1, ready)

    def pairable(self, one: Step, two: Step) -> bool:
        if not isinstance(one, Action) or not isinstance(two, Action):
            return False
        if one.phase is Phase.F and two.phase is Phase.F:
            return self.forwards
        return one.phase is Phase.F or two.phase is Phase.F

    def arrival(self, step: Step) -> float:
        latest, m = 0.0, self.schedule.m
        for action in step.parts if isinstance(step, Composite) else (step,):
            here = action.chunk * m + action.microbatch
            if action.phase is Phase.F:
                latest = max(latest, self.activations[here])
            elif action.phase is Phase.W:
                latest = max(latest, self.gradients[here])
            else:
                latest = max(latest, self.activations[here + m], self.gradients[here + m])
        return latest

    def start(self, rank: int, count: int, now: float) -> None:
        self.held.pop(rank, None)
        at = self.position[rank]
        steps = self.schedule.actions[rank][at : at + count]
        step = steps[0] if count == 1 else _paired(steps)
        self.position[rank] = at + count
        self.rows[rank].append(step)
        end = now + self.costs.duration(step)
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        placement, m = self.schedule.placement, self.schedule.m
        for action in step.parts if isinstance(step, Composite) else (step,):
            here = action.chunk * m + action.microbatch
            if action.phase is Phase.W:
                continue
            if action.phase is Phase.F:
                self.activations[here + m] = end
                target = action.chunk + 1
            else:
                self.gradients[here] = end
                target = action.chunk - 1
            if 0 <= target < placement.n_chunks:
                # A rank that gave up waiting starts in the past: its results may come before far is free.
                far = placement.rank_of(target)
                heapq.heappush(self.events, (max(end, self.free[far]), far))


def _paired(steps: Sequence[Step]) -> Composite:
    one, two = steps
    if not isinstance(one, Action) or not isinstance(two, Action):
        raise TypeError(f"only two single actions pair, got {one} and {two}")
    return Composite((one, two) if one.phase is Phase.F else (two, one))
