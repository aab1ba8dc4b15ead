"""``braid(memory_budget=...)``: the fastest way to run that no rank needs more memory for.

Two questions, kept apart. What fits is read off the programs of all ranks (``runtime.predict``), by every rank for
itself and with the same result, so that what can't be done is refused before anything is sent. What is fastest among
that is asked of the simulator at costs measured here; the first rank answers, as in :mod:`fxbraid.decide`.

Offload takes as much as there is time for, so it is known at measured costs alone: what does not fit is looked at again
then, with the first chunk of every rank on its way to the host, the fastest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from . import schedule as schedules
from .memory import memory_of
from .options import Options
from .passes.errors import BraidError, PartitionError
from .passes.pipeline import Cut, Lowered, recut
from .plan.choose import NEAR, Candidate, Choice, braids, hides
from .runtime.ghosts import Library
from .schedule import FAMILIES, Placement, Schedule, ScheduleError
from .schedule.offload import OffloadPlan
from .simulate import BlockClock, Workload, at_clock, peaks
from .simulate.memory import amount
from .simulate.offload import early_chunks, plan_offload


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to trade time for memory: what it changes of ``Options``, and how it is called in sentences. beyond: the
    variants that it does everything of, and more: where one of them fits, this one would be slower for nothing."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()


KEPT = Variant("everything kept")


def _again(policy: str, *beyond: str) -> Variant:
    return Variant(_called(policy), {"checkpoint": policy}, (KEPT.name, *map(_called, beyond)))


def _called(policy: str) -> str:
    return f'checkpoint="{policy}"'


VARIANTS: tuple[Variant, ...] = (
    KEPT,
    _again("mlp"),
    _again("attention"),
    _again("attention+mlp", "mlp", "attention"),
    _again("all", "mlp", "attention", "attention+mlp"),
)
"""What is tried with every schedule before anything is measured."""

AWAY = "chunk0"
"""What is offloaded of what does not fit."""

NEARLY = 1.05
"""The simulator's peak of saved activations may be so far off where it says that offload can't be enough."""

GROW = ("gpipe", "looped_bfs", "stp_plus")
"""Schedules whose peak grows with the number of micro-batches, beyond 3p of them."""


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule under a variant. make: it, for any number of micro-batches."""

    variant: Variant
    name: str
    schedule: Schedule
    make: Callable[[int], Schedule]

    @property
    def said(self) -> str:
        """In sentences."""
        return self.name if not self.variant.changes else f"{self.name} with {self.variant.name}"

    @property
    def with_offload(self) -> str:
        """The same with its first chunk on the host."""
        return f"{self.said}{' and' if self.variant.changes else ' with'} offload={AWAY!r}".replace("'", '"')

    @property
    def offloaded(self) -> Way:
        """This way, with its first chunk on the host among what it changes."""
        changes = {**self.variant.changes, "offload": AWAY}
        return replace(self, variant=replace(self.variant, changes=changes))


