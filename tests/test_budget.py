"""A budget: the fastest way that fits, what more would buy, and by how much it can't be done."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import fxbraid
from fxbraid.budget import Budget, Variant, Way, choose_under
from fxbraid.cli import app, mount
from fxbraid.options import Options
from fxbraid.passes.checkpoint import NAMES
from fxbraid.passes.pipeline import Lowered
from fxbraid.runtime.costs import workload
from fxbraid.runtime.measure import measure
from fxbraid.simulate import Workload

from .alone import engine, inputs
from .test_memory import traced
from .tiny import batch, qwen2

P, M = 2, 8
OPTIONS = Options(n_microbatches=M, compile=False)


def trace(options: Options, n_chunks: int) -> Lowered:
    return traced("none", n_chunks)[1]


def costs(way: Way) -> Workload:
    """Units in proportion to their FLOPs, as if all-reduces took half as long as what is beside them."""
    lowered = traced(way.variant.changes.get("checkpoint", "none"), way.schedule.n_chunks)[1]
    units = [u for c in lowered.chunks.values() for us in c.units.values() for u in us]
    found = workload(lowered, {u.key: 1e-6 + 1e-10 * u.flops for u in units})
    chunks = tuple(
        replace(c, f=tuple(replace(u, collective=1e-5 * u.launches) for u in c.f)) for c in found.chunks
    )
    return replace(found, chunks=chunks)


def budget_of(nbytes: int, known: Budget | None = None) -> Budget:
    """``known``: one whose traces and peaks it shares."""
    budget = Budget(nbytes, OPTIONS, (P, 1), trace)
    for policy in NAMES[1:]:
        for n_chunks in (P, 2 * P):
            budget._traces[f'checkpoint="{policy}"', n_chunks] = traced(policy, n_chunks)[1]
    if known is not None:
        budget._peaks = known._peaks
    return budget


def test_a_sweep_is_monotone_and_every_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = budget_of(1)  # nothing fits, so every way is looked at
    peaks = sorted({everything.peak(way) for way in everything.ways})
    assert len(peaks) > 20 and len({way.variant.name for way in everything.ways}) == 5
    times, said, names = [], [], []
    few = [*peaks[:2], *peaks[2 :: len(peaks) // 10]]
    for nbytes in [2**40, *reversed(few)]:
        budget = budget_of(nbytes, everything)
        way, choice, _ = choose_under(budget, costs, ("paper",), "auto")
        times.append(choice.best.step_time)
        names.append(way.name)
        said.append(way.variant.name)
        assert choice.best.peak <= nbytes and budget.exact(way) == choice.best.peak
    assert times == sorted(times) and times[-1] > times[0] and len(set(names)) > 2
    # Memory is bought with time: from keeping everything to computing all of it again.
    assert said[0] == "everything kept" and said[-1] == 'checkpoint="all"' and len(set(said)) > 2
    # What the last sentence promises for more memory is what more memory gives.
    text = "\n".join(choice.lines)
    assert "the next larger budget that buys time is" in text and f"{len(budget.ways)} ways" in text
    # The leanest choice, really run: what is alive stays under the budget, static bytes and all.
    model, lowered = traced("all", way.schedule.n_chunks)
    for rank in range(P):
        made, _ = engine(model, lowered, way.schedule, rank, monkeypatch, keeps=False)
        found = measure(made, inputs(lowered, batch(2), M), held=[*model.parameters(), *model.buffers()])
        model.zero_grad()
        said = everything.exact(way)
        assert found.inside < said
    impossible = budget_of(peaks[0] - 1000, everything)
    with pytest.raises(
        fxbraid.BraidError, match=r"can't be kept: the leanest of \d+ ways to run, .*1000 B more"
    ):
        impossible.fitting()


def test_variants_are_tried_in_their_order_and_named() -> None:
    lean = Variant("half of it", {"max_programs": 3})  # any option; what it saves, the trace says
    asked = fxbraid.schedule.build("stp", p=P, m=M)

    def smaller(options: Options, n_chunks: int) -> Lowered:
        return trace(options, n_chunks)

    budget = Budget(2**40, OPTIONS, (P, 1), smaller, asked, (Variant("all"), lean))
    assert [way.said for way in budget.fitting()] == ["stp", "stp with half of it"]


def test_braid_keeps_to_a_budget_and_says_so() -> None:
    data = batch(8)
    model = fxbraid.braid(qwen2(), data, n_microbatches=4, compile=False, memory_budget="1GiB")
    assert "memory budget 1 GiB: " in str(model.report()) and model.memory().peak < 2**30
    model.step(**data)
    fixed = fxbraid.braid(
        qwen2(), data, n_microbatches=4, compile=False, schedule="gpipe", memory_budget="1GB"
    )
    assert fixed.schedule.name == "gpipe"
    need = fixed.memory().peak
    asked: dict[str, Any] = {"n_microbatches": 4, "compile": False}
    # Under the same schedule, less is kept; where that was decided already, or everything is too much, it is refused.
    again = fxbraid.braid(qwen2(), data, **asked, schedule="gpipe", memory_budget=need - 1)
    assert again.schedule.name == "gpipe" and again.memory().peak < need
    assert any(u.again for c in again.lowered.chunks.values() for us in c.units.values() for u in us)
    with pytest.raises(fxbraid.BraidError, match=r'gpipe with checkpoint="(all|attention.mlp)", needs'):
        fxbraid.braid(qwen2(), data, **asked, schedule="gpipe", memory_budget="1MB")
    need = again.memory().peak
    policy = again._options.checkpoint
    with pytest.raises(fxbraid.BraidError, match="gpipe, needs") as error:
        fxbraid.braid(qwen2(), data, **asked, schedule="gpipe", checkpoint=policy, memory_budget=need - 1)
    assert "1 B more" in str(error.value)
    lean = fxbraid.braid(qwen2(), data, **asked, memory_budget=need - 1)
    assert lean.memory().peak < need
    with pytest.raises(fxbraid.BraidError, match="no amount"):
        fxbraid.braid(qwen2(), data, n_microbatches=4, memory_budget="lots")


def test_a_plan_keeps_to_a_budget() -> None:
    mount(["plan"])
    asked = "plan --model qwen2-12.1b --gpus 16 --device a800 --seq 6144 --global-batch 32"
    asked += " --tp 8 --pp 2 --micro-batch 1"
    times = []
    for budget in ("70GiB", "45GiB", "30GiB"):
        done = CliRunner().invoke(app, [*asked.split(), "--memory-budget", budget, "--json"])
        assert done.exit_code == 0, done.output
        best = json.loads(done.output)["ranking"][0]
        assert best["peak_bytes"] <= best["limit_bytes"] == int(budget[:-3]) * 2**30
        times.append(best["step_time"])
    assert times == sorted(times)
    done = CliRunner().invoke(app, [*asked.split(), "--memory-budget", "10GiB"])
    assert done.exit_code != 0 and re.search(r"nothing fits.*GB too few", " ".join(done.output.split()))
