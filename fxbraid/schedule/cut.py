"""Where to cut a row of unequal layers into chunks: where the chunks balance, and where a step is shortest.

A row is stretches: layer k is stretch 2k + 1, and what lies before it, between it and the layer in front or behind the
last one is a gap, stretch 2k. A cut is the first stretch of every chunk but the first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from math import comb

At = tuple[int, ...]
"""The first stretch of every chunk but the first."""

TRIALS = 400
"""Cuts that a search looks at, at most."""

NEAR = 0.02
"""A cut that is faster by less than this share of the step is not worth chunks of unequal cost."""

REACH = 2
"""How many places a search moves a boundary at once."""

STARTS = 4
"""From how many cuts, beside the balanced one and the one with equal numbers of layers, a search starts."""


@dataclass(frozen=True, slots=True)
class Row:
    """``layers`` of them. ``seams``: gaps between two towers, which a chunk may begin behind as well as before."""

    layers: int
    seams: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Stretches."""
        return 2 * self.layers + 1

    @property
    def places(self) -> list[int]:
        """Every stretch at which a chunk may begin, but the first."""
        return sorted({2 * k for k in range(1, self.layers)} | {seam + 1 for seam in self.seams})

    def fits(self, at: Sequence[int]) -> bool:
        """Does every chunk get a layer?"""
        layers = [one // 2 for one in (0, *at, self.count)]
        return sorted(set(layers)) == layers

    def of_layers(self, split: Sequence[int]) -> At:
        """The cut with so many layers in each chunk."""
        return tuple(2 * total for total in accumulate(split[:-1]))

    def equal(self, n_chunks: int) -> list[int]:
        """As equal numbers of layers as there can be."""
        n = self.layers
        return [n * (c + 1) // n_chunks - n * c // n_chunks for c in range(n_chunks)]


def balance(totals: Sequence[float], row: Row, n_chunks: int) -> At:
    """The dearest chunk is as cheap as possible, then the sum of squares (dynamic programming over the cuts).
    ``totals``: what each stretch costs."""
    prefix = [0.0, *accumulate(totals)]
    ends = [*row.places, row.count]
    best: dict[int, tuple[float, float, At]] = {0: (0.0, 0.0, ())}
    for c in range(n_chunks):
        left = n_chunks - 1 - c
        grown: dict[int, tuple[float, float, At]] = {}
        for end in ends if c < n_chunks - 1 else [row.count]:
            options = []
            for start, (top, squares, at) in best.items():
                if end // 2 > start // 2 and row.layers - end // 2 >= left:
                    own = prefix[end] - prefix[start]
                    options.append((max(top, own), squares + own * own, (*at, end)))
            if options:
                grown[end] = min(options)
        best = grown
    return best[row.count][2][:-1]


StepTime = Callable[[At], float]


def search(
    totals: Sequence[float],
    row: Row,
    n_chunks: int,
    step_time: StepTime,
    *,
    guess: StepTime | None = None,
    trials: int = TRIALS,
    guesses: int = TRIALS,
    near: float = NEAR,
) -> At:
    """The cut of the shortest step: of all, where there are ``trials`` or fewer. Else boundaries move one or two at a
    time, or several together, for as long as that makes the step shorter (or as short, and the dearest chunk cheaper):
    from the balanced cut on and from a few others, or, where there is a quick ``guess`` of a step's time, from the best
    of those that the same search finds with up to ``guesses`` of it. A plain cut (balanced, or equal numbers of layers)
    stays where nothing is faster by more than ``near`` of it. Same arguments, same result."""
    even = balance(totals, row, n_chunks)
    if n_chunks == 1:
        return even
    found = _Search(totals, row, step_time, trials)
    plain = [even, row.of_layers(row.equal(n_chunks))]
    number = comb(len(row.places), n_chunks - 1)
    if number <= trials:
        found.look_at(filter(row.fits, combinations(row.places, n_chunks - 1)))
    else:
        starts = [*plain, *_random(row, n_chunks)]
        if guess is not None:
            quick = _Search(totals, row, guess, guesses)
            if number <= guesses:
                quick.look_at(filter(row.fits, combinations(row.places, n_chunks - 1)))
            for start in starts:
                quick.climb(start)
            found.look_at([*plain, *quick.ranked[: trials // 2]])
            starts = found.ranked[:2]
        for start in starts:
            found.climb(start)
    best, stays = found.ranked[0], min(plain, key=found.value)
    return best if found.value(best)[0] < found.value(stays)[0] * (1 - near) else stays


_Value = tuple[float, float, float]
"""A step's time, the dearest chunk, and the sum of squares."""


@dataclass(slots=True)
class _Search:
    """Every cut is timed once, ``trials`` of them at most."""

    totals: Sequence[float]
    row: Row
    step_time: StepTime
    trials: int
    known: dict[At, _Value] = field(default_factory=dict)

    @property
    def ranked(self) -> list[At]:
        """Best first: by time but for rounding, then by how even chunks are."""
        scale = 1e9 / max((value[0] for value in self.known.values()), default=1.0)
        return sorted(self.known, key=lambda at: (round(self.known[at][0] * scale), *self.known[at][1:], at))

    def value(self, at: At) -> _Value:
        if at not in self.known:
            prefix = [0.0, *accumulate(self.totals)]
            own = [prefix[b] - prefix[a] for a, b in pairwise((0, *at, self.row.count))]
            self.known[at] = self.step_time(at), max(own), sum(one * one for one in own)
        return self.known[at]

    def look_at(self, cuts: Iterable[At]) -> None:
        for at in cuts:
            self.value(at)

    def climb(self, start: At) -> None:
        better: At | None = start
        while better is not None:
            here = better
            self.value(here)
            better = None
            for new in self._moved(here):
                if new not in self.known and len(self.known) >= self.trials:
                    return
                if _less(self.value(new), self.value(here)):
                    better = new
                    break

    def _moved(self, at: At) -> Iterator[At]:
        ends = self.row.places
        index = {place: k for k, place in enumerate(ends)}
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
            if self.row.fits(new):
                yield tuple(new)


def _random(row: Row, n_chunks: int) -> Iterator[At]:
    rng = random.Random(row.layers * 1009 + n_chunks)
    for _ in range(STARTS):
        yield tuple(2 * k for k in sorted(rng.sample(range(1, row.layers), n_chunks - 1)))


def _less(one: _Value, other: _Value) -> bool:
    """Shorter by more than rounding, or equal but for that and smaller otherwise."""
    if abs(one[0] - other[0]) > 1e-9 * other[0]:
        return one[0] < other[0]
    return one[1:] < other[1:]
