"""The order of units inside a block from measured costs: what ``weave`` does by the paper, done by the numbers.

One processor runs the units, one lane the collectives, first come, first served. A unit waits for the collective of
the unit before it in its strand; a W of the same action waits for the unit of I that makes its gradients; a queued W
waits for nothing. Among all orders that this allows, the one with the shortest block is searched for, and among
equals the one whose results leave first::

    F: 4 4   I: 4 4   own W: 1 1   collectives of 2        paper   F0 I0 W0 F1 I1 W1    F leaves at 13, I at 17
                                                           costs   F0 I0 F1 I1 W0 W1    F leaves at 12, I at 16

The search goes through partial orders layer by layer, one unit more each. Partial orders that have run the same
units are compared: one that is nowhere later makes the other superfluous. Up to ``WIDTH`` of a layer are kept, the
most promising by a lower bound on the block's length; where no layer was cut, the result is the best there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from fxbraid.schedule.weave import Order, Strand, weave

WIDTH = 240
"""Partial orders kept per layer. Blocks of four layers a chunk are searched exhaustively with far fewer."""

CLOSE = 1e-9
"""Relative differences in time below this are rounding."""


class Played(NamedTuple):
    """A block under the model: its length, and when the results of its F and I strands leave, added up."""

    length: float
    sent: float


def order_units(strands: Sequence[Strand], contention: float = 0.0) -> Order:
    """Order of a block from the seconds that its ``strands`` carry: (strand, unit) pairs, every unit once.

    contention: share of the device that a running collective takes from the units beside it. Never worse than
    ``weave`` under the model, and equal to it where nothing is better or where a strand carries no seconds. Same
    arguments, same result, on every rank.
    """
    paper = weave(strands)
    if not all(strand.timed for strand in strands) or sum(map(len, strands)) < 2:
        return paper
    search = _Search(strands, contention)
    known = search.play(paper)
    found = search.run(known.length)
    if found is None:
        return paper
    order, mine = found
    slack = CLOSE * known.length
    if mine.length < known.length - slack:
        return order
    return order if mine.length <= known.length + slack and mine.sent < known.sent - slack else paper


def play(strands: Sequence[Strand], order: Order, contention: float = 0.0) -> Played:
    """``order`` on the clock that ``order_units`` searches with."""
    return _Search(strands, contention).play(order)


def leaving(strands: Sequence[Strand], order: Order, contention: float = 0.0) -> tuple[float, list[float]]:
    """The block's length, and per strand when its result leaves (for a W, when the block ends)."""
    search = _Search(strands, contention)
    label = search.start()
    ends: dict[int, float] = {}
    for s, unit in order:
        before = label.sent
        label = search.follow(label, s, unit)
        if label.sent != before:
            ends[s] = label.now
    length = search.end(label).length
    late = search.late(label)
    return length, [ends.get(s, late.get(s, length)) for s in range(len(strands))]


@dataclass(slots=True)
class Orders:
    """``order_units`` that remembers: blocks of equal costs are searched once, whatever their chunks are called."""

    contention: float = 0.0
    known: dict[tuple[Strand, ...], Order] = field(default_factory=dict)

    def __call__(self, strands: Sequence[Strand]) -> Order:
        key = tuple(strands)
        if key not in self.known:
            self.known[key] = order_units(strands, self.contention)
        return self.known[key]


class UnitTime(NamedTuple):
    """What the order of a block is made from: seconds of a unit, and of the collectives that it launches."""

    seconds: float
    collective: float = 0.0


Times = Mapping[str, UnitTime]
"""By the unit's label, for example ``attn3_F``."""


@dataclass(slots=True)
class CostOrder:
    """Orders for blocks whose units have labels: what the executor's blocks are built with."""

    times: Times
    orders: Orders

    def timed(self, strand: Strand, labels: Sequence[str]) -> Strand:
        """``strand`` with the times of its units; as it is where one of them is unknown, which keeps the paper's
        order for its blocks.
        """
        found = [self.times[label] for label in labels if label in self.times]
        if len(found) < len(labels):
            return strand
        seconds, collective = (tuple(one[k] for one in found) for k in (0, 1))
        return replace(strand, seconds=seconds, collective=collective)

    def __call__(self, strands: Sequence[Strand]) -> Order:
        return self.orders(strands)


