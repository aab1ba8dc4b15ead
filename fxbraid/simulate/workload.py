"""What the simulator is told: how long each unit and each collective takes, what it keeps, how fast the links
are.

Times are seconds, sizes bytes; with constants they may be anything, as long as they agree. A workload knows
nothing of a schedule and holds no order: that comes from ``fxbraid.schedule.weave`` and
``fxbraid.schedule.lower``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from math import isfinite

from fxbraid.schedule import ScheduleError
from fxbraid.schedule.weave import Strand


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One unit of one phase, on one rank of its tensor-parallel group.

    seconds: compute. launches: it ends with a collective, which takes ``collective`` seconds (0 where tp is
    1: the order of units does not depend on it). heavy: it contains a matrix product. depth: its place in F
    or I; in W, the unit of I whose gradients it needs. saves: bytes that it makes and that outlive it. frees:
    bytes that nobody needs after it. Over F, I and W of a chunk, saves and frees add up to the same. fetch: seconds
    of an all-gather that W waits for, which is launched ahead of it; fetched: its bytes, from then to its end. again:
    a unit of I that computes again what F did not save; it waits for no collective.
    """

    name: str
    seconds: float
    depth: int
    launches: bool = False
    collective: float = 0.0
    heavy: bool = True
    saves: float = 0.0
    frees: float = 0.0
    fetch: float = 0.0
    fetched: float = 0.0
    again: bool = False


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """The units of one chunk in the order in which they run alone, and the bytes of the boundary behind it
    (``sends_f``: activations to the next chunk) and before it (``sends_i``: gradients to the previous
    one). reduces: seconds of the sum of its gradients over data-parallel replicas, 0 where there is one. parks: bytes
    of each of its storages that may leave the device between F and its backward, in the order in which F makes them.
    """

    f: tuple[UnitCost, ...]
    i: tuple[UnitCost, ...]
    w: tuple[UnitCost, ...]
    sends_f: float = 0.0
    sends_i: float = 0.0
    reduces: float = 0.0
    parks: tuple[float, ...] = ()

    def of(self, phase: str) -> tuple[UnitCost, ...]:
        """The units of phase "F", "I" or "W"."""
        return {"F": self.f, "I": self.i, "W": self.w}[phase]

    def seconds(self, phases: str = "FIW") -> float:
        """Compute of ``phases``, collectives left out."""
        return sum(unit.seconds for phase in phases for unit in self.of(phase))

    def collective(self, phases: str = "FI") -> float:
        """Time of all collectives of ``phases``."""
        units = [unit for phase in phases for unit in self.of(phase)]
        return sum(unit.collective for unit in units if unit.launches) + sum(unit.fetch for unit in units)

    @property
    def saved(self) -> float:
        """Bytes that live between F and the backward: one chunk activation, M_a."""
        return sum(unit.saves for unit in self.f)

    def scaled(self, factor: float) -> ChunkCost:
        """The same chunk with its compute ``factor`` times as long."""
        f, i, w = (tuple(replace(u, seconds=u.seconds * factor) for u in self.of(phase)) for phase in "FIW")
        return replace(self, f=f, i=i, w=w)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks: a message occupies it for bytes / bandwidth, and arrives ``latency``
    later.

    rendezvous: a message starts when its receive has been posted (``lower`` posts one step ahead), as with
    NCCL; otherwise it starts when it is sent.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    rendezvous: bool = True

    def __post_init__(self) -> None:
        if not (isfinite(self.latency) and self.latency >= 0 and self.bandwidth > 0):
            raise ScheduleError(
                "a link needs a finite latency >= 0 s and bandwidth > 0 bytes/s, "
                f"got {self.latency} and {self.bandwidth}"
            )


