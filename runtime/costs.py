"""Costs of the traced units: what the simulator is told about a real model.

``profile`` measures every distinct unit once on this machine. ``workload`` puts measured (or any other) times onto
the units of all chunks; bytes come from the graphs. The simulator then orders them with
``fxbraid.schedule.weave`` and ``fxbraid.schedule.lower``, as the executor does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from ..passes.aliases import storage
from ..passes.compile import Artefacts
from ..passes.cost import nbytes, reduce_bytes
from ..passes.errors import BraidError
from ..passes.joint import Phase
from ..passes.launches import ends_with_mark, fetched, launched
from ..passes.offload import stored
from ..passes.pipeline import Lowered
from ..passes.units import ChunkUnits, Unit
from ..simulate import INSTANT, ChunkCost, Link, UnitCost, Workload
from .unit import BoundUnit, GradSlot

#: A unit of the program: takes its arguments out of the list.
Call = Callable[[list[Tensor]], Sequence[Tensor]]

#: A reading of the clock should be over this many seconds, as far as ``MOST_RUNS`` of a unit reach.
LEAST_S = 1e-3
MOST_RUNS = 20

#: Seconds that an all-reduce of so many bytes takes.
CollectiveTime = Callable[[int], float]


def profile(lowered: Lowered, artefacts: Artefacts, *, repeats: int = 5) -> dict[str, float]:
    """Seconds of every distinct unit (by key) of ``lowered``'s chunks. Local: nothing is communicated."""
    units = (u for chunk in lowered.chunks.values() for us in chunk.units.values() for u in us)
    return unit_seconds(units, artefacts, repeats=repeats)


@torch.no_grad()
def unit_seconds(units: Iterable[Unit], artefacts: Artefacts, *, repeats: int = 5) -> dict[str, float]:
    """Seconds of every distinct one of ``units``, by key: the median of ``repeats`` runs after one that is discarded,
    called as the program calls it, on random values of the unit's own shapes. A W unit adds into gradients that are
    there already. Very short units are run several times for each reading of the clock."""
    measured: dict[str, float] = {}
    for unit in units:
        if unit.key in measured:
            continue
        call, inputs = bound_unit(unit, artefacts)

        def run(times: int, call: Call = call, inputs: list[Tensor] = inputs) -> float:
            start = _clock(inputs)
            for _ in range(times):
                call(list(inputs))
            return (_clock(inputs) - start) / times

        run(1)
        times = max(1, min(MOST_RUNS, int(LEAST_S / max(run(1), 1e-9))))
        measured[unit.key] = statistics.median(run(times) for _ in range(repeats))
    return measured


def bound_unit(unit: Unit, artefacts: Artefacts) -> tuple[Call, list[Tensor]]:
    """``unit`` as the program calls it, ``call(list(inputs))``, on parameters and inputs of random values."""
    values = [_random(node.meta["val"]) for node in unit.graph_module.graph.find_nodes(op="placeholder")]
    state = dict(zip(unit.state, values, strict=False))
    slots: dict[str, GradSlot] = {}
    for out, name in zip(unit.outs, unit.grads, strict=True):
        if name is not None:
            slots[name] = GradSlot(nn.Parameter(_random(out.meta["val"])), shared=False)
    return BoundUnit(unit, artefacts.get(unit), state, slots).boxed, values[len(unit.state) :]


def _random(val: Tensor) -> Tensor:
    # Through a flat buffer: a broadcast mask has strides of 0, which nothing may write to.
    size = 1 + sum((n - 1) * stride for n, stride in zip(val.shape, val.stride(), strict=True))
    flat = torch.empty(max(size, 1), dtype=val.dtype, device=val.device)
    if val.is_floating_point():
        flat.uniform_(0.1, 1.0)
    else:
        flat.zero_()  # indices: 0 is valid for every table and every label
    return flat.as_strided(val.shape, val.stride())


def _clock(inputs: Iterable[Tensor]) -> float:
    if any(tensor.is_cuda for tensor in inputs):
        torch.cuda.synchronize()
    return time.perf_counter()


def workload(
    lowered: Lowered,
    seconds: Mapping[str, float],
    *,
    collective: CollectiveTime = lambda _: 0.0,
    reduce: CollectiveTime | None = None,
    link: Link = INSTANT,
    host: Link = INSTANT,
    label: str = "measured profile",
) -> Workload:
    """Costs of all chunks of ``lowered`` (which must hold all of them).

    ``seconds``: by unit key (or place), as :func:`profile` returns. ``collective``: bytes -> seconds of one all-reduce,
    ``reduce``: of one over replicas, None where there is one. Bytes of saved activations, hand-over and boundaries are
    counted from the graphs, each storage once, freed behind the last unit that reads it.
    """
    chunks = [lowered.chunks[index] for index in range(len(lowered.partition.chunks))]
    made = tuple(
        chunk_cost(chunk, seconds, collective if chunk.tp_size > 1 else lambda _: 0.0, reduce)
        for chunk in chunks
    )
    return Workload(made, link=link, host=host, label=label)


