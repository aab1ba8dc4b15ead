"""Pipeline schedules as data: built, checked, transformed, read, written. No torch, no state.

>>> from fxbraid import schedule
>>> one = schedule.build("1f1b", p=2, m=2)
>>> schedule.check(one)
>>> print(one.to_csv())
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
<BLANKLINE>
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from fxbraid.schedule.action import Action, Composite, Phase, Step, parse_step, parts
from fxbraid.schedule.braid import TYPICAL, braid
from fxbraid.schedule.check import check
from fxbraid.schedule.controllable import v_half, v_min
from fxbraid.schedule.dualpipev import dualpipev
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.gpipe import gpipe
from fxbraid.schedule.interleaved import interleaved_1f1b, interleaved_zero_bubble, looped_bfs, zb_h1
from fxbraid.schedule.local import EFFORT
from fxbraid.schedule.low_memory import stp_low_memory
from fxbraid.schedule.makespan import Costs, makespan
from fxbraid.schedule.memory import Peak, peak_live, peak_memory
from fxbraid.schedule.one_f_one_b import one_f_one_b
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.search import search
from fxbraid.schedule.stp import stp
from fxbraid.schedule.stp_plus import stp_plus
from fxbraid.schedule.transform import (
    forward_only,
    merge_backward,
    reproducible,
    split_backward,
    truncate,
    unbraid,
)
from fxbraid.schedule.zbv import zbv

__all__ = [
    "FAMILIES",
    "Action",
    "Composite",
    "Costs",
    "Family",
    "Peak",
    "Phase",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Step",
    "auto",
    "braid",
    "build",
    "check",
    "forward_only",
    "makespan",
    "merge_backward",
    "parse_step",
    "parts",
    "peak_live",
    "peak_memory",
    "reproducible",
    "split_backward",
    "truncate",
    "unbraid",
]


class Family(NamedTuple):
    """A named schedule: the function of (p, m, v) that makes it, the default v and whether v may differ
    from that, and the other names it goes by (compared without case, separators and a leading "Schedule").
    """

    make: Callable[[int, int, int], Schedule]
    v: int
    any_v: bool
    aliases: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": Family(lambda p, m, v: gpipe(p, m), 1, False),
        "1f1b": Family(lambda p, m, v: one_f_one_b(p, m), 1, False),
        "interleaved_1f1b": Family(lambda p, m, v: interleaved_1f1b(p, m, v), 2, True),
        "looped_bfs": Family(lambda p, m, v: looped_bfs(p, m, v), 2, True),
        "interleaved_zero_bubble": Family(
            lambda p, m, v: interleaved_zero_bubble(p, m, v), 2, True, ("zb1p",)
        ),
        "zb_h1": Family(lambda p, m, v: zb_h1(p, m), 1, False),
        "zbv": Family(lambda p, m, v: zbv(p, m), 2, False, ("zbvzerobubble",)),
        "dualpipev": Family(lambda p, m, v: dualpipev(p, m), 2, False),
        "v_half": Family(lambda p, m, v: v_half(p, m), 2, False),
        "v_min": Family(lambda p, m, v: v_min(p, m), 2, False),
        "stp": Family(lambda p, m, v: stp(p, m), 2, False),
        "stp_plus": Family(lambda p, m, v: stp_plus(p, m), 2, False),
        "stp_low_memory": Family(lambda p, m, v: stp_low_memory(p, m), 2, False),
    }
)
"""Every named schedule. torch's class names are accepted as well, with or without "Schedule"."""


def build(name: str, *, p: int, m: int, v: int | None = None) -> Schedule:
    """The schedule ``name`` on ``p`` ranks for ``m`` micro-batches, and ``v`` chunks a rank if it has a
    choice.

    ``auto`` is a name too: the search at its default costs and without a memory limit.
    """
    key = canonical(name)
    if key == "auto":
        return auto(p=p, m=m, v=2 if v is None else v)
    family = FAMILIES[key]
    if v is not None and v != family.v and not family.any_v:
        raise ScheduleError(
            f"{key} has v={family.v} chunks a rank, not {v}; leave v out, or take interleaved_1f1b"
        )
    v = family.v if v is None else v
    if min(p, m, v) < 1:
        raise ScheduleError(f"a schedule needs p, m, v >= 1, got p={p}, m={m}, v={v}")
    return family.make(p, m, v)


def canonical(name: str) -> str:
    """The one name of what ``name`` stands for: a key of ``FAMILIES``, or "auto". Raises ``ScheduleError``."""
    known = {_plain(alias): key for key, family in FAMILIES.items() for alias in (key, *family.aliases)}
    key = (known | {"auto": "auto"}).get(_plain(name))
    if key is None:
        raise ScheduleError(f"no schedule is named {name!r}; there are {', '.join(FAMILIES)} and auto")
    return key


def auto(
    *,
    p: int,
    m: int,
    v: int = 2,
    costs: Costs = TYPICAL,
    max_live: int | None = None,
    effort: int = EFFORT,
) -> Schedule:
    """The fastest schedule that a search finds at ``costs`` with at most ``max_live`` activations (F to W).

    Never slower than the fastest named schedule with ``v`` chunks a rank under the same limit, as it starts
    from them all; see ``fxbraid.schedule.search``.
    """
    if min(p, m, v) < 1:
        raise ScheduleError(f"a schedule needs p, m, v >= 1, got p={p}, m={m}, v={v}")
    names = [name for name, family in FAMILIES.items() if family.any_v or family.v == v]
    named = [partial(build, name, p=p, m=m, v=v) for name in names]
    return search(named, p, m, v, costs=costs, max_live=max_live, effort=effort)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower())).removeprefix("schedule")
