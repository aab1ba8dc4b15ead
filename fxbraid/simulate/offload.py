"""How much of each micro-batch goes to the host, and when: a plan from costs.

The schedule is simulated as it is. Copies then get the time that is there: an item may be on its way out for the next
one to three steps behind its F (in the paper's words, slots), and on its way back for the one to three before its
backward, on one lane each way and behind what the lane already has; so no step of the simulated clock waits for a copy,
and a slow host link moves less. Of all such plans (slots out, slots back, the share of a micro-batch, how many of the
first micro-batches stay) a rank takes the one with the lowest peak, and of those the one that moves least.

The method is the offloading variant of "Synergistic Tensor and Pipeline Parallelism" (arXiv 2510.27257), for any
schedule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from fxbraid.schedule import Phase, Schedule, ScheduleError, parts
from fxbraid.schedule.offload import Item, OffloadPlan, Parcel
from fxbraid.simulate.block import BlockClock
from fxbraid.simulate.engine import run
from fxbraid.simulate.host import memory_changes
from fxbraid.simulate.workload import INSTANT, ChunkCost, Link, Workload

HEADROOM = 0.95
"""Share of the time at hand that copies may take: what is measured varies."""

SMALL = 0.01
"""Storages below this share of a chunk's activations stay: they are not worth a copy."""

SLOTS = (1, 2, 3)
SHARES = (1.0, 0.75, 0.5, 0.25)
FIRST = range(1, 9)
PIECES = 4
"""Where a workload does not say which storages a unit saves, it saves this many equal ones."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What may leave of a chunk: of its storages with these numbers (None: all), at most ``fraction`` of the bytes."""

    fraction: float = 1.0
    numbers: frozenset[int] | None = None


def early_chunks(schedule: Schedule, fraction: float = 1.0) -> dict[int, Wanted]:
    """The first chunk of every rank, whose activations live longest."""
    if not 0 < fraction <= 1:
        raise ScheduleError(
            f"offload={fraction:g} is no share of a chunk's activations; give one above 0, up to 1"
        )
    place = schedule.placement
    return {min(place.chunks_of(rank)): Wanted(fraction) for rank in range(schedule.p)}


def plan_offload(
    schedule: Schedule,
    workload: Workload,
    wanted: Mapping[int, Wanted],
    *,
    braided: bool = True,
    ordered_by: Workload | None = None,
    ranks: Iterable[int] | None = None,
) -> OffloadPlan:
    """What there is time for of ``wanted`` (by chunk), over ``workload.host``. ranks: those to plan for (default: all);
    the others' parcels are empty. Raises ScheduleError where the workload does not fit the schedule."""
    clock = BlockClock(workload, braided, ordered_by)
    trace = run(schedule, clock)
    found: list[tuple[Parcel, ...]] = [() for _ in range(schedule.p)]
    asked = [0.0] * schedule.p
    for rank in range(schedule.p) if ranks is None else ranks:
        starts, blocks = trace.starts[rank], trace.blocks[rank]
        ends = [start + block.length for start, block in zip(starts, blocks, strict=True)]
        loads = _loads(schedule, rank, workload, wanted)
        asked[rank] = sum(load.limit for load in loads)
        heights = [_height(block.memory) for block in blocks]
        found[rank] = _best(_Rank(starts, ends, heights, loads, workload.host))
    return OffloadPlan(tuple(found), tuple(asked))


def parks(chunk: ChunkCost) -> tuple[float, ...]:
    """Bytes of each storage of a chunk that may leave, in the order in which they are made."""
    if chunk.parks:
        return chunk.parks
    return tuple(unit.saves / PIECES for unit in chunk.f if unit.saves > 0 for _ in range(PIECES))


@dataclass(frozen=True, slots=True)
class _Load:
    """One chunk and micro-batch: the steps of its F and its backward, what may leave by number, largest first, and how
    many bytes of it at most."""

    chunk: int
    microbatch: int
    forward: int
    backward: int
    sizes: tuple[tuple[int, float], ...]
    limit: float

    @property
    def returns(self) -> tuple[int, int, int]:
        return self.backward, self.chunk, self.microbatch


