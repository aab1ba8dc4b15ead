"""Calculators and the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fxbraid.plan import Candidate, Request, bubble_fraction, plan, tp_bytes_per_layer
from fxbraid.plan.cli import plan_command
from fxbraid.plan.predict import outlook, peak_memory, predict
from fxbraid.plan.published import compare_published, to_markdown
from fxbraid.plan.report import to_json
from fxbraid.plan.space import FAMILIES
from fxbraid.schedule import ScheduleError
from fxbraid.simulate import ModelConfig, device, load_model, simulate
from fxbraid.simulate.cli import simulate_command
from fxbraid.simulate.inputs import read_schedule

DOCS = Path(__file__).parent.parent / "docs"
QWEN = load_model("qwen2-12.1b")


@pytest.mark.parametrize(("tp", "layer", "step"), [(2, 537, 42.9), (4, 805, 64.4), (8, 940, 75.2)])
def test_tp_traffic(tp: int, layer: float, step: float) -> None:
    """b = 1, s = h = 8192, bf16, 80 layers."""
    found = tp_bytes_per_layer(1, 8192, 8192, tp)
    assert round(found / 1e6) == layer
    assert found * 80 / 1e9 == pytest.approx(step, abs=0.06)
    assert tp_bytes_per_layer(1, 8192, 8192, 1) == 0


BUBBLES = [
    *[(4, m, 1, share) for m, share in ((8, 27.3), (32, 8.6), (128, 2.3))],
    *[(8, m, 1, share) for m, share in ((8, 46.7), (32, 17.9), (128, 5.2))],
    *[(16, m, 1, share) for m, share in ((8, 65.2), (32, 31.9), (128, 10.5))],
    *[(p, 32, 4, share) for p, share in ((4, 2.3), (8, 5.2), (16, 10.5))],
]


@pytest.mark.parametrize(("p", "m", "v", "share"), BUBBLES)
def test_bubbles(p: int, m: int, v: int, share: float) -> None:
    assert round(100 * bubble_fraction(p, m, v), 1) == share
    name = "1f1b" if v == 1 else "interleaved_1f1b"
    if m <= 32:
        from fxbraid.simulate import constants

        schedule = read_schedule(name, p, m, v)
        assert simulate(schedule, constants(schedule)).bubble_share == pytest.approx(bubble_fraction(p, m, v))


def test_calculators_refuse_nonsense() -> None:
    with pytest.raises(ScheduleError, match="p, m, v >= 1"):
        bubble_fraction(0, 1)
    with pytest.raises(ScheduleError, match=">= 1"):
        tp_bytes_per_layer(0, 1, 1, 1)


def request(**more: object) -> Request:
    basic: dict[str, object] = {"gpus": 16, "seq": 6144, "global_batch": 192, "tp": (8,), "pp": (2,)}
    return Request(QWEN, device("a800"), **(basic | more))  # type: ignore[arg-type]


def test_a_plan_is_ranked_and_says_why() -> None:
    found = plan(request(), top=5)
    times = [p.step_time for p in found.ranking]
    assert times == sorted(times) and len(times) == 5
    assert all(p.fits for p in found.ranking)
    assert len(found.why) == 4 and all("%" in text for text in found.why)
    assert found.ranking[0].candidate.schedule in ("stp", "stp_low_memory", "braid:dualpipev")
    document = json.loads(to_json(found))
    assert document["ranking"][0]["step_time"] == times[0]
    assert document["considered"] > document["simulated"] >= 5


def test_the_ranking_is_that_of_trying_everything() -> None:
    """Bounds only skip what can't win."""
    wanted = request(micro_batch=(1,), checkpoints=("none",))
    limit = wanted.device.memory * wanted.memory
    everything = []
    for schedule, v in FAMILIES:
        view = outlook(wanted, Candidate(8, 2, 1, 1, 192, v, schedule, "none"))
        everything.append(predict(wanted, view, peak_memory(view)))
        assert everything[-1].step_time >= view.bound
    fits = sorted(p.step_time for p in everything if p.peak <= limit)
    assert [p.step_time for p in plan(wanted, top=3).ranking] == fits[:3]


