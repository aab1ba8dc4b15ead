"""What a bench compares: an entry names an engine, a schedule and what becomes of its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxbraid import schedule
from fxbraid.bench.pippy import SCHEDULES
from fxbraid.passes.block import Collectives

BLOCKING, FREE = ":blocking", ":free"
ORDER = "order:"
AUTO = "auto"
MODES: dict[str, Collectives] = {BLOCKING: "blocking", FREE: "free"}
#: Names that stand for many.
GROUPS = ("all", "ours", "torch", "orders")

Engine = Literal["fxbraid", "order", "torch"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a bench.

    engine: "fxbraid", or "torch" (the real class on DTensor stages), or "order" (the order of torch's class on
    fxbraid's executor, unbraided, each collective waited for where it is launched). schedule: fxbraid's family or
    torch's class name. collectives: "free" leaves them out, and is timing only.
    """

    name: str
    engine: Engine
    schedule: str
    collectives: Collectives = "overlap"

    @property
    def free(self) -> bool:
        return self.collectives == "free"


def parse(name: str) -> Entry:
    """``stp``, ``stp:blocking``, ``stp:free``, ``ScheduleGPipe``, ``order:ZBVZeroBubble``; see :class:`Entry`.

    Other spellings of fxbraid's names become the name itself. Raises ``ScheduleError`` for what nobody has, and for a
    class of torch with a suffix, which means nothing there.
    """
    if name.startswith(ORDER):
        kind = name.removeprefix(ORDER)
        kind = kind if kind in SCHEDULES else f"Schedule{kind}"
        if kind not in SCHEDULES:
            raise schedule.ScheduleError(
                f"{name!r} asks for the order of a class that torch.distributed.pipelining does not have; there are "
                f"{', '.join(ORDER + short(known) for known in SCHEDULES)}"
            )
        return Entry(ORDER + short(kind), "order", kind, "blocking")
    if name in SCHEDULES:
        return Entry(name, "torch", name)
    plain, colon, mode = name.partition(":")
    if plain in SCHEDULES and colon + mode in (BLOCKING, FREE):
        raise schedule.ScheduleError(
            f"{name!r}: torch's classes always block, and have no order of fxbraid's to block or free; take {plain}, "
            f"or {schedule.canonical(plain)}{colon}{mode} for fxbraid's schedule of that name"
        )
    for suffix, collectives in MODES.items():
        if name.endswith(suffix):
            family = schedule.canonical(name.removesuffix(suffix))
            return Entry(family + suffix, "fxbraid", family, collectives)
    family = schedule.canonical(name)
    return Entry(family, "fxbraid", family)


def expand(names: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the names of groups by their members, other spellings by the name, and keep each name once."""
    ours = (*schedule.FAMILIES, AUTO, f"stp{BLOCKING}", f"stp{FREE}")
    torch = tuple(SCHEDULES)
    orders = tuple(ORDER + short(name) for name in SCHEDULES)
    groups = {"ours": ours, "torch": torch, "orders": orders, "all": (*ours, *orders, *torch)}
    full = (one for name in names for one in groups.get(name, (name,)))
    return tuple(dict.fromkeys(parse(name).name for name in full))


def short(name: str) -> str:
    """torch's class name without "Schedule"."""
    return name.removeprefix("Schedule")
