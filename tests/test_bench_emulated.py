"""The bench on emulated devices: one run of every kind of engine, on the virtual clock, and torch's real classes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fxbraid.bench.cli import app
from fxbraid.bench.config import BenchConfig
from fxbraid.bench.devices import LINKS, count_flops, equal_times, flops_times, parse_link
from fxbraid.bench.hiding import best_order, hiding_rows, share_of_bound, simulator_text
from fxbraid.bench.lab import Found, Plan, emulated_config, measure
from fxbraid.bench.models import build_model, make_batch
from fxbraid.runtime.launch import launch

RATIO, M = 0.5, 8
NAMES = ("stp", "stp:blocking", "stp:free", "auto", "zbv", "order:ZBVZeroBubble", "ScheduleZBVZeroBubble")


@pytest.fixture(scope="module")
def found() -> Found:
    config = emulated_config(2, 2, 1, unit_ms=2.0, clock="virtual", arithmetic=False, pp_link="100e-6,1e8")
    plan = Plan(config, NAMES, (M,), (RATIO,), rounds=2)
    results = launch(measure, (plan,), nproc=4, timeout_s=240, on_line=lambda *_: None)
    assert all(result == results[0] for result in results)  # every rank knows the same times
    return results[0]


def test_braided_stp_hides_what_it_can(found: Found) -> None:
    hidden = share_of_bound(found.at(M, RATIO), 2, M)
    assert hidden is not None and 0.95 <= hidden[1] <= 1.1
    cells = found.at(M, RATIO)
    assert cells["stp:free"].seconds < cells["stp"].seconds < 0.9 * cells["stp:blocking"].seconds
    assert cells["auto"].seconds <= 1.01 * best_order(cells).seconds
    assert "virtual clock" in found.label and "timing only" in found.label


def test_every_step_time_is_the_simulators_and_repeats_to_the_bit(found: Found) -> None:
    for cell in found.cells:
        assert cell.samples_s[0] == cell.samples_s[1] and cell.error == 0.0
        if cell.name.startswith("Schedule"):
            assert cell.predicted_s is None
        else:
            assert cell.apart == pytest.approx(0.0, abs=0.01), cell.name
    assert "of 7 schedules" in simulator_text(found)
    plan = Plan(BenchConfig(), NAMES, (M,), (RATIO,))
    assert len(hiding_rows(found, plan)) == 1


def test_torchs_real_class_takes_the_time_of_its_order(found: Found) -> None:
    # Both block at every all-reduce, and spend F, I and W where their schedule has them.
    cells = found.at(M, RATIO)
    assert cells["ScheduleZBVZeroBubble"].seconds == pytest.approx(
        cells["order:ZBVZeroBubble"].seconds, rel=0.02
    )
    assert cells["order:ZBVZeroBubble"].note == "torch's pipeline_order"


def test_a_whole_run_writes_table_json_csv_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (the extra plot) is not installed")
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "csv", "svg")}
    sizes = (
        "--pp 2 --tp 1 -m 4 --seq 16 --layers 4 --hidden 32 --link 1e-3,1e9 --pp-link 0,inf --compute modelled "
        "--times flops"
    )
    names = "stp,stp:blocking,stp:free,order:Interleaved1F1B,ScheduleInterleaved1F1B"
    outputs = ["--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["svg"])]
    done = CliRunner().invoke(app, [*sizes.split(), "--schedules", names, *outputs])
    assert done.exit_code == 0, done.output
    content = json.loads(files["json"].read_text())
    assert (
        content["ok"]
        and content["valid"]
        and content["clock_name"] == "virtual"
        and content["clock"].startswith("emulated, virtual clock")
    )
    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == names.split(",")
    for name, row in rows.items():
        assert row["samples_s"][0] == row["samples_s"][1]
        if row["label"] != "torch":
            # The simulator leaves the loss's broadcast out: it is on the PP link, and takes no time there.
            assert abs(row["prediction_difference"]) < 1e-9, name
            assert max(row["peak_bytes"]) == pytest.approx(row["prediction"]["peak"], rel=0.01)
        assert row["timing_only"] == (name == "stp:free") == (row["difference"] is None)
    assert content["bitwise"]["stp = stp:blocking"] is True
    assert content["eta"] == [{"schedule": "stp", "value": None, "best": None}]  # no TP, nothing to hide
    assert [line["name"] for line in csv.DictReader(files["csv"].open())] == list(rows)
    picture = files["svg"].read_text()
    assert picture.startswith("<?xml") and len(picture) > 5000
    for said in (
        "emulated, virtual clock",
        "in proportion to FLOPs",
        "Timing only, numbers not checked: stp:free",
    ):
        assert said in " ".join(done.output.split())
    again = CliRunner().invoke(app, ["compare", str(files["json"]), str(files["json"])])
    assert again.exit_code == 0 and "No worse: 5 schedules" in again.output


def test_flops_times_follow_the_trace() -> None:
    config = BenchConfig(hidden=32, seq=16)
    model = build_model(config.hf(num_hidden_layers=1), 0)
    counts = count_flops(model, make_batch(512, 2, 16, 0), 2)
    assert {kind for kind, _ in counts} == {"attn", "mlp", "head"}
    tokens, hidden, inner = 2 * 16, 32, config.hf().intermediate_size
    assert counts["mlp", "F"] == 2 * tokens * 3 * hidden * inner // 2
    times = flops_times(counts, 2e-3)
    assert times.forward == pytest.approx(2e-3)
    assert times.seconds["mlp", "W"] / times.seconds["mlp", "F"] == pytest.approx(1.0)
    assert times.seconds["head", "F"] > 0
    assert times.link(0.37).alpha_s == pytest.approx(0.74e-3)


def test_named_links_have_sources_and_times_only_for_layers() -> None:
    for name, named in LINKS.items():
        assert parse_link(name) == named.link and len(named.source) > 40
    assert LINKS["nvlink"].link.beta_bytes_per_s > LINKS["ib"].link.beta_bytes_per_s
    assert LINKS["ib"].link.beta_bytes_per_s > LINKS["pcie"].link.beta_bytes_per_s

    class Unit:
        def __init__(self, name: str, phase: str) -> None:
            self.name, self.phase = name, type("P", (), {"value": phase})
            self.again = False

    times = equal_times(3e-3)
    assert times.of(Unit("attn12", "I")) == times.of(Unit("mlp0", "W")) == 3e-3
    assert (
        times.of(Unit("embed", "F")) == times.of(Unit("norm0", "W")) == times.of(Unit("tail_c0", "F")) == 0.0
    )


def wall(config: BenchConfig) -> Any:
    from fxbraid.bench.ranks import run_ranks

    torch.set_num_threads(1)
    return run_ranks(config)


@pytest.mark.slow
def test_real_compute_on_an_emulated_link_with_a_measured_ratio() -> None:
    config = BenchConfig(
        pp=2,
        tp=2,
        microbatches=2,
        seq=16,
        layers=4,
        hidden=64,
        steps=2,
        ratio=2.0,
        schedules=("stp", "Schedule1F1B"),
    )
    assert config.clock_name == "wall"
    result = launch(wall, (config,), nproc=4, timeout_s=240, on_line=lambda *_: None)[0]
    found = re.match(r"emulated, wall clock, tp ([\d.]+) us", result.clock)
    assert found is not None and float(found[1]) > 20
    assert result.ok and result.times == "real"
    for row in result.rows:
        assert len(row.samples_s) == len(row.errors) == 2 and row.difference is not None
