"""``braid(offload=...)``: what was asked to leave the device, the plan that came of it, and what to say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .passes.errors import BraidError
from .passes.offload import stored
from .passes.pipeline import Lowered
from .passes.units import ChunkUnits, Unit
from .runtime.mesh import Mesh
from .runtime.profile import Profile, gather_workload, meet
from .schedule import Schedule
from .schedule.offload import OffloadPlan
from .simulate import Workload, peaks
from .simulate.offload import Wanted, early_chunks, plan_offload, without_link

Offload = str | float | Callable[[int, Unit], bool]
"""What ``braid(offload=...)`` takes: "chunk0", a fraction of the same chunks, or which units of which chunks."""

CHUNK0 = "chunk0"
MATTERS = 0.01
"""Lower peaks than this share are not worth a word."""


def check_offload(offload: object) -> None:
    """Raise :class:`BraidError` for what can't be offloaded."""
    if offload is None or callable(offload) or offload == CHUNK0:
        return
    if isinstance(offload, int | float) and not isinstance(offload, bool) and 0 < offload <= 1:
        return
    raise BraidError(
        f'offload={offload!r}: use "{CHUNK0}" (the activations of every rank\'s first chunk, as much as there is time '
        "for), a fraction of them above 0 and up to 1, a function (chunk, unit) -> bool of the units whose activations "
        "may leave, or None"
    )


@dataclass(frozen=True)
class Offloading:
    """What leaves under one schedule at given costs. ``wanted``: by chunk, of all ranks; ``links``: as measured."""

    schedule: Schedule
    costs: Workload
    wanted: Mapping[int, Wanted]
    rank: int
    braided: bool
    ordered_by: Workload | None

    @cached_property
    def own(self) -> OffloadPlan:
        """For this rank alone."""
        return self._plan(self.costs, [self.rank])

    @cached_property
    def every(self) -> OffloadPlan:
        """For all ranks; for this one the same."""
        return self._plan(self.costs, None)

    def _plan(self, costs: Workload, ranks: list[int] | None) -> OffloadPlan:
        return plan_offload(
            self.schedule,
            costs,
            self.wanted,
            braided=self.braided,
            ordered_by=self.ordered_by,
            ranks=ranks,
        )

    def plan_for(self, lowered: Lowered) -> OffloadPlan:
        """``own`` for another trace of the same chunks (batches of another shape): the same storages, as far as it has
        them, at their sizes there."""
        return fitted(self.own, self.rank, lowered)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """For the report of this rank: what leaves, what that is worth, and whether the link holds it back."""
        plan, rank = self.own, self.rank
        link = self.costs.host
        where = (
            f"{link.latency * 1e6:g} us + {link.bandwidth / 1e9:.3g} GB/s"
            if link.bandwidth < float("inf")
            else "a host link that takes no time"
        )
        before, after = (self._peak(one) for one in (None, plan))
        asked = plan.wanted[rank]
        if not asked:
            return ("offload: nothing of this rank's chunks was asked to leave",)
        said = (
            f"offload: {_size(plan.moved(rank))} of {_size(asked)} ({100 * plan.share(rank):.0f} %) go to the host and "
            f"come back in each step, {len(plan.parcels[rank])} of {self.schedule.m} micro-batches, over {where}; "
            f"predicted peak of saved activations {_size(after)} instead of {_size(before)} "
            f"({100 * (after / before - 1):+.0f} %)"
        )
        free = self._peak(self._plan(without_link(self.costs), [rank]))
        if after <= free + MATTERS * before:
            return (said,)
        return (
            said,
            f"offload: the host link holds it back: there is no time to move more, and one that takes no time would "
            f"bring the peak to {_size(free)} ({100 * (free / before - 1):+.0f} %)",
        )

    def _peak(self, plan: OffloadPlan | None) -> float:
        return peaks(self.schedule, self.costs, ordered_by=self.ordered_by, offload=plan)[self.rank]


def fitted(plan: OffloadPlan, rank: int, lowered: Lowered) -> OffloadPlan:
    """The parcels of ``rank`` with the storages and sizes that ``lowered`` has."""
    sizes = {index: [one.nbytes for one in stored(chunk)] for index, chunk in lowered.chunks.items()}
    parcels = []
    for parcel in plan.parcels[rank]:
        known = sizes[parcel.chunk]
        items = tuple(
            replace(item, size=known[item.number]) for item in parcel.items if item.number < len(known)
        )
        if items:
            parcels.append(replace(parcel, items=items))
    rows = tuple(tuple(parcels) if r == rank else () for r in range(len(plan.parcels)))
    return replace(plan, parcels=rows)


def offloading(
    offload: Offload,
    schedule: Schedule,
    lowered: Lowered,
    profile: Profile,
    mesh: Mesh,
    *,
    braided: bool = True,
    ordered_by: Workload | None = None,
) -> Offloading:
    """What of ``lowered``'s activations there is time for, at the costs of ``profile``. Collective; the same on every
    rank."""
    costs = gather_workload(lowered, profile, mesh)
    if callable(offload):
        wanted = _chosen(offload, lowered)
    else:
        wanted = early_chunks(schedule, 1.0 if offload == CHUNK0 else float(offload))
    return Offloading(schedule, costs, wanted, mesh.pp_rank, braided, ordered_by)


def _chosen(choose: Callable[[int, Unit], bool], lowered: Lowered) -> dict[int, Wanted]:
    """The storages of the units that ``choose`` wants, of every rank's chunks."""
    try:
        mine: dict[str, Any] = {str(i): _numbers(choose, chunk) for i, chunk in lowered.chunks.items()}
    except Exception as error:  # on this rank; the others are to hear of it
        said = (
            str(error) if isinstance(error, BraidError) else f"offload raised {type(error).__name__}: {error}"
        )
        mine = {"error": said}
    found: dict[int, Wanted] = {}
    parts = meet(mine)
    if errors := [part["error"] for part in parts if "error" in part]:
        raise BraidError(errors[0])
    for part in parts:
        for index, numbers in part.items():
            wanted = Wanted(numbers=frozenset(numbers))
            if found.setdefault(int(index), wanted) != wanted:
                raise BraidError(
                    f"offload answers differently on ranks that share chunk {index}; it must answer by chunk and unit"
                )
    return found


def _numbers(choose: Callable[[int, Unit], bool], chunk: ChunkUnits) -> list[int]:
    numbers = []
    for number, one in enumerate(stored(chunk)):
        if one.unit is None:
            continue
        answer = choose(chunk.index, one.unit)
        if not isinstance(answer, bool):
            raise BraidError(
                f"offload says {answer!r} of unit {one.unit.name} of chunk {chunk.index}; it answers True or False"
            )
        if answer:
            numbers.append(number)
    return numbers


def _size(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