def chunk_cost(
    chunk: ChunkUnits,
    seconds: Mapping[str, float],
    collective: CollectiveTime,
    reduce: CollectiveTime | None = None,
) -> ChunkCost:
    """The costs of one chunk; see :func:`workload`. Its gradients go over the replicas as if in one message."""
    saves, frees = _bytes(chunk)

    def cost(unit: Unit) -> UnitCost:
        sizes = [reduce_bytes(user) for out in unit.outs for user in launched(chunk, unit, out)]
        gathered = fetched(chunk, unit)
        return UnitCost(
            name=unit.name,
            seconds=time_of(seconds, unit),
            depth=unit.index,
            launches=ends_with_mark(chunk, unit),
            collective=sum(collective(size) for size in sizes),
            heavy=unit.heavy,
            saves=saves.get(unit.label, 0),
            frees=frees.get(unit.label, 0),
            fetch=sum(collective(reduce_bytes(node)) for node in gathered),
            fetched=sum(nbytes(node.meta["val"]) for node in gathered),
            again=unit.again,
        )

    f, i, w = (tuple(cost(unit) for unit in chunk.units[phase]) for phase in (Phase.F, Phase.I, Phase.W))
    forward = sum(nbytes(n.meta["val"]) for n in chunk.outputs) if chunk.joint.chunk.boundary_out else 0
    backward = sum(nbytes(n.meta["val"]) for n in chunk.input_grads)
    return ChunkCost(
        f,
        i,
        w,
        forward,
        backward,
        reduces=reduce(gradient_bytes(chunk)) if reduce is not None else 0.0,
        parks=tuple(one.nbytes for one in stored(chunk)),
    )


def gradient_bytes(chunk: ChunkUnits) -> int:
    """Bytes of the gradients of a chunk's parameters on one rank, which add up in float32 or wider by default."""
    sizes = {
        name: out.meta["val"].numel() * max(4, out.meta["val"].dtype.itemsize)
        for unit in chunk.units[Phase.W]
        for out, name in zip(unit.outs, unit.grads, strict=True)
        if name is not None
    }
    return sum(sizes.values())


def place_of(unit: Unit) -> str:
    """Names a unit by where it stands, the same on every rank: chunk, phase and index."""
    return f"{unit.chunk}{unit.kind}{unit.index}"


def time_of(seconds: Mapping[str, float], unit: Unit) -> float:
    """A unit's time: by its place where that is given (modelled times may differ between equal units), else by key."""
    placed = seconds.get(place_of(unit))
    if placed is not None:
        return placed
    if unit.key not in seconds:
        raise BraidError(
            f"the times say nothing of unit {unit.label} of chunk {unit.chunk} (key {unit.key}); they hold "
            f"{len(seconds)} others. Measure them on this model and these shapes: fxbraid.profile(model)"
        )
    return seconds[unit.key]


def _bytes(chunk: ChunkUnits) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that each unit adds to what outlives it, and bytes that nobody needs behind it, by unit label."""
    saves: dict[str, int] = {}
    frees: dict[str, int] = {}
    order = [unit for phase in Phase for unit in chunk.units[phase]]
    makers = {storage(out): unit for unit in reversed(order) for out in unit.outs}
    readers: dict[fx.Node, Unit] = {}
    for unit in order:
        if unit.phase is not Phase.F:
            readers.update({storage(arg): unit for arg in unit.args})
    given = {*chunk.joint.inputs.values(), *chunk.joint.tangents}
    again = [out for unit in order if unit.again for out in unit.outs]
    for value in {storage(n) for n in (*chunk.for_I, *chunk.for_W, *chunk.handed, *again)} - given:
        if value not in readers:
            continue
        # A value that no unit makes is the boundary that F received, or a collective's result.
        source = value.args[0] if chunk.is_collective(value) else value
        maker = makers.get(value) or makers.get(storage(source)) or order[0]  # type: ignore[arg-type]
        size = nbytes(value.meta["val"])
        saves[maker.label] = saves.get(maker.label, 0) + size
        frees[readers[value].label] = frees.get(readers[value].label, 0) + size
    return saves, frees
