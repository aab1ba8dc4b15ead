"""``Profile``: what this machine needs for every distinct unit and link, measured once and the same on all ranks.

Orders of units and schedules are derived from it, and ranks of a tensor-parallel group must derive the same ones: so
every rank measures its own units, all ranks meet, and each takes the median of what was measured. On an emulated
cluster the modelled times and links are taken instead.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..passes.compile import Artefacts
from ..passes.errors import BraidError
from ..passes.partition import alike
from ..passes.pipeline import Lowered
from ..passes.units import ChunkUnits, Unit
from ..schedule import Schedule
from ..schedule.listorder import CostOrder, Orders, UnitTime
from ..schedule.lower import channels
from ..simulate import ChunkCost, Link, UnitCost, Workload
from . import emulate, ranks
from .costs import chunk_cost, place_of, unit_seconds
from .links import INSTANT, LinkTime, Sizes, links_of, measure_links, sizes_of
from .mesh import Mesh
from .profile_cache import ProfileCache, machine

#: A collective that leaves less than this of the device to the units beside it is taken to leave this much.
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Profile(Mapping[str, float]):
    """Seconds of units by key (it is a mapping of them), and links. Every rank has the same.

    all_reduce: of the TP group, by bytes of the tensor; replicas: over data-parallel replicas. messages: by (source,
    destination) pipeline rank; rendezvous: a message starts when its receive is posted. contention: share of the device
    that a running all-reduce takes from the units beside it, 0 to 1 or above where overlapping costs more than it
    gains. host: one way between device and host, by bytes. label: where the numbers come from. made_from: what they
    depend on.
    """

    seconds: Mapping[str, float]
    all_reduce: LinkTime = INSTANT
    messages: Mapping[tuple[int, int], LinkTime] = field(default_factory=dict)
    rendezvous: bool = True
    contention: float = 0.0
    label: str = "measured profile"
    made_from: Mapping[str, Any] = field(default_factory=dict)
    replicas: LinkTime = INSTANT
    host: LinkTime = INSTANT

    def __getitem__(self, key: str) -> float:
        return self.seconds[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.seconds)

    def __len__(self) -> int:
        return len(self.seconds)

    def links(self) -> dict[tuple[int, int], Link]:
        """The links of pipeline ranks, as the simulator takes them."""
        return {
            ends: Link(link.alpha_s, link.beta_bytes_per_s, self.rendezvous)
            for ends, link in self.messages.items()
        }

    def host_link(self) -> Link:
        """The link to the host, as the simulator takes it."""
        return Link(self.host.alpha_s, self.host.beta_bytes_per_s)

    @property
    def share(self) -> float:
        """``contention`` within what a clock can work with."""
        return min(max(self.contention, 0.0), 1 - LEAST_SHARE)

    def with_times(self, seconds: Mapping[str, float]) -> Profile:
        """The same links with other unit times."""
        return dataclasses.replace(self, seconds=dict(seconds))


def as_profile(times: Mapping[str, float]) -> Profile:
    """A profile from plain seconds by unit key: links that take no time. Raises :class:`BraidError` for what are no
    times."""
    if not isinstance(times, Mapping):
        raise BraidError(
            f"{times!r} holds no times; give seconds by unit key, as fxbraid.profile(model) does"
        )
    for key, seconds in times.items():
        known = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not isinstance(key, str) or not known or not (math.isfinite(seconds) and seconds >= 0):
            raise BraidError(
                f"the time of unit {key!r} is {seconds!r}; give finite seconds, 0 or more, by unit key"
            )
    if not isinstance(times, Profile):
        return Profile(dict(times), label="given times")
    links = {
        "all-reduces": times.all_reduce,
        "sums over replicas": times.replicas,
        "copies to the host": times.host,
    } | {f"messages {a}-{b}": x for (a, b), x in times.messages.items()}
    for name, link in links.items():
        if not (0 <= link.alpha_s < math.inf and link.beta_bytes_per_s > 0):
            raise BraidError(
                f"{link} of {name} is no link; give finite seconds, 0 or more, and bytes/s above 0"
            )
    if not math.isfinite(times.contention):
        raise BraidError(
            f"the profile's contention is {times.contention}; give the share of a device, 0 to 1"
        )
    return times


def make_profile(
    lowered: Lowered,
    artefacts: Artefacts,
    mesh: Mesh,
    schedule: Schedule,
    *,
    repeats: int = 5,
    cache: bool = True,
) -> Profile:
    """Measure what the cache does not know. Collective over all ranks of ``mesh``.

    ``lowered``: this rank's chunks. ``schedule`` says which ranks exchange messages. What was measured is stored by
    rank 0 and read by rank 0 alone, so that all ranks always start from the same.
    """
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise BraidError(f"repeats={repeats!r}: give a whole number of measurements, 1 or more")
    session = emulate.active()
    if session is not None and session.cluster.clock != "wall":
        return _emulated(lowered, mesh, schedule, session)
    columns = _columns(meet({**dataclasses.asdict(sizes_of(lowered)), "repeats": repeats}))
    if len(asked := set(columns.pop("repeats"))) > 1:
        raise BraidError(f"repeats differs between ranks: {sorted(asked)}; give all ranks the same")
    largest = {name: max(found) for name, found in columns.items()}
    facts = {
        "machine": sorted({json.dumps(fact, sort_keys=True) for fact in meet(_machine(mesh))}),
        "torch": torch.__version__,
        "compile": str(artefacts.mode),
        "world": {"tp": mesh.tp_size, "pp": mesh.pp_size, "placement": schedule.placement.kind}
        | ({"dp": mesh.dp_size} if mesh.dp_size > 1 else {}),
        "bytes": largest,
    }
    emulated = session is not None
    store = ProfileCache.of(facts) if cache and not emulated else None
    names = links_of(mesh, schedule)
    known = meet(store.read(names) if store is not None and mesh.world_rank == 0 else None)[0]
    known = known or {"seconds": {}, "links": None}
    missing = [unit for unit in _units(lowered) if unit.key not in known["seconds"]]
    measured = unit_seconds(missing, artefacts, repeats=repeats)
    links = known["links"]
    if links is None:
        links = measure_links(lowered, artefacts, mesh, schedule, Sizes(**largest), repeats=repeats)
    merged = _merged(meet({"seconds": measured, "links": links}))
    merged["seconds"] = {**known["seconds"], **merged["seconds"]}
    if store is not None and mesh.world_rank == 0 and merged != known:
        store.write(merged)
    label = emulate.label() if emulated else f"measured on this machine, {_device(mesh)}"
    return _profile(merged, label, facts)


def gather_workload(lowered: Lowered, profile: Profile, mesh: Mesh) -> Workload:
    """Costs of all chunks from what each rank knows of its own. Collective; the same on every rank."""
    here = {
        str(index): dataclasses.asdict(_cost(chunk, profile, mesh)) for index, chunk in lowered.chunks.items()
    }
    found: dict[str, Any] = {}
    for part in meet(here):
        found = {**part, **found}
    count = len(lowered.partition.chunks)
    made: dict[str, ChunkCost] = {}
    chunks = []
    for index in range(count):
        text = json.dumps(found[str(index)], sort_keys=True)
        if text not in made:  # equal chunks share one object, and the simulator times their blocks once
            made[text] = _chunk_cost(found[str(index)])
        chunks.append(made[text])
    return _workload(chunks, profile)


def layer_costs(layers: Lowered, profile: Profile, mesh: Mesh) -> Workload:
    """Costs of a model whose every layer is a chunk, of which ``layers`` holds those that differ. Local."""
    made = {index: _cost(chunk, profile, mesh) for index, chunk in layers.chunks.items()}
    return _workload([made[first] for first in alike(layers.partition)], profile)


def _cost(chunk: ChunkUnits, profile: Profile, mesh: Mesh) -> ChunkCost:
    return chunk_cost(
        chunk,
        profile,
        profile.all_reduce.seconds if chunk.tp_size > 1 else INSTANT.seconds,
        profile.replicas.seconds if mesh.dp_size > 1 else None,
    )


def _workload(chunks: Iterable[ChunkCost], profile: Profile) -> Workload:
    return Workload(
        tuple(chunks),
        links=profile.links(),
        label=profile.label,
        contention=profile.share,
        host=profile.host_link(),
    )


def order_from(costs: Workload, lowered: Lowered) -> CostOrder:
    """The order of this rank's blocks, made from ``costs``. A chunk that another trace has cut otherwise keeps the
    paper's."""
    times: dict[str, UnitTime] = {}
    for index, chunk in lowered.chunks.items():
        for phase, units in chunk.units.items():
            known = costs.chunks[index].of(phase.value)
            if len(known) == len(units):
                times |= {
                    unit.label: UnitTime(cost.seconds, cost.collective * cost.launches)
                    for unit, cost in zip(units, known, strict=True)
                }
    return CostOrder(times, Orders(costs.contention))


