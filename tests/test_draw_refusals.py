"""What ``fxbraid draw`` can't do, or would do without effect: one sentence, unbroken, and exit code 2."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fxbraid.draw import cli
from fxbraid.draw.cli import draw
from fxbraid.plan.cli import plan_command
from fxbraid.schedule import Schedule
from fxbraid.simulate.cli import simulate_command
from fxbraid.timeline import Timeline
from tests.timelines import straggling


def run(*arguments: str, command: Callable[..., None] = draw, code: int = 2) -> str:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "step.json"
    straggling()[0].save(path)
    return path


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(draw, []), (simulate_command, []), (plan_command, ["--gpus", "8", "--model"])],
)
def test_a_long_path_with_brackets_stays_in_one_piece(command: Any, arguments: list[str]) -> None:
    name = f"/{'a long way ' * 12}[/]/[red].csv"
    assert name in run(*arguments, name, command=command)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--times", "nan,1,1,1"], "finite"),
        (["--times", "1,1,inf,1"], "finite"),
        (["--times", "0,0,0,0"], "nothing takes any time"),
        (["--latency", "nan"], "finite latency"),
        (["--latency", "inf"], "finite latency"),
        (["--imbalance", "0:nan"], "positive and finite"),
        (["--imbalance", "0:inf"], "positive and finite"),
        (["--pp", "1000000", "-m", "1"], "1024 ranks and 1048576 actions at most"),
        (["--pp", "4", "-m", "1000000"], "1048576 actions at most"),
        (["--layers", "1000000000"], "can be simulated"),
        (["--svg", "/nope/x.svg"], "/nope/x.svg can't be written: there is no folder /nope"),
        (["--svg", "/tmp"], "/tmp is a folder"),
        (["--width", "-3"], "--width -3: a picture takes 30 columns or more"),
        (["--width", "0"], "--width 0"),
        (["--tp-rank", "1"], "give --measured too"),
    ],
)
def test_refused_before_anything_is_drawn(arguments: list[str], words: str) -> None:
    assert words in run("stp", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "4"], "-m would change nothing"),
        (["--pp", "8"], "--pp would change nothing"),
        (["--layers", "7", "--latency", "0.1"], "--layers and --latency would change nothing"),
        (["-v", "5"], "-v would change nothing"),
        (["--braid"], "--braid would change nothing"),
        (["1f1b"], "1f1b has 2 chunks on 2 ranks, and the measured step has costs of 4 chunks on 2"),
    ],
)
def test_a_measured_step_takes_no_option_that_would_change_nothing(
    step: Path, arguments: list[str], words: str
) -> None:
    assert words in run(*arguments, "--measured", str(step))


def test_given_times_are_seconds_and_memory_stays_in_chunk_activations(step: Path) -> None:
    said = run("--measured", str(step), "--times", "0.004,0.004,0.004,0.002", "--latency", "1e-3", code=0)
    assert "chunk" in said and re.search(r"\d B\b", said) is None and "ms" in said


def test_auto_is_made_for_the_measured_costs(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    read = cli.read_schedule

    def reading(*arguments: Any, **options: Any) -> Schedule:
        seen.append(options["costs"])
        return read(*arguments, **options)

    monkeypatch.setattr(cli, "read_schedule", reading)
    run("auto", "--measured", str(step), code=0)
    # straggling(): F, I and W of 4 ms and 1 ms of all-reduces in F and again in I
    assert [seen[0].f, seen[0].i, seen[0].w, seen[0].ar] == pytest.approx([1, 1, 1, 0.25])
    monkeypatch.setattr(cli, "mean_costs", lambda _: pytest.fail("not asked for the measured costs"))
    with pytest.raises(pytest.fail.Exception):
        cli.Ask("auto", 2, 6, None, None, 1, 0.0, False, False, "").beside(cli.read_measured(step, 0))


def events(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e.get("args", {}).get("span", {}).get("kind") == kind]


def spoil(document: dict[str, Any], how: str) -> None:
    """Damage a measured timeline in one way."""
    known = document["otherData"]["fxbraid_timeline"]
    if how == "no events":
        document["traceEvents"] = []
    elif how == "no schedule":
        del known["schedule"]
    elif how == "no ranks":
        known["ranks"] = []
    elif how == "rank twice":
        known["ranks"][1] = known["ranks"][0]
    elif how == "NaN seconds":
        known["pipeline_seconds"] = math.nan
    elif how == "words":
        known["seconds"] = "fast"
    elif how == "span of no step":
        events(document, "unit")[0]["args"]["span"]["step"] = 999
    elif how == "span of another action":
        events(document, "unit")[0]["args"]["span"]["action"] = "9F9"
    elif how == "backwards":
        events(document, "unit")[0]["args"]["span"]["end"] = -5.0
    elif how == "no waits":
        for event in events(document, "wait"):
            del event["args"]["span"]
    elif how == "never sent":
        for event in events(document, "send"):
            del event["args"]["span"]
    elif how == "other process":
        events(document, "unit")[0]["pid"] = 99
    elif how == "few chunks":
        known["workload"]["chunks"].pop()
    elif how == "costs are NaN":
        known["workload"]["chunks"][0]["f"][0]["seconds"] = math.nan
    else:
        raise AssertionError(how)


WAYS = [
    "no events",
    "no schedule",
    "no ranks",
    "rank twice",
    "NaN seconds",
    "words",
    "span of no step",
    "span of another action",
    "backwards",
    "no waits",
    "never sent",
    "other process",
    "few chunks",
    "costs are NaN",
]


@pytest.mark.parametrize("how", WAYS)
def test_a_damaged_timeline_is_refused_in_a_sentence(step: Path, tmp_path: Path, how: str) -> None:
    document = json.loads(step.read_text())
    spoil(document, how)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"damaged\.json is damaged \(.+\); record the step again"):
        Timeline.load(path)
    assert "is damaged" in run("--measured", str(path))


def test_a_file_that_nests_too_deeply_is_no_timeline(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "is no measured timeline" in run("--measured", str(tmp_path / "deep.json"))
