"""What every rank holds, node by node of its program, by what it is for. Plain data: no torch.

``runtime.predict`` fills it from a traced model, ``draw.memory`` draws it under the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "hand-over",
    "communication",
    "temporaries",
)
"""What bytes are for.

parameters: this rank's shards, buffers, and both copies where there are master weights. gradients: what they add up
in, from the first contribution on. optimizer: its state. activations: what F keeps for I and W. hand-over: what I
keeps for W. communication: receive buffers (kept from step to step; a boundary that is saved for the backward stays in
its buffer), messages on their way out, collectives in flight. temporaries: values inside a unit, and values between two
units of a block that nobody keeps.
"""

STATIC = ("parameters", "gradients", "optimizer")
"""Kinds that do not depend on the schedule; the others are what a step's activations need."""

Levels = tuple[int, ...]
"""Bytes of each of ``KINDS``."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One node of a rank's program. step: the step of its list that it belongs to. node: the unit, launch, wait,
    message or block. levels: bytes behind it; high: at the moment inside it when they are the most.
    """

    step: int
    node: str
    levels: Levels
    high: Levels


@dataclass(frozen=True)
class RankMemory:
    """A rank over one step. steps: the texts of the steps in its list."""

    rank: int
    samples: tuple[Sample, ...]
    steps: tuple[str, ...]

    @cached_property
    def moment(self) -> Sample:
        """The (first) node in which the rank holds the most."""
        return max(self.samples, key=lambda sample: sum(sample.high))

    @property
    def peak(self) -> int:
        """The most bytes that the rank holds at once."""
        return sum(self.moment.high)

    @property
    def static(self) -> int:
        """What it holds when the step is over: parameters, gradients, the optimizer's state."""
        return sum(self.samples[-1].levels) - dynamic(self.samples[-1].levels)

    @property
    def split(self) -> dict[str, int]:
        """The peak by kind."""
        return dict(zip(KINDS, self.moment.high, strict=True))

    @cached_property
    def activations(self) -> int:
        """The most bytes of a step's own values between two nodes: all that is not static, without what lives only
        inside a unit. It is what ``measure_peak`` measures."""
        return max(dynamic(sample.levels) for sample in self.samples)

    @cached_property
    def activations_inside(self) -> int:
        """The same with what lives only inside a unit."""
        return max(dynamic(sample.high) for sample in self.samples)

    @property
    def where(self) -> str:
        """The moment of the peak, in words."""
        return self._said(self.moment)

    def curve(self) -> Iterator[tuple[int, Levels]]:
        """(step, the levels at its highest moment), step by step."""
        best: dict[int, Levels] = {}
        for sample in self.samples:
            if sample.step not in best or sum(sample.high) > sum(best[sample.step]):
                best[sample.step] = sample.high
        yield from sorted(best.items())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rank": self.rank,
            "peak": self.peak,
            "peak_at": {"step": self.moment.step, "said": self.where},
            "split": self.split,
            "activations": self.activations,
            "activations_inside_units": self.activations_inside,
            "curve": [{"step": step, "levels": list(levels)} for step, levels in self.curve()],
        }

    def _said(self, sample: Sample) -> str:
        if sample.step < 0:
            return "before the first step"
        if sample.step >= len(self.steps):
            return "behind the last step"
        return f"step {sample.step + 1} of {len(self.steps)}, {self.steps[sample.step]}, in {sample.node}"


@dataclass(frozen=True)
class Memory:
    """All ranks of a pipeline (each is the same for every rank of its tensor-parallel group). label: of what."""

    schedule: str
    label: str
    ranks: tuple[RankMemory, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank at its fullest moment."""
        return max(rank.peak for rank in self.ranks)

    @property
    def fullest(self) -> RankMemory:
        """The (first) rank with that peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schedule": self.schedule,
            "label": self.label,
            "kinds": list(KINDS),
            "peak": self.peak,
            "ranks": [rank.as_dict() for rank in self.ranks],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("rank", "peak", *KINDS)]
        for rank in self.ranks:
            rows.append((str(rank.rank), amount(rank.peak), *(amount(rank.split[kind]) for kind in KINDS)))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        full = self.fullest
        said = [f"memory of {self.label}, {self.schedule}: each rank at its fullest moment", *table]
        said.append(f"fullest: rank {full.rank} with {amount(full.peak)}, at {full.where}")
        return "\n".join([*said, *self.notes])


def dynamic(levels: Levels) -> int:
    """The bytes that are not static."""
    return sum(levels) - sum(levels[k] for k, kind in enumerate(KINDS) if kind in STATIC)


def amount(nbytes: float) -> str:
    """Bytes for people: "23.4 GiB"."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 1024**power:
            return f"{nbytes / 1024**power:.4g} {name}"
    return f"{nbytes:.0f} B"


UNITS: Mapping[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**k for k, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**k for k, letter in enumerate("KMGT", 1)},
}


def read_amount(text: str | float) -> int:
    """Bytes of "60GiB", "80 GB", "1e9" or a number. Raises ScheduleError for anything else, or less than a byte."""
    from fxbraid.schedule import ScheduleError

    number, unit = str(text).strip(), ""
    while number and number[-1].isalpha():
        number, unit = number[:-1], number[-1] + unit
    known = {name.lower(): size for name, size in UNITS.items()}
    try:
        found = float(number) * known[unit.lower()]
    except (KeyError, ValueError):
        found = 0.0
    if not 1 <= found < float("inf"):
        raise ScheduleError(
            f"{text!r} is no amount of memory; say for example 60GiB, 80GB or a number of bytes"
        )
    return int(found)
