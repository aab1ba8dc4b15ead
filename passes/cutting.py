"""Part of pass ``partition``: where the chunks begin, by what the stretches cost.

A chunk is a run of stretches with one layer or more in it. A cut lies before the gap in front of a layer, or, at a seam
of two towers, behind that gap: what lies between them (a merger, an embedding) goes with either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..schedule.cut import Row, balance
from .cost import StretchCost
from .errors import PartitionError
from .stretches import Stretches


@dataclass(frozen=True, slots=True)
class Cut:
    """``at``: the first stretch of every chunk but the first."""

    at: tuple[int, ...]

    def check(self, row: Stretches, n_chunks: int) -> None:
        """Raise :class:`PartitionError` where ``row`` can't be cut so."""
        known, own = set(places(row)), row_of(row)
        if len(self.at) != n_chunks - 1 or not set(self.at) <= known or not own.fits(self.at):
            raise PartitionError(
                f"a cut at stretches {list(self.at)} does not make {n_chunks} chunks of one layer or more: give "
                f"{n_chunks - 1} of {sorted(known)}, with a layer between any two"
            )


Cutter = Callable[[Sequence[StretchCost], Stretches, int], Cut]
"""Says where to cut a row into so many chunks, given the costs of its stretches."""


def row_of(row: Stretches) -> Row:
    """Layers and seams alone."""
    return Row(len(row.layers), row.seams)


def places(row: Stretches) -> list[int]:
    """Every stretch at which a chunk may begin, but the first."""
    return row_of(row).places


def given(split: Sequence[int], row: Stretches, n_chunks: int) -> Cut:
    """So many layers in each chunk."""
    layers = len(row.layers)
    if len(split) != n_chunks or sum(split) != layers or min(split) < 1:
        raise PartitionError(
            f"split={list(split)} must have {n_chunks} entries of 1 or more that add up to {layers} layers"
        )
    return Cut(row_of(row).of_layers(split))


def balanced(costs: Sequence[StretchCost], row: Stretches, n_chunks: int) -> Cut:
    """The dearest chunk is as cheap as possible, then the sum of squares."""
    return Cut(balance([cost.total for cost in costs], row_of(row), n_chunks))