class Budget:
    """What fits into ``nbytes`` a rank. ``trace``: a variant's model, cut into so many chunks, all of them.

    ``asked``: the one schedule that is looked at, None for all that have a name. Peaks count parameters, gradients,
    AdamW's state and all that a step needs, also inside units. variants: default ``VARIANTS``; where a policy of
    checkpointing was asked for, that alone.
    """

    def __init__(
        self,
        nbytes: int,
        options: Options,
        sizes: tuple[int, int],
        trace: Callable[[Options, int], Lowered],
        asked: Schedule | None = None,
        variants: Sequence[Variant] | None = None,
    ) -> None:
        self.nbytes, self.options = nbytes, options
        self.p, self.dp = sizes
        self.m = options.n_microbatches
        self._trace = trace
        self._traces: dict[tuple[str, int], Lowered | None] = {}
        self._library = Library(fused=options.compile is not False)
        self._peaks: dict[tuple[str, str], int] = {}
        self._least = 0
        self._asked = asked
        if variants is None:
            variants = VARIANTS if options.checkpoint == "none" else (KEPT,)
        self._variants = variants

    @cached_property
    def ways(self) -> list[Way]:
        """What is looked at: every schedule, with every variant that goes beyond none that already fits."""
        found: list[Way] = []
        fits: dict[str, set[str]] = {}
        for variant in self._variants:
            for name, schedule, make in self._schedules(self._asked):
                mine = fits.setdefault(name, set())
                if mine & set(variant.beyond) or self.lowered(variant, schedule.n_chunks) is None:
                    continue
                found.append(Way(variant, name, schedule, make))
                if self.peak(found[-1]) <= self.nbytes:
                    mine.add(variant.name)
        return found

    def lowered(self, variant: Variant, n_chunks: int) -> Lowered | None:
        """The trace; None where the model can't be cut into as many chunks."""
        key = variant.name, n_chunks
        if key not in self._traces:
            self._traces[key] = self._cut(variant, n_chunks)
        return self._traces[key]

    def _cut(self, variant: Variant, n_chunks: int) -> Lowered | None:
        if set(variant.changes) == {"checkpoint"}:  # the same trace, cut into other units
            kept = self.lowered(KEPT, n_chunks)
            if kept is None:
                return None
            tp_size = next(iter(kept.chunks.values())).tp_size
            policy = variant.changes["checkpoint"]
            return recut(kept, Cut(tp_size, regather=self.options.regather, checkpoint=policy))
        try:
            return self._trace(replace(self.options, **variant.changes), n_chunks)
        except PartitionError:
            return None

    def again(self, way: Way) -> int:
        """FLOPs of a micro-batch that are done once more, on all pipeline ranks."""
        lowered = self.lowered(way.variant, way.schedule.n_chunks)
        assert lowered is not None
        units = (u for chunk in lowered.chunks.values() for us in chunk.units.values() for u in us)
        return sum(unit.flops for unit in units if unit.again)

    def _schedules(self, asked: Schedule | None) -> Iterator[tuple[str, Schedule, Callable[[int], Schedule]]]:
        if asked is not None:
            yield asked.name, asked, lambda m: asked
            return
        seen = set()
        for name, family in FAMILIES.items():
            if family.v not in (1, 2):
                continue
            for said, change in (
                (name, _same),
                (f"{name}, neighbours braided", schedules.braid),
                (f"{name}, unbraided", schedules.unbraid),
            ):

                def make(
                    m: int, name: str = name, change: Callable[[Schedule], Schedule] = change
                ) -> Schedule:
                    return self._settled(change(schedules.build(name, p=self.p, m=m)))

                made = make(self.m)
                live = max(schedules.peak_live(made)) * 2 // made.placement.v
                if made.actions not in seen and live <= (self.options.max_live or live):
                    seen.add(made.actions)
                    yield said, made, make

    def _settled(self, schedule: Schedule) -> Schedule:
        if not self.options.braided:
            schedule = schedules.unbraid(schedule)
        return schedules.reproducible(schedule) if self.options.reproducible else schedule

    def peak(self, way: Way) -> int:
        """Bytes of the fullest rank. Steps of many micro-batches are looked at with 3p, behind which nothing grows."""
        key = way.variant.name, way.name
        if key not in self._peaks:
            few = min(self.m, max(3 * self.p, 4))
            short = way.schedule if way.name.split(",")[0] in GROW else way.make(few)
            # A loss is kept for every micro-batch.
            self._peaks[key] = self.exact(way, short) + 4 * (self.m - short.m)
        return self._peaks[key]

    def exact(
        self,
        way: Way,
        schedule: Schedule | None = None,
        ordered_by: Workload | None = None,
        offload: OffloadPlan | None = None,
    ) -> int:
        """The same for the whole step, with units in blocks ordered by costs, and with offload."""
        made = schedule or way.schedule
        lowered = self.lowered(way.variant, made.n_chunks)
        assert lowered is not None
        options = replace(self.options, **way.variant.changes)
        found = memory_of(
            lowered, made, options, self.dp, library=self._library, ordered_by=ordered_by, offload=offload
        )
        static = max(rank.static for rank in found.ranks)
        self._least = min(static, self._least or static)
        return found.peak

    @property
    def asked(self) -> str:
        """The name of the one schedule, or "auto"."""
        return self._asked.name if self._asked is not None else "auto"

    @property
    def offloads(self) -> bool:
        """May activations go to the host where too much does not fit?"""
        return self.options.offload is None

    def fitting(self, *, offload: bool = False) -> list[Way]:
        """Every way that fits. Raises BraidError, with what the leanest needs, where there is none; with ``offload``
        only where activations on the host can't help. Local; the same on every rank."""
        if not self.ways:
            raise BraidError(
                f"no schedule can be looked at for memory_budget={amount(self.nbytes)}: the model has too few layers "
                f"for {self.p} chunks; lower pp_size"
            )
        found = [way for way in self.ways if self.peak(way) <= self.nbytes]
        if not found and not (offload and self.offloads and self._least <= self.nbytes):
            raise BraidError(self.too_little())
        return found

    def too_little(self, hosted: tuple[int, str] | None = None) -> str:
        """Why nothing fits. hosted: bytes of what needs least with activations on the host, and its name."""
        leanest = min(self.ways, key=self.peak)
        least, said = self.peak(leanest), leanest.said
        if hosted is not None and hosted[0] < least:
            least, said = hosted
        return (
            f"memory_budget={amount(self.nbytes)} can't be kept: the leanest of {len(self.ways)} ways to run, {said}, "
            f"needs {amount(least)} on its fullest rank (parameters, gradients, AdamW's state and a step), "
            f"{amount(least - self.nbytes)} more; raise the budget to that, use more ranks, or smaller micro-batches"
        )

    def hosted(self, way: Way, costs: Workload, order: str) -> int | None:
        """Bytes of the fullest rank where the first chunk of each goes to the host, as far as there is time; None where
        nothing does, or where that can't be enough."""
        ordered_by = costs if order == "costs" else None
        wanted = early_chunks(way.schedule)
        plan = plan_offload(way.schedule, costs, wanted, braided=self.options.braided, ordered_by=ordered_by)
        if not any(plan.parcels):
            return None
        here, gone = (peaks(way.schedule, costs, ordered_by=ordered_by, offload=p) for p in (None, plan))
        if self.peak(way) - max(a - b for a, b in zip(here, gone, strict=True)) > NEARLY * self.nbytes:
            return None
        return self.exact(way, ordered_by=ordered_by, offload=plan)


