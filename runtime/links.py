"""Links, measured: the all-reduce of the tensor-parallel group and messages between pipeline ranks.

Two sizes each give alpha and beta. What is measured is what the program will do: collectives over the ranks that use
them (all TP groups at the same time, as in a step), messages over the channels' own groups.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..passes.compile import Artefacts
from ..passes.cost import nbytes, reduce_bytes
from ..passes.joint import Phase
from ..passes.pipeline import Lowered
from ..schedule import Schedule
from ..schedule.lower import Channel, channels
from . import emulate
from .costs import bound_unit
from .mesh import Mesh

SMALL = 1024
"""Bytes of a message whose time is nearly all alpha."""

FASTEST = 1e13
"""Bytes a second above which a link is none: more than the memory of any device gives."""

REPLICAS_BYTES = 2**22
"""Bytes of the sum over replicas that is measured."""

HOST_BYTES = 2**24
"""Bytes of the copy to the host that is measured."""

BESIDE_S = 0.3
"""Seconds, at most, of units that run beside an all-reduce to see how they slow each other down."""


@dataclass(frozen=True, slots=True)
class LinkTime:
    """alpha_s + bytes / beta_bytes_per_s; of a collective the factor of its algorithm is in beta."""

    alpha_s: float = 0.0
    beta_bytes_per_s: float = math.inf

    def seconds(self, size: int) -> float:
        """Seconds for ``size`` bytes."""
        return self.alpha_s + size / self.beta_bytes_per_s


INSTANT = LinkTime()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest collective and the largest boundary, in bytes."""

    collective: int
    boundary: int


def sizes_of(lowered: Lowered) -> Sizes:
    """What this rank's chunks reduce and send; at least 64 KB, below which beta would be noise."""
    collective = boundary = 2**16
    for chunk in lowered.chunks.values():
        for units in chunk.units.values():
            for out in (out for unit in units for out in unit.outs):
                for user in filter(chunk.is_collective, out.users):
                    collective = max(collective, reduce_bytes(user))
        for values in (chunk.outputs if chunk.joint.chunk.boundary_out else (), chunk.input_grads):
            boundary = max(boundary, sum(nbytes(node.meta["val"]) for node in values))
    return Sizes(collective, boundary)


def links_of(mesh: Mesh, schedule: Schedule) -> frozenset[str]:
    """The names that all ranks together measure."""
    found = {f"message {source}-{destination}" for _, source, destination in channels(schedule)}
    if mesh.dp_size > 1:
        found.add("replicas")
    found.add("host")
    return frozenset(found | {"all_reduce", "contention"} if mesh.tp_size > 1 else found)


def measure_links(
    lowered: Lowered, artefacts: Artefacts, mesh: Mesh, schedule: Schedule, sizes: Sizes, *, repeats: int
) -> dict[str, list[float]]:
    """This rank's measurements by name: ``host`` (copies to and from it), ``all_reduce`` of the TP group,
    ``replicas`` (an all-reduce over them) and ``message S-D`` as [alpha, beta], ``contention`` as [share].

    Collective over all ranks, which must give equal ``sizes``.
    """
    found: dict[str, list[float]] = {"host": _host(mesh, repeats)}
    if mesh.dp_group is not None:
        found["replicas"], _ = _all_reduce(mesh.dp_group, mesh, REPLICAS_BYTES, repeats)
    if mesh.tp_group is not None and mesh.tp_size > 1:
        found["all_reduce"], large = _all_reduce(mesh.tp_group, mesh, sizes.collective, repeats)
        found["contention"] = [_contention(lowered, artefacts, mesh, large, sizes.collective)]
    groups = mesh.channel_groups(schedule)
    seen: set[tuple[int, int]] = set()
    for channel, source, destination in channels(schedule):
        if (source, destination) in seen:
            continue
        seen.add((source, destination))
        if mesh.pp_rank in (source, destination):
            values = _message(groups, channel, source, destination, mesh, sizes.boundary, repeats)
            if values is not None:
                found[f"message {source}-{destination}"] = values
    return found


