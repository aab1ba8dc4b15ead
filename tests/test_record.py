"""Steps that are measured and recorded on the emulated cluster: the same division of time as the simulator's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid import schedule as schedules
from fxbraid.metrics import StepMetrics
from fxbraid.runtime.launch import launch
from fxbraid.runtime.record_step import CudaTape
from fxbraid.simulate import Link as SimLink
from fxbraid.simulate import Result, constants, simulate
from fxbraid.timeline import Span, Timeline

from . import recorded
from .recorded import AR_S, MESSAGE, PP_LINK, UNIT_S, M
from .tiny import batch, qwen2

RUNS = [("stp", "overlap"), ("stp", "blocking"), ("stp", "free"), ("dualpipev", "overlap")]
NAMES = [":".join(run) for run in RUNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("timelines")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return launch(recorded.everything, (RUNS, str(folder)), nproc=4, timeout_s=240)


@pytest.fixture(scope="module")
def ranks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["runs"] for rank in found]


def predicted(name: str) -> Result:
    """The simulator on constants, which knows nothing of the run."""
    kind, _, collectives = name.partition(":")
    schedule = schedules.build(kind, p=2, m=M)
    layers = 4 // schedule.n_chunks
    chunk, ar = 2 * layers * UNIT_S, 2 * layers * AR_S * (collectives != "free")
    link = SimLink(PP_LINK.alpha_s, PP_LINK.beta_bytes_per_s)
    workload = constants(schedule, chunk, chunk, chunk, ar, layers=layers, message=MESSAGE, link=link)
    return simulate(schedule, workload, braided=collectives != "blocking")


def agree(measured: StepMetrics | Timeline, result: Result, tp_size: int = 2) -> None:
    assert measured.pipeline_seconds == pytest.approx(result.step_time, rel=1e-9)
    for rank in measured.ranks:
        times = result.ranks[rank.pp]
        for part in ("compute", "exposed_tp", "exposed_p2p", "bubble", "collective"):
            got = getattr(rank, part)
            assert got == pytest.approx(getattr(times, part), rel=1e-9, abs=1e-12), (rank, part)
    assert len(measured.ranks) == tp_size * len(result.ranks)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_divided_as_the_simulator_divides_it(ranks: list[dict[str, Any]], name: str) -> None:
    result = predicted(name)
    for found in ranks:
        measured: StepMetrics = found[name]["plain"]
        agree(measured, result)
        for share in ("exposed_tp_share", "exposed_p2p_share", "bubble_share"):
            assert getattr(measured, share) == pytest.approx(getattr(result, share), rel=1e-9, abs=1e-12)
        # The step as the caller sees it: the loss goes to all ranks as well.
        assert measured.seconds == pytest.approx(found[name]["seconds"][0], rel=1e-9)
        assert "virtual" in measured.label and measured.tokens == 16 * M and measured.samples == M
        total = sum(r.collective for r in result.ranks)
        if total:
            hidden = 1 - sum(r.exposed_tp for r in result.ranks) / total
            assert measured.hidden_share == pytest.approx(hidden, rel=1e-9, abs=1e-12)
            assert (hidden > 0.3) == (name != "stp:blocking")
        else:
            assert measured.hidden_share is None


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_is_the_same_step(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        entry = found[name]
        assert entry["seconds"][0] == entry["seconds"][1]
        assert entry["losses"][0] == entry["losses"][1] or name.endswith("free")
        agree(entry["recorded"], predicted(name))
        agree(entry["timeline"], predicted(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_timeline_is_that_of_a_simulation_of_its_own_medians(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """Every unit, wait and message of the run stands where the simulator puts it."""
    timeline: Timeline = ranks[0][name]["timeline"]
    assert timeline.workload is not None
    braided = timeline.collectives != "blocking"
    result = simulate(timeline.schedule, timeline.workload, braided=braided)
    agree(timeline, result)
    for pp in range(2):
        boxes = [box for box in result.boxes(pp) if box.lane == "compute"]
        simulated = sorted((b.step, f"{b.unit}_{b.phase}", b.start, b.end) for b in boxes)
        for tp in range(2):
            units = [s for s in timeline.spans[pp][tp] if s.kind == "unit"]
            ran = sorted((s.step, f"{s.name}_{s.phase}", s.start, s.end) for s in units)
            assert [r[:2] for r in ran] == [s[:2] for s in simulated]
            for r, s in zip(ran, simulated, strict=True):
                assert r[2:] == pytest.approx(s[2:], abs=1e-9)
            flights = timeline.flights(pp, tp)
            wires = sorted((b.start, b.end, b.exposed) for b in result.boxes(pp) if b.lane == "collective")
            assert len(flights) == len(wires)
            for flight, wire in zip(flights, wires, strict=True):
                assert (flight.launched, flight.end, flight.exposed) == pytest.approx(wire, abs=1e-9)


def test_free_says_that_it_is_for_timing_only(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        free, overlap = found["stp:free"], found["stp:overlap"]
        assert free["losses"][0] != overlap["losses"][0]
        assert free["plain"].seconds < overlap["plain"].seconds < found["stp:blocking"]["plain"].seconds
        assert "wrong" in free["plain"].note and "wrong" in str(free["plain"]) and "wrong" in free["report"]
        assert not overlap["plain"].note and "wrong" not in overlap["report"]
        assert found["stp:blocking"]["losses"] == overlap["losses"]


def test_the_report_has_the_last_step(ranks: list[dict[str, Any]]) -> None:
    report = ranks[1]["stp:overlap"]["report"]
    assert "exposed TP" in report and "tokens/s" in report and "virtual clock" in report


def test_the_file_is_one_trace_of_all_ranks_and_reads_back(ranks: list[dict[str, Any]], folder: Path) -> None:
    for name in NAMES:
        path = folder / f"{name.replace(':', '-')}.json"
        assert Timeline.load(path) == ranks[0][name]["timeline"]
    events = json.loads((folder / "stp-overlap.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert {event["cat"] for event in spans} >= {"block", "F", "I", "W", "collective", "wait", "message"}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * predicted("stp:overlap").step_time)
    starts, ends = ({e["id"] for e in events if e["ph"] == ph} for ph in "sf")
    assert (
        starts == ends and len(starts) == 2 * M * 4
    )  # two boundaries between ranks, each way, on each TP rank


def test_on_a_real_clock_the_parts_add_up_and_no_rank_is_waited_for(found: list[dict[str, Any]]) -> None:
    ranks = [rank["real"] for rank in found]
    assert len({str(rank["losses"]) for rank in ranks}) == 1
    for rank in ranks:
        measured: StepMetrics = rank["metrics"]
        assert (
            measured.label == "wall clock of the host"
            and 0 < measured.pipeline_seconds < measured.seconds * 1.5
        )
        for own in measured.ranks:
            parts = (own.compute, own.exposed_tp, own.exposed_p2p, own.bubble)
            assert all(part is not None and part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(measured.pipeline_seconds, rel=1e-6)  # type: ignore[arg-type]
            assert own.compute > 0 and own.exposed_tp and own.collective is None
        assert measured.hidden_share is None  # nobody knows how long a hidden one takes
        assert "no step() yet" in rank["said"] and "was not recorded" in rank["said"]
    assert ranks[0]["last"] is not None and ranks[0]["last"].seconds > 0
    assert ranks[0]["last"].ranks != ranks[0]["metrics"].ranks


def test_on_a_real_clock_spans_nest_and_messages_arrive_behind_their_sending(
    found: list[dict[str, Any]],
) -> None:
    timeline: Timeline = found[0]["real"]["timeline"]
    assert timeline.workload is not None and timeline.workload.link.latency > 0
    result = simulate(timeline.schedule, timeline.workload)
    assert 0.2 < timeline.pipeline_seconds / result.step_time < 5
    for pp in range(2):
        for tp in range(2):
            spans = timeline.spans[pp][tp]
            blocks = {s.step: s for s in spans if s.kind == "block"}
            assert list(blocks) == list(range(len(timeline.schedule.actions[pp])))
            for span in spans:
                assert 0 <= span.start <= span.end <= timeline.pipeline_seconds
                if span.kind in ("unit", "launch", "wait", "send"):
                    assert blocks[span.step].start <= span.start and span.end <= blocks[span.step].end
            sent = {s.action: s for s in timeline.spans[1 - pp][tp] if s.kind == "send"}
            taken = [s for s in spans if s.kind == "receive"]
            assert len(taken) == 2 * M and all(sent[s.action].start < s.end for s in taken)


def test_contention_is_how_much_longer_a_unit_takes_beside_a_collective(
    found: list[dict[str, Any]],
) -> None:
    for plain, slowed in (rank["contentions"] for rank in found):
        assert plain == pytest.approx(1.0, abs=1e-9)
        assert slowed == pytest.approx(1.5, abs=1e-9)


class FakeEvent:
    """A CUDA event on a clock that the test moves (ms)."""

    now = 100.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        FakeEvent.now += 1.5
        self.at = FakeEvent.now

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def test_a_tape_of_events_gives_ticks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = time.monotonic_ns()
    tape = CudaTape()
    spans = [Span("unit", "a", tape.now(), tape.now(), 0), Span("wait", "b", tape.now(), tape.now(), 0)]
    first, second = tape.ticks(spans)
    assert first.seconds == second.seconds == 1_500_000
    assert second.start - first.end == 1_500_000
    assert before <= first.start - 1_500_000 <= time.monotonic_ns()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: records a step with CUDA events")
def test_a_step_on_a_gpu_is_timed_by_events() -> None:
    model = fxbraid.braid(qwen2(), batch(12), n_microbatches=6, compile=False)
    model.train()
    model.step(**batch(12))
    plain = model.last_step
    assert plain.seconds > 0 and plain.bubble_share is None and "record" in plain.note
    model.record(**batch(12))
    recorded = model.last_step
    assert recorded.compute_share is not None and 0 < recorded.compute_share <= 1
    spans = model.timeline().spans
    assert all(span.end >= span.start for span in spans) and any(span.kind == "unit" for span in spans)
