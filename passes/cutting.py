"""Part of pass ``partition``: where the chunks begin, by what the stretches cost.

A chunk is a run of stretches with one layer or more in it. A cut lies before the gap in front of a layer, or, at a seam
of two towers, behind that gap: what lies between them (a merger, an embedding) goes with either side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from math import comb

from ..schedule import Placement, build
from ..schedule.uneven import uneven_makespan
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


TRIALS = 400
"""Cuts that a search looks at, at most."""

NEAR = 0.02
"""A cut that is faster by less than this share of the step is not worth chunks of unequal cost."""

REACH = 2
"""How many places a search moves a boundary at once."""

STARTS = 4
"""From how many cuts, beside the balanced one and the one with equal numbers of layers, a search starts."""


def searched(
    costs: Sequence[StretchCost],
    row: Stretches,
    n_chunks: int,
    step_time: Callable[[Cut], float],
    *,
    trials: int = TRIALS,
    near: float = NEAR,
) -> Cut:
    """The cut of the shortest step: of all, where there are ``trials`` or fewer. Else from the balanced cut on, and
    then from a few others, boundaries move one or two at a time, or several together, for as long as that makes the
    step shorter (or as short, and the dearest chunk cheaper). The balanced cut stays where nothing is faster by more
    than ``near`` of it. Same arguments, same result."""
    ends = places(row)
    index = {place: k for k, place in enumerate(ends)}
    prefix = [0.0, *accumulate(cost.total for cost in costs)]
    known: dict[tuple[int, ...], _Value] = {}

    def value(at: tuple[int, ...]) -> _Value:
        if at not in known:
            own = [prefix[b] - prefix[a] for a, b in pairwise((0, *at, row.count))]
            known[at] = step_time(Cut(at)), max(own), sum(one * one for one in own)
        return known[at]

    def moved(at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        steps = [by for by in range(-REACH, REACH + 1) if by]
        one = [((k, by),) for k in range(len(at)) for by in steps]
        two = [((j, a), (k, b)) for j, k in combinations(range(len(at)), 2) for a in steps for b in steps]
        more = [
            tuple((n, by) for n in range(j, k + 1))
            for j, k in combinations(range(len(at)), 2)
            if k > j + 1
            for by in steps
        ]
        for shift in (*one, *two, *more):
            new = list(at)
            for k, by in shift:
                to = index[new[k]] + by
                new[k] = ends[to] if 0 <= to < len(ends) else 0
            if _fits(new, row):
                yield tuple(new)

    even = best = balanced(costs, row, n_chunks).at
    if comb(len(ends), len(best)) <= trials:
        for new in combinations(ends, len(best)):
            if _fits(new, row) and _less(value(new), value(best)):
                best = new
    else:
        for start in (even, *_starts(row, n_chunks)):
            here = start
            better: tuple[int, ...] | None = start
            while better is not None and len(known) < trials:
                here = better
                better = next((new for new in moved(here) if _less(value(new), value(here))), None)
            best = here if _less(value(here), value(best)) else best
    return Cut(best if value(best)[0] < value(even)[0] * (1 - near) else even)


_Value = tuple[float, float, float]


def _fits(at: Sequence[int], row: Stretches) -> bool:
    layers = [one // 2 for one in (0, *at, row.count)]
    return sorted(set(layers)) == layers


def _starts(row: Stretches, n_chunks: int) -> Iterator[tuple[int, ...]]:
    layers = len(row.layers)
    yield given(
        [layers * (c + 1) // n_chunks - layers * c // n_chunks for c in range(n_chunks)], row, n_chunks
    ).at
    rng = random.Random(layers * 1009 + n_chunks)
    for _ in range(STARTS if n_chunks > 1 else 0):
        yield tuple(2 * k for k in sorted(rng.sample(range(1, layers), n_chunks - 1)))


def _less(one: _Value, other: _Value) -> bool:
    """Shorter by more than rounding, or equal but for that and smaller otherwise."""
    if abs(one[0] - other[0]) > 1e-9 * other[0]:
        return one[0] < other[0]
    return one[1:] < other[1:]


def chunk_costs(costs: Sequence[StretchCost], cut: Cut) -> list[StretchCost]:
    """What each chunk of ``cut`` costs."""
    found = []
    for a, b in pairwise((0, *cut.at, len(costs))):
        total = StretchCost()
        for cost in costs[a:b]:
            total += cost
        found.append(total)
    return found


@dataclass(frozen=True, slots=True)
class ForPlacement:
    """A cutter that looks for the shortest step where chunks lie as ``placement`` says, on a clock over whole actions.

    The schedule is stp on the V, 1F1B (interleaved) else, with 4p micro-batches: the cut does not depend on which of
    the placement's schedules runs, so that all of them share a trace. ``collectives``: T_AR over T_F of every chunk, as
    long as nothing has been measured."""

    placement: Placement
    collectives: float = 0.0

    def __call__(self, costs: Sequence[StretchCost], row: Stretches, n_chunks: int) -> Cut:
        place = self.placement
        if place.p == 1 or (place.kind == "v" and place.v != 2):
            return balanced(costs, row, n_chunks)
        name = "stp" if place.kind == "v" else "1f1b" if place.v == 1 else "interleaved_1f1b"
        schedule = build(name, p=place.p, m=4 * place.p, v=place.v)

        def step_time(cut: Cut) -> float:
            return uneven_makespan(schedule, chunk_costs(costs, cut), self.collectives)

        return searched(costs, row, n_chunks, step_time)