@pytest.mark.parametrize("schedule", [name for name, _ in FAMILIES if name != "interleaved_1f1b"])
def test_extrapolation_in_m(schedule: str) -> None:
    wanted = request(tp=(4,), pp=(4,))
    view = outlook(wanted, Candidate(4, 4, 1, 1, 96, dict(FAMILIES)[schedule], schedule, "none"))
    v = None if schedule == "1f1b" else 2
    base = schedule.removeprefix("braid:")
    whole = simulate(read_schedule(base, 4, 96, v, braided=base != schedule), view.workload)
    assert predict(wanted, view, 0).pipeline == pytest.approx(whole.step_time, rel=0.01)
    assert peak_memory(view) == pytest.approx(max(whole.peak))


def test_imbalance_changes_the_answer() -> None:
    even, uneven = plan(request(), top=1), plan(request(imbalance=((0, 1.2),)), top=1)
    assert uneven.ranking[0].step_time > 1.1 * even.ranking[0].step_time
    assert uneven.ranking[0].candidate != even.ranking[0].candidate


def test_what_does_not_work_is_said() -> None:
    with pytest.raises(ScheduleError, match="no configuration divides"):
        plan(request(gpus=17))
    with pytest.raises(ScheduleError, match="nothing fits"):
        plan(Request(load_model("meta-llama/Llama-3.1-405B"), device("h100"), 8, 4096, 8))
    with pytest.raises(ScheduleError, match="a plan knows"):
        plan(request(schedules=("magic",)))
    with pytest.raises(ScheduleError, match="between 0 and 1"):
        request(memory=1.5)


def test_published_measurements() -> None:
    """One model per device, nothing fitted: the gains are within three points; the docs explain the rest."""
    found = compare_published()
    for comparison in found:
        assert comparison.gain == pytest.approx(comparison.published_gain, abs=3)
    h20 = found[1]
    assert h20.predicted[0] == pytest.approx(h20.setting.published[0], rel=0.05)
    assert h20.predicted[1] == pytest.approx(h20.setting.published[1], rel=0.05)
    assert to_markdown(found) in (DOCS / "predictions.md").read_text("utf-8")


def test_the_commands() -> None:
    app, runner = typer.Typer(), CliRunner()
    app.command("plan")(plan_command)
    app.command("simulate")(simulate_command)
    base = ["plan", "--model", "qwen2-12.1b", "--gpus", "16", "--device", "a800", "--seq", "6144"]
    base += ["--global-batch", "64", "--tp", "8", "--pp", "2", "--schedules", "stp,1f1b"]
    shown = runner.invoke(app, [*base, "--top", "2"])
    assert shown.exit_code == 0 and "2 behind 1" in shown.output and "TP traffic" in shown.output
    as_json = json.loads(runner.invoke(app, [*base, "--json"]).output)
    assert as_json["ranking"][0]["schedule"] == "stp"
    assert runner.invoke(app, ["plan", "--model", "x", "--gpus", "4"]).exit_code == 2
    one = ["simulate", "stp", "--pp", "2", "-m", "16", "--json"]
    constant = json.loads(runner.invoke(app, one).output)
    assert constant["memory_unit"] == "chunk activations" and constant["mfu"] is None
    one += [
        "--model",
        "qwen2-12.1b",
        "--device",
        "a800",
        "--tp",
        "8",
        "--seq",
        "6144",
        "--split",
        "12,12,12,10",
    ]
    real = json.loads(runner.invoke(app, one).output)
    assert 0.4 < real["mfu"] < 0.7
    assert sum(real["critical_path"].values()) == pytest.approx(real["step_time"])
    assert (
        runner.invoke(app, ["simulate", "stp", "--checkpoint", "no", "--model", "qwen2-12.1b"]).exit_code == 2
    )


@pytest.mark.slow
def test_a_plan_for_4096_devices() -> None:
    big = ModelConfig("big", 16384, 128, 128, 8, 128, 53248, 128256)
    whole = plan(Request(big, device("h200"), 4096, 8192, 2048))
    given = plan(Request(big, device("h200"), 4096, 8192, 2048, tp=(8,), pp=(64,)))
    assert given.ranking[0].candidate.dp == 8
    assert whole.ranking[0].step_time <= given.ranking[0].step_time
