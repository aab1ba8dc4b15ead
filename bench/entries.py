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

    Raises ``ScheduleError`` for a class that torch does not have; whether fxbraid has a family is found out when it is
    built.
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
    if name.endswith(BLOCKING):
        return Entry(name, "fxbraid", name.removesuffix(BLOCKING), "blocking")
    if name.endswith(FREE):
        return Entry(name, "fxbraid", name.removesuffix(FREE), "free")
    return Entry(name, "fxbraid", name)


def expand(names: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the names of groups by their members, and keep each name once."""
    ours = (*schedule.FAMILIES, AUTO, f"stp{BLOCKING}", f"stp{FREE}")
    torch = tuple(SCHEDULES)
    orders = tuple(ORDER + short(name) for name in SCHEDULES)
    groups = {"ours": ours, "torch": torch, "orders": orders, "all": (*ours, *orders, *torch)}
    full = (one for name in names for one in groups.get(name, (name,)))
    return tuple(dict.fromkeys(full))


def short(name: str) -> str:
    """torch's class name without "Schedule"."""
    return name.removeprefix("Schedule")
