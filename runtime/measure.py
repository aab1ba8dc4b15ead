"""Peak of live activation bytes: measured by running the program one node at a time, and predicted without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..passes.program import ONE
from ..simulate import ChunkCost, Workload, peaks
from .costs import chunk_cost
from .engine import Engine
from .offload import Parked


class _Sampler(fx.Interpreter):
    """Runs a graph node by node, block graphs too, and samples what is alive after each node."""

    def __init__(self, module: fx.GraphModule, meter: Meter) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.meter = meter

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, fx.GraphModule):
            return self.meter.run(module, args)
        return module(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.meter.sample(result)
        return result


class Meter:
    """Keeps the peak over every sample; ``held`` are storages that don't count (parameters, the batch)."""

    def __init__(self, engine: Engine, held: Iterable[Tensor]) -> None:
        self.outbox = engine.outbox
        self.held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self.frames: list[_Sampler] = []
        self.peak = 0

    def run(self, module: fx.GraphModule, args: Sequence[Any]) -> Any:
        """Run ``module`` on ``args`` under measurement."""
        frame = _Sampler(module, self)
        self.frames.append(frame)
        try:
            return frame.run(*args)
        finally:
            self.frames.pop()

    def sample(self, result: Any) -> None:
        """Count the bytes of all distinct storages that any frame, or the outbox, holds now."""
        seen: dict[int, int] = {}
        alive = [value for frame in self.frames for value in frame.env.values()]
        for tensor in _tensors([alive, result, self.outbox.tensors()]):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.held:
                seen[storage.data_ptr()] = storage.nbytes()
        self.peak = max(self.peak, sum(seen.values()))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Parked):
        yield from value.tensors()


@torch.no_grad()
def measure_peak(engine: Engine, inputs: Mapping[str, Sequence[Tensor]], *, held: Iterable[Tensor]) -> int:
    """Peak bytes of activations over one run of ``engine`` on this rank; see ``BraidedModel.measure_peak``."""
    args = [engine.one if name == ONE else inputs[name] for name in engine.compiled.inputs]
    meter = Meter(engine, [*held, engine.one, *_tensors(list(inputs.values()))])
    meter.run(engine.program, args)
    engine.outbox.flush()
    engine.meter.peak_measured = meter.peak
    return meter.peak


def predict_peak(engine: Engine, ordered_by: Workload | None = None) -> int:
    """What ``measure_peak`` will find on this rank, from the graphs of its chunks and its list of the schedule.
    ordered_by: the costs that units in blocks are ordered by, None for the paper's order."""
    meter = engine.meter
    if meter.peak_predicted is None:
        chunks = engine.lowered.chunks
        # A rank's memory depends on its own list alone, and on the order of units but not on their times.
        second = dict.fromkeys((u.key for c in chunks.values() for us in c.units.values() for u in us), 1.0)
        costs = {index: chunk_cost(chunk, second, lambda _: 0.0) for index, chunk in chunks.items()}
        other = ChunkCost((), (), ())
        every = tuple(costs.get(index, other) for index in range(engine.schedule.n_chunks))
        row = engine.schedule.actions[engine.mesh.pp_rank]
        alone = replace(
            engine.schedule,
            actions=tuple(row if r == engine.mesh.pp_rank else () for r in range(engine.schedule.p)),
        )
        meter.peak_predicted = round(
            peaks(alone, Workload(every), ordered_by=ordered_by, offload=engine.offload)[engine.mesh.pp_rank]
        )
    return meter.peak_predicted
