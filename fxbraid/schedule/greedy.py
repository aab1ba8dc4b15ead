"""List scheduling: all ranks run on a clock, and each decides what is next when it is free."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Literal

from fxbraid.schedule.action import Action, Composite, Phase, Step
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Policy:
    """How a free rank chooses among what is ready.

    max_activations: cap on chunk activations from F to I (at least v, else no micro-batch fits).
    max_live: cap on chunk activations from F to W; a rank that meets it pays a W first.
    deep_forward, deep_backward: prefer the later or the earlier chunk.
    braid: run a ready F and I as one composite.
    first: which of F and I goes first when both are ready and not braided.
    """

    max_activations: int
    max_live: int
    deep_forward: bool = True
    deep_backward: bool = True
    braid: bool = True
    first: Literal["F", "I"] = "I"


class _Rank:
    """What one rank has left to do and what it holds."""

    def __init__(self, chunks: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.forwards = [0] * len(chunks)
        self.gradients = [0] * len(chunks)
        self.owed: deque[Action] = deque()
        self.activations = 0
        self.free_at = 0.0
        self.row: list[Step] = []


class _Clock:
    """One run of the list scheduler."""

    def __init__(
        self, placement: Placement, m: int, policy: Policy, costs: tuple[float, float, float]
    ) -> None:
        self.placement, self.m, self.policy = placement, m, policy
        self.cost = dict(zip((Phase.F, Phase.I, Phase.W), costs, strict=True))
        self.ranks = [_Rank(placement.chunks_of(rank)) for rank in range(placement.p)]
        # arrival[0][c][j]: the input of F(c, j) is there; arrival[1][c][j]: the output gradient of I(c, j).
        never = float("inf")
        self.inputs = [[never] * m for _ in range(placement.n_chunks)]
        self.inputs[0] = [0.0] * m
        self.outputs = [[never] * m for _ in range(placement.n_chunks)]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(placement.p)]

    def run(self) -> tuple[tuple[Step, ...], ...]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            state = self.ranks[rank]
            if state.free_at > now:
                continue
            chosen = self.choose(state, now)
            if chosen:
                self.start(state, rank, chosen, now)
        return tuple(tuple(state.row) for state in self.ranks)

    def ready_forward(self, state: _Rank, now: float, ahead: int = 0) -> list[int]:
        policy, v = self.policy, len(state.chunks)
        found = []
        for local, chunk in enumerate(state.chunks):
            j = state.forwards[local]
            # Later chunks keep a place each, so the oldest micro-batch always fits through.
            room = policy.max_activations - (v - 1 - local)
            if j < self.m and self.inputs[chunk][j] <= now and state.activations - ahead < room:
                found.append(local)
        return found[::-1] if policy.deep_forward else found

    def ready_backward(self, state: _Rank, now: float) -> list[int]:
        found = [
            local
            for local, chunk in enumerate(state.chunks)
            if state.gradients[local] < state.forwards[local]
            and self.outputs[chunk][state.gradients[local]] <= now
        ]
        return found[::-1] if self.policy.deep_backward else found

    def choose(self, state: _Rank, now: float) -> list[Action]:
        policy = self.policy
        backward = self.ready_backward(state, now)
        forward = self.ready_forward(state, now, ahead=1 if backward and policy.braid else 0)
        live = state.activations + len(state.owed)
        f = Action(Phase.F, state.chunks[forward[0]], state.forwards[forward[0]]) if forward else None
        i = Action(Phase.I, state.chunks[backward[0]], state.gradients[backward[0]]) if backward else None
        if f and i and policy.braid:
            if live + 1 > policy.max_live:
                return [f, i, state.owed[0]] if state.owed else [i]
            return [f, i]
        if f and live + 1 > policy.max_live:
            f = None
        if f and i:
            return [f] if policy.first == "F" else [i]
        if i:
            return [i]
        if f:
            return [f]
        if state.owed:
            return [state.owed[0]]
        return []

    def start(self, state: _Rank, rank: int, chosen: list[Action], now: float) -> None:
        end = now + sum(self.cost[action.phase] for action in chosen)
        state.free_at = end
        heapq.heappush(self.events, (end, rank))
        state.row.append(chosen[0] if len(chosen) == 1 else Composite(tuple(chosen)))
        for action in chosen:
            local = state.chunks.index(action.chunk)
            if action.phase is Phase.W:
                state.owed.popleft()
                continue
            if action.phase is Phase.F:
                state.forwards[local] += 1
                state.activations += 1
                target, arrivals = action.chunk + 1, self.inputs
                if target == self.placement.n_chunks:
                    target, arrivals = action.chunk, self.outputs
            else:
                state.gradients[local] += 1
                state.activations -= 1
                state.owed.append(Action(Phase.W, action.chunk, action.microbatch))
                target, arrivals = action.chunk - 1, self.outputs
                if target < 0:
                    continue
            arrivals[target][action.microbatch] = end
            heapq.heappush(self.events, (end, self.placement.rank_of(target)))


def list_schedule(
    name: str, placement: Placement, m: int, policy: Policy, costs: tuple[float, float, float] = (1, 1, 1)
) -> Schedule:
    """The schedule that ``policy`` makes on ``placement`` with (t_f, t_i, t_w) = ``costs``.

    It always ends: with max_live >= max_activations >= v the oldest micro-batch always finds its place.
    """
    if not placement.v <= policy.max_activations <= policy.max_live:
        raise ScheduleError(
            f"a list schedule needs v={placement.v} <= max_activations={policy.max_activations} "
            f"<= max_live={policy.max_live}; raise the limits"
        )
    return Schedule(name, placement, m, _Clock(placement, m, policy, costs).run())
