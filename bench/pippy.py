"""The baseline: the real schedules of torch.distributed.pipelining, with DTensor tensor parallelism.

``TorchPipeline.step`` returns the loss and leaves the gradients of the uncut model, also with ragged labels
and tied embeddings. What that takes, and why, is in DESIGN section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from fxbraid.bench.stages import StageModule, base_of, layer_styles, parallelize, split_layers

#: Its first step also warms the point-to-point connections and sets the receive buffers up.
WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """A schedule class and what it asks for. ``refuses(p, m)`` is the reason why it cannot run, or None."""

    cls: Callable[..., Any]
    chunks_per_rank: int
    placement: str  # "loop" or "v"
    refuses: Callable[[int, int], str | None]
    splits_backward: bool = False


def _anything(p: int, m: int) -> str | None:
    return None


def _at_least_stages(p: int, m: int) -> str | None:
    return None if m >= p else f"it needs m >= {p} stages, and m is {m}"


def _whole_rounds(p: int, m: int) -> str | None:
    rounds = max(1, m // p)
    return None if m % rounds == 0 else f"it needs m divisible by max(1, m // p) = {rounds}, and m is {m}"


def _at_least_twice(p: int, m: int) -> str | None:
    return None if m >= 2 * p else f"it needs m >= 2p = {2 * p}, and m is {m}"


SCHEDULES: Mapping[str, TorchSchedule] = {
    "ScheduleGPipe": TorchSchedule(ScheduleGPipe, 1, "loop", _anything),
    "Schedule1F1B": TorchSchedule(Schedule1F1B, 1, "loop", _at_least_stages),
    "ScheduleInterleaved1F1B": TorchSchedule(ScheduleInterleaved1F1B, 2, "loop", _whole_rounds),
    "ScheduleLoopedBFS": TorchSchedule(ScheduleLoopedBFS, 2, "loop", _anything),
    "ScheduleInterleavedZeroBubble": TorchSchedule(
        ScheduleInterleavedZeroBubble, 2, "loop", _whole_rounds, splits_backward=True
    ),
    "ScheduleZBVZeroBubble": TorchSchedule(ScheduleZBVZeroBubble, 2, "v", _anything, splits_backward=True),
    "ScheduleDualPipeV": TorchSchedule(ScheduleDualPipeV, 2, "v", _at_least_twice, splits_backward=True),
}


def token_loss(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """A micro-batch's part of the whole batch's mean: its sum over tokens by the global count."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    total = F.cross_entropy(
        logits.float().flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="sum"
    )
    return total / count


