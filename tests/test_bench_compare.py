"""The regression gate: what is worse, what is broken, what cannot be compared."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fxbraid.bench.cli import app
from fxbraid.bench.compare import CompareError, compare_files


def content(clock: str = "loopback", scale: float = 1.0, seed: int = 0, **slower: float) -> dict[str, Any]:
    """A bench of three schedules, ten rounds, on a machine ``scale`` times as slow; ``slower``: factors by name."""
    rng = random.Random(seed)
    base = {"stp": 0.4, "stp_blocking": 0.5, "ScheduleGPipe": 1.0}
    noise = 0.0 if clock == "virtual" else 0.01
    rounds = [scale * rng.uniform(0.9, 1.3) for _ in range(10)] if clock != "virtual" else [1.0] * 2
    rows = [
        {
            "name": name.replace("_", ":"),
            "samples_s": [t * slower.get(name, 1.0) * r * rng.uniform(1 - noise, 1 + noise) for r in rounds],
            "ok": True,
            "valid": True,
            "difference": {"loss": 0.0, "grad": 1e-7, "worst": "w"},
        }
        for name, t in base.items()
    ]
    return {
        "config": {"model": "qwen2-tiny", "tp": 2, "schedules": list(base), "steps": len(rounds)},
        "clock_name": clock,
        "rows": rows,
        "bitwise": {"stp = stp:blocking": True},
    }


def test_another_machine_is_no_regression_and_a_slower_schedule_is() -> None:
    old = content()
    same = compare_files(old, content(scale=3.0, seed=1))
    assert same.ok and same.baseline == "ScheduleGPipe"
    assert [change.name for change in same.changes] == ["stp", "stp:blocking"]
    assert same.own is not None and same.own.new / same.own.old == pytest.approx(3.0, rel=0.2)
    worse = compare_files(old, content(scale=0.5, seed=1, stp=1.15))
    assert len(worse.problems) == 1
    assert worse.problems[0].startswith("stp was 0.4") and "x ScheduleGPipe" in worse.problems[0]
    assert compare_files(old, content(seed=1, stp=1.15), tolerance=0.2).ok
    assert compare_files(old, content(seed=1, stp=0.5)).ok
    assert compare_files(old, content(seed=1), baseline="stp:blocking").baseline == "stp:blocking"


def test_a_slowdown_of_all_of_fxbraid_shows_beside_torch() -> None:
    found = compare_files(content(), content(seed=1, stp=3.0, stp_blocking=3.0))
    assert [problem.split()[0] for problem in found.problems] == ["stp", "stp:blocking"]


@pytest.mark.parametrize("slower", ["ScheduleGPipe", "stp_blocking"])
def test_a_slower_baseline_hides_nothing(slower: str) -> None:
    baseline = slower.replace("_", ":")
    found = compare_files(content(), content(seed=1, **{slower: 100.0}), baseline=baseline)
    assert len(found.problems) == 1 and found.problems[0].startswith(f"the baseline {baseline} was ")
    # What became faster is no slower baseline, whatever the machine.
    faster = {name: 0.5 for name in ("stp", "stp_blocking", "ScheduleGPipe") if name != slower}
    assert compare_files(content(), content(seed=1, **faster), baseline=baseline).ok


def without(*names: str, **more: Any) -> dict[str, Any]:
    found = content(**more)
    found["rows"] = [row for row in found["rows"] if row["name"] not in names]
    found["bitwise"] = {}
    return found


def test_without_torch_a_blocking_engine_is_the_baseline() -> None:
    assert compare_files(without("ScheduleGPipe"), without("ScheduleGPipe")).baseline == "stp:blocking"


def test_one_engine_on_a_real_clock_compares_nothing_and_is_refused() -> None:
    alone = without("ScheduleGPipe", "stp:blocking")
    with pytest.raises(CompareError, match=r"only stp is in both files, .* so nothing was compared"):
        compare_files(alone, alone)
    virtual = without("ScheduleGPipe", "stp:blocking", clock="virtual")
    assert len(compare_files(virtual, virtual).changes) == 1
    with pytest.raises(CompareError, match="no engine is in both files, so nothing was compared"):
        compare_files(virtual, without("stp", clock="virtual"))


@pytest.mark.parametrize("clock", ["loopback", "virtual"])
@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 0, True, "fast", None])
def test_what_is_no_time_is_refused(time: Any, clock: str) -> None:
    for place in (0, 2):
        bad = content(clock)
        bad["rows"][place]["samples_s"][1] = time
        for old, new in ((bad, content(clock)), (content(clock), bad)):
            with pytest.raises(CompareError, match="seconds, which is no time"):
                compare_files(old, new)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.update(rows=None), "is not what fxbraid bench --json writes: look at 'rows'"),
        (lambda c: c.update(rows={"a": 1}), "look at 'rows'"),
        (lambda c: c.update(config=[1]), "look at 'config'"),
        (lambda c: c.update(clock_name=None), "look at 'clock_name'"),
        (lambda c: c.update(bitwise=None), "look at 'bitwise'"),
        (lambda c: c["rows"].append(3), "row 3 of the new file has no name of its own"),
        (lambda c: c["rows"].append(c["rows"][0]), "row 3 of the new file has no name of its own"),
        (lambda c: c["rows"][0].pop("ok"), "stp in the new file does not say whether it is ok"),
        (lambda c: c["rows"][0].pop("samples_s"), "stp in the new file has no list of samples_s"),
        (lambda c: c["rows"][0].update(samples_s="123"), "stp in the new file has no list of samples_s"),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence(spoil: Any, message: str) -> None:
    bad = content()
    spoil(bad)
    with pytest.raises(CompareError, match=re.escape(message)):
        compare_files(content(), bad)


def test_spread_is_allowed_on_top_of_the_tolerance() -> None:
    old, new = content(), content(seed=1, stp=1.07)
    assert not compare_files(old, new).ok
    noisy = copy.deepcopy(new)
    row = noisy["rows"][0]
    row["samples_s"] = [s * (0.9 if i % 2 else 1.1) for i, s in enumerate(row["samples_s"])]
    assert compare_files(old, noisy).ok


def test_virtual_times_count_as_they_are() -> None:
    old = content("virtual")
    assert compare_files(old, content("virtual")).baseline is None
    assert compare_files(old, content("virtual")).ok
    worse = compare_files(old, content("virtual", stp=1.06, stp_blocking=1.06, ScheduleGPipe=1.06))
    assert len(worse.problems) == 3 and "400.00 ms and is 424.00 ms: 6.0 % worse" in worse.problems[0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c["rows"].pop(0), "stp ran before and does not now"),
        (
            lambda c: c["rows"][0].update(ok=False),
            "stp no longer gives the loss and gradients of one process",
        ),
        (lambda c: c["rows"][0].update(valid=False), "stp was measured under too much emulation error"),
        (lambda c: c["rows"][0].update(difference=None), "stp was checked against one process before"),
        (lambda c: c["rows"][0].update(samples_s=[]), "stp ran before and does not now"),
        (lambda c: c["bitwise"].update({"stp = stp:blocking": False}), "stp = stp:blocking was bitwise and"),
        (lambda c: c["bitwise"].update({"zbv = stp": False}), "zbv = stp is not bitwise equal"),
    ],
)
def test_what_broke_fails_the_gate(spoil: Any, message: str) -> None:
    new = content()
    spoil(new)
    assert any(message in problem for problem in compare_files(content(), new).problems)


def test_runs_of_different_things_are_refused() -> None:
    other = content()
    other["config"]["tp"] = 4
    with pytest.raises(CompareError, match="different runs and cannot be compared: tp 2 and 4"):
        compare_files(content(), other)
    with pytest.raises(CompareError, match="one file is on the loopback clock, the other on virtual"):
        compare_files(content(), content("virtual"))
    with pytest.raises(CompareError, match="the old file is not what fxbraid bench --json writes"):
        compare_files({}, content())
    with pytest.raises(CompareError, match="baseline zbv is not in both files"):
        compare_files(content(), content(), baseline="zbv")
    fewer = content()
    fewer["config"]["schedules"] = ["stp"]
    fewer["config"]["steps"] = 3
    compare_files(content(), fewer)  # how often, and what else ran, may differ


def test_the_command_exits_with_the_verdict(tmp_path: Path) -> None:
    old, new, bad = (tmp_path / name for name in ("old.json", "new.json", "bad.json"))
    old.write_text(json.dumps(content()))
    new.write_text(json.dumps(content(seed=1)))
    bad.write_text(json.dumps(content(seed=1, stp=1.5)))
    good = CliRunner().invoke(app, ["compare", str(old), str(new)])
    assert good.exit_code == 0 and "No worse: 2 schedules" in good.output, good.output
    worse = CliRunner().invoke(app, ["compare", str(old), str(bad), "--tolerance", "3%"])
    assert worse.exit_code == 1 and "WORSE: stp was" in worse.output
    assert CliRunner().invoke(app, ["compare", str(old), str(bad), "--tolerance", "0.6"]).exit_code == 0
    assert "baseline ScheduleGPipe: " in good.output
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for arguments in (["none.json"], ["deep.json"], ["new.json", "--tolerance", "much"]):
        refused = CliRunner().invoke(app, ["compare", str(old), str(tmp_path / arguments[0]), *arguments[1:]])
        assert refused.exit_code == 2, refused.output
    percent = CliRunner().invoke(app, ["compare", str(old), str(new), "--tolerance", "5"])
    assert percent.exit_code == 2 and "write 5% or 0.05" in " ".join(percent.output.split())
    assert (
        CliRunner().invoke(app, ["compare", str(old), str(bad), "--tolerance", "150%"]).exit_code == 0
    )  # meant
