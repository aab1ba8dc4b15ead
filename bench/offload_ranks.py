"""Runs inside the ranks of ``bench.offload``: one schedule without offload and over several host links."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fxbraid import schedule as schedules
from fxbraid.bench.config import BenchConfig
from fxbraid.bench.devices import Times, equal_times
from fxbraid.bench.engines import Batch, Workshop
from fxbraid.bench.entries import parse
from fxbraid.bench.models import build_model, make_batch
from fxbraid.bench.ranks import group, tell
from fxbraid.model import BraidedModel
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Link
from fxbraid.variant import variant


@dataclass(frozen=True, slots=True)
class Plan:
    """Travels to the ranks. shares: host links, of the TP link's bandwidth."""

    config: BenchConfig
    schedule: str
    m: int
    ratio: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank under one host link (0: without offload). moved: share of what was asked that leaves."""

    share: float
    seconds: float
    peak: int
    predicted: int
    moved: float
    digest: str
    lines: tuple[str, ...] = ()


def measure(plan: Plan) -> list[Cell]:
    """In each rank: one cell without offload, one for each host link."""
    torch.set_num_threads(1)
    config = replace(plan.config, compute="modelled")
    times = equal_times(config.unit_ms * 1e-3)
    with group(config, times):
        tp_link = link_of(config, times, plan.ratio)
        emulate.change(tp_link=tp_link)
        hf = config.hf()
        mesh = dist.device_mesh.init_device_mesh("cpu", (config.pp, config.tp), mesh_dim_names=("pp", "tp"))
        batch = make_batch(hf.vocab_size, plan.m * config.microbatch_size, config.seq, 1, ragged=True)
        _say("build")
        workshop = Workshop(config, mesh, partial(build_model, hf, config.seed), times=times)
        engine: Any = workshop.make(parse(plan.schedule), batch, plan.m)
        plain: BraidedModel = engine.model
        cells = [_cell(plain, batch, 0.0)]
        for share in plan.shares:
            _say(f"host link {share:g} of the TP link")
            emulate.change(host_link=Link(tp_link.alpha_s, share * tp_link.beta_bytes_per_s))
            made = schedules.build(plan.schedule, p=config.pp, m=plan.m)
            cells.append(_cell(variant(plain, made, dict(batch), offload="chunk0"), batch, share))
        return cells


def link_of(config: BenchConfig, times: Times, ratio: float) -> Link:
    """The TP link over which the all-reduce behind a unit takes ``ratio`` of the unit's forward."""
    nbytes = config.microbatch_size * config.seq * config.hf().hidden_size * 4
    moved = nbytes * emulate.factor(emulate.Op.ALL_REDUCE, config.tp)
    return Link(0.0, moved / (ratio * times.forward))


def _cell(model: BraidedModel, batch: Batch, share: float) -> Cell:
    model.zero_grad()
    with emulate.stopwatch() as reading:
        loss = model.step(**batch)
    digest = hashlib.sha256(loss.numpy().tobytes())
    for _, parameter in model.named_parameters():
        if parameter.grad is not None:
            digest.update(parameter.grad.numpy().tobytes())
    predicted = model.last_step.peak_predicted
    peak = model.measure_peak(**batch)
    offload = model._offloading
    return Cell(
        share=share,
        seconds=reading.seconds,
        peak=peak,
        predicted=0 if predicted is None else predicted,
        moved=0.0 if offload is None else offload.own.share(offload.rank),
        digest=digest.hexdigest(),
        lines=model.report().offload,
    )


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        tell(0, 0, text)
