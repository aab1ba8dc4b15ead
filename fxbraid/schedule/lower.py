"""A schedule as one instruction list per rank: what to post, what to wait for, what to run.

The FX program of a rank is this list with blocks in it, one node per instruction (``passes.program``); the
simulator reads the same list where no graph exists.

Every (phase, boundary) is a channel of its own and carries micro-batches in increasing order (the checker demands
it), so both ends agree on the order of messages by construction, whatever else they do. A receive is posted one
step before the step that needs it; a send leaves inside its block and is never waited for before the end.

With an offload plan (:mod:`fxbraid.schedule.offload`) saved activations leave the device behind their F and come back
ahead of their backward: each copy is started early and waited for late, as messages are.

With data parallelism a chunk's gradients are summed over the replicas behind its last W (or B), while other chunks and
micro-batches go on; that, too, is waited for at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fxbraid.schedule.action import Action, Phase, Step, parts
from fxbraid.schedule.offload import Moves, OffloadPlan, Parcel, check_offload, moves
from fxbraid.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """F: activations from ``chunk`` to ``chunk + 1``; I: gradients from ``chunk`` to ``chunk - 1``."""

    phase: Literal["F", "I"]
    chunk: int

    @property
    def target(self) -> int:
        return self.chunk + 1 if self.phase == "F" else self.chunk - 1


@dataclass(frozen=True, slots=True)
class Message:
    """One micro-batch over one channel."""

    channel: Channel
    microbatch: int


@dataclass(frozen=True, slots=True)
class Post:
    """Give a receive its buffer."""

    message: Message


@dataclass(frozen=True, slots=True)
class Arrive:
    """Wait for a posted receive."""

    message: Message


@dataclass(frozen=True, slots=True)
class Run:
    """Run the block of a step; its sends are inside."""

    step: Step


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start to sum a chunk's gradients over the data-parallel replicas: its last W is done."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Start to copy a parcel to the host; its F is done."""

    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Away:
    """Wait for the copies of these items (places in the parcel) and let go of them on the device."""

    parcel: Parcel
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reload:
    """Start to copy these items back, in this order."""

    parcel: Parcel
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Back:
    """Wait until all of a parcel is back: its backward is next."""

    parcel: Parcel


Instruction = Post | Arrive | Run | Reduce | Offload | Away | Reload | Back


def channels(schedule: Schedule) -> list[tuple[Channel, int, int]]:
    """Every channel between two ranks as (channel, source rank, destination rank), in one fixed order."""
    place = schedule.placement
    found = []
    for chunk in range(place.n_chunks - 1):
        here, there = place.rank_of(chunk), place.rank_of(chunk + 1)
        if here != there:
            found.append((Channel("F", chunk), here, there))
            found.append((Channel("I", chunk + 1), there, here))
    return found


def needs(schedule: Schedule, action: Action) -> Message | None:
    """The message from another rank that ``action`` needs before it can start, if any."""
    place = schedule.placement
    here = place.rank_of(action.chunk)
    if action.phase is Phase.F and action.chunk > 0:
        channel = Channel("F", action.chunk - 1)
    elif action.phase in (Phase.I, Phase.B) and action.chunk < place.n_chunks - 1:
        channel = Channel("I", action.chunk + 1)
    else:
        return None
    if place.rank_of(channel.chunk) == here:
        return None
    return Message(channel, action.microbatch)


def lower(
    schedule: Schedule, rank: int, *, reduce: bool = False, offload: OffloadPlan | None = None
) -> list[Instruction]:
    """The instructions of ``rank``, in order; with ``reduce``, those that sum gradients over replicas; with
    ``offload``, those that move saved activations to the host and back. Raises ScheduleError for a plan that does not
    fit the schedule."""
    row = schedule.actions[rank]
    wanted = [[m for a in parts(step) if (m := needs(schedule, a)) is not None] for step in row]
    if offload is not None:
        check_offload(schedule, offload)
    moved = moves(offload.parcels[rank]) if offload is not None else {}
    return list(_instructions(row, wanted, complete(row) if reduce else {}, moved))


def complete(row: tuple[Step, ...]) -> dict[int, list[int]]:
    """The chunks whose gradients are complete behind a step, by its index."""
    last: dict[int, int] = {}
    for i, step in enumerate(row):
        last |= {action.chunk: i for action in parts(step) if action.phase in (Phase.W, Phase.B)}
    found: dict[int, list[int]] = {}
    for chunk, i in sorted(last.items()):
        found.setdefault(i, []).append(chunk)
    return found


def _instructions(
    row: tuple[Step, ...],
    wanted: list[list[Message]],
    complete: dict[int, list[int]],
    moved: dict[int, Moves],
) -> Iterator[Instruction]:
    for message in wanted[0] if wanted else []:
        yield Post(message)
    for i, step in enumerate(row):
        for message in wanted[i + 1] if i + 1 < len(row) else []:
            yield Post(message)
        for message in wanted[i]:
            yield Arrive(message)
        here = moved.get(i, Moves())
        yield from (Away(parcel, items) for parcel, items in here.away)
        yield from (Reload(parcel, items) for parcel, items in here.reload)
        yield from (Back(parcel) for parcel in here.back)
        yield Run(step)
        yield from (Offload(parcel) for parcel in here.out)
        for chunk in complete.get(i, ()):
            yield Reduce(chunk)
