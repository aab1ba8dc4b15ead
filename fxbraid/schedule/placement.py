"""Placement: which rank holds which chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxbraid.schedule.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Placement:
    """``v`` chunks on each of ``p`` ranks, chunk c feeding chunk c + 1.

    ``loop``: chunk c lies on rank c mod p, so every pass goes from rank 0 to rank p - 1 and jumps back.
    ``v``: even passes go down the ranks, odd passes come back up; with v = 2 rank r holds chunks r and
    2p - 1 - r, and the chunks on both sides of a turn lie on one rank. (A zigzag for v > 2.)
    """

    kind: Literal["loop", "v"]
    p: int
    v: int

    def __post_init__(self) -> None:
        if self.kind not in ("loop", "v"):
            raise ScheduleError(f"placement {self.kind!r} is unknown; use 'loop' or 'v'")
        if self.p < 1 or self.v < 1:
            raise ScheduleError(
                f"a placement needs p >= 1 ranks and v >= 1 chunks a rank, got p={self.p}, v={self.v}"
            )

    @property
    def n_chunks(self) -> int:
        """p x v."""
        return self.p * self.v

    def rank_of(self, chunk: int) -> int:
        """The rank that holds ``chunk``."""
        if not 0 <= chunk < self.p * self.v:
            raise ScheduleError(
                f"chunk {chunk} does not exist; p={self.p}, v={self.v} has chunks 0..{self.p * self.v - 1}"
            )
        turn, place = divmod(chunk, self.p)
        return self.p - 1 - place if self.kind == "v" and turn % 2 else place

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of ``rank``, in model order."""
        if not 0 <= rank < self.p:
            raise ScheduleError(f"rank {rank} does not exist; p={self.p} has ranks 0..{self.p - 1}")
        back = self.p - 1 - rank if self.kind == "v" else rank
        return tuple(turn * self.p + (back if turn % 2 else rank) for turn in range(self.v))
