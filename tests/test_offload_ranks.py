"""Offload in ranks on the emulated cluster: the same bits, the step time of the simulator, a report that says what a
slow link costs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid.bench import offload as bench
from fxbraid.bench.config import BenchConfig, ConfigError, check_config
from fxbraid.passes.errors import BraidError
from fxbraid.passes.offload import stored
from fxbraid.pippy import Runtime
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link
from fxbraid.runtime.launch import launch
from fxbraid.timeline import Timeline

from .parity import Case, make_batches, make_model, merge, run_case, share_traces

M, LAYERS, UNIT_S = 6, 4, 2e-3
FAST, SLOW = Link(0.0, 8e6), Link(0.0, 8e5)


def seconds(unit: Any) -> float:
    return UNIT_S if unit.name.startswith(("attn", "mlp")) else 0.0


def in_ranks() -> dict[str, Any]:
    """By name: (digest, virtual seconds, predicted seconds, measured peak, report's lines, storages that left)."""
    torch.set_num_threads(1)
    share_traces()
    batch = make_batches(1, M, mask=False, steps=1)[0]
    found: dict[str, Any] = {}
    with emulate.process_group(Cluster(Link(1e-4), Link(0.0), host_link=FAST), timeout_s=60):
        emulate.unit_times(seconds)
        asked: dict[str, Any] = {
            "plain": None,
            "chunk0": "chunk0",
            "slow": "chunk0",
            "half": 0.5,
            "mlp": lambda chunk, unit: unit.name.startswith("mlp") and chunk < 2,
        }
        for name, offload in asked.items():
            emulate.change(host_link=SLOW if name == "slow" else FAST)
            model = fxbraid.braid(
                make_model("qwen2", tied=False, layers=LAYERS, dtype=torch.float32),
                batch,
                tp_size=1,
                pp_size=2,
                n_microbatches=M,
                compile=False,
                split=[1] * 4,
                offload=offload,
            )
            with emulate.stopwatch() as reading:
                loss = model.record(**batch) if name == "chunk0" else model.step(**batch)
            digest = hashlib.sha256(loss.numpy().tobytes())
            for _, parameter in model.named_parameters():
                assert parameter.grad is not None
                digest.update(parameter.grad.numpy().tobytes())
            plan = model._last.offload
            names = set()
            if plan is not None:
                for parcel in plan.parcels[model.mesh.pp_rank]:
                    units = [one.unit for one in stored(model.lowered.chunks[parcel.chunk])]
                    names |= {units[item.number].name for item in parcel.items}  # type: ignore[union-attr]
            more: Any = None
            if name == "chunk0":
                timeline = model.write_timeline(None)
                more = timeline
                with pytest.raises(BraidError, match="torch's runtime"):
                    Runtime(model)
            found[name] = (
                digest.hexdigest(),
                reading.seconds,
                model.simulate(model.profile()).step_time,
                model.measure_peak(**batch),
                model.report().offload,
                names,
                more,
            )
        return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(in_ranks, (), nproc=2, timeout_s=300)


def test_no_bit_changes_and_no_step_is_longer(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for name, (digest, took, predicted, *_) in found.items():
            assert digest == found["plain"][0], name
            assert took == pytest.approx(found["plain"][1], rel=1e-9), name
            assert predicted == pytest.approx(found["plain"][2], rel=1e-9), name


def test_a_slow_link_moves_less_and_the_report_says_so(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["plain"][4] == ()
        assert found["chunk0"][3] < 0.9 * found["plain"][3]
        assert found["chunk0"][3] < found["half"][3] < found["plain"][3]
        assert found["chunk0"][3] < found["slow"][3] <= found["plain"][3]
        assert "go to the host" in found["chunk0"][4][0]
        assert len(found["slow"][4]) == 2 and "the host link holds it back" in found["slow"][4][1]


def test_a_function_chooses_units(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["mlp"][5] and all(name.startswith("mlp") for name in found["mlp"][5])
        assert any(name.startswith("attn") for name in found["chunk0"][5])


def test_a_recorded_step_has_its_copies(ranks: list[dict[str, Any]]) -> None:
    timeline = ranks[0]["chunk0"][6]
    assert isinstance(timeline, Timeline)
    for row in timeline.spans:
        copies = [span for span in row[0] if span.kind == "copy"]
        assert {span.name for span in copies} == {"out", "away", "reload", "back"}
        blocks = {span.step: span for span in row[0] if span.kind == "block"}
        for span in copies:
            block = blocks[span.step]
            assert span.start >= block.end if span.name == "out" else span.end <= block.start


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, "unit"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_schedule_in_parity_with_one_process_to_the_bit(tp: int, compile: Any) -> None:
    base = Case(tp=tp, pp=2 if tp == 2 else 4, layers=8, m=6, compile=compile)
    cases = []
    for schedule in ("stp", "zbv", "1f1b", "dualpipev", "gpipe"):
        plain = replace(base, schedule=schedule)
        cases += [plain, replace(plain, options=(("offload", "chunk0"),))]
    nproc = base.tp * base.pp
    outcomes = launch(on_emulated, (cases,), nproc=nproc, timeout_s=1800)
    merged = [merge([rank[i] for rank in outcomes]) for i in range(len(cases))]
    for one, other in zip(merged[::2], merged[1::2], strict=True):
        assert one.loss <= 1e-6 and one.grad <= 1e-5
        assert one.digests == other.digests, other.case


def on_emulated(cases: list[Case]) -> list[Any]:
    torch.set_num_threads(1)
    share_traces()
    with emulate.process_group(Cluster(Link(1e-4), Link(0.0), host_link=FAST), timeout_s=60):
        emulate.unit_times(seconds)
        return [run_case(case) for case in cases]


# -- the bench's verdicts, on made-up numbers


def cell(
    share: float, seconds: float, peak: int, moved: float = 0.6, digest: str = "a", said: str = ""
) -> Any:
    return bench.Cell(share, seconds, peak, peak, moved, digest, (said,))


def test_the_bench_misses_what_it_should() -> None:
    plain, quarter = cell(0, 1.0, 100), cell(0.25, 1.005, 80)
    slow = cell(1 / 64, 1.0, 97, moved=0.1, said="the host link holds it back")
    assert bench.problems([[plain, quarter, slow]], 2) == []
    assert len(bench.table([[plain, quarter, slow]], 2)) == 3
    (missed,) = bench.problems([[plain, replace(quarter, peak=86), slow]], 2)
    assert missed == "MISSED p 2: the peak is 14.0 % lower, wanted 15 %"
    (missed,) = bench.problems([[plain, quarter, slow], [plain, replace(quarter, peak=90), slow]], 2)
    assert "10.0 % lower" in missed  # the fullest rank counts
    (missed,) = bench.problems([[plain, replace(quarter, seconds=1.02), slow]], 2)
    assert "2.00 % longer" in missed
    (missed,) = bench.problems([[plain, replace(quarter, digest="b"), slow]], 2)
    assert "differ" in missed
    (missed,) = bench.problems([[plain, quarter, replace(slow, lines=())]], 2)
    assert "no report" in missed
    (missed,) = bench.problems([[plain, quarter, replace(slow, moved=0.7)]], 2)
    assert "moves 0.70" in missed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "chunk1"}, 'use "chunk0"'),
        ({"offload": 2.0}, "a fraction of them"),
        ({"host_link": "0,1e9"}, "add --offload"),
        ({"offload": "chunk0", "host_link": "0,1e9"}, "are measured"),
        ({"offload": 0.5, "host_link": "far", "compute": "modelled", "link": "nvlink"}, "no link"),
    ],
)
def test_the_benchmark_refuses_what_makes_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(BenchConfig(**options))
    check_config(BenchConfig(offload=0.5, host_link="pcie", compute="modelled", link="nvlink"))
