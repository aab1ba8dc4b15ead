"""Which schedule, and which order of units, at measured costs: ``braid(schedule="auto")`` and ``braid(order="costs")``.

Collective: ranks profile their own chunks, everybody learns the costs of all chunks, the first rank decides and the
others are told. So the decision is the same everywhere, whatever each rank's clock said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from . import schedule as schedules
from .budget import Budget, Way, choose_under, own
from .order import Order
from .passes.compile import Artefacts
from .passes.cutting import Cut
from .passes.errors import BraidError, PartitionError
from .passes.partition import Partition
from .passes.pipeline import Lowered
from .plan.choose import Candidate, Choice, UnitOrder, choose, settle
from .plan.cut import CutClock, fastest_cut
from .runtime.mesh import Mesh
from .runtime.profile import Profile, as_profile, gather_workload, layer_costs, make_profile, meet
from .schedule import Placement, Schedule
from .schedule.cut import Row
from .simulate import Workload

MEASURED = 0.005
"""A cut that is faster by less, at measured costs, is as good as the plain one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be decided. schedule: None for "auto". order: "costs" measures, a profile is taken as it is."""

    schedule: Schedule | None
    order: Order
    m: int
    braided: bool = True
    reproducible: bool = False
    max_live: int | None = None
    repeats: int = 5


class Trace(Protocol):
    """What a decision has traced: ``tracing.Traces``."""

    @property
    def free(self) -> bool:
        """May chunks begin where they want?"""

    def chunks(self, schedule: Schedule, cut: Cut | None = None) -> Lowered:
        """This rank's chunks under ``schedule``, cut for it or at ``cut``."""

    def layers(self, count: int) -> Lowered:
        """Every layer as a chunk, those made that differ."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs. ordered_by: the costs that units in blocks are ordered by, None for the paper's order. lowered: this
    rank's chunks, traced for training.
    """

    schedule: Schedule
    ordered_by: Workload | None
    profile: Profile
    choice: Choice
    lowered: Lowered


def decide(asked: Asked, mesh: Mesh, artefacts: Artefacts, traces: Trace) -> Decision:
    """Measure, cut, choose, and lower for what was chosen. Collective; the same on every rank."""
    schedule = asked.schedule
    start = schedule if schedule is not None else _provisional(asked, mesh, traces)
    lowered, profile, costs = _measured(asked, mesh, artefacts, traces, start)
    orders: tuple[UnitOrder, ...] = ("paper",) if asked.order == "paper" else ("costs", "paper")

    def decision() -> Choice:
        if schedule is not None:
            return settle(_plain(schedule, asked), costs, orders=orders)
        found = choose(mesh.pp_size, asked.m, costs, orders=orders, max_live=asked.max_live)
        return found if asked.braided else settle(_plain(found.schedule, asked), costs, orders=orders)

    choice = _hear(_told(mesh, lambda: _say(decision())))
    chosen = schedules.reproducible(choice.schedule) if asked.reproducible else choice.schedule
    schedules.check(chosen)
    if chosen.placement != start.placement:
        lowered, profile, costs = _measured(asked, mesh, artefacts, traces, chosen)
    return Decision(chosen, costs if choice.best.order == "costs" else None, profile, choice, lowered)


def decide_under(
    asked: Asked, budget: Budget, mesh: Mesh, artefacts: Artefacts
) -> tuple[Decision, Mapping[str, Any]]:
    """:func:`decide` among what fits into ``budget``; with the options that the choice changes. What can't be done is
    refused before anything is measured. Collective."""
    budget.fitting(offload=True)
    costs: dict[tuple[str, int], tuple[Lowered, Profile, Workload]] = {}
    for way in budget.ways:  # the same on every rank
        key = way.variant.name, way.schedule.n_chunks
        if key not in costs:
            mine = _mine(budget, way, mesh)
            profile = _profile(asked, mesh, artefacts, mine, way.schedule)
            costs[key] = mine, profile, gather_workload(mine, profile, mesh)
    orders: tuple[UnitOrder, ...] = ("paper",) if asked.order == "paper" else ("costs", "paper")

    def decision() -> dict[str, Any]:
        way, choice, _ = choose_under(
            budget, lambda way: costs[way.variant.name, way.schedule.n_chunks][2], orders, budget.asked
        )
        hosted = "offload" in way.variant.changes
        at = next(k for k, one in enumerate(budget.ways) if way in (one, one.offloaded))
        return {"at": at, "hosted": hosted, **_say(choice)}

    said = _told(mesh, decision)
    way, choice = budget.ways[said["at"]], _hear(said)
    _, profile, workload = costs[way.variant.name, way.schedule.n_chunks]
    ordered_by = workload if choice.best.order == "costs" else None
    changes = (way.offloaded if said["hosted"] else way).variant.changes
    return Decision(way.schedule, ordered_by, profile, choice, _mine(budget, way, mesh)), changes


