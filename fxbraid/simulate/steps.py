"""Unit-level times of whole steps, for clocks that only know steps (``schedule.local``)."""

from __future__ import annotations

from collections.abc import Sequence

from fxbraid.schedule import Action, Phase, Placement, Step
from fxbraid.simulate.block import BlockClock


class BlockTimesOfSteps:
    """``schedule.local.StepTimes`` from the unit-level clock of blocks, messages at their links' times.

    What it leaves out of ``simulate``: messages queueing on a link, and receives that are posted late.
    """

    def __init__(self, clock: BlockClock, placement: Placement) -> None:
        self.clock, self.placement = clock, placement

    def duration(self, step: Step) -> float:
        return self.clock.time(step).length

    def leaves(self, step: Step) -> Sequence[float]:
        block = self.clock.time(step)
        return [block.length if sent is None else sent[0] for sent in block.sends]

    def delay(self, action: Action) -> float:
        target = action.chunk + (1 if action.phase is Phase.F else -1)
        if not 0 <= target < self.placement.n_chunks:
            return 0.0
        source, destination = self.placement.rank_of(action.chunk), self.placement.rank_of(target)
        if source == destination:
            return 0.0
        workload = self.clock.workload
        link, chunk = workload.link_between(source, destination), workload.chunks[action.chunk]
        size = chunk.sends_f if action.phase is Phase.F else chunk.sends_i
        return link.latency + size / link.bandwidth
