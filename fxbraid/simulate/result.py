"""What a simulation says: times, shares, memory, the critical path, and the boxes that the pictures show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fxbraid.schedule import Action, Schedule, Step, parts
from fxbraid.schedule.lower import Channel
from fxbraid.schedule.offload import OffloadPlan
from fxbraid.simulate.block import BlockClock, BlockTimes
from fxbraid.simulate.engine import UNKNOWN, Trace
from fxbraid.simulate.host import Copy, memory_changes
from fxbraid.simulate.workload import Workload

REDUCTION = "gradients over replicas"


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Where one rank's step time goes: compute + exposed_tp + exposed_p2p + exposed_dp + bubble = step time.

    exposed_tp: it waits for a collective inside a block. exposed_p2p: it waits for a message that is on its
    way. bubble: it waits for a message that has not been sent, or is done. collective: total time of its
    collectives, hidden or not. peak: the most bytes that live at once, static ones included. exposed_dp: all its
    blocks are done, and the sums of its gradients over replicas are not. exposed_host: it waits for a copy to or from
    the host; one more term of that sum.
    """

    compute: float
    exposed_tp: float
    exposed_p2p: float
    bubble: float
    collective: float
    peak: float
    exposed_dp: float = 0.0
    exposed_host: float = 0.0


@dataclass(frozen=True, slots=True)
class Box:
    """One unit or one collective of one rank: what a picture draws. step: index in the rank's list. others:
    indices among the boxes of the same step; for a collective what hides it, for a unit what it hides.
    """

    rank: int
    lane: Literal["compute", "collective"]
    step: int
    action: Action
    phase: str
    unit: str
    start: float
    end: float
    others: tuple[int, ...] = ()
    exposed: float = 0.0


@dataclass(frozen=True, slots=True)
class StepBox:
    """One entry of a rank's list, from its start to the moment when the rank goes on."""

    rank: int
    step: int
    what: Step
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class MessageBox:
    """One message: sent, on the wire from ``began``, there at ``arrived``."""

    channel: Channel
    microbatch: int
    source: int
    destination: int
    sent: float
    began: float
    arrived: float


@dataclass(frozen=True, slots=True)
class PathItem:
    """One link of the critical path, which has no gap: each item starts when the one before it ends."""

    kind: Literal["unit", "collective", "message", "copy"]
    rank: int
    what: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated step. Everything beyond ``step_time`` and ``ranks`` is made from the trace when asked
    for.
    """

    schedule: Schedule
    workload: Workload
    braided: bool
    step_time: float
    ranks: tuple[RankTimes, ...]
    trace: Trace
    ordered_by: Workload | None = None
    offload: OffloadPlan | None = None

    @property
    def bubble_share(self) -> float:
        """Mean over ranks of the share of the step time in which a rank waits for work that is not there
        yet.
        """
        return self._share("bubble")

    @property
    def exposed_tp_share(self) -> float:
        """Mean share of the step time in which a rank waits for a tensor-parallel collective."""
        return self._share("exposed_tp")

    @property
    def exposed_p2p_share(self) -> float:
        """Mean share of the step time in which a rank waits for a message on its way."""
        return self._share("exposed_p2p")

    @property
    def exposed_dp_share(self) -> float:
        """Mean share of the step time in which a rank is done but for sums of gradients over replicas."""
        return self._share("exposed_dp")

    @property
    def exposed_host_share(self) -> float:
        """Mean share of the step time in which a rank waits for a copy to or from the host."""
        return self._share("exposed_host")

    @property
    def peak(self) -> tuple[float, ...]:
        """Peak bytes of every rank (chunk activations where the workload is made from constants)."""
        return tuple(rank.peak for rank in self.ranks)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the devices could do in the step time; None where the workload has
        neither.
        """
        if not self.workload.flops or not self.workload.peak or not self.step_time:
            return None
        capacity = self.step_time * self.workload.peak * self.schedule.p
        return self.workload.flops * self.schedule.m / capacity

    def _share(self, name: str) -> float:
        if not self.step_time:
            return 0.0
        return sum(getattr(rank, name) for rank in self.ranks) / (len(self.ranks) * self.step_time)

    # -- what the pictures read

    def steps(self, rank: int) -> Iterator[StepBox]:
        """The blocks of a rank."""
        rows = zip(self.schedule.actions[rank], self.trace.blocks[rank], self.trace.starts[rank], strict=True)
        for at, (step, block, start) in enumerate(rows):
            yield StepBox(rank, at, step, start, start + block.length)

    def boxes(self, rank: int) -> Iterator[Box]:
        """The units and collectives of a rank, block by block."""
        rows = zip(self.schedule.actions[rank], self.trace.blocks[rank], self.trace.starts[rank], strict=True)
        for at, (step, block, start) in enumerate(rows):
            actions = parts(step)
            for slot in block.slots:
                yield Box(
                    rank=rank,
                    lane=slot.lane,
                    step=at,
                    action=actions[slot.part],
                    phase=slot.phase,
                    unit=slot.name,
                    start=start + slot.start,
                    end=start + slot.end,
                    others=slot.others,
                    exposed=slot.exposed,
                )
            yield from self._reductions(rank, at)

    def _reductions(self, rank: int, at: int) -> Iterator[Box]:
        """The sums over replicas that step ``at`` launches; exposed is what lies behind the rank's last block."""
        for one in self.trace.reductions[rank]:
            if one.step == at:
                action = next(a for a in parts(self.schedule.actions[rank][at]) if a.chunk == one.chunk)
                exposed = max(0.0, one.end - max(one.start, blocks_end(self.trace, rank)))
                yield Box(rank, "collective", at, action, "W", REDUCTION, one.start, one.end, exposed=exposed)

    def messages(self) -> Iterator[MessageBox]:
        """All messages between ranks."""
        t, m = self.trace, self.schedule.m
        for number, (channel, source, destination) in enumerate(t.channels):
            for microbatch in range(m):
                key = number * m + microbatch
                if t.arrived[key] != UNKNOWN:
                    yield MessageBox(
                        channel, microbatch, source, destination, t.sent[key], t.began[key], t.arrived[key]
                    )

    def copies(self, rank: int) -> list[Copy]:
        """Copies of a rank to its host and back, in order of their launch."""
        return self.trace.hosts[rank].copies

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """(time, bytes from then on) of a rank, static bytes included."""
        level = static_bytes(self.schedule, self.workload, rank)
        curve = [(0.0, level)]
        moved = memory_changes(self.offload.parcels[rank]) if self.offload is not None else {}
        rows = zip(self.trace.blocks[rank], self.trace.starts[rank], strict=True)
        for at, (block, start) in enumerate(rows):
            first = ((0.0, moved[at]),) if at in moved else ()
            for time, change in (*first, *block.memory):
                level += change
                if curve[-1][0] == start + time:
                    # A peak of no duration stays visible as the level just before.
                    curve[-1] = (start + time, level)
                else:
                    curve.append((start + time, level))
        return curve

    def critical_path(self) -> list[PathItem]:
        """The units, collectives and messages that the step time is the sum of, in order of time."""
        from fxbraid.simulate.path import critical_path

        return critical_path(self)

    def summary(self) -> dict[str, float | None]:
        """The numbers of the table and of the JSON."""
        return {
            "step_time": self.step_time,
            "bubble_share": self.bubble_share,
            "exposed_tp_share": self.exposed_tp_share,
            "exposed_p2p_share": self.exposed_p2p_share,
            **({"exposed_dp_share": self.exposed_dp_share} if any(self.trace.reductions) else {}),
            **({"exposed_host_share": self.exposed_host_share} if self.offload is not None else {}),
            "peak": max(self.peak),
            "mfu": self.mfu,
        }