def _mine(budget: Budget, way: Way, mesh: Mesh) -> Lowered:
    lowered = budget.lowered(way.variant, way.schedule.n_chunks)
    assert lowered is not None
    return own(lowered, way.schedule.placement, mesh.pp_rank)


def _measured(
    asked: Asked, mesh: Mesh, artefacts: Artefacts, traces: Trace, schedule: Schedule
) -> tuple[Lowered, Profile, Workload]:
    """This rank's chunks under ``schedule``, cut by what layers cost where that is free, and the costs of all."""
    lowered = traces.chunks(schedule)
    cut = _cut(asked, mesh, artefacts, traces, schedule, lowered.partition)
    if cut is not None and cut != lowered.partition.cut:
        lowered = traces.chunks(schedule, cut)
    profile = _profile(asked, mesh, artefacts, lowered, schedule)
    return lowered, profile, gather_workload(lowered, profile, mesh)


def _cut(
    asked: Asked, mesh: Mesh, artefacts: Artefacts, traces: Trace, schedule: Schedule, parts: Partition
) -> Cut | None:
    """Where ``schedule``'s step is shortest, by measured costs of every layer; None where there is nothing to choose,
    or nothing to measure (a profile that was given knows the units of its own cut alone)."""
    count = parts.layers
    if not traces.free or count == len(parts.chunks) or not isinstance(asked.order, str):
        return None
    layers = traces.layers(count)
    profile = make_profile(layers, artefacts, mesh, schedule, repeats=asked.repeats)
    pieces = layer_costs(layers, profile, mesh)
    clock = CutClock(schedule, pieces, asked.braided, by_costs=asked.order == "costs")
    return Cut(fastest_cut(clock, Row(count), near=MEASURED))


def _plain(schedule: Schedule, asked: Asked) -> Schedule:
    return schedule if asked.braided else schedules.unbraid(schedule)


def _provisional(asked: Asked, mesh: Mesh, traces: Trace) -> Schedule:
    """Where chunks lie while costs are measured: two a rank on the V, or one where the model has too few layers."""
    two = schedules.build("zbv", p=mesh.pp_size, m=asked.m)
    try:
        traces.chunks(two)
    except PartitionError:
        return schedules.build("1f1b", p=mesh.pp_size, m=asked.m)
    return two


def _profile(asked: Asked, mesh: Mesh, artefacts: Artefacts, lowered: Lowered, schedule: Schedule) -> Profile:
    if isinstance(asked.order, str):
        return make_profile(lowered, artefacts, mesh, schedule, repeats=asked.repeats)
    return as_profile(asked.order)  # the same on every rank: braid() has compared it


def _told(mesh: Mesh, decision: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The first rank's decision, on every rank, as JSON. If it raises there, it raises everywhere."""
    first = mesh.world_rank == 0
    mine: Any = None
    error: Exception | None = None
    if first:
        try:
            mine = decision()
        except (schedules.ScheduleError, BraidError) as raised:
            mine, error = {"error": str(raised), "refused": isinstance(raised, BraidError)}, raised
    said = meet(mine)[0]
    if "error" in said:
        raise error or (BraidError if said["refused"] else schedules.ScheduleError)(said["error"])
    return dict(said)


def _say(choice: Choice) -> dict[str, Any]:
    schedule = choice.schedule
    place = schedule.placement
    return {
        "asked": choice.asked,
        "schedule": [schedule.name, place.kind, place.p, place.v, schedule.to_csv()],
        "best": dataclasses.asdict(choice.best),
        "torch": None if choice.torch is None else dataclasses.asdict(choice.torch),
        "others": [dataclasses.asdict(one) for one in choice.others],
        "considered": choice.considered,
        "costs": choice.costs,
        "hides": choice.hides,
        "notes": list(choice.notes),
    }


def _hear(said: Mapping[str, Any]) -> Choice:
    name, kind, p, v, text = said["schedule"]
    return Choice(
        asked=said["asked"],
        schedule=Schedule.from_csv(text, Placement(kind, p, v), name=name),
        best=Candidate(**said["best"]),
        torch=None if said["torch"] is None else Candidate(**said["torch"]),
        others=tuple(Candidate(**one) for one in said["others"]),
        considered=said["considered"],
        costs=said["costs"],
        hides=said["hides"],
        notes=tuple(said["notes"]),
    )
