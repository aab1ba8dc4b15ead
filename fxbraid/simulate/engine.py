"""The clock over all ranks: blocks in the order of ``lower``, messages over links.

A rank starts a block when the block before it has ended and all its messages have arrived; its compute lane
and its collective lane are inside the block (``block``). A message can start when it has been sent and, with
rendezvous, when its receive is posted, one step ahead; messages that can start queue on the link of their
direction in that order, and no message waits behind one that can't. Events are therefore handled in order of
time; a rank itself runs on until a message is missing.

With an offload plan, copies to the host and back run on two lanes of their own (``host``), and a step also waits for
those that it needs.

With replicas, the sum of a chunk's gradients over them starts behind the step that completes it, one after the other
on a lane of their own; the step is over when the last of them is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from fxbraid.schedule import Composite, Phase, Schedule, ScheduleError, Step
from fxbraid.schedule.lower import Arrive, Channel, Post, Reduce, Run, channels, lower
from fxbraid.schedule.offload import OffloadPlan, check_offload
from fxbraid.schedule.walk import execution_order
from fxbraid.simulate.block import BlockClock, BlockTimes
from fxbraid.simulate.host import HostLanes

UNKNOWN = -1.0


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of a chunk's gradients over replicas, launched behind a rank's ``step``."""

    chunk: int
    step: int
    start: float
    end: float


@dataclass(slots=True)
class Trace:
    """What happened, as plain lists.

    blocks[rank][i], starts[rank][i]: step i's inner times and start. causes[rank][i]: the message whose
    arrival it waited for, -1 if it followed the step before at once. Messages are numbered channel x m +
    micro-batch; sent, posted, began and arrived are their times (UNKNOWN for one that never went); sender is
    (rank, step, part), receiver (rank, step), and before is the message that held the link up, -1 if none
    did. reductions[rank]: in order of their start. hosts[rank]: its copies to the host and back.
    """

    blocks: list[list[BlockTimes]]
    starts: list[list[float]]
    causes: list[list[int]]
    channels: list[tuple[Channel, int, int]]
    sent: list[float]
    posted: list[float]
    began: list[float]
    arrived: list[float]
    sender: list[tuple[int, int, int]]
    receiver: list[tuple[int, int]]
    before: list[int]
    in_flight: list[float] = field(default_factory=list)
    reductions: list[list[Reduction]] = field(default_factory=list)
    hosts: list[HostLanes] = field(default_factory=list)


def run(schedule: Schedule, clock: BlockClock, offload: OffloadPlan | None = None) -> Trace:
    """Simulate; raises ScheduleError if a workload does not fit or the schedule deadlocks."""
    for costs in (clock.workload, clock.ordered_by or clock.workload):
        if len(costs.chunks) != schedule.n_chunks:
            raise ScheduleError(
                f"the workload describes {len(costs.chunks)} chunks, but {schedule.name} on p={schedule.p}, "
                f"v={schedule.v} has {schedule.n_chunks}; give one ChunkCost per chunk"
            )
    if offload is not None:
        check_offload(schedule, offload)
    return _Run(schedule, clock, offload).go()