def _loads(schedule: Schedule, rank: int, workload: Workload, wanted: Mapping[int, Wanted]) -> list[_Load]:
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    for at, step in enumerate(schedule.actions[rank]):
        for action in parts(step):
            if action.phase is not Phase.W:
                places = forward if action.phase is Phase.F else backward
                places[action.chunk, action.microbatch] = at
    sizes: dict[int, tuple[tuple[tuple[int, float], ...], float]] = {}
    for chunk in {chunk for chunk, _ in forward} & set(wanted):
        asked, every = wanted[chunk], parks(workload.chunks[chunk])
        least = SMALL * sum(every)
        mine = [
            (number, size)
            for number, size in enumerate(every)
            if size > least and (asked.numbers is None or number in asked.numbers)
        ]
        mine.sort(key=lambda one: (-one[1], one[0]))
        sizes[chunk] = tuple(mine), asked.fraction * sum(size for _, size in mine)
    return [
        _Load(chunk, microbatch, at, backward[chunk, microbatch], *sizes[chunk])
        for (chunk, microbatch), at in sorted(forward.items(), key=lambda one: (one[1], one[0]))
        if chunk in sizes and (chunk, microbatch) in backward
    ]


@dataclass(frozen=True, slots=True)
class _Rank:
    """Times of a rank's steps, what each adds to its memory at most and in the end, and what may leave."""

    starts: Sequence[float]
    ends: Sequence[float]
    heights: Sequence[tuple[float, float]]
    loads: Sequence[_Load]
    link: Link

    def peak(self, parcels: Sequence[Parcel]) -> float:
        moved = memory_changes(parcels)
        level = peak = 0.0
        for at, (highest, change) in enumerate(self.heights):
            level += moved.get(at, 0.0)
            peak = max(peak, level + highest)
            level += change
        return peak


@dataclass(frozen=True, slots=True)
class _Choice:
    out: int
    back: int
    share: float
    first: int


def _best(rank: _Rank) -> tuple[Parcel, ...]:
    best: tuple[Parcel, ...] = ()
    whole = rank.peak(best) or 1.0
    lowest = (1.0, 0.0)
    chosen = _Choice(SLOTS[0], SLOTS[0], SHARES[0], 0)
    times = [_Choice(out, back, share, 0) for out, back, share in product(SLOTS, SLOTS, SHARES)]
    for part in ("times", "first"):
        for choice in times if part == "times" else [replace(chosen, first=k) for k in FIRST]:
            parcels = _plan(rank, choice)
            # Rounding must not decide: of two plans that are alike the one that moves less is better.
            score = round(rank.peak(parcels) / whole, 9), sum(parcel.size for parcel in parcels)
            if score < lowest:
                best, lowest, chosen = parcels, score, choice
    return best


@dataclass(slots=True)
class _Leaving:
    load: _Load
    #: number, bytes, step from which it is away
    items: list[tuple[int, float, int]] = field(default_factory=list)


def _plan(rank: _Rank, choice: _Choice) -> tuple[Parcel, ...]:
    """All that fits into the time that ``choice`` gives: the lane out first, in order of time, then the lane back, from
    its end, each as late as it can be."""
    rate = HEADROOM * rank.link.bandwidth
    leaving: list[_Leaving] = []
    free = 0.0
    for load in rank.loads[choice.first :]:
        one = _Leaving(load)
        until = rank.ends[min(load.forward + choice.out, len(rank.ends) - 1)]
        at = max(free, rank.ends[load.forward]) + rank.link.latency
        left = choice.share * load.limit * (1 + 1e-9)
        for number, size in load.sizes:
            done = at + size / rate
            if size > left or done > until:
                continue
            step = bisect_left(rank.starts, done, lo=load.forward + 1)
            if step >= load.backward - 1:
                continue
            one.items.append((number, size, step))
            at, left = done, left - size
        if one.items:
            free = at
            leaving.append(one)
    parcels: list[Parcel] = []
    limit = float("inf")
    for one in sorted(leaving, key=lambda one: one.load.returns, reverse=True):
        load = one.load
        end = min(limit, rank.starts[load.backward])
        items: list[Item] = []
        for number, size, away in one.items:
            begin = end - size / rate
            step = min(bisect_right(rank.starts, begin - rank.link.latency), load.backward) - 1
            if step < max(load.backward - choice.back, away + 1):
                continue
            items.append(Item(number, size, away, step))
            end = begin
        if items:
            limit = end - rank.link.latency
            parcels.append(Parcel(load.chunk, load.microbatch, load.forward, load.backward, tuple(items)))
    return tuple(sorted(parcels, key=Parcel.leaves))


def _height(memory: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """What a block adds at most, and what it leaves behind."""
    level = highest = 0.0
    for _, change in memory:
        level += change
        highest = max(highest, level)
    return highest, level


def without_link(workload: Workload) -> Workload:
    """The same with a host link that costs nothing: what a faster one could gain at most."""
    return replace(workload, host=INSTANT)
