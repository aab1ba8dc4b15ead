"""Costs of the traced units: what the simulator is told about a real model.

``profile`` measures every distinct unit once on this machine. ``workload`` puts measured (or any other) times onto
the units of all chunks; bytes come from the graphs. The simulator then orders them with
``fxbraid.schedule.weave`` and ``fxbraid.schedule.lower``, as the executor does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, fx

from ..passes.block import ends_with_mark
from ..passes.compile import Artefacts
from ..passes.cost import nbytes
from ..passes.joint import VIEWS, Phase
from ..passes.pipeline import Lowered
from ..passes.units import ChunkUnits, Unit
from ..simulate import INSTANT, ChunkCost, Link, UnitCost, Workload

#: Seconds that an all-reduce of so many bytes takes.
CollectiveTime = Callable[[int], float]


@torch.no_grad()
def profile(lowered: Lowered, artefacts: Artefacts, *, repeats: int = 5) -> dict[str, float]:
    """Seconds of every distinct unit (by key) of ``lowered``'s chunks: the median of ``repeats`` runs after one
    that is discarded, on random values of the unit's own shapes. Nothing is communicated."""
    measured: dict[str, float] = {}
    for unit in (u for chunk in lowered.chunks.values() for us in chunk.units.values() for u in us):
        if unit.key in measured:
            continue
        artefact = artefacts.get(unit)
        inputs = [_random(n.meta["val"]) for n in unit.graph_module.graph.find_nodes(op="placeholder")]
        samples = []
        for _ in range(repeats + 1):
            start = _clock(inputs)
            artefact(*inputs)
            samples.append(_clock(inputs) - start)
        measured[unit.key] = statistics.median(samples[1:])
    return measured


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
    link: Link = INSTANT,
    label: str = "measured profile",
) -> Workload:
    """Costs of all chunks of ``lowered`` (which must hold all of them).

    ``seconds``: by unit key, as :func:`profile` returns. ``collective``: bytes -> seconds of one all-reduce.
    Bytes of saved activations, hand-over and boundaries are counted from the graphs, each storage once, freed
    behind the last unit that reads it.
    """
    chunks = [lowered.chunks[index] for index in range(len(lowered.partition.chunks))]
    made = tuple(
        _chunk(chunk, seconds, collective if chunk.tp_size > 1 else lambda _: 0.0) for chunk in chunks
    )
    return Workload(made, link=link, label=label)


def _chunk(chunk: ChunkUnits, seconds: Mapping[str, float], collective: CollectiveTime) -> ChunkCost:
    saves, frees = _bytes(chunk)

    def cost(unit: Unit) -> UnitCost:
        launched = [
            nbytes(user.meta["val"]) for out in unit.outs for user in out.users if chunk.is_collective(user)
        ]
        return UnitCost(
            name=unit.name,
            seconds=seconds[unit.key],
            depth=unit.index,
            launches=ends_with_mark(chunk, unit),
            collective=sum(collective(size) for size in launched),
            heavy=unit.matmuls > 0,
            saves=saves.get(unit.label, 0),
            frees=frees.get(unit.label, 0),
        )

    f, i, w = (tuple(cost(unit) for unit in chunk.units[phase]) for phase in (Phase.F, Phase.I, Phase.W))
    forward = sum(nbytes(n.meta["val"]) for n in chunk.outputs) if chunk.joint.chunk.boundary_out else 0
    return ChunkCost(f, i, w, forward, sum(nbytes(n.meta["val"]) for n in chunk.input_grads))


def _bytes(chunk: ChunkUnits) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that each unit adds to what outlives it, and bytes that nobody needs behind it, by unit label."""
    saves: dict[str, int] = {}
    frees: dict[str, int] = {}
    order = [unit for phase in Phase for unit in chunk.units[phase]]
    makers = {_storage(out): unit for unit in reversed(order) for out in unit.outs}
    readers: dict[fx.Node, Unit] = {}
    for unit in order:
        if unit.phase is not Phase.F:
            readers.update({_storage(arg): unit for arg in unit.args})
    given = {*chunk.joint.inputs.values(), *chunk.joint.tangents}
    for value in {_storage(n) for n in (*chunk.for_I, *chunk.for_W, *chunk.handed)} - given:
        if value not in readers:
            continue
        # A value that no unit makes is the boundary that F received, or a collective's result.
        source = value.args[0] if chunk.is_collective(value) else value
        maker = makers.get(value) or makers.get(_storage(source)) or order[0]  # type: ignore[arg-type]
        size = nbytes(value.meta["val"])
        saves[maker.label] = saves.get(maker.label, 0) + size
        frees[readers[value].label] = frees.get(readers[value].label, 0) + size
    return saves, frees


def _storage(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` is a view of."""
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node
