"""The contestants behind one face: a step, the gradients it left, and the activations it held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from fxbraid.bench.config import BenchConfig, is_torch, split_name
from fxbraid.bench.memory import SavedTensors
from fxbraid.bench.parity import Part, dtensor_part
from fxbraid.bench.pippy import SCHEDULES, TorchPipeline

Batch = Mapping[str, Tensor]


class Engine(Protocol):
    """One way to train one rank's share of a model. All methods are collective."""

    label: str
    memory_source: str

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of the whole batch; adds to the gradients; the loss, on every rank."""

    def zero_grad(self) -> None: ...

    def parts(self) -> Iterator[Part]:
        """This rank's gradients, under Hugging Face's names."""

    def peak_bytes(self, batch: Batch) -> int | None:
        """The most activation bytes that this rank held during a step, or None where nobody can say."""


class TorchEngine:
    """A schedule class of torch.distributed.pipelining."""

    memory_source = "live storages that autograd saved, parameters excluded (saved_tensors_hooks)"

    def __init__(self, model: PreTrainedModel, name: str, config: BenchConfig, mesh: DeviceMesh) -> None:
        self._pipeline = TorchPipeline(
            model,
            name,
            mesh=mesh,
            n_microbatches=config.microbatches,
            microbatch_size=config.microbatch_size,
            seq_len=config.seq,
        )
        self.label = "torch"
        if config.compile:
            if SCHEDULES[name].splits_backward:  # would run its compiled backward twice
                self.label = "torch eager"
            else:
                self._pipeline.compile()

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
    """``fxbraid.braid``."""

    memory_source = "fxbraid's own measurement (BraidedModel.measure_peak)"

    def __init__(
        self, model: PreTrainedModel, name: str, config: BenchConfig, mesh: DeviceMesh, batch: Batch
    ) -> None:
        import fxbraid

        schedule, braided = split_name(name)
        self._shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        self._tp = (mesh["tp"].get_local_rank(), mesh["tp"].size())
        self._model: Any = fxbraid.braid(
            model,
            dict(batch),
            device_mesh=mesh,
            n_microbatches=config.microbatches,
            schedule=schedule,
            compile="unit" if config.compile else False,
            braided=braided,
        )
        self.label = "fxbraid"

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self._model.step(**batch)
        return loss

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def parts(self) -> Iterator[Part]:
        for name, parameter in self._model.named_parameters():
            yield shard_part(name, parameter.grad, tuple(parameter.shape), self._shapes.get(name), self._tp)

    def peak_bytes(self, batch: Batch) -> int | None:
        measure = getattr(self._model, "measure_peak", None)
        return None if measure is None else int(measure(**batch))


def shard_part(
    name: str, grad: Tensor | None, local: tuple[int, ...], full: tuple[int, ...] | None, tp: tuple[int, int]
) -> Part:
    """Tell a shard's dimension from its shape: it is the one in which it is smaller than the whole."""
    cut = [] if full is None else [d for d, (a, b) in enumerate(zip(local, full, strict=True)) if a != b]
    return Part(name, grad, cut[0], *tp) if cut else Part(name, grad)


def make_engine(
    model: PreTrainedModel, name: str, config: BenchConfig, mesh: DeviceMesh, batch: Batch
) -> Engine:
    """Takes over ``model``. Collective."""
    if is_torch(name):
        return TorchEngine(model, name, config, mesh)
    return BraidEngine(model, name, config, mesh, batch)