class _Label(NamedTuple):
    """A partial order. ready: when the last collective of each F or I strand is done. sent: when results left,
    added up. last: the queue that it took its last unit from; before: the partial order without it.
    """

    now: float
    ready: tuple[float, ...]
    sent: float
    last: int
    before: _Label | None


_Position = tuple[int, ...]
"""How many units of each queue have run."""


class _Search:
    def __init__(self, strands: Sequence[Strand], contention: float) -> None:
        self.strands, self.contention = strands, contention
        # One queue of units per strand of F and I, first of all; then one of W.
        self.comm = [s for s, strand in enumerate(strands) if strand.phase != "W"]
        self.queues: list[tuple[int, list[int]]] = [(s, list(range(len(strands[s])))) for s in self.comm]
        self.queues += [(s, _weights(strand)) for s, strand in enumerate(strands) if strand.phase == "W"]
        self.queue_of = {s: q for q, (s, _) in enumerate(self.queues)}
        self.seconds = [[strands[s].seconds[u] for u in units] for s, units in self.queues]
        self.gaps = [[strands[s].collective[u] for u in range(len(strands[s]))] for s in self.comm]
        # What is left of a queue from each position on: compute alone, and with the collectives in between.
        self.compute = [_rest(times) for times in self.seconds]
        self.chain = [
            _rest([self._alone(q, u) for u in range(len(strands[s]))]) for q, s in enumerate(self.comm)
        ]
        self.needs = [self._needed(s, units) for s, units in self.queues[len(self.comm) :]]

    def _needed(self, s: int, units: list[int]) -> list[tuple[int, int]]:
        """For each W of its own action: the queue of I and how many of its units must have run."""
        if not self.strands[s].own:
            return [(0, 0)] * len(units)
        q = next(q for q, at in enumerate(self.comm) if self.strands[at].phase == "I")
        made = self.strands[self.comm[q]].depth
        return [(q, sum(depth <= self.strands[s].depth[u] for depth in made)) for u in units]

    def _alone(self, q: int, unit: int) -> float:
        """The least that ``unit`` adds to its strand: what is computed again may lie beside a collective of it."""
        return 0.0 if self.strands[self.comm[q]].repeats(unit) else self.seconds[q][unit] + self.gaps[q][unit]

    # -- the clock

    def start(self) -> _Label:
        return _Label(0.0, (0.0,) * len(self.comm), 0.0, -1, None)

    def step(self, label: _Label, q: int, index: int) -> _Label:
        """Unit ``index`` of queue ``q`` comes next."""
        seconds = self.seconds[q][index]
        if q >= len(self.comm):
            now = label.now + self._beside(seconds, label.now, label.ready)
            return _Label(now, label.ready, label.sent, q, label)
        waits = not self.strands[self.comm[q]].repeats(index)
        now = max(label.now, label.ready[q]) if waits else label.now
        now += self._beside(seconds, now, label.ready)
        gap, ready, sent = self.gaps[q][index], label.ready, label.sent
        if gap > 0:
            done = max(now, *ready) + gap
            ready = (*ready[:q], done, *ready[q + 1 :])
        elif index + 1 == len(self.seconds[q]):
            sent += now
        return _Label(now, ready, sent, q, label)

    def _beside(self, seconds: float, now: float, ready: tuple[float, ...]) -> float:
        if not self.contention or not ready:
            return seconds
        busy = max(ready) - now
        if busy <= 0:
            return seconds
        done = busy * (1 - self.contention)
        return seconds / (1 - self.contention) if seconds <= done else busy + seconds - done

    def end(self, label: _Label) -> Played:
        """A block ends when its collectives have."""
        length = max(label.now, *label.ready) if label.ready else label.now
        return Played(length, label.sent + sum(self.late(label).values()))

    def late(self, label: _Label) -> dict[int, float]:
        """When the results of strands that end with a collective leave: waited for at the block's end, in order."""
        now, found = label.now, dict[int, float]()
        for s, gaps, ready in zip(self.comm, self.gaps, label.ready, strict=True):
            now = max(now, ready)
            if gaps and gaps[-1] > 0:
                found[s] = now
        return found

    def play(self, order: Order) -> Played:
        label = self.start()
        for s, unit in order:
            label = self.follow(label, s, unit)
        return self.end(label)

    def follow(self, label: _Label, s: int, unit: int) -> _Label:
        """Unit ``unit`` of strand ``s`` comes next."""
        q = self.queue_of[s]
        return self.step(label, q, self.queues[q][1].index(unit))

    # -- the search

    def run(self, bound: float) -> tuple[Order, Played] | None:
        """The best order with a block of at most ``bound``."""
        limit = bound * (1 + CLOSE)
        layer: dict[_Position, list[_Label]] = {(0,) * len(self.queues): [self.start()]}
        for _ in range(sum(len(times) for times in self.seconds)):
            grown: dict[_Position, list[_Label]] = {}
            for position, labels in layer.items():
                for q, index in self._next(position):
                    to = (*position[:q], index + 1, *position[q + 1 :])
                    for label in labels:
                        new = self.step(label, q, index)
                        if self._least(to, new) <= limit:
                            _insert(grown.setdefault(to, []), new)
            layer = self._cut(grown)
        ends = [label for labels in layer.values() for label in labels]
        if not ends:
            return None
        best = min(ends, key=self.end)
        return self._order(best), self.end(best)

    def _next(self, position: _Position) -> Iterator[tuple[int, int]]:
        for q, index in enumerate(position):
            if index == len(self.seconds[q]):
                continue
            if q >= len(self.comm):
                other, count = self.needs[q - len(self.comm)][index]
                if count and position[other] < count:
                    continue
            yield q, index

    def _least(self, position: _Position, label: _Label) -> float:
        """No order that begins like ``label`` makes a shorter block."""
        least = label.now
        for q, index in enumerate(position):
            least += self.compute[q][index]
        for q, ready in enumerate(label.ready):
            least = max(least, max(label.now, ready) + self.chain[q][position[q]])
        return least

    def _cut(self, grown: dict[_Position, list[_Label]]) -> dict[_Position, list[_Label]]:
        if sum(map(len, grown.values())) <= WIDTH:
            return grown
        ranked = sorted(
            (
                (self._least(position, label), label.sent, max(label.ready, default=0.0), position, label)
                for position, labels in grown.items()
                for label in labels
            ),
            key=lambda one: one[:4],
        )
        kept: dict[_Position, list[_Label]] = {}
        for _, _, _, position, label in ranked[:WIDTH]:
            kept.setdefault(position, []).append(label)
        return kept

    def _order(self, label: _Label) -> Order:
        taken: list[int] = []
        at: _Label | None = label
        while at is not None and at.before is not None:
            taken.append(at.last)
            at = at.before
        position, order = [0] * len(self.queues), []
        for q in reversed(taken):
            s, units = self.queues[q]
            order.append((s, units[position[q]]))
            position[q] += 1
        return order