class _Run:
    def __init__(self, schedule: Schedule, clock: BlockClock, offload: OffloadPlan | None) -> None:
        self.schedule, self.workload = schedule, clock.workload
        self.clock = clock
        lanes = channels(schedule)
        self.number = {(channel.phase, channel.chunk): k for k, (channel, _, _) in enumerate(lanes)}
        count = len(lanes) * schedule.m
        self.trace = Trace(
            blocks=[[self.clock.time(step) for step in row] for row in schedule.actions],
            starts=[[] for _ in schedule.actions],
            causes=[[] for _ in schedule.actions],
            channels=lanes,
            sent=[UNKNOWN] * count,
            posted=[UNKNOWN] * count,
            began=[UNKNOWN] * count,
            arrived=[UNKNOWN] * count,
            sender=[(-1, -1, -1)] * count,
            receiver=[(-1, -1)] * count,
            before=[-1] * count,
            in_flight=[0.0] * schedule.p,
            reductions=[[] for _ in schedule.actions],
            hosts=[
                HostLanes(self.workload.host, () if offload is None else offload.parcels[rank])
                for rank in range(schedule.p)
            ],
        )
        self.wires = [self.wire(lane) for lane in lanes]
        self.reduces = any(chunk.reduces for chunk in self.workload.chunks)
        self.reduced: list[list[tuple[int, int]]] = [[] for _ in schedule.actions]
        self.posts, self.arrives = self.messages()
        self.free = [0.0] * schedule.p
        self.at = [0] * schedule.p
        self.stuck: dict[int, int] = {}  # message -> the rank that waits for it
        self.pending: list[tuple[float, int]] = []  # messages that can start, by the time at which they can
        self.link_free: dict[tuple[int, int], float] = {}
        self.link_last: dict[tuple[int, int], int] = {}

    def wire(self, lane: tuple[Channel, int, int]) -> tuple[tuple[int, int], float, float, bool]:
        """(source, destination), seconds on the wire, latency, rendezvous."""
        channel, source, destination = lane
        link = self.workload.link_between(source, destination)
        chunk = self.workload.chunks[channel.chunk]
        size = chunk.sends_f if channel.phase == "F" else chunk.sends_i
        return (source, destination), size / link.bandwidth, link.latency, link.rendezvous

    def messages(self) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """For every rank and step, the messages that are posted before it, and those that it waits for."""
        posts: list[list[list[int]]] = []
        arrives: list[list[list[int]]] = []
        for rank in range(self.schedule.p):
            post: list[int] = []
            arrive: list[int] = []
            posts.append([])
            arrives.append([])
            for instruction in lower(self.schedule, rank, reduce=self.reduces):
                if isinstance(instruction, Reduce):
                    self.reduced[rank].append((len(posts[rank]) - 1, instruction.chunk))
                    continue
                if isinstance(instruction, Run):
                    posts[rank].append(post)
                    arrives[rank].append(arrive)
                    post, arrive = [], []
                    continue
                if not isinstance(instruction, Post | Arrive):
                    continue  # copies to the host and back, of which there are none without a plan
                message = instruction.message
                channel = message.channel
                number = self.number[channel.phase, channel.chunk]
                key = number * self.schedule.m + message.microbatch
                if isinstance(instruction, Post):
                    post.append(key)
                else:
                    arrive.append(key)
        return posts, arrives

    def go(self) -> Trace:
        for rank in range(self.schedule.p):
            self.advance(rank)
        while self.pending:
            ready, message = heapq.heappop(self.pending)
            self.transfer(message, ready)
            waiting = self.stuck.pop(message, None)
            if waiting is not None:
                self.advance(waiting)
        if any(at < len(row) for at, row in zip(self.at, self.schedule.actions, strict=True)):
            for _ in execution_order(self.schedule):  # says which cycle it is
                pass
            raise ScheduleError(
                f"{self.schedule.name} stops at steps {self.at} of its ranks: a message that a step "
                "needs is never sent; run fxbraid.schedule.check on it"
            )
        self.reduce()
        return self.trace

    def reduce(self) -> None:
        """When the sums over replicas run; every replica takes the same times."""
        for rank, found in enumerate(self.reduced):
            free = 0.0
            for step, chunk in found:
                done = self.trace.starts[rank][step] + self.trace.blocks[rank][step].length
                start = max(done, free)
                free = start + self.workload.chunks[chunk].reduces
                self.trace.reductions[rank].append(Reduction(chunk, step, start, free))

    def advance(self, rank: int) -> None:
        """Run ``rank`` until a message is missing that has not even started."""
        trace, arrived = self.trace, self.trace.arrived
        row, posts, arrives = self.schedule.actions[rank], self.posts[rank], self.arrives[rank]
        blocks, starts, causes = trace.blocks[rank], trace.starts[rank], trace.causes[rank]
        host = trace.hosts[rank]
        at, free = self.at[rank], self.free[rank]
        while at < len(row):
            if posts[at]:
                self.post(posts[at], rank, at, free)
            start, cause = free, -1
            for message in arrives[at]:
                time = arrived[message]
                if time == UNKNOWN:
                    self.stuck[message] = rank
                    self.at[rank], self.free[rank] = at, free
                    return
                if time > start:
                    start, cause = time, message
            if cause >= 0:
                trace.in_flight[rank] += start - max(free, trace.sent[cause])
            start = host.before(at, start)
            starts.append(start)
            causes.append(cause)
            block = blocks[at]
            self.send(row[at], block, rank, at, start)
            free = start + block.length
            host.behind(at, free)
            at += 1
        self.at[rank], self.free[rank] = at, free

    def post(self, messages: Sequence[int], rank: int, at: int, now: float) -> None:
        posted, sent = self.trace.posted, self.trace.sent
        for message in messages:
            if posted[message] == UNKNOWN:
                posted[message] = now
                self.trace.receiver[message] = (rank, at)
                if sent[message] != UNKNOWN and self.wires[message // self.schedule.m][3]:
                    heapq.heappush(self.pending, (max(now, sent[message]), message))

    def send(self, step: Step, block: BlockTimes, rank: int, at: int, start: float) -> None:
        m, trace = self.schedule.m, self.trace
        for part, action in enumerate(step.parts if isinstance(step, Composite) else (step,)):
            leaves = block.sends[part]
            if leaves is None:
                continue
            number = self.number.get(("F" if action.phase is Phase.F else "I", action.chunk))
            if number is None:
                continue
            message = number * m + action.microbatch
            now = start + leaves[0]
            trace.sent[message] = now
            trace.sender[message] = (rank, at, part)
            rendezvous = self.wires[number][3]
            if not rendezvous:
                heapq.heappush(self.pending, (now, message))
            elif trace.posted[message] != UNKNOWN:
                heapq.heappush(self.pending, (max(now, trace.posted[message]), message))

    def transfer(self, message: int, ready: float) -> None:
        ends, seconds, latency, _ = self.wires[message // self.schedule.m]
        began = ready
        free = self.link_free.get(ends, 0.0)
        if free > ready:
            began = free
            self.trace.before[message] = self.link_last[ends]
        self.link_free[ends] = began + seconds
        self.link_last[ends] = message
        self.trace.began[message] = began
        self.trace.arrived[message] = began + seconds + latency
