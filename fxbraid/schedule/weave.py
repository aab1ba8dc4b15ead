"""The order of units inside a block: the braid itself, as data.

The executor's block graphs, the simulator and the pictures all take their order from :func:`weave`, or, where costs
are known and asked for, from ``listorder.order_units``, so that none of them can disagree with another about it
(DESIGN section 7).

The order is the paper's (arXiv 2510.27257, section 3, braided execution blocks)::

    wait ARf; Attn_k(F);  launch ARf
    wait ARb; MLP_q(I);   launch ARb;  MLP_q(W) or queue it
    wait ARf; MLP_k(F);   launch ARf
    wait ARb; Attn_q(I);  launch ARb;  Attn_q(W)

A launch stands right after its unit and a wait right before the first unit that reads its result; neither is
listed, both follow from the order of the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxbraid.schedule.errors import ScheduleError

Order = list[tuple[int, int]]
"""Units of a block in the order in which they run, as (strand, unit) pairs."""


@dataclass(frozen=True, slots=True)
class Strand:
    """The units of one action inside a block.

    ``phase``: "F", "I" or "W". ``launches[i]``: unit i ends with a collective. ``heavy[i]``: unit i contains a
    matrix product, so it can hide a collective, or in W is read by one that does. ``depth[i]``: for W, the unit of I
    (its ``depth``) whose gradients it needs.
    ``own`` (W only): the W of the I in this block; else its I is done and it can run at any time.
    ``fetches`` (W only): unit i reads an all-gather that is launched ahead of it (:func:`fetch_points`).
    ``again`` (I only): unit i computes again what F did not save, ahead of the unit of I behind it; it reads no
    gradient, so it waits for no collective and hides the one that is under way.
    ``seconds`` and ``collective``: of every unit and of what it launches, where the order is made from costs
    (``listorder``); the paper's order does not read them.
    """

    phase: str
    launches: tuple[bool, ...]
    heavy: tuple[bool, ...]
    depth: tuple[int, ...]
    own: bool = False
    seconds: tuple[float, ...] = ()
    collective: tuple[float, ...] = ()
    fetches: tuple[bool, ...] = ()
    again: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.launches)

    @property
    def timed(self) -> bool:
        """Does it say how long its units take?"""
        return len(self.seconds) == len(self.collective) == len(self)

    def repeats(self, unit: int) -> bool:
        """Does ``unit`` compute again what F did?"""
        return bool(self.again) and self.again[unit]

    @property
    def bridged(self) -> bool:
        """Does every other collective follow a unit that hides nothing (sequence parallelism: a norm between a
        reduce-scatter and an all-gather)? A lookup or a loss that ends with one makes no such strand.
        """
        light = sum(launch and not heavy for launch, heavy in zip(self.launches, self.heavy, strict=True))
        return light > 1 and light >= sum(self.launches) - light - 1

    def segments(self) -> list[list[int]]:
        """Runs of units that end with a collective, and between bridges with any unit that can hide one; the last one
        ends without.
        """
        found: list[list[int]] = [[]]
        for unit, launch in enumerate(self.launches):
            found[-1].append(unit)
            if launch or (self.bridged and self.heavy[unit]):
                found.append([])
        return found


def weave(strands: Sequence[Strand]) -> Order:
    """Order of a block: (strand, unit) pairs, every unit once.

    One or two strands of F and I alternate, a segment of each in turn; a W of its own follows its I segment at
    once; a W from the queue is spread evenly behind the launches. Between bridges a strand has three segments for two
    collectives, ``norm, AG; half; half, RS``, and the second strand begins up to two segments later, as leaves the
    fewest collectives bare: then each runs beside a half of the other strand::

        F: norm AG | half |      | half RS |      | norm AG |         | half |
        I:                  norm AG |        half |         | half RS |      | norm AG
    """
    comm = [s for s, strand in enumerate(strands) if strand.phase in ("F", "I")]
    fill = [s for s, strand in enumerate(strands) if strand.phase == "W"]
    if len(comm) > 2 or len(fill) > 1:
        raise ScheduleError(f"a block takes at most two strands of F and I and one of W, got {len(strands)}")
    if not comm:
        return [(s, unit) for s in fill for unit in range(len(strands[s]))]
    turns = _alternate(strands, comm)
    if not fill:
        return [(s, unit) for s, segment in turns for unit in segment]
    if strands[fill[0]].own:
        return _with_own(strands, turns, fill[0])
    return _with_queued(strands, turns, fill[0])


def fetch_points(strands: Sequence[Strand], order: Order) -> dict[int, Order]:
    """Position in ``order`` -> the units whose input is gathered from there on: before the last unit with a matrix
    product that runs ahead of them, which hides it; at the block's start where there is none.
    """
    points: dict[int, Order] = {}
    hiding = 0
    for position, (s, unit) in enumerate(order):
        strand = strands[s]
        if strand.fetches and strand.fetches[unit]:
            points.setdefault(hiding, []).append((s, unit))
        if strand.heavy[unit]:
            hiding = position
    return points


def _alternate(strands: Sequence[Strand], comm: Sequence[int]) -> list[tuple[int, list[int]]]:
    lags = range(3) if len(comm) == 2 and all(strands[s].bridged for s in comm) else range(1)
    return min((_in_turn(strands, comm, lag) for lag in lags), key=lambda turns: _bare(strands, turns))


def _in_turn(strands: Sequence[Strand], comm: Sequence[int], lag: int) -> list[tuple[int, list[int]]]:
    """A segment of each strand in turn, the second strand ``lag`` segments late."""
    queues = {s: strands[s].segments() for s in comm}
    late = {s: k * lag for k, s in enumerate(comm)}
    turns: list[tuple[int, list[int]]] = []
    for step in range(max(len(queues[s]) + late[s] for s in comm)):
        turns += [(s, queues[s][step - late[s]]) for s in comm if 0 <= step - late[s] < len(queues[s])]
    return turns


def _bare(strands: Sequence[Strand], turns: Sequence[tuple[int, list[int]]]) -> int:
    """How many collectives have no unit of another strand beside them that could hide them."""
    open_: set[int] = set()
    bare = 0
    for s, segment in turns:
        for unit in segment:
            bare += s in open_
            open_.discard(s)
            if strands[s].heavy[unit]:
                open_ &= {s}
            if strands[s].launches[unit]:
                open_.add(s)
    return bare


def _with_own(
    strands: Sequence[Strand], turns: Sequence[tuple[int, list[int]]], fill: int
) -> list[tuple[int, int]]:
    """Each W unit right behind the I segment that makes its gradients; the rest at the end."""
    order: list[tuple[int, int]] = []
    pending = list(range(len(strands[fill])))
    done = -1
    for s, segment in turns:
        order += [(s, unit) for unit in segment]
        if strands[s].phase == "I" and segment:
            done = max(
                (strands[s].depth[unit] for unit in segment if not strands[s].repeats(unit)), default=done
            )
            ready = [unit for unit in pending if strands[fill].depth[unit] <= done]
            order += [(fill, unit) for unit in ready]
            pending = [unit for unit in pending if unit not in ready]
    return order + [(fill, unit) for unit in pending]


def _with_queued(
    strands: Sequence[Strand], turns: Sequence[tuple[int, list[int]]], fill: int
) -> list[tuple[int, int]]:
    """W units behind launches: of the I strand if the other strand already hides the F's, else of the only one."""
    hidden_by = [s for s, _ in turns if strands[s].phase == "I"] or [s for s, _ in turns]
    slots = [i for i, (s, seg) in enumerate(turns) if s in hidden_by and seg and strands[s].launches[seg[-1]]]
    heavy = [unit for unit in range(len(strands[fill])) if strands[fill].heavy[unit]]
    behind: dict[int, list[int]] = {}
    for k, unit in enumerate(heavy):
        at = slots[k * len(slots) // len(heavy)] if slots else len(turns) - 1
        behind.setdefault(at, []).append(unit)
    order: list[tuple[int, int]] = []
    for i, (s, segment) in enumerate(turns):
        order += [(s, unit) for unit in segment]
        order += [(fill, unit) for unit in behind.get(i, [])]
    # Light units hide nothing: they come last, where they delay nobody's message. No heavy unit reads one,
    # and among themselves their order is kept: a W unit may read an earlier one's result.
    placed = {unit for units in behind.values() for unit in units}
    return order + [(fill, unit) for unit in range(len(strands[fill])) if unit not in placed]
