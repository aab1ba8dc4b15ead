"""A rank's link to its host on a clock: one lane out and one back, each a queue.

What one instruction copies takes latency + bytes / bandwidth, behind what its lane was given before; an item is there
when its own last byte is. Compute is not slowed down: copies have engines of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fxbraid.schedule.offload import Moves, Parcel, moves
from fxbraid.simulate.workload import Link


@dataclass(frozen=True, slots=True)
class Copy:
    """What one Offload or Reload copies, launched around ``step``, on its lane from ``start`` to ``end``."""

    way: Literal["out", "back"]
    chunk: int
    microbatch: int
    step: int
    size: float
    launched: float
    start: float
    end: float


@dataclass(slots=True)
class HostLanes:
    """Both lanes of one rank. copies: in order of launch. waited: seconds for which the rank stood still for copies;
    waits: the same by the step that waited."""

    link: Link
    parcels: Sequence[Parcel]
    copies: list[Copy] = field(default_factory=list)
    waited: float = 0.0
    waits: dict[int, float] = field(default_factory=dict)
    _moves: dict[int, Moves] = field(init=False)
    _free: dict[str, float] = field(default_factory=lambda: {"out": 0.0, "back": 0.0})
    #: when each item of a parcel is on the host, and when all of it is back
    _gone: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    _back: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._moves = moves(self.parcels)

    def before(self, step: int, now: float) -> float:
        """When ``step``, which could start at ``now``, starts: what must be away is, and what it reads is back."""
        found = self._moves.get(step)
        if found is None:
            return now
        start = now
        for parcel, items in found.away:
            ends = self._gone[parcel.chunk, parcel.microbatch]
            now = max(now, *(ends[k] for k in items))
        for parcel, items in found.reload:
            ends = self._copy("back", parcel, items, step, now)
            key = parcel.chunk, parcel.microbatch
            self._back[key] = max(ends[-1], self._back.get(key, 0.0))
        for parcel in found.back:
            now = max(now, self._back[parcel.chunk, parcel.microbatch])
        if now > start:
            self.waited += now - start
            self.waits[step] = now - start
        return now

    def behind(self, step: int, now: float) -> None:
        """``step`` has ended at ``now``: parcels start to leave."""
        found = self._moves.get(step)
        for parcel in found.out if found is not None else ():
            every = tuple(range(len(parcel.items)))
            self._gone[parcel.chunk, parcel.microbatch] = self._copy("out", parcel, every, step, now)

    def _copy(
        self, way: Literal["out", "back"], parcel: Parcel, items: Sequence[int], step: int, now: float
    ) -> list[float]:
        """When each of ``items`` is there."""
        start = max(now, self._free[way])
        ends: list[float] = []
        size = 0.0
        for k in items:
            size += parcel.items[k].size
            ends.append(start + self.link.latency + size / self.link.bandwidth)
        self._free[way] = ends[-1]
        self.copies.append(Copy(way, parcel.chunk, parcel.microbatch, step, size, now, start, ends[-1]))
        return ends


def memory_changes(parcels: Sequence[Parcel]) -> dict[int, float]:
    """By step: bytes that a rank holds more (or less) from its start on, since items are let go or come back."""
    found: dict[int, float] = {}
    for parcel in parcels:
        for item in parcel.items:
            found[item.away] = found.get(item.away, 0.0) - item.size
            found[item.reload] = found.get(item.reload, 0.0) + item.size
    return found