def _weights(strand: Strand) -> list[int]:
    """W units in the order in which they may run: their own as I makes their gradients; queued ones heavy first, as
    light units hide nothing. (A W unit may read an earlier one's result, so each kind keeps its order; no heavy one
    reads a light one's.)
    """
    units = range(len(strand))
    if strand.own:
        return sorted(units, key=lambda unit: (strand.depth[unit], unit))
    return sorted(units, key=lambda unit: (not strand.heavy[unit], unit))


def _rest(times: Sequence[float]) -> list[float]:
    """``rest[i]``: the sum of ``times`` from i on."""
    return list(accumulate(reversed(times), initial=0.0))[::-1]


def _insert(front: list[_Label], new: _Label) -> None:
    """Keep ``new`` unless one in ``front`` is nowhere later; drop those that it makes superfluous."""
    for old in front:
        if old.now <= new.now and old.sent <= new.sent and _nowhere_later(old, new):
            return
    front[:] = [
        old for old in front if not (new.now <= old.now and new.sent <= old.sent and _nowhere_later(new, old))
    ]
    front.append(new)


def _nowhere_later(one: _Label, two: _Label) -> bool:
    # A collective that is done by now is as good as one that was never launched.
    return all(a <= max(b, two.now) for a, b in zip(one.ready, two.ready, strict=True))
