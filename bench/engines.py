"""The contestants behind one face: a step, the gradients it left, and the activations it held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

import fxbraid
from fxbraid import schedule as schedules
from fxbraid.bench.config import BenchConfig
from fxbraid.bench.devices import Times, spend_in
from fxbraid.bench.entries import AUTO, Entry
from fxbraid.bench.memory import SavedTensors
from fxbraid.bench.orders import torch_order
from fxbraid.bench.parity import Part, dtensor_part
from fxbraid.bench.pippy import SCHEDULES, TorchPipeline, compile_layers
from fxbraid.bench.stages import StageModule, split_layers
from fxbraid.decide import Decision
from fxbraid.model import BraidedModel
from fxbraid.schedule import Placement, Schedule
from fxbraid.variant import automatic, variant

Batch = Mapping[str, Tensor]


class Engine(Protocol):
    """One way to train one rank's share of a model. All methods are collective."""

    label: str
    memory_source: str
    note: str

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of the whole batch; adds to the gradients; the loss, on every rank."""

    def zero_grad(self) -> None: ...

    def parts(self) -> Iterator[Part]:
        """This rank's gradients, under Hugging Face's names."""

    def peak_bytes(self, batch: Batch) -> int | None:
        """The most activation bytes that this rank held during a step, or None where nobody can say."""


class TorchEngine:
    """A schedule class of torch.distributed.pipelining; with ``times``, its stages spend them."""

    memory_source = "live storages that autograd saved, parameters excluded (saved_tensors_hooks)"

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        config: BenchConfig,
        mesh: DeviceMesh,
        times: Times | None = None,
    ) -> None:
        self.label, self.note = "torch", ""
        prepare: Callable[[StageModule], None] | None = None
        if times is not None:
            prepare = partial(spend_in, times=times)
        if config.compile:
            if SCHEDULES[name].splits_backward:
                self.label = "torch eager"
            elif times is not None:  # a compiled layer would spend its time while it is traced
                self.label = "torch eager"
                self.note = "eager, since modelled times cannot be spent in compiled layers"
            else:
                prepare = compile_layers
        self._pipeline = TorchPipeline(
            model,
            name,
            mesh=mesh,
            n_microbatches=config.microbatches,
            microbatch_size=config.microbatch_size,
            seq_len=config.seq,
            prepare=prepare,
        )

    def step(self, batch: Batch) -> Tensor:
        return self._pipeline.step(**batch)

    def zero_grad(self) -> None:
        self._pipeline.zero_grad()

    def parts(self) -> Iterator[Part]:
        for name, parameter in self._pipeline.named_parameters():
            yield dtensor_part(name, parameter)

    def peak_bytes(self, batch: Batch) -> int | None:
        saved = SavedTensors(parameter for _, parameter in self._pipeline.named_parameters())
        with saved.watch():
            self._pipeline.step(**batch)
        return saved.peak


class BraidEngine:
    """A ``BraidedModel``. ``shapes``: of the unsplit model's parameters."""

    memory_source = "fxbraid's own measurement (BraidedModel.measure_peak)"

    def __init__(
        self, model: Any, shapes: Mapping[str, tuple[int, ...]], tp: tuple[int, int], label: str, note: str
    ) -> None:
        self.model, self.label, self.note = model, label, note
        self._shapes, self._tp = shapes, tp

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model.step(**batch)
        return loss

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def parts(self) -> Iterator[Part]:
        for name, parameter in self.model.named_parameters():
            yield shard_part(name, parameter.grad, tuple(parameter.shape), self._shapes.get(name), self._tp)

    def peak_bytes(self, batch: Batch) -> int | None:
        return int(self.model.measure_peak(**batch))


def shard_part(
    name: str, grad: Tensor | None, local: tuple[int, ...], full: tuple[int, ...] | None, tp: tuple[int, int]
) -> Part:
    """Tell a shard's dimension from its shape: it is the one in which it is smaller than the whole."""
    cut = [] if full is None else [d for d, (a, b) in enumerate(zip(local, full, strict=True)) if a != b]
    return Part(name, grad, cut[0], *tp) if cut else Part(name, grad)


class Workshop:
    """Makes engines on one mesh. fxbraid's with the same placement of chunks share one build (``fxbraid.variant``).

    ``new_model`` gives the unsplit model with fresh, equal weights. ``times``: modelled ones; then every chunk has the
    same number of layers, as torch's stages have. All methods are collective.
    """

    def __init__(
        self,
        config: BenchConfig,
        mesh: DeviceMesh,
        new_model: Callable[[], PreTrainedModel],
        *,
        times: Times | None = None,
    ) -> None:
        self._config, self._mesh, self._new_model, self._times = config, mesh, new_model, times
        self._built: dict[Placement, BraidedModel] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def make(self, entry: Entry, batch: Batch, m: int) -> Engine:
        """The engine of ``entry`` for ``batch``, of ``m`` micro-batches."""
        if entry.engine == "torch":
            config = replace(self._config, microbatches=m)
            return TorchEngine(self._new_model(), entry.schedule, config, self._mesh, self._times)
        p, note, decision = self._config.pp, "", None
        if entry.engine == "order":
            order = torch_order(entry.schedule, p, m)
            made, note = order.schedule, order.source
        elif entry.schedule == AUTO:
            decision = self._decide(batch, m)
            made, note = decision.schedule, decision.choice.lines[0]
        else:
            made = schedules.build(entry.schedule, p=p, m=m)
        twin = variant(
            self._base(made, batch),
            made,
            dict(batch),
            collectives=entry.collectives,
            braided=entry.engine == "fxbraid",
            decision=decision,
            offload=self._config.offload,
        )
        tp = (self._mesh["tp"].get_local_rank(), self._mesh["tp"].size())
        return BraidEngine(twin, self._shapes, tp, entry.engine, note)

    def _decide(self, batch: Batch, m: int) -> Decision:
        """``auto``, at the costs of now."""

        def other(placement: Placement) -> BraidedModel:
            name = {1: "1f1b", 2: "interleaved_1f1b" if placement.kind == "loop" else "zbv"}[placement.v]
            return self._base(schedules.build(name, p=placement.p, m=m), batch)

        first = other(schedules.build("zbv", p=self._config.pp, m=m).placement)
        return automatic(first, m, other)

    def _base(self, made: Schedule, batch: Batch) -> BraidedModel:
        """The model with chunks placed as ``made`` has them: traced, sharded and compiled once."""
        if made.placement not in self._built:
            model = self._new_model()
            self._shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
            layers = int(model.config.num_hidden_layers)
            self._built[made.placement] = fxbraid.braid(
                model,
                dict(batch),
                device_mesh=self._mesh,
                n_microbatches=made.m,
                schedule=made,
                compile="unit" if self._config.compile else False,
                sequence_parallel=self._config.sequence_parallel,
                # Whole on every TP rank, as in torch's stages, and two collectives per layer and no other: what the
                # bounds and the ratios of the benchmark are about (``bench.vocab`` is about the vocabulary).
                vocab_parallel=False,
                split=[len(part) for part in split_layers(layers, made.n_chunks)]
                if self._times is not None
                else "auto",
            )
        return self._built[made.placement]