class TorchPipeline:
    """One rank's share of ``model`` under one torch schedule.

    ``mesh`` has the axes "pp" and "tp". The model's parameters become this object's; with TP its layers are
    sharded in place, so every pipeline needs a model of its own, with equal weights on all ranks. ``prepare`` changes
    each stage's module before the schedule sees it.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: str,
        *,
        mesh: DeviceMesh,
        n_microbatches: int,
        microbatch_size: int,
        seq_len: int,
        prepare: Callable[[StageModule], None] | None = None,
    ) -> None:
        kind = SCHEDULES[schedule]
        self._pp: dist.ProcessGroup = mesh["pp"].get_group()
        p, rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
        if reason := kind.refuses(p, n_microbatches):
            raise ValueError(f"{schedule} cannot run: {reason}")
        n_stages = p * kind.chunks_per_rank
        base = base_of(model)
        styles = layer_styles(model) if mesh["tp"].size() > 1 else {}
        cuts = split_layers(len(base.layers), n_stages)
        self._owner = _placement(kind, p)
        self.modules: list[StageModule] = []
        stages = []
        for index in (i for i in range(n_stages) if self._owner[i] == rank):
            module = StageModule(model, cuts[index], first=index == 0, last=index == n_stages - 1)
            parallelize(module, styles, mesh["tp"])
            if prepare is not None:
                prepare(module)
            self.modules.append(module)
            shapes = _boundary(base.config, module, microbatch_size, seq_len)
            device = next(module.parameters()).device
            stages.append(PipelineStage(module, index, n_stages, device, *shapes, group=self._pp))
        self._first = self._owner[0] == rank
        self._last = self._owner[n_stages - 1] == rank
        self._tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self._tie_group = self._make_tie_group(mesh)
        single = issubclass(kind.cls, PipelineScheduleSingle)  # type: ignore[arg-type]
        self._schedule = kind.cls(
            stages[0] if single else stages, n_microbatches, loss_fn=token_loss, scale_grads=False
        )

    def step(self, *, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Forward and backward of the whole batch; the same 0-d loss on every rank."""
        count = (labels[:, 1:] != -100).sum()
        losses: list[Tensor] = []
        self._schedule.step(
            *((input_ids,) if self._first else ()),
            target=labels if self._last else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"count": count},
            **({} if attention_mask is None else {"attention_mask": attention_mask}),
        )
        if self._tie_group is not None:
            weight = self._tied_weight()
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=self._tie_group)
        loss = (
            torch.stack([x.detach() for x in losses]).sum()
            if losses
            else torch.zeros((), device=labels.device)
        )
        dist.broadcast(loss, group=self._pp, group_src=self._owner[-1])
        return loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters (DTensors where sharded) under Hugging Face's names, each once.

        A tied head goes by the name of the embedding.
        """
        seen: set[str] = set()
        for module in self.modules:
            for name, parameter in module.hf_parameters():
                if self._tied and name == "lm_head.weight":
                    name = f"{module._prefix}embed_tokens.weight"
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def zero_grad(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def _make_tie_group(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """The pair of ranks that hold the two uses of a tied weight, where they are two."""
        if not self._tied or self._owner[0] == self._owner[-1]:
            return None
        ranks = mesh.mesh  # [pp, tp]
        mine = None
        for column in range(ranks.shape[1]):  # every rank makes every group, in one order
            pair = [int(ranks[self._owner[0], column]), int(ranks[self._owner[-1], column])]
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                mine = group
        return mine

    def _tied_weight(self) -> nn.Parameter:
        module = self.modules[0] if self._first else self.modules[-1]
        weight: nn.Parameter = module.body.embed_tokens.weight if self._first else module.head.weight
        return weight


def try_compiled(name: str) -> str:
    """In one rank: run torch's class ``name`` on a tiny model with compiled layers, by ``torch.compile(layer)`` and by
    ``layer.compile()``. How each ended, as the end of a sentence (see DESIGN section 9)."""
    from torch.distributed.device_mesh import init_device_mesh

    from fxbraid.bench.models import build_model, load_config, make_batch
    from fxbraid.runtime.launch import process_group

    config = load_config(
        "llama-tiny", num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=64
    )
    batch = make_batch(64, 2, 8, 0)

    def gradients(prepare: Callable[[StageModule], None] | None) -> list[Tensor]:
        pipeline = TorchPipeline(
            build_model(config, 0),
            name,
            mesh=mesh,
            n_microbatches=2,
            microbatch_size=1,
            seq_len=8,
            prepare=prepare,
        )
        for _ in range(2):
            pipeline.zero_grad()
            pipeline.step(**batch)
        return [p.grad for _, p in pipeline.named_parameters() if p.grad is not None]

    with process_group(timeout_s=60, device_type="cpu"):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
        eager = gradients(None)
        ended = []
        for how, prepare in (("torch.compile(layer)", _wrap_layers), ("layer.compile()", compile_layers)):
            try:
                pairs = list(zip(gradients(prepare), eager, strict=True))
                worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
                said = f"gives gradients within {worst:.0e} of eager"
            except Exception as error:  # whatever it is: the question is how it fails
                text = " ".join(str(error).split())
                said = f"fails with {type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"
            ended.append(f"with {how} it {said}")
    return "; ".join(ended)


def compile_layers(module: StageModule) -> None:
    """Compile every decoder layer in place."""
    for layer in module.body.layers:
        layer.compile()


def _wrap_layers(module: StageModule) -> None:
    for index, layer in enumerate(module.body.layers):
        module.body.layers[index] = torch.compile(layer)


def _placement(kind: TorchSchedule, p: int) -> list[int]:
    """Stage -> pipeline rank."""
    if kind.placement == "v":
        return [*range(p), *reversed(range(p))]
    return [stage % p for stage in range(p * kind.chunks_per_rank)]


def _boundary(config: Any, module: StageModule, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Shapes of what a stage receives and sends: given, so that torch runs no stage to infer them."""
    weight = next(module.parameters())

    def empty(*shape: int, dtype: torch.dtype, grad: bool) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

    hidden = empty(batch, seq, config.hidden_size, dtype=weight.dtype, grad=True)
    ids = empty(batch, seq, dtype=torch.int64, grad=False)
    logits = empty(batch, seq, config.vocab_size, dtype=weight.dtype, grad=True)
    return ids if module.first else hidden, hidden if module.head is None else logits
