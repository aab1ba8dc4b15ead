"""What a simulation says: times, shares, memory, the critical path, and the boxes that the pictures show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fxbraid.schedule import Action, Schedule, Step, parts
from fxbraid.schedule.lower import Channel
from fxbraid.simulate.block import BlockClock, BlockTimes
from fxbraid.simulate.engine import UNKNOWN, Trace
from fxbraid.simulate.workload import Workload

REDUCTION = "gradients over replicas"


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Where one rank's step time goes: compute + exposed_tp + exposed_p2p + exposed_dp + bubble = step time.

    exposed_tp: it waits for a collective inside a block. exposed_p2p: it waits for a message that is on its
    way. bubble: it waits for a message that has not been sent, or is done. collective: total time of its
    collectives, hidden or not. peak: the most bytes that live at once, static ones included. exposed_dp: all its
    blocks are done, and the sums of its gradients over replicas are not.
    """

    compute: float
    exposed_tp: float
    exposed_p2p: float
    bubble: float
    collective: float
    peak: float
    exposed_dp: float = 0.0


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

    kind: Literal["unit", "collective", "message"]
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
                exposed = max(0.0, one.end - max(one.start, _blocks_end(self.trace, rank)))
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

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """(time, bytes from then on) of a rank, static bytes included."""
        level = static_bytes(self.schedule, self.workload, rank)
        curve = [(0.0, level)]
        for block, start in zip(self.trace.blocks[rank], self.trace.starts[rank], strict=True):
            for time, change in block.memory:
                level += change
                if curve[-1][0] == start + time:
                    # A peak of no duration stays visible as the level just before.
                    curve[-1] = (start + time, level)
                else:
                    curve.append((start + time, level))
        return curve

    def critical_path(self) -> list[PathItem]:
        """The units, collectives and messages that the step time is the sum of, in order of time."""
        return _critical_path(self)

    def summary(self) -> dict[str, float | None]:
        """The numbers of the table and of the JSON."""
        return {
            "step_time": self.step_time,
            "bubble_share": self.bubble_share,
            "exposed_tp_share": self.exposed_tp_share,
            "exposed_p2p_share": self.exposed_p2p_share,
            **({"exposed_dp_share": self.exposed_dp_share} if any(self.trace.reductions) else {}),
            "peak": max(self.peak),
            "mfu": self.mfu,
        }


def static_bytes(schedule: Schedule, workload: Workload, rank: int) -> float:
    """Bytes of the weights, gradients and optimizer state of a rank's chunks."""
    if not workload.static:
        return 0.0
    return sum(workload.static[chunk] for chunk in schedule.placement.chunks_of(rank))


def summarize(schedule: Schedule, clock: BlockClock, trace: Trace) -> Result:
    """The totals of a trace."""
    workload = clock.workload
    step_time = max(_end(trace, rank) for rank in range(schedule.p))
    ranks = []
    for rank in range(schedule.p):
        blocks = trace.blocks[rank]
        compute = sum(block.compute for block in blocks)
        exposed = sum(block.exposed for block in blocks)
        p2p, dp = trace.in_flight[rank], _end(trace, rank) - _blocks_end(trace, rank)
        ranks.append(
            RankTimes(
                compute=compute,
                exposed_tp=exposed,
                exposed_p2p=p2p,
                bubble=max(0.0, step_time - compute - exposed - p2p - dp),
                collective=_collective(trace, rank),
                peak=_peak(static_bytes(schedule, workload, rank), blocks),
                exposed_dp=dp,
            )
        )
    return Result(schedule, workload, clock.braided, step_time, tuple(ranks), trace, clock.ordered_by)


def _collective(trace: Trace, rank: int) -> float:
    known: dict[int, float] = {}
    total = 0.0
    for block in trace.blocks[rank]:
        key = id(block)
        if key not in known:
            known[key] = sum(s.end - s.start for s in block.slots if s.lane == "collective")
        total += known[key]
    return total


