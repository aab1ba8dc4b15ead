"""A budget: the fastest way that fits, what more would buy, and by how much it can't be done."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import fxbraid
from fxbraid import budget as budgets
from fxbraid.budget import KEPT, Budget, Variant, Way, choose_under
from fxbraid.cli import app, mount
from fxbraid.options import Options
from fxbraid.passes.checkpoint import NAMES
from fxbraid.passes.pipeline import Lowered
from fxbraid.runtime.costs import workload
from fxbraid.runtime.measure import measure
from fxbraid.schedule import FAMILIES
from fxbraid.simulate import Link, Workload, simulate
from fxbraid.simulate.offload import early_chunks, plan_offload

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


HOST = Link(bandwidth=2e9)


def sweep(schedules: Sequence[str], pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From generous to impossible: more memory is never slower, every budget is kept, what can't be is refused."""
    monkeypatch.setattr(budgets, "FAMILIES", {name: FAMILIES[name] for name in schedules})
    everything = budget_of(1)  # nothing fits, so every way is looked at
    peaks = sorted({everything.peak(way) for way in everything.ways})
    assert len({way.variant.name for way in everything.ways}) == 5
    times, said, names = [], [], []
    few = [*peaks[:2], *peaks[2 :: max(1, len(peaks) // pieces)]]
    for nbytes in [2**40, *reversed(few)]:
        budget = budget_of(nbytes, everything)
        way, choice, _ = choose_under(budget, costs, ("paper",), "auto")
        times.append(choice.best.step_time)
        names.append(choice.best.name)
        said.append(way.variant.name)
        assert choice.best.peak <= nbytes
        if "offload" not in way.variant.changes:
            assert budget.exact(way) == choice.best.peak
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
        assert found.inside < choice.best.peak
    impossible = budget_of(peaks[0] // 2, everything)
    with pytest.raises(
        fxbraid.BraidError, match=r"can't be kept: the leanest of \d+ ways to run, .* more; raise"
    ):
        choose_under(impossible, costs, ("paper",), "auto")
    with pytest.raises(fxbraid.BraidError, match="can't be kept"):
        impossible.fitting()


def test_a_sweep_over_some_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(("1f1b", "stp"), 4, monkeypatch)


@pytest.mark.slow
def test_a_sweep_is_monotone_and_every_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(tuple(FAMILIES), 12, monkeypatch)


def test_what_does_not_fit_may_fit_with_activations_on_the_host() -> None:
    stp = fxbraid.schedule.build("stp", p=P, m=M)

    def only(nbytes: int, **changes: Any) -> Budget:
        return Budget(nbytes, replace(OPTIONS, **changes), (P, 1), trace, stp, (KEPT,))

    here = only(2**40)
    (way,) = here.fitting()
    needs = here.exact(way)
    tight = only(needs - 1)
    assert tight.fitting(offload=True) == []  # it is not known yet whether offload is enough
    with pytest.raises(fxbraid.BraidError, match=r"stp, needs .* 1 B more"):
        tight.fitting()
    chosen, choice, load = choose_under(tight, hosted, ("paper",), "stp")
    assert chosen.variant.changes == {"offload": "chunk0"} and chosen.schedule == stp
    plan = plan_offload(stp, load, early_chunks(stp))
    assert choice.best.peak == tight.exact(way, offload=plan) < needs
    assert (
        choice.best.name == 'stp with offload="chunk0"'
        and "0 of 1 ways fit without offload" in choice.notes[0]
    )
    # The step is as long as without.
    moved, stays = (simulate(stp, load, offload=one).step_time for one in (plan, None))
    assert choice.best.step_time == pytest.approx(stays) == pytest.approx(moved)
    too_small = only(int(choice.best.peak) - 1)
    with pytest.raises(fxbraid.BraidError, match=r'stp with offload="chunk0", needs .* 1 B more'):
        choose_under(too_small, hosted, ("paper",), "stp")
    # Below what lies there when nothing runs, nobody measures anything.
    with pytest.raises(fxbraid.BraidError, match="can't be kept"):
        only(1000).fitting(offload=True)
    with pytest.raises(fxbraid.BraidError, match="can't be kept"):  # it was asked for already
        only(needs - 1, offload="chunk0").fitting(offload=True)


def hosted(way: Way) -> Workload:
    """As ``costs``, with a host link."""
    return replace(costs(way), host=HOST)


def test_variants_are_tried_in_their_order_and_named() -> None:
    lean = Variant("half of it", {"max_programs": 3})  # any option; what it saves, the trace says
    asked = fxbraid.schedule.build("stp", p=P, m=M)

    def smaller(options: Options, n_chunks: int) -> Lowered:
        return trace(options, n_chunks)

    budget = Budget(2**40, OPTIONS, (P, 1), smaller, asked, (Variant("all"), lean))
    assert [way.said for way in budget.fitting()] == ["stp", "stp with half of it"]


def small() -> nn.Module:
    return qwen2(num_hidden_layers=2)


def test_braid_keeps_to_a_budget_and_says_so(shared_traces: None) -> None:
    data, asked = batch(4), {"n_microbatches": 2, "compile": False}
    model = fxbraid.braid(small(), data, **asked, memory_budget="1GiB")
    assert "memory budget 1 GiB: " in str(model.report()) and model.memory().peak < 2**30
    model.step(**data)
    fixed = fxbraid.braid(small(), data, **asked, schedule="gpipe", memory_budget="1GB")
    assert fixed.schedule.name == "gpipe"
    need = fixed.memory().peak
    # Under the same schedule, less is kept; where that was decided already, or everything is too much, it is refused.
    again = fxbraid.braid(small(), data, **asked, schedule="gpipe", memory_budget=need - 1)
    assert again.schedule.name == "gpipe" and again.memory().peak < need
    assert any(u.again for c in again.lowered.chunks.values() for us in c.units.values() for u in us)
    with pytest.raises(
        fxbraid.BraidError, match=r"the leanest of 5 ways to run, gpipe with checkpoint=.*, needs"
    ):
        fxbraid.braid(small(), data, **asked, schedule="gpipe", memory_budget="100kB")
    need = again.memory().peak
    # All has been tried of checkpointing and nothing is to leave: a byte less can't be.
    final = {**asked, "schedule": "gpipe", "checkpoint": again._options.checkpoint, "offload": 0.1}
    with pytest.raises(fxbraid.BraidError, match=r"gpipe, needs .* 1 B more"):
        fxbraid.braid(small(), data, **final, memory_budget=need - 1)
    with pytest.raises(fxbraid.BraidError, match="no amount"):
        fxbraid.braid(small(), data, n_microbatches=2, memory_budget="lots")


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
