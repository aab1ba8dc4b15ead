"""Runs inside ranks: steps on the emulated cluster, measured and recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import fxbraid
from fxbraid.metrics import StepMetrics
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link
from fxbraid.runtime.launch import process_group
from fxbraid.timeline import Timeline, contention

from .parity import make_batches, make_model, share_traces

UNIT_S, AR_S = 2e-3, 1e-3  # of each attention and MLP unit, in each of F, I and W; of each all-reduce
PP_LINK = Link(0.5e-3, 4e6)
CLUSTER = Cluster(Link(AR_S), PP_LINK)
MESSAGE = 16 * 32 * 4  # bytes of one micro-batch: a row of 16 tokens, 32 wide, float32
M = 8


def seconds(unit: Any) -> float:
    """Attention and MLP alike, everything else free."""
    return UNIT_S if unit.name.startswith(("attn", "mlp")) else 0.0


def make(schedule: str, batch: dict[str, Any], **options: Any) -> Any:
    plain = make_model("qwen2", tied=False, layers=4, dtype=torch.float32)
    # Whole, so that every collective is one of an attention or MLP unit: what ``constants`` says.
    options = {"vocab_parallel": False, "compile": False, "tp_size": 2, "pp_size": 2, **options}
    options.setdefault("n_microbatches", M)
    if schedule in ("stp", "dualpipev"):
        options["split"] = [1] * 4
    return fxbraid.braid(plain, batch, schedule=schedule, **options)


def everything(runs: list[tuple[str, str]], folder: str) -> dict[str, Any]:
    """In each of 2 x 2 ranks: what the functions below find."""
    torch.set_num_threads(1)
    share_traces()
    return {"runs": measure(runs, folder), "contentions": contentions(), "real": real()}


def measure(runs: list[tuple[str, str]], folder: str) -> dict[str, dict[str, Any]]:
    """In each of 2 x 2 ranks, on the virtual clock: for each schedule and mode of collectives the step time that a
    stopwatch says, metrics, losses of a plain and of a recorded step, and the merged timeline."""
    batch = make_batches(1, M, mask=False, steps=1)[0]
    found: dict[str, dict[str, Any]] = {}
    with emulate.process_group(CLUSTER, timeout_s=60):
        emulate.unit_times(seconds)
        for schedule, collectives in runs:
            model = make(schedule, batch, collectives=collectives)
            with emulate.stopwatch() as reading:
                loss = float(model.step(**batch))
            plain: StepMetrics = model.last_step
            with emulate.stopwatch() as again:
                recorded = float(model.record(**batch))
            timeline: Timeline = model.write_timeline(f"{folder}/{schedule}-{collectives}.json")
            found[f"{schedule}:{collectives}"] = {
                "seconds": (reading.seconds, again.seconds),
                "losses": (loss, recorded),
                "plain": plain,
                "recorded": model.last_step,
                "timeline": timeline,
                "report": str(model.report()),
            }
    return found


def real() -> dict[str, Any]:
    """In each of 2 x 2 ranks, on gloo and the clock of the machine: three steps, the second one recorded; only the
    first rank asks for the metrics of the last."""
    batches = make_batches(1, M, mask=False, steps=3)
    with process_group(timeout_s=60):
        model = make("stp", batches[0])
        try:
            said = str(model.last_step)
        except fxbraid.BraidError as error:
            said = str(error)
        losses = [float(model.step(**batches[0]))]
        first = model.last_step
        losses.append(float(model.record(**batches[1])))
        own, timeline = model.timeline(), model.write_timeline()
        losses.append(float(model.step(**batches[2])))
        try:
            model.timeline()
        except fxbraid.BraidError as error:
            said += str(error)
        last = model.last_step if dist.get_rank() == 0 else None
        return {
            "losses": losses,
            "metrics": first,
            "last": last,
            "own": own,
            "timeline": timeline,
            "said": said,
        }


def contentions() -> list[float | None]:
    """In each of 2 x 2 ranks: contention of a step with units as fast, and 1.5 times as slow, beside a collective."""
    batch = make_batches(1, M, mask=False, steps=1)[0]
    found: list[float | None] = []
    # All-reduces that last longer than what stands beside them, so that units are beside one from end to end.
    with emulate.process_group(replace(CLUSTER, tp_link=Link(3e-3)), timeout_s=60):
        emulate.unit_times(seconds)
        model = make("stp", batch)
        for slowdown in (1.0, 1.5):
            emulate.change(slowdown=slowdown)
            model.record(**batch)
            found.append(contention(model.write_timeline()))
    return found