def peaks(schedule: Schedule, workload: Workload, *, ordered_by: Workload | None = None) -> tuple[float, ...]:
    """``Result.peak`` without a clock: a rank's memory depends on its own list alone."""
    return peaks_at(schedule, BlockClock(workload, ordered_by=ordered_by))


def peaks_at(schedule: Schedule, clock: BlockClock) -> tuple[float, ...]:
    """``peaks`` with block times that are there already."""
    workload = clock.workload
    return tuple(
        _peak(static_bytes(schedule, workload, rank), [clock.time(step) for step in row])
        for rank, row in enumerate(schedule.actions)
    )


def _peak(static: float, blocks: Sequence[BlockTimes]) -> float:
    """Block by block: what a block adds at most, and what it leaves behind, is known once per kind."""
    known: dict[int, tuple[float, float]] = {}
    level = peak = static
    for block in blocks:
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


def _critical_path(result: Result) -> list[PathItem]:
    trace, m = result.trace, result.schedule.m
    rank = max(range(result.schedule.p), key=lambda r: _end(trace, r))
    items: list[PathItem] = []
    at = _behind_reductions(trace, rank, items)
    slot = trace.blocks[rank][at].last if at >= 0 else -1
    while at >= 0:
        block, start = trace.blocks[rank][at], trace.starts[rank][at]
        while slot >= 0:
            found = block.slots[slot]
            action = parts(result.schedule.actions[rank][at])[found.part]
            what = f"{found.name} of {action.chunk}{found.phase}{action.microbatch}"
            kind: Literal["unit", "collective"] = "unit" if found.lane == "compute" else "collective"
            if found.end > found.start:
                items.append(PathItem(kind, rank, what, start + found.start, start + found.end))
            slot = found.cause
        message = trace.causes[rank][at]
        if message < 0:
            at -= 1
            slot = trace.blocks[rank][at].last if at >= 0 else -1
            continue
        rank, at, slot = _follow(trace, m, message, items)
    return items[::-1]


def _follow(trace: Trace, m: int, message: int, items: list[PathItem]) -> tuple[int, int, int]:
    """Back along a message, and along those that held its link up, to the (rank, step, slot) that let it
    go.
    """
    until = trace.arrived[message]
    while True:
        channel, source, destination = trace.channels[message // m]
        began = trace.began[message]
        if until > began:
            what = f"{channel.chunk}{channel.phase}{message % m} from rank {source} to rank {destination}"
            items.append(PathItem("message", source, what, began, until))
        held = trace.before[message]
        if held < 0:
            return _origin(trace, message)
        until, message = began, held


def _origin(trace: Trace, message: int) -> tuple[int, int, int]:
    if trace.posted[message] > trace.sent[message] and trace.began[message] >= trace.posted[message]:
        rank, at = trace.receiver[
            message
        ]  # its receive was posted last: behind the step before the one before
        at -= 1
        return rank, at, trace.blocks[rank][at].last if at >= 0 else -1
    rank, at, part = trace.sender[message]
    leaves = trace.blocks[rank][at].sends[part]
    return rank, at, -1 if leaves is None else leaves[1]


def _behind_reductions(trace: Trace, rank: int, items: list[PathItem]) -> int:
    """Back along the sums over replicas at the end of ``rank``, to the step behind which the path goes on."""
    if _end(trace, rank) == _blocks_end(trace, rank):
        return len(trace.starts[rank]) - 1
    found = trace.reductions[rank]
    at = len(found) - 1
    while True:
        one = found[at]
        items.append(PathItem("collective", rank, f"{REDUCTION}, chunk {one.chunk}", one.start, one.end))
        if at == 0 or found[at - 1].end < one.start:
            return one.step
        at -= 1


def _end(trace: Trace, rank: int) -> float:
    return max([_blocks_end(trace, rank), *(one.end for one in trace.reductions[rank])])


def _blocks_end(trace: Trace, rank: int) -> float:
    return trace.starts[rank][-1] + trace.blocks[rank][-1].length if trace.starts[rank] else 0.0
