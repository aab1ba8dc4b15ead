"""What of a schedule's saved activations leaves the device and when, as data.

A *parcel* is what leaves of one chunk and micro-batch: items (the storages that pass ``offload`` counts), in the order
in which they leave. An item is copied behind the step of its F, is gone from the device before step ``away``, takes
memory again from step ``reload`` on, and is back before the step of its backward::

    step    3     4     5     6    ...   11    12    13
           F0_2        away              reload      B0_2
             |- out -|                    |-- back --|

Numbers of steps are places in the list of the parcel's rank. ``lower`` makes instructions of it, the simulator moves
its bytes over the host link, ``simulate.offload`` makes plans from costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fxbraid.schedule.action import Phase, parts
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Item:
    """One storage: ``number`` among those of its chunk, bytes, and the steps before which it is gone and takes memory
    again."""

    number: int
    size: float
    away: int
    reload: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """``forward``, ``backward``: the steps of its F, and of its I or B. Items leave in their order and come back in the
    opposite one, so that what left first is away for longest."""

    chunk: int
    microbatch: int
    forward: int
    backward: int
    items: tuple[Item, ...]

    @property
    def size(self) -> float:
        """Bytes."""
        return sum(item.size for item in self.items)

    def leaves(self) -> tuple[int, int, int]:
        """Parcels leave in this order."""
        return self.forward, self.chunk, self.microbatch

    def returns(self) -> tuple[int, int, int]:
        """They are back in this order."""
        return self.backward, self.chunk, self.microbatch


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """``parcels``: of each rank, in the order of their F's. ``wanted``: per rank, the bytes of a step that were asked
    to leave; what leaves of them is what there is time for."""

    parcels: tuple[tuple[Parcel, ...], ...]
    wanted: tuple[float, ...] = ()

    def moved(self, rank: int) -> float:
        """Bytes that leave rank ``rank`` in a step, and come back."""
        return sum(parcel.size for parcel in self.parcels[rank])

    def share(self, rank: int) -> float:
        """The share of what was asked to leave that leaves."""
        wanted = self.wanted[rank] if self.wanted else 0.0
        return self.moved(rank) / wanted if wanted else 0.0


@dataclass(slots=True)
class Moves:
    """What happens around one step of a rank, each in order: before it items are let go (``away``) and start to come
    back (``reload``), whole parcels are waited for (``back``); behind it parcels start to leave (``out``). Items are
    given by their places in the parcel."""

    away: list[tuple[Parcel, tuple[int, ...]]] = field(default_factory=list)
    reload: list[tuple[Parcel, tuple[int, ...]]] = field(default_factory=list)
    back: list[Parcel] = field(default_factory=list)
    out: list[Parcel] = field(default_factory=list)


def moves(parcels: Iterable[Parcel]) -> dict[int, Moves]:
    """What happens around each step of a rank, by the step."""
    found: dict[int, Moves] = {}

    def at(step: int) -> Moves:
        return found.setdefault(step, Moves())

    parcels = sorted(parcels, key=Parcel.leaves)
    for parcel in parcels:
        at(parcel.forward).out.append(parcel)
        for step in sorted({item.away for item in parcel.items}):
            gone = tuple(k for k, item in enumerate(parcel.items) if item.away == step)
            at(step).away.append((parcel, gone))
    for parcel in sorted(parcels, key=Parcel.returns):
        for step in sorted({item.reload for item in parcel.items}):
            again = [k for k, item in enumerate(parcel.items) if item.reload == step]
            at(step).reload.append((parcel, tuple(reversed(again))))
        at(parcel.backward).back.append(parcel)
    return found


def check_offload(schedule: Schedule, plan: OffloadPlan) -> None:
    """Raises ScheduleError, naming rank and parcel, unless every parcel leaves behind its own F, each item is away
    before it comes back and takes memory again one step or more before its own backward, and none leaves twice."""
    if len(plan.parcels) != schedule.p:
        raise ScheduleError(f"the plan is for {len(plan.parcels)} ranks, and the schedule has {schedule.p}")
    for rank, parcels in enumerate(plan.parcels):
        places = {
            (action.phase is Phase.F, action.chunk, action.microbatch): at
            for at, step in enumerate(schedule.actions[rank])
            for action in parts(step)
            if action.phase is not Phase.W
        }
        seen: set[tuple[int, int]] = set()
        for parcel in parcels:
            name, key = f"rank {rank}, {parcel.chunk}F{parcel.microbatch}", (parcel.chunk, parcel.microbatch)
            if key in seen:
                raise ScheduleError(f"{name}: its activations leave twice")
            seen.add(key)
            if not parcel.items or len({item.number for item in parcel.items}) < len(parcel.items):
                raise ScheduleError(f"{name}: a parcel holds storages, each once")
            if (places.get((True, *key)), places.get((False, *key))) != (parcel.forward, parcel.backward):
                raise ScheduleError(
                    f"{name}: the plan has it leave behind step {parcel.forward} and back for step "
                    f"{parcel.backward}; its F and its backward are steps {places.get((True, *key))} and "
                    f"{places.get((False, *key))}"
                )
            for item in parcel.items:
                if not parcel.forward < item.away < item.reload < parcel.backward:
                    raise ScheduleError(
                        f"{name}: storage {item.number} is away from step {item.away} to {item.reload}; that has to "
                        f"lie behind its F in step {parcel.forward} and a step before its backward in {parcel.backward}"
                    )
            for one, other in zip(parcel.items, parcel.items[1:], strict=False):
                if one.away > other.away or one.reload < other.reload:
                    raise ScheduleError(f"{name}: what leaves first has to be gone first and come back last")
