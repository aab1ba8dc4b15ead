"""The regression gate: two JSON files of one bench, compared engine by engine.

Machines differ, so on a real or paced clock an engine's time counts relative to a baseline engine of the same file,
round by round (rounds are interleaved: both met the same moment of the machine): one of torch's where there is one,
which no change to fxbraid touches. Virtual times are the same on every machine and count as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Of the config: what may differ without making two runs incomparable.
FREE_FIELDS = ("schedules", "steps")
TOLERANCE = 0.05


class CompareError(ValueError):
    """The files cannot be compared; says why."""


@dataclass(frozen=True, slots=True)
class Change:
    """One engine: time over the baseline's (or seconds), old and new, and how far it may rise for its spread."""

    name: str
    old: float
    new: float
    spread: float

    def worse(self, tolerance: float) -> bool:
        return self.new > self.old * (1 + tolerance + self.spread)

    def better(self, tolerance: float) -> bool:
        """Faster by as much as would be worse the other way round."""
        return self.new * (1 + tolerance + self.spread) < self.old


@dataclass(frozen=True, slots=True)
class Comparison:
    """``baseline``: the engine that times are relative to, None for seconds. ``own``: its own change, in seconds of
    two machines. ``changes``: of all others. ``problems``: what fails the gate."""

    baseline: str | None
    own: Change | None
    changes: tuple[Change, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def compare_files(
    old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float = TOLERANCE, baseline: str | None = None
) -> Comparison:
    """Compare two runs. Raises :class:`CompareError` where they are not runs of one thing, where a file is damaged,
    and where nothing would be compared."""
    for content, which in ((old, "old"), (new, "new")):
        check_content(content, which)
    _check_same(old, new)
    before, after = _rows(old), _rows(new)
    absolute = old["clock_name"] == "virtual" and baseline is None
    base = None if absolute else _baseline(before, after, baseline)
    problems = [f"{name} ran before and does not now" for name in before if name not in after]
    changes = [_change(before, after, name, base) for name in before if name in after and name != base]
    if not changes:
        raise CompareError(_nothing(base))
    problems += [_sentence(change, base, tolerance) for change in changes if change.worse(tolerance)]
    own = None if base is None else _change(before, after, base, None)
    if own is not None and own.worse(tolerance) and all(change.better(tolerance) for change in changes):
        problems.append(
            f"the baseline {base} was {_show(own.old, None)} and is {_show(own.new, None)}, more than any other has "
            "risen, so times relative to it can hide a slower engine; measure again, or give another --baseline"
        )
    problems += _broken(old, new, before, after)
    return Comparison(base, own, tuple(changes), tuple(problems))


def _change(before: Mapping[str, Any], after: Mapping[str, Any], name: str, base: str | None) -> Change:
    was, now = (_ratio(rows, name, base) for rows in (before, after))
    return Change(name, was[0], now[0], was[1] + now[1])


def _sentence(change: Change, base: str | None, tolerance: float) -> str:
    return (
        f"{change.name} was {_show(change.old, base)} and is {_show(change.new, base)}: "
        f"{100 * (change.new / change.old - 1):.1f} % worse, {100 * tolerance:g} % and a spread of "
        f"{100 * change.spread:.1f} % are allowed"
    )


def _nothing(base: str | None) -> str:
    if base is None:
        return "no engine is in both files, so nothing was compared"
    return (
        f"only {base} is in both files, and its seconds are those of two machines or two moments, so nothing was "
        "compared; run at least one more schedule, best one of torch's, or --compute modelled on the virtual clock"
    )


def check_content(content: Any, which: str) -> None:
    """Raise :class:`CompareError` where ``content`` is not what ``--json`` writes, or holds a time that is none."""
    kinds: dict[str, Any] = {"config": Mapping, "clock_name": str, "rows": list, "bitwise": Mapping}
    for key, kind in kinds.items():
        value = content.get(key, {} if key == "bitwise" else None) if isinstance(content, Mapping) else None
        if not isinstance(value, kind):
            raise CompareError(f"the {which} file is not what fxbraid bench --json writes: look at {key!r}")
    seen: set[str] = set()
    for number, row in enumerate(content["rows"]):
        name = row.get("name") if isinstance(row, Mapping) else None
        if not isinstance(name, str) or name in seen:
            raise CompareError(f"row {number} of the {which} file has no name of its own")
        seen.add(name)
        samples = row.get("samples_s")
        if not isinstance(samples, Sequence) or isinstance(samples, str):
            raise CompareError(f"{name} in the {which} file has no list of samples_s")
        for sample in samples:
            plain = isinstance(sample, int | float) and not isinstance(sample, bool)
            if not (plain and math.isfinite(sample) and sample > 0):
                raise CompareError(f"{name} in the {which} file took {sample!r} seconds, which is no time")
        for key in ("ok", "valid"):
            if not isinstance(row.get(key), bool):
                raise CompareError(f"{name} in the {which} file does not say whether it is {key}")


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    a, b = old["config"], new["config"]
    keys = [key for key in {**a, **b} if key not in FREE_FIELDS and a.get(key) != b.get(key)]
    if keys:
        shown = ", ".join(f"{key} {a.get(key)!r} and {b.get(key)!r}" for key in keys)
        raise CompareError(f"the files are of different runs and cannot be compared: {shown}")
    if old["clock_name"] != new["clock_name"]:
        raise CompareError(f"one file is on the {old['clock_name']} clock, the other on {new['clock_name']}")


def _rows(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows that were timed."""
    return {row["name"]: row for row in content["rows"] if row["samples_s"]}


def _baseline(before: Mapping[str, Any], after: Mapping[str, Any], wanted: str | None) -> str:
    both = [name for name in before if name in after]
    if wanted is not None and wanted not in both:
        raise CompareError(
            f"the baseline {wanted} is not in both files; there are {', '.join(both) or 'none'}"
        )
    if not both:
        raise CompareError("no engine is in both files, so there is nothing to compare")
    torch = [name for name in both if name.startswith("Schedule")]
    blocking = [name for name in both if name.endswith(":blocking")]
    return wanted or (torch + blocking + both)[0]


def _ratio(rows: Mapping[str, Mapping[str, Any]], name: str, base: str | None) -> tuple[float, float]:
    """Median over rounds, and the relative half of the middle half of them."""
    values: Sequence[float] = rows[name]["samples_s"]
    if base is not None:
        # Runs of one file have one round each per sample; the shorter counts if someone cut a file.
        values = [a / b for a, b in zip(values, rows[base]["samples_s"], strict=False)]
    median = statistics.median(values)
    if len(values) < 2:
        return median, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / 2 / median


def _show(value: float, base: str | None) -> str:
    return f"{value * 1e3:.2f} ms" if base is None else f"{value:.3f} x {base}"


def _broken(
    old: Mapping[str, Any], new: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Parity, bits and validity that were there and are gone."""
    found = []
    for name, row in after.items():
        if not row["ok"]:
            found.append(f"{name} no longer gives the loss and gradients of one process")
        if not row["valid"]:
            found.append(f"{name} was measured under too much emulation error to count")
        if before.get(name, {}).get("difference") and not row.get("difference"):
            found.append(f"{name} was checked against one process before and is not now")
    for pair, equal in old.get("bitwise", {}).items():
        names = pair.split(" = ")
        if equal and all(name in after for name in names) and not new.get("bitwise", {}).get(pair, False):
            found.append(f"{pair} was bitwise and is not now")
    found += [
        f"{pair} is not bitwise equal"
        for pair, equal in new.get("bitwise", {}).items()
        if not equal and pair not in old.get("bitwise", {})
    ]
    return found
