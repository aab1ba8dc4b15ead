"""What the ranks of ``fxbraid.bench.ablation`` run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import fxbraid
from fxbraid.bench.config import BenchConfig
from fxbraid.bench.devices import Times, count_flops, flops_times
from fxbraid.bench.models import build_model, make_batch
from fxbraid.bench.offload_ranks import link_of
from fxbraid.bench.ranks import group, tell
from fxbraid.passes.checkpoint import Named
from fxbraid.runtime import emulate

POLICIES: tuple[Named, ...] = ("none", "mlp", "attention+mlp", "all")


@dataclass(frozen=True, slots=True)
class ByFlops(Times):
    """Every unit takes its own FLOPs over ``rate``, so what is computed again takes what of F is computed again."""

    rate: float

    def of(self, unit: Any) -> float:
        return float(unit.flops / self.rate)


@dataclass(frozen=True, slots=True)
class Plan:
    """Travels to the ranks."""

    config: BenchConfig
    schedule: str
    m: int
    ratio: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank under one policy: seconds and bytes of a step, run and predicted."""

    policy: str
    seconds: float
    simulated: float
    peak: int
    predicted: int
    loss: float


def measure(plan: Plan) -> list[Cell]:
    """In each rank: a cell for each policy."""
    torch.set_num_threads(1)
    config, hf = replace(plan.config, compute="modelled"), plan.config.hf()
    batch = make_batch(hf.vocab_size, plan.m * config.microbatch_size, config.seq, 1, ragged=True)
    micro = {name: value[: config.microbatch_size] for name, value in batch.items()}
    flops = count_flops(build_model(hf, config.seed), micro, config.tp)
    mean = flops_times(flops, 1.0)
    rate = flops["mlp", "F"] / mean.seconds["mlp", "F"] / (config.unit_ms * 1e-3)
    times = ByFlops(mean.seconds, "in proportion to FLOPs", rate)
    cells = []
    with group(config, times):
        emulate.change(tp_link=link_of(config, flops_times(flops, config.unit_ms * 1e-3), plan.ratio))
        mesh = dist.device_mesh.init_device_mesh("cpu", (config.pp, config.tp), mesh_dim_names=("pp", "tp"))
        for policy in POLICIES:
            if dist.get_rank() == 0:
                tell(0, 0, policy)
            model = fxbraid.braid(
                build_model(hf, config.seed),
                dict(batch),
                device_mesh=mesh,
                n_microbatches=plan.m,
                schedule=plan.schedule,
                compile=False,
                vocab_parallel=False,
                checkpoint=policy,
            )
            with emulate.stopwatch() as reading:
                loss = model.step(**batch)
            predicted = model.last_step.peak_predicted or 0
            simulated = model.simulate(model.profile(cache=False)).step_time
            peak = model.measure_peak(**batch)
            cells.append(Cell(policy, reading.seconds, simulated, peak, predicted, loss.item()))
    return cells
