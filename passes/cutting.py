"""Part of pass ``partition``: where the chunks begin.

A chunk is a run of stretches with one layer or more in it. A cut lies before the gap in front of a layer, or, at a seam
of two towers, behind that gap: what lies between them (a merger, an embedding) goes with either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cost import StretchCost
from .errors import PartitionError
from .stretches import Stretches


@dataclass(frozen=True, slots=True)
class Cut:
    """``at``: the first stretch of every chunk but the first."""

    at: tuple[int, ...]

    def check(self, row: Stretches, n_chunks: int) -> None:
        """Raise :class:`PartitionError` where ``row`` can't be cut so."""
        known = set(places(row))
        layers = [at // 2 for at in (0, *self.at, row.count)]
        if len(self.at) != n_chunks - 1 or not set(self.at) <= known or sorted(set(layers)) != layers:
            raise PartitionError(
                f"a cut at stretches {list(self.at)} does not make {n_chunks} chunks of one layer or more: give "
                f"{n_chunks - 1} of {sorted(known)}, with a layer between any two"
            )


Cutter = Callable[[Sequence[StretchCost], Stretches, int], Cut]
"""Says where to cut a row into so many chunks, given the costs of its stretches."""


def places(row: Stretches) -> list[int]:
    """Every stretch at which a chunk may begin, but the first."""
    before = {2 * k for k in range(1, len(row.layers))}
    return sorted(before | {seam + 1 for seam in row.seams})


def given(split: Sequence[int], row: Stretches, n_chunks: int) -> Cut:
    """So many layers in each chunk."""
    layers = len(row.layers)
    if len(split) != n_chunks or sum(split) != layers or min(split) < 1:
        raise PartitionError(
            f"split={list(split)} must have {n_chunks} entries of 1 or more that add up to {layers} layers"
        )
    at, total = [], 0
    for size in split[:-1]:
        total += size
        at.append(2 * total)
    return Cut(tuple(at))


def balanced(costs: Sequence[StretchCost], row: Stretches, n_chunks: int) -> Cut:
    """The dearest chunk is as cheap as possible, then the sum of squares (dynamic programming over the cuts)."""
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost.total)
    ends = [*places(row), row.count]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for c in range(n_chunks):
        left = n_chunks - 1 - c
        grown: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends if c < n_chunks - 1 else [row.count]:
            options = []
            for start, (top, squares, at) in best.items():
                if end // 2 > start // 2 and len(row.layers) - end // 2 >= left:
                    own = prefix[end] - prefix[start]
                    options.append((max(top, own), squares + own * own, (*at, end)))
            if options:
                grown[end] = min(options)
        best = grown
    return Cut(best[row.count][2][:-1])