INSTANT = Link()
"""Messages take no time."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Costs of all S = p x v chunks for one micro-batch.

    link: every pair of ranks, except those in ``links`` (by source and destination). host: each way between a device
    and its host, for offload. flops: what the model needs for one micro-batch, over all chunks, on one rank of each TP
    group (its 1/t); peak: FLOP/s of one device. Both are only read for the MFU. memory_unit, time_unit: what numbers
    are in, for the pictures; "" are plain units of time. static: bytes per chunk that are there all the time (weights,
    gradients, optimizer). contention: share of the device that a running collective takes: compute beside it
    goes on at 1 - contention.
    """

    chunks: tuple[ChunkCost, ...]
    link: Link = INSTANT
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    flops: float = 0.0
    peak: float = 0.0
    static: tuple[float, ...] = ()
    label: str = "constants"
    memory_unit: str = "bytes"
    contention: float = 0.0
    time_unit: str = "s"
    host: Link = INSTANT

    def link_between(self, source: int, destination: int) -> Link:
        """The link from rank to rank."""
        return self.links.get((source, destination), self.link)

    def merged(self) -> Workload:
        """Half as many chunks, each of two neighbours: what the same model costs with half the chunks a rank.

        An approximation of tracing it anew: the units at the seam stay apart, and layers are not balanced again.
        """
        if len(self.chunks) % 2:
            raise ScheduleError(f"{len(self.chunks)} chunks do not merge in pairs")
        static = tuple(a + b for a, b in zip(self.static[::2], self.static[1::2], strict=True))
        return replace(self.cut(range(2, len(self.chunks), 2)), static=static)

    def cut(self, bounds: Sequence[int]) -> Workload:
        """The chunks put together to fewer: ``bounds`` are the first of each but the first. What a model costs when
        it is cut so, where these are its layers one by one (an approximation as in :meth:`merged`)."""
        chunks = tuple(reduce(joined, self.chunks[a:b]) for a, b in pairwise((0, *bounds, len(self.chunks))))
        return replace(self, chunks=chunks, static=())

    def imbalanced(self, factors: Mapping[int, float], rank_of: tuple[int, ...]) -> Workload:
        """The chunks of rank r take ``factors[r]`` times as long; ``rank_of[chunk]`` is the placement."""
        for rank, factor in factors.items():
            if rank not in rank_of or not (isfinite(factor) and factor > 0):
                raise ScheduleError(
                    f"imbalance {rank}:{factor} does not fit: "
                    f"ranks are 0..{max(rank_of)}, factors are positive and finite"
                )
        chunks = tuple(
            chunk.scaled(factors[rank]) if rank in factors else chunk
            for chunk, rank in zip(self.chunks, rank_of, strict=True)
        )
        return replace(self, chunks=chunks)


def joined(a: ChunkCost, b: ChunkCost) -> ChunkCost:
    """``a`` and the chunk behind it as one."""

    def behind(units: tuple[UnitCost, ...], made: tuple[UnitCost, ...]) -> tuple[UnitCost, ...]:
        deepest = 1 + max((unit.depth for unit in made), default=-1)
        return tuple(replace(unit, depth=unit.depth + deepest) for unit in units)

    return ChunkCost(
        f=(*a.f, *behind(b.f, a.f)),
        i=(*b.i, *behind(a.i, b.i)),
        w=(*b.w, *behind(a.w, b.i)),
        sends_f=b.sends_f,
        sends_i=a.sends_i,
        reduces=a.reduces + b.reduces,
        parks=(*a.parks, *b.parks),
    )


def strand(
    units: tuple[UnitCost, ...], phase: str, own: bool, costs: tuple[UnitCost, ...] | None = None
) -> Strand:
    """What ``weave`` needs to know of the units of one phase; with ``costs``, the same units at the times that their
    order is made from, what ``listorder`` needs to know.
    """
    if costs is not None and len(costs) != len(units):
        raise ScheduleError(
            f"the order is to be made from costs of {len(costs)} {phase} units, but the chunk has {len(units)}; make "
            "both workloads from the same partition"
        )
    return Strand(
        phase=phase,
        launches=tuple(unit.launches for unit in units),
        heavy=tuple(unit.heavy for unit in units),
        depth=tuple(unit.depth for unit in units),
        own=own,
        fetches=tuple(unit.fetch > 0 for unit in units),
        again=tuple(unit.again for unit in units),
        seconds=() if costs is None else tuple(unit.seconds for unit in costs),
        collective=() if costs is None else tuple(unit.collective * unit.launches for unit in costs),
    )