def meet(value: Any) -> list[Any]:
    """Every rank's ``value``, which is what JSON can say, as JSON says it back: like a file of the cache.
    Collective over all ranks of all replicas."""
    return [json.loads(text) for text in ranks.gather(json.dumps(value))]


# -- inside


def _units(lowered: Lowered) -> Iterable[Unit]:
    return (unit for chunk in lowered.chunks.values() for units in chunk.units.values() for unit in units)


def _machine(mesh: Mesh) -> dict[str, Any]:
    return machine(mesh.device) | {"threads": torch.get_num_threads()}


def _device(mesh: Mesh) -> str:
    return torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"


def _columns(rows: Iterable[Mapping[str, int]]) -> dict[str, list[int]]:
    table: dict[str, list[int]] = {}
    for row in rows:
        for name, value in row.items():
            table.setdefault(name, []).append(value)
    return table


def _merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of what the ranks measured, number by number."""
    by_key: dict[str, list[float]] = {}
    by_link: dict[str, list[list[float]]] = {}
    for part in found:
        for key, seconds in part["seconds"].items():
            by_key.setdefault(key, []).append(seconds)
        for name, values in part["links"].items():
            by_link.setdefault(name, []).append(values)
    return {
        "seconds": {key: statistics.median(values) for key, values in sorted(by_key.items())},
        "links": {
            name: [statistics.median(column) for column in zip(*rows, strict=True)]
            for name, rows in sorted(by_link.items())
        },
    }


def _profile(merged: Mapping[str, Any], label: str, facts: Mapping[str, Any]) -> Profile:
    links: dict[str, list[float]] = merged["links"]
    messages = {}
    for name, values in links.items():
        if name.startswith("message "):
            source, destination = map(int, name.removeprefix("message ").split("-"))
            messages[source, destination] = LinkTime(*values)
    return Profile(
        seconds=dict(merged["seconds"]),
        all_reduce=LinkTime(*links["all_reduce"]) if "all_reduce" in links else INSTANT,
        messages=messages,
        rendezvous=True,
        contention=links.get("contention", [0.0])[0],
        label=label,
        made_from=dict(facts),
        replicas=LinkTime(*links["replicas"]) if "replicas" in links else INSTANT,
        host=LinkTime(*links["host"]) if "host" in links else INSTANT,
    )


def _emulated(lowered: Lowered, mesh: Mesh, schedule: Schedule, session: Any) -> Profile:
    """What the emulated cluster will take: nothing is measured, and nothing cached."""
    if session.units is None:
        raise BraidError(
            "on this emulated cluster units take no time until emulate.unit_times(...) gives them some, and there "
            "is nothing to make an order or a schedule from; call it first"
        )
    # By place: units that compute the same may be given different times.
    mine = {place_of(unit): float(session.units.of(unit)) for unit in _units(lowered)}
    seconds: dict[str, float] = {}
    for part in meet(mine):
        seconds.update(part)
    cluster, tp = session.cluster, mesh.tp_size
    all_reduce = INSTANT
    if tp > 1 and mesh.tp_group is not None:
        members = dist.get_process_group_ranks(mesh.tp_group)
        link = cluster.link(members, message=False, description=mesh.tp_group.group_desc)
        moved = emulate.factor(emulate.Op.ALL_REDUCE, tp)
        all_reduce = LinkTime(link.alpha_s, link.beta_bytes_per_s / moved)
    replicas = INSTANT
    if mesh.dp_group is not None:
        link = cluster.link(dist.get_process_group_ranks(mesh.dp_group), message=False, description="dp")
        moved = emulate.factor(emulate.Op.ALL_REDUCE, mesh.dp_size)
        replicas = LinkTime(link.alpha_s, link.beta_bytes_per_s / moved)
    messages = {}
    for _, source, destination in channels(schedule):
        ends = [mesh.global_rank(source), mesh.global_rank(destination)]
        link = cluster.link(ends, message=True)
        messages[source, destination] = LinkTime(link.alpha_s, link.beta_bytes_per_s)
    return Profile(
        seconds,
        all_reduce,
        messages,
        rendezvous=cluster.pp_link.rendezvous,
        contention=1 - 1 / cluster.slowdown,
        label=emulate.label(),
        made_from={"emulated": str(cluster), "by": "place of the unit"},
        replicas=replicas,
        host=INSTANT
        if cluster.host_link is None
        else LinkTime(cluster.host_link.alpha_s, cluster.host_link.beta_bytes_per_s),
    )


def _chunk_cost(values: Mapping[str, Any]) -> ChunkCost:
    f, i, w = (tuple(UnitCost(**unit) for unit in values[phase]) for phase in ("f", "i", "w"))
    return ChunkCost(f, i, w, values["sends_f"], values["sends_i"], values["reduces"], tuple(values["parks"]))
