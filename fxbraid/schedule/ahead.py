"""List scheduling on a clock that knows collectives: what a rank runs next is what hides something.

Where ``greedy`` counts phases, this one is told how long whole steps take (``local.StepTimes``), braided or not, and
when their results leave. A free rank prefers, of what is ready: an F beside an I; an I or an F beside the oldest
queued W; two F's beside each other; what there is. Running further ahead in the warm-up costs activations, and fills
the time that the first micro-batches' collectives take on their way down the ranks and back.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Literal

from fxbraid.schedule.action import Action, Composite, Phase, Step, parts
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.local import StepTimes
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule

NEVER = float("inf")
CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Pace:
    """How a rank chooses.

    max_activations: cap on chunk activations from F to I (at least v). max_live: cap from F to W. keep: W's that a
    rank queues before an F runs beside a full backward again and no longer beside an I. together: whether two F's
    may run beside each other: "later" not where one of them is a chunk's first, which the others wait for.
    deep_forward: prefer the later chunk. patience: how long a ready I waits for an F that is on its way.
    """

    max_activations: int
    max_live: int
    keep: int
    together: Literal["never", "later", "always"] = "later"
    deep_forward: bool = True
    patience: float = 0.0


def run_ahead(name: str, placement: Placement, m: int, pace: Pace, times: StepTimes) -> Schedule:
    """The schedule that ``pace`` makes on ``placement`` at ``times``. Valid for every m: the oldest micro-batch always
    finds its place.
    """
    if not placement.v <= pace.max_activations <= pace.max_live:
        raise ScheduleError(
            f"running ahead needs v={placement.v} <= max_activations={pace.max_activations} <= "
            f"max_live={pace.max_live}; raise the limits"
        )
    return Schedule(name, placement, m, _Clock(placement, m, pace, times).run())


class _Rank:
    """What one rank has done and holds."""

    def __init__(self, chunks: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.forwards, self.gradients = [0] * len(chunks), [0] * len(chunks)
        self.owed: deque[Action] = deque()
        self.activations = 0
        self.free = 0.0
        self.row: list[Step] = []

    @property
    def live(self) -> int:
        return self.activations + len(self.owed)


class _Clock:
    def __init__(self, placement: Placement, m: int, pace: Pace, times: StepTimes) -> None:
        self.placement, self.m, self.pace, self.times = placement, m, pace, times
        self.ranks = [_Rank(placement.chunks_of(rank)) for rank in range(placement.p)]
        # When the input of F(c, j), and the output gradient of I(c, j), is there.
        self.inputs = [[NEVER] * m for _ in range(placement.n_chunks)]
        self.inputs[0] = [0.0] * m
        self.outputs = [[NEVER] * m for _ in range(placement.n_chunks)]
        self.events = [(0.0, rank) for rank in range(placement.p)]

    def run(self) -> tuple[tuple[Step, ...], ...]:
        while self.events:
            now, number = heapq.heappop(self.events)
            rank = self.ranks[number]
            if rank.free > now + CLOSE:
                continue
            chosen = self.choose(rank, number, now)
            if chosen:
                self.start(rank, number, chosen, now)
        return tuple(tuple(rank.row) for rank in self.ranks)

    # -- what is ready

    def forward(self, rank: _Rank, at: float, held: int, behind: tuple[int, ...] = ()) -> Action | None:
        """The preferred F that can start at ``at``. held: activations that the step adds before it. behind: the local
        chunks of F's that are chosen already.
        """
        v = len(rank.chunks)
        for local in reversed(range(v)) if self.pace.deep_forward else range(v):
            microbatch = rank.forwards[local] + behind.count(local)
            # Later chunks keep a place each, so the oldest micro-batch always fits through.
            room = v - 1 - local
            if (
                microbatch < self.m
                and self.inputs[rank.chunks[local]][microbatch] <= at + CLOSE
                and rank.activations + held < self.pace.max_activations - room
                and rank.live + held < self.pace.max_live - room
            ):
                return Action(Phase.F, rank.chunks[local], microbatch)
        return None

    def gradient(self, rank: _Rank, now: float) -> Action | None:
        for local in reversed(range(len(rank.chunks))):
            microbatch = rank.gradients[local]
            ready = microbatch < rank.forwards[local]
            if ready and self.outputs[rank.chunks[local]][microbatch] <= now + CLOSE:
                return Action(Phase.I, rank.chunks[local], microbatch)
        return None

    # -- the choice

    def choose(self, rank: _Rank, number: int, now: float) -> list[Action]:
        gradient = self.gradient(rank, now)
        if gradient is not None:
            return self.backward(rank, number, gradient, now)
        first = self.forward(rank, now, 0)
        if first is None:
            return [rank.owed[0]] if rank.owed else []
        if rank.owed:
            return [first, rank.owed[0]]
        second = self.beside(rank, first, now)
        return [first] if second is None else [first, second]

    def backward(self, rank: _Rank, number: int, gradient: Action, now: float) -> list[Action]:
        full = Action(Phase.B, gradient.chunk, gradient.microbatch)
        forward = self.forward(rank, now, -1)
        if forward is not None:
            whole = len(rank.owed) >= self.pace.keep or rank.live + 1 > self.pace.max_live
            return [forward, full if whole else gradient]
        if self.pace.patience and (soon := self.arrival(rank, now)) is not None:
            heapq.heappush(self.events, (soon, number))
            return []
        return [gradient, rank.owed[0]] if rank.owed else [full]

    def beside(self, rank: _Rank, first: Action, now: float) -> Action | None:
        """An F to run beside ``first``, of the other chunks before the same."""
        local = rank.chunks.index(first.chunk)
        if self.pace.together == "never" or (self.pace.together == "later" and not first.microbatch):
            return None
        found = self.forward(rank, now, 1, (local,))
        if found is None or (found.chunk != first.chunk and found.microbatch == first.microbatch):
            return None  # one part would need the other
        return found

    def arrival(self, rank: _Rank, now: float) -> float | None:
        """When the next F that may run gets its input, if that is worth waiting for."""
        until = now + self.pace.patience
        forward = self.forward(rank, until, -1)
        return None if forward is None else self.inputs[forward.chunk][forward.microbatch]

    # -- what it sets in motion

    def start(self, rank: _Rank, number: int, chosen: list[Action], now: float) -> None:
        step: Step = chosen[0] if len(chosen) == 1 else Composite(tuple(chosen))
        rank.free = now + self.times.duration(step)
        rank.row.append(step)
        heapq.heappush(self.events, (rank.free, number))
        for action, leaves in zip(parts(step), self.times.leaves(step), strict=True):
            local = rank.chunks.index(action.chunk)
            if action.phase is Phase.W:
                rank.owed.popleft()
                continue
            if action.phase is Phase.F:
                rank.forwards[local] += 1
                rank.activations += 1
                target, arrivals = action.chunk + 1, self.inputs
                if target == self.placement.n_chunks:
                    target, arrivals = action.chunk, self.outputs
            else:
                rank.gradients[local] += 1
                rank.activations -= 1
                if action.phase is Phase.I:
                    rank.owed.append(Action(Phase.W, action.chunk, action.microbatch))
                target, arrivals = action.chunk - 1, self.outputs
                if target < 0:
                    continue
            far = self.placement.rank_of(target)
            there = rank.free if far == number else now + leaves + self.times.delay(action)
            arrivals[target][action.microbatch] = there
            heapq.heappush(self.events, (max(there, self.ranks[far].free), far))
