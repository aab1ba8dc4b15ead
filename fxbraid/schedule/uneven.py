"""The time of a step where chunks differ: what a cut of a model is judged by before anything has been measured.

(The simulator does the same unit by unit, with links; here a step's results leave when it ends, and messages take no
time.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxbraid.schedule import build
from fxbraid.schedule.action import Action, Phase, Step, parts
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.local import ListClock
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule

PhaseTimes = tuple[float, float, float]
"""Times of F, I and W of one chunk and micro-batch."""


def total(times: Sequence[PhaseTimes]) -> PhaseTimes:
    """Of a chunk that is made of these."""
    f, i, w = (sum(time[k] for time in times) for k in range(3))
    return f, i, w


def stand_in(placement: Placement) -> Schedule | None:
    """The schedule that a cut for ``placement`` is timed with as long as nothing is measured: stp on the V, 1F1B
    (interleaved) else, of 4p micro-batches, so that all schedules of a placement have one cut. None where there is
    nothing to time."""
    p, v = placement.p, placement.v
    if p == 1 or (placement.kind == "v" and v != 2):
        return None
    name = "stp" if placement.kind == "v" else "1f1b" if v == 1 else "interleaved_1f1b"
    return build(name, p=p, m=4 * p, v=v)


@dataclass(frozen=True, slots=True)
class UnevenTimes:
    """``local.StepTimes`` with times of F, I and W for every chunk. collectives: those of an F or an I as a share of
    its chunk's F; in a step each hides its own behind the compute of the other parts, as far as that goes."""

    chunks: Sequence[PhaseTimes]
    collectives: float = 0.0

    def duration(self, step: Step) -> float:
        both = parts(step)
        compute = [self._compute(action) for action in both]
        total = sum(compute)
        if not self.collectives:
            return total
        bare = 0.0
        for action, own in zip(both, compute, strict=True):
            if action.phase is not Phase.W:
                f, i, _ = self.chunks[action.chunk]
                beside = total - (own if action.phase is not Phase.B else i)
                bare += max(0.0, self.collectives * f - beside)
        return total + bare

    def _compute(self, action: Action) -> float:
        f, i, w = self.chunks[action.chunk]
        return {Phase.F: f, Phase.I: i, Phase.W: w, Phase.B: i + w}[action.phase]

    def leaves(self, step: Step) -> Sequence[float]:
        return [self.duration(step)] * len(parts(step))

    def delay(self, action: Action) -> float:
        return 0.0


def uneven_makespan(schedule: Schedule, chunks: Sequence[PhaseTimes], collectives: float = 0.0) -> float:
    """When the last rank ends. Raises ScheduleError where there is not one entry per chunk, or for a deadlock."""
    if len(chunks) != schedule.n_chunks:
        raise ScheduleError(
            f"{schedule.name} has {schedule.n_chunks} chunks, and there are times of {len(chunks)}; give one entry "
            "per chunk"
        )
    time = ListClock(schedule, UnevenTimes(chunks, collectives)).run(schedule.actions)
    if time is None:
        raise ScheduleError(f"{schedule.name} deadlocks; run fxbraid.schedule.check on it")
    return time[0]