def _all_reduce(group: dist.ProcessGroup, mesh: Mesh, size: int, repeats: int) -> tuple[list[float], float]:
    """[alpha, beta] of an all-reduce over ``group``, and the seconds of one of ``size`` bytes."""

    def reduce(tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    small, large = (_median(reduce, _bytes(n, mesh), mesh, repeats) for n in (SMALL, size))
    return fit(small, large, size), large


def _host(mesh: Mesh, repeats: int) -> list[float]:
    """[alpha, beta] of a copy between device and host, the slower way; on the CPU, of a copy in memory."""
    session = emulate.active()
    if session is not None and (link := session.cluster.host_link) is not None:
        return [link.alpha_s, min(link.beta_bytes_per_s, FASTEST)]

    ways = []
    for out in (True, False):
        small, large = (_copy_seconds(size, mesh, repeats, out=out) for size in (SMALL, HOST_BYTES))
        ways.append(fit(small, large, HOST_BYTES))
    return [max(alpha for alpha, _ in ways), min(beta for _, beta in ways)]


def _copy_seconds(size: int, mesh: Mesh, repeats: int, *, out: bool) -> float:
    here = _bytes(size, mesh)
    there = torch.zeros(here.shape, dtype=here.dtype, pin_memory=here.is_cuda)

    def copy(here: Tensor) -> None:
        source, target = (here, there) if out else (there, here)
        target.copy_(source, non_blocking=True)

    return _median(copy, here, mesh, repeats)


def _message(
    groups: Mapping[Channel, dist.ProcessGroup],
    channel: Channel,
    source: int,
    destination: int,
    mesh: Mesh,
    size: int,
    repeats: int,
) -> list[float] | None:
    """[alpha, beta] on the source, None on the destination: a message out, and a small one back."""
    group = groups[channel]
    peer = mesh.global_rank(destination if mesh.pp_rank == source else source)
    back = _bytes(SMALL, mesh)

    def there_and_back(tensor: Tensor) -> None:
        if mesh.pp_rank == source:
            dist.send(tensor, peer, group=group)
            dist.recv(back, peer, group=group)
        else:
            dist.recv(tensor, peer, group=group)
            dist.send(back, peer, group=group)

    small, large = (_median(there_and_back, _bytes(n, mesh), mesh, repeats) for n in (SMALL, size))
    if mesh.pp_rank == destination:
        return None
    # What comes back takes half of the small round trip, and never more than half of the large one.
    return fit(small / 2, large - min(small, large) / 2, size)


def fit(small: float, large: float, size: int) -> list[float]:
    """[alpha, beta] through the seconds of ``SMALL`` and of ``size`` bytes.

    Where the large one took no longer, or so little that the rate would be none (``FASTEST``), a busy machine was
    measured: then the large one's own rate, without alpha, which is right for the size that the program moves.
    """
    more = large - small
    if more <= (size - SMALL) / FASTEST:
        return [0.0, min(size / max(large, 1e-9), FASTEST)]
    beta = (size - SMALL) / more
    return [max(small - SMALL / beta, 0.0), beta]


def _contention(
    lowered: Lowered, artefacts: Artefacts, mesh: Mesh, reduce_s: float, size: int, repeats: int = 3
) -> float:
    """What an all-reduce of ``size`` bytes takes from the units beside it, as a share of its own time.

    The heaviest F unit runs alone for as long as the all-reduce takes and half as long again, then beside it.
    """
    units = [u for chunk in lowered.chunks.values() for u in chunk.units[Phase.F]]
    call, inputs = bound_unit(max(units, key=lambda unit: unit.flops), artefacts)
    tensor = _bytes(size, mesh)
    alone = _median(lambda _: call(list(inputs)), tensor, mesh, repeats)
    # The same number on every rank of the group: each does its share of collectives.
    wanted = torch.tensor(
        [min(1.5 * reduce_s, BESIDE_S) / max(alone, 1e-6)], dtype=torch.float64, device=mesh.device
    )
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=mesh.tp_group)
    count = max(1, math.ceil(float(wanted)))

    def units_alone(_: Tensor) -> None:
        for _run in range(count):
            call(list(inputs))

    def beside(tensor: Tensor) -> None:
        work = dist.all_reduce(tensor, group=mesh.tp_group, async_op=True)
        units_alone(tensor)
        if work is not None:
            work.wait()

    plain = _median(units_alone, tensor, mesh, repeats)
    both = _median(beside, tensor, mesh, repeats)
    return (both - max(plain, reduce_s)) / max(min(plain, reduce_s), 1e-9)


def _bytes(size: int, mesh: Mesh) -> Tensor:
    return torch.zeros(max(size // 4, 1), dtype=torch.float32, device=mesh.device)


def _median(call: Callable[[Tensor], Any], tensor: Tensor, mesh: Mesh, repeats: int) -> float:
    """Seconds of ``call``; the first run is discarded."""
    samples = []
    for _ in range(repeats + 1):
        start = _now(mesh)
        call(tensor)
        samples.append(_now(mesh) - start)
    return statistics.median(samples[1:])


def _now(mesh: Mesh) -> float:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter()
