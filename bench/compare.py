"""The regression gate: two JSON files of one bench, compared engine by engine.

Machines differ, so on a real or paced clock an engine's time counts relative to a baseline engine of the same file,
round by round (rounds are interleaved: both met the same moment of the machine). Virtual times are the same on every
machine and count as they are.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """``baseline``: the engine that times are relative to, None for seconds. ``problems``: what fails the gate."""

    baseline: str | None
    changes: tuple[Change, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def compare_files(
    old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float = TOLERANCE, baseline: str | None = None
) -> Comparison:
    """Compare two runs. Raises :class:`CompareError` where they are not runs of one thing."""
    _check_same(old, new)
    before, after = _rows(old), _rows(new)
    absolute = old["clock_name"] == "virtual" and baseline is None
    base = None if absolute else _baseline(before, after, baseline)
    problems = [f"{name} ran before and does not now" for name in before if name not in after]
    changes = []
    for name in (name for name in before if name in after and name != base):
        was, now = (_ratio(rows, name, base) for rows in (before, after))
        change = Change(name, was[0], now[0], was[1] + now[1])
        changes.append(change)
        if change.worse(tolerance):
            problems.append(
                f"{name} was {_show(change.old, base)} and is {_show(change.new, base)}: "
                f"{100 * (change.new / change.old - 1):.1f} % worse, {100 * tolerance:g} % and a spread of "
                f"{100 * change.spread:.1f} % are allowed"
            )
    problems += _broken(old, new, before, after)
    return Comparison(base, tuple(changes), tuple(problems))


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for content, which in ((old, "old"), (new, "new")):
        if "rows" not in content or "config" not in content or "clock_name" not in content:
            raise CompareError(f"the {which} file is not what fxbraid bench --json writes")
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
    # Blocking or torch's own: what a change to the braid does not touch.
    steady = [name for name in both if name.endswith(":blocking")] + [n for n in both if n[0].isupper()]
    return wanted or (steady or both)[0]


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
        if before.get(name, {}).get("difference") and not row["difference"]:
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
