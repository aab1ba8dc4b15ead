"""Schedule: for each rank a list of steps, frozen."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fxbraid.schedule import csvfile
from fxbraid.schedule.action import Step
from fxbraid.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Schedule:
    """``actions[rank]`` is what ``rank`` runs, in order, for ``m`` micro-batches.

    Nothing is proven by construction: ``fxbraid.schedule.check`` says whether it can run.
    """

    name: str
    placement: Placement
    m: int
    actions: tuple[tuple[Step, ...], ...]

    @property
    def p(self) -> int:
        """Pipeline ranks."""
        return self.placement.p

    @property
    def v(self) -> int:
        """Chunks per rank."""
        return self.placement.v

    @property
    def n_chunks(self) -> int:
        """p x v."""
        return self.placement.n_chunks

    def __str__(self) -> str:
        steps = sum(len(row) for row in self.actions)
        return f"{self.name}: p={self.p}, v={self.v} ({self.placement.kind}), m={self.m}, {steps} steps"

    def to_csv(self, *, for_torch: bool = False) -> str:
        """One line per rank, compute only, as torch's ``_PipelineScheduleRuntime._load_csv`` reads it.

        ``for_torch``: every composite is called ``OVERLAP_F_B``, the only one of torch's grammar, whatever its parts
        are. :meth:`from_csv` reads both.
        """
        return csvfile.write(self.actions, for_torch=for_torch)

    @classmethod
    def from_csv(
        cls, source: str | os.PathLike[str], placement: Placement | None = None, *, name: str = "csv"
    ) -> Schedule:
        """A schedule from CSV text or a path, with or without communication; see ``csvfile.read``.

        It is parsed, not proven: run ``check`` on it.
        """
        return cls(name, *csvfile.read(source, placement))