def choose_under(
    budget: Budget, costs: Callable[[Way], Workload], orders: Sequence[str], asked: str
) -> tuple[Way, Choice, Workload]:
    """The fastest way that fits. ``costs``: of a way's chunks. Every rank gets the same from the same costs."""
    timed: list[Timed] = []
    for way in budget.ways:
        workload = costs(way)
        for order in orders:
            seconds = at_clock(way.schedule, _clock(workload, order)).step_time
            timed.append((seconds, budget.peak(way), way, order, workload))
    timed.sort(key=lambda one: one[:2])
    inside = [one for one in timed if one[1] <= budget.nbytes]
    hosted = _with_offload(budget, timed, inside[0][0] * (1 - NEAR) if inside else None)
    if hosted is not None:
        return _chosen(budget, hosted, timed, asked, offload=AWAY)
    fastest = inside[0][0]
    near = sorted((one for one in inside if one[0] <= fastest * (1 + NEAR)), key=lambda one: one[1])
    for one in [*near, *(other for other in inside if other not in near)]:
        seconds, _, way, order, workload = one
        peak = budget.exact(way, ordered_by=workload if order == "costs" else None)
        if peak <= budget.nbytes:  # also in the order that units will have
            break
    else:
        raise ScheduleError(
            f"memory_budget={amount(budget.nbytes)} can't be kept with units ordered by costs; use order='paper'"
        )
    return _chosen(budget, (seconds, peak, way, order, workload), timed, asked)


Timed = tuple[float, int, Way, str, Workload]
"""Seconds, bytes, what it is, the order of units, and the costs."""


def _with_offload(budget: Budget, timed: Sequence[Timed], before: float | None) -> Timed | None:
    """The fastest of what does not fit that does with activations on the host, faster than ``before`` seconds. Raises
    BraidError where ``before`` is None, nothing fits without, and there is none."""
    if not budget.offloads:
        return None
    leanest: tuple[int, str] | None = None
    for seconds, peak, way, order, workload in timed:
        if peak <= budget.nbytes or (before is not None and seconds >= before):
            continue
        needs = budget.hosted(way, workload, order)
        if needs is not None and needs <= budget.nbytes:
            return seconds, needs, way, order, workload
        if needs is not None and (leanest is None or needs < leanest[0]):
            leanest = needs, way.with_offload
    if before is None:
        raise BraidError(budget.too_little(leanest))
    return None


def _chosen(
    budget: Budget, one: Timed, timed: Sequence[Timed], asked: str, *, offload: str | None = None
) -> tuple[Way, Choice, Workload]:
    """The choice, and what to say about it."""
    time, peak, way, order, workload = one
    inside = [other for other in timed if other[1] <= budget.nbytes]
    name = way.said if offload is None else way.with_offload
    best = Candidate(name, order, time, peak, braids(way.schedule))  # type: ignore[arg-type]
    larger = [other for other in timed if other[0] < time * (1 - NEAR) and other[1] > budget.nbytes]
    said = [
        f"memory budget {amount(budget.nbytes)}: {name} needs {amount(peak)} on its fullest rank (parameters, "
        f"gradients, AdamW's state and the step); {len({other[2].said for other in inside})} of {len(budget.ways)} "
        f"ways fit{'' if offload is None else ' without offload'}"
    ]
    if larger:
        more = min(larger, key=lambda other: other[1])
        said.append(
            f"the next larger budget that buys time is {amount(more[1])}: {more[2].said} would take {more[0]:.6g}, "
            f"{100 * (1 - more[0] / time):.1f} % less"
        )
    else:
        said.append("a larger budget would buy no time")
    others: list[Candidate] = []
    for seconds, needs, other, how, _ in inside:
        if other.said not in (name, *(known.name for known in others)) and len(others) < 3:
            others.append(Candidate(other.said, how, seconds, needs, braids(other.schedule)))  # type: ignore[arg-type]
    choice = Choice(
        asked,
        way.schedule,
        best,
        None,
        tuple(others),
        len(timed),
        workload.label,
        hides(workload),
        notes=tuple(said),
    )
    return (way if offload is None else way.offloaded), choice, workload


def own(lowered: Lowered, placement: Placement, rank: int) -> Lowered:
    """A rank's chunks out of a trace of all."""
    return replace(lowered, chunks={c: lowered.chunks[c] for c in placement.chunks_of(rank)})


def _clock(workload: Workload, order: str) -> BlockClock:
    return BlockClock(workload, ordered_by=workload if order == "costs" else None)


def _same(schedule: Schedule) -> Schedule:
    return schedule


__all__ = ["KEPT", "VARIANTS", "Budget", "Variant", "Way", "choose_under", "own"]
