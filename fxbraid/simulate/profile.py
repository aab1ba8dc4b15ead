"""Workloads from measured unit times: a plain mapping from unit to seconds, as a benchmark of this machine
writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxbraid.schedule import ScheduleError
from fxbraid.simulate.workload import INSTANT, ChunkCost, Link, UnitCost, Workload


def from_profile(
    seconds: Mapping[str, float],
    chunks: Sequence[Sequence[str]],
    *,
    collective: float | Mapping[str, float] = 0.0,
    saves: Mapping[str, float] | None = None,
    message: float = 0.0,
    link: Link = INSTANT,
) -> Workload:
    """Every chunk from the names of its units in forward order, for example ``["embed", "attn0", "mlp0"]``.

    seconds: by ``<unit>_<phase>`` (``attn0_F``), else by the kind without its number (``attn_F``), as equal
    units share one measurement; a phase that a unit does not have may be missing if another phase is there.
    Units named attn* and mlp* launch a collective in F and in I, which takes ``collective`` seconds, or by
    ``<unit>_<phase>`` as above. saves: bytes by unit, from F to I. message: bytes of a boundary.
    """
    if not chunks:
        raise ScheduleError("a profile needs the names of the units of at least one chunk")
    made = tuple(_chunk(names, seconds, collective, saves or {}, message) for names in chunks)
    return Workload(made, link=link, label="measured profile")


def _chunk(
    names: Sequence[str],
    seconds: Mapping[str, float],
    collective: float | Mapping[str, float],
    saves: Mapping[str, float],
    message: float,
) -> ChunkCost:
    back = list(reversed(names))
    for name in names:
        if all(_find(seconds, name, phase) is None for phase in "FIW"):
            raise ScheduleError(
                f"the profile says nothing of unit {name!r}: it has neither {name}_F nor {_kind(name)}_F; "
                f"it knows {', '.join(sorted(seconds)[:12])}"
            )

    def units(order: Sequence[str], phase: str) -> tuple[UnitCost, ...]:
        found = []
        for depth, name in enumerate(order):
            time = _find(seconds, name, phase)
            if time is None:
                continue
            launches = phase != "W" and _kind(name) in ("attn", "mlp")
            held = saves.get(name, saves.get(_kind(name), 0.0))
            found.append(
                UnitCost(
                    name,
                    time,
                    depth,
                    launches,
                    _time(collective, name, phase) if launches else 0.0,
                    saves=held if phase == "F" else 0.0,
                    frees=held if phase == "I" else 0.0,
                )
            )
        return tuple(found)

    tail = (UnitCost("tail", 0.0, len(names), heavy=False),)
    return ChunkCost(units(names, "F") + tail, units(back, "I") + tail, units(back, "W"), message, message)


def _find(seconds: Mapping[str, float], name: str, phase: str) -> float | None:
    return seconds.get(f"{name}_{phase}", seconds.get(f"{_kind(name)}_{phase}"))


def _time(collective: float | Mapping[str, float], name: str, phase: str) -> float:
    if not isinstance(collective, Mapping):
        return collective
    found = _find(collective, name, phase)
    if found is None:
        raise ScheduleError(f"no time is given for the collective behind {name}_{phase}")
    return found


def _kind(name: str) -> str:
    return name.rstrip("0123456789")
