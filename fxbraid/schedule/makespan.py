"""Makespan of a schedule at one cost per phase: a clock over whole actions, for tests and for the search.

(The full simulator works on units, lanes and links; here P2P takes no time and a step's results leave when it
ends.)
"""

from __future__ import annotations

from typing import NamedTuple

from fxbraid.schedule.action import Composite, Phase, Step
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.walk import execution_order


class Costs(NamedTuple):
    """Times of one chunk and one micro-batch: forward, input gradient, weight gradient, and the
    tensor-parallel all-reduces of one F or of one I (T_AR).
    """

    f: float = 1
    i: float = 1
    w: float = 1
    ar: float = 0

    def compute(self, step: Step) -> float:
        """The compute of a step: the sum of its parts, B = I + W."""
        if isinstance(step, Composite):
            return sum([self.compute(part) for part in step.parts])
        match step.phase:
            case Phase.F:
                return self.f
            case Phase.I:
                return self.i
            case Phase.W:
                return self.w
            case Phase.B:
                return self.i + self.w

    def exposed(self, step: Step) -> float:
        """The all-reduce time that nothing in the step hides: each F and each I hides its own behind the
        compute of everything else in the step. So F or I alone exposes T_AR, B max(0, T_AR - T_W), and a
        composite nothing as long as its other parts take T_AR.
        """
        if not self.ar:
            return 0.0
        total, hidden = self.compute(step), 0.0
        for part in step.parts if isinstance(step, Composite) else (step,):
            if part.phase is not Phase.W:
                own = self.f if part.phase is Phase.F else self.i
                hidden += max(0.0, self.ar - (total - own))
        return hidden

    def duration(self, step: Step) -> float:
        """Compute and what it exposes."""
        return self.compute(step) + self.exposed(step)


UNIT = Costs()


def makespan(schedule: Schedule, t_f: float = 1, t_i: float = 1, t_w: float = 1, t_ar: float = 0) -> float:
    """The time at which the last rank ends, all ranks starting at 0 and running their lists in order."""
    ends = end_times(schedule, Costs(t_f, t_i, t_w, t_ar))
    return max(row[-1] if row else 0.0 for row in ends)


def end_times(schedule: Schedule, costs: Costs = UNIT) -> list[list[float]]:
    """When each step of each rank ends. Raises ScheduleError if the schedule deadlocks."""
    m, forward, weight = schedule.m, Phase.F, Phase.W
    activations = [0.0] * ((schedule.n_chunks + 1) * m)
    gradients = [0.0] * ((schedule.n_chunks + 1) * m)
    duration: dict[tuple[Phase, ...], float] = {}
    ends: list[list[float]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.p
    for rank, at in execution_order(schedule):
        step = schedule.actions[rank][at]
        both = step.parts if isinstance(step, Composite) else (step,)
        end = free[rank]
        for action in both:
            if action.phase is weight:
                continue
            here = action.chunk * m + action.microbatch
            arrival = activations[here] if action.phase is forward else gradients[here + m]
            end = max(end, arrival)
        kind = tuple([action.phase for action in both])
        if kind not in duration:
            duration[kind] = costs.duration(step)
        end += duration[kind]
        free[rank] = end
        ends[rank].append(end)
        for action in both:
            here = action.chunk * m + action.microbatch
            if action.phase is forward:
                activations[here + m] = end
            elif action.phase is not weight:
                gradients[here] = end
    return ends