def static_bytes(schedule: Schedule, workload: Workload, rank: int) -> float:
    """Bytes of the weights, gradients and optimizer state of a rank's chunks."""
    if not workload.static:
        return 0.0
    return sum(workload.static[chunk] for chunk in schedule.placement.chunks_of(rank))


def summarize(
    schedule: Schedule, clock: BlockClock, trace: Trace, offload: OffloadPlan | None = None
) -> Result:
    """The totals of a trace."""
    workload = clock.workload
    step_time = max(end_of(trace, rank) for rank in range(schedule.p))
    ranks = []
    for rank in range(schedule.p):
        blocks = trace.blocks[rank]
        compute = sum(block.compute for block in blocks)
        exposed = sum(block.exposed for block in blocks)
        host = trace.hosts[rank].waited
        moved = memory_changes(offload.parcels[rank]) if offload is not None else {}
        p2p, dp = trace.in_flight[rank], end_of(trace, rank) - blocks_end(trace, rank)
        ranks.append(
            RankTimes(
                compute=compute,
                exposed_tp=exposed,
                exposed_p2p=p2p,
                bubble=max(0.0, step_time - compute - exposed - p2p - dp - host),
                collective=_collective(trace, rank),
                peak=_peak(static_bytes(schedule, workload, rank), blocks, moved),
                exposed_dp=dp,
                exposed_host=host,
            )
        )
    return Result(
        schedule, workload, clock.braided, step_time, tuple(ranks), trace, clock.ordered_by, offload
    )


def _collective(trace: Trace, rank: int) -> float:
    known: dict[int, float] = {}
    total = 0.0
    for block in trace.blocks[rank]:
        key = id(block)
        if key not in known:
            known[key] = sum(s.end - s.start for s in block.slots if s.lane == "collective")
        total += known[key]
    return total


def peaks(
    schedule: Schedule,
    workload: Workload,
    *,
    ordered_by: Workload | None = None,
    offload: OffloadPlan | None = None,
) -> tuple[float, ...]:
    """``Result.peak`` without a clock: a rank's memory depends on its own list alone, and on the steps of ``offload``
    before which something leaves it or comes back."""
    return peaks_at(schedule, BlockClock(workload, ordered_by=ordered_by), offload)


def peaks_at(schedule: Schedule, clock: BlockClock, offload: OffloadPlan | None = None) -> tuple[float, ...]:
    """``peaks`` with block times that are there already."""
    workload = clock.workload
    return tuple(
        _peak(
            static_bytes(schedule, workload, rank),
            [clock.time(step) for step in row],
            memory_changes(offload.parcels[rank]) if offload is not None else {},
        )
        for rank, row in enumerate(schedule.actions)
    )


def _peak(static: float, blocks: Sequence[BlockTimes], moved: Mapping[int, float]) -> float:
    """Block by block: what a block adds at most, and what it leaves behind, is known once per kind. moved: what is
    there more or less from a step on."""
    known: dict[int, tuple[float, float]] = {}
    level = peak = static
    for at, block in enumerate(blocks):
        level += moved.get(at, 0.0)
        key = id(block)
        if key not in known:
            height = highest = 0.0
            for _, change in block.memory:
                height += change
                highest = max(highest, height)
            known[key] = (highest, height)
        highest, change = known[key]
        peak = max(peak, level + highest)
        level += change
    return peak


def end_of(trace: Trace, rank: int) -> float:
    return max([blocks_end(trace, rank), *(one.end for one in trace.reductions[rank])])


def blocks_end(trace: Trace, rank: int) -> float:
    return trace.starts[rank][-1] + trace.blocks[rank][-1].length if trace.starts[rank] else 0.0
