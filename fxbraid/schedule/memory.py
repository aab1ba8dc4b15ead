"""Activation memory of a schedule, counted in chunk activations."""

from __future__ import annotations

from dataclasses import dataclass

from fxbraid.schedule.action import Composite, Phase
from fxbraid.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that one rank holds at once; the three need not happen at the same time.

    live: chunk activations from F to the end of their B or W. activations: from F to the end of their I or B,
    that is before I hands over to W. queued: from I to W. At any moment live = activations + queued.
    """

    live: int
    activations: int
    queued: int


def peak_memory(schedule: Schedule, *, release_in_block: bool = True) -> tuple[Peak, ...]:
    """The peaks of every rank, in list order (a rank's memory depends on its own list alone).

    A braided step frees its backward's activations unit by unit while it makes its forward's, so with
    ``release_in_block`` a composite counts after what it frees. Otherwise it counts all that it makes before
    it frees anything, which is what a block that is one opaque graph does.
    """
    return tuple(_peak(schedule, rank, release_in_block) for rank in range(schedule.p))


def peak_live(schedule: Schedule, *, release_in_block: bool = True) -> tuple[int, ...]:
    """``Peak.live`` of every rank."""
    return tuple(peak.live for peak in peak_memory(schedule, release_in_block=release_in_block))


def _peak(schedule: Schedule, rank: int, release_in_block: bool) -> Peak:
    activations = queued = 0
    most_live = most_activations = most_queued = 0
    for step in schedule.actions[rank]:
        made = freed = handed = done = 0
        for action in step.parts if isinstance(step, Composite) else (step,):
            match action.phase:
                case Phase.F:
                    made += 1
                case Phase.B:
                    freed += 1
                case Phase.I:
                    freed += 1
                    handed += 1
                case Phase.W:
                    done += 1
        before = activations + queued + made
        activations += made - freed
        queued += handed - done
        most_live = max(most_live, activations + queued if release_in_block else before)
        most_activations = max(most_activations, activations if release_in_block else activations + freed)
        most_queued = max(most_queued, queued if release_in_block else queued + done)
    return Peak(most_live, most_activations, most_queued)
