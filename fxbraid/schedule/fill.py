"""Filling: forwards and input gradients keep their order, weight gradients go where they fit."""

from __future__ import annotations

import heapq
from collections import deque

from fxbraid.schedule.action import Action, Phase, Step
from fxbraid.schedule.makespan import UNIT, Costs
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.transform import split_backward, unbraid, with_rows


def fill_weights(schedule: Schedule, max_live: int, costs: Costs = UNIT) -> Schedule:
    """Puts the W's, oldest first, into the gaps that the F's and I's leave.

    Every rank keeps its order of F's and I's (composites come apart). It runs a queued W when its next F or I
    has not got its input yet, and when the next is an F that would take it past ``max_live`` chunk
    activations (F to W). If the order of F's and I's alone holds more than that, the result does too.
    """
    return with_rows(schedule, _Filling(schedule, max_live, costs).run())


class _Filling:
    def __init__(self, schedule: Schedule, max_live: int, costs: Costs) -> None:
        self.schedule, self.max_live, self.costs = schedule, max_live, costs
        rows = split_backward(unbraid(schedule)).actions
        self.todo = [
            deque(step for step in row if isinstance(step, Action) and step.phase is not Phase.W)
            for row in rows
        ]
        never, m, n_chunks = float("inf"), schedule.m, schedule.n_chunks
        self.activations = [0.0] * m + [never] * (n_chunks * m)
        self.gradients = [never] * (n_chunks * m) + [0.0] * m
        self.owed: list[deque[Action]] = [deque() for _ in rows]
        self.live, self.free = [0] * len(rows), [0.0] * len(rows)
        self.rows: list[list[Step]] = [[] for _ in rows]
        self.events = [(0.0, rank) for rank in range(len(rows))]

    def run(self) -> list[list[Step]]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] > now:
                continue
            action = self.choose(rank, now)
            if action is not None:
                self.start(rank, action, now)
        return self.rows

    def choose(self, rank: int, now: float) -> Action | None:
        todo, owed = self.todo[rank], self.owed[rank]
        if todo and self.arrival(todo[0]) <= now:
            full = todo[0].phase is Phase.F and self.live[rank] >= self.max_live
            return owed.popleft() if full and owed else todo.popleft()
        return owed.popleft() if owed else None

    def arrival(self, action: Action) -> float:
        here, m = action.chunk * self.schedule.m + action.microbatch, self.schedule.m
        if action.phase is Phase.F:
            return self.activations[here]
        return max(self.activations[here + m], self.gradients[here + m])

    def start(self, rank: int, action: Action, now: float) -> None:
        end = now + self.costs.duration(action)
        self.free[rank] = end
        self.rows[rank].append(action)
        heapq.heappush(self.events, (end, rank))
        here, m = action.chunk * self.schedule.m + action.microbatch, self.schedule.m
        target = -1
        match action.phase:
            case Phase.F:
                self.live[rank] += 1
                self.activations[here + m] = end
                target = action.chunk + 1
            case Phase.I:
                self.owed[rank].append(Action(Phase.W, action.chunk, action.microbatch))
                self.gradients[here] = end
                target = action.chunk - 1
            case _:
                self.live[rank] -= 1
        if 0 <= target < self.schedule.n_chunks:
            heapq.heappush(self.events, (end, self.schedule.placement.rank_of(target)))
