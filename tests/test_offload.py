"""Offload: what may leave, when it does by costs, and a program that computes the same bits with it."""

from __future__ import annotations

import inspect
import itertools
import json
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

import fxbraid
from fxbraid.arguments import checked
from fxbraid.draw import to_svg, to_trace
from fxbraid.draw.palette import BACK, OUT
from fxbraid.offloading import _chosen, fitted
from fxbraid.passes.errors import BraidError, VerifyError
from fxbraid.passes.joint import Phase
from fxbraid.passes.offload import span, stored
from fxbraid.passes.pipeline import Lowered
from fxbraid.passes.verify import verify_offload
from fxbraid.plan.search import plan as plan_devices
from fxbraid.plan.space import Request
from fxbraid.runtime.costs import workload
from fxbraid.runtime.measure import measure
from fxbraid.runtime.offload import Away, Back, CpuLanes, HostMemory, Offload, Reload
from fxbraid.schedule import Placement, Schedule, ScheduleError, build, parts
from fxbraid.schedule.lower import Away as AwayNode
from fxbraid.schedule.lower import Back as BackNode
from fxbraid.schedule.lower import Offload as OffloadNode
from fxbraid.schedule.lower import Reload as ReloadNode
from fxbraid.schedule.lower import Run, lower
from fxbraid.schedule.offload import Item, OffloadPlan, Parcel, check_offload
from fxbraid.simulate import Link, Workload, constants, device, load_model, peaks, simulate
from fxbraid.simulate.cli import simulate_command
from fxbraid.simulate.offload import Wanted, early_chunks, parks, plan_offload

from . import alone
from .tiny import batch, qwen2
from .tiny import lower as lower_tiny

FAMILIES = ("stp", "zbv", "1f1b", "dualpipev", "gpipe", "interleaved_1f1b")


# -- the plan


def costs(schedule: Schedule, bandwidth: float, latency: float = 0.0, **more: Any) -> Workload:
    return replace(
        constants(schedule, 1, 1, 1, 0.3, layers=2, handed=0.3, **more), host=Link(latency, bandwidth)
    )


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_waits_for_a_copy_and_the_peak_is_lower(name: str, p: int) -> None:
    schedule = build(name, p=p, m=3 * p)
    for bandwidth, latency in ((0.12, 0.0), (0.3, 0.05), (1.0, 0.0), (1e9, 0.0)):
        load = costs(schedule, bandwidth, latency)
        plan = plan_offload(schedule, load, early_chunks(schedule))
        check_offload(schedule, plan)
        plain, moved = simulate(schedule, load), simulate(schedule, load, offload=plan)
        assert moved.step_time == pytest.approx(plain.step_time, rel=1e-12)
        assert not any(rank.exposed_host for rank in moved.ranks)
        assert moved.peak == peaks(schedule, load, offload=plan)
        for rank in range(p):
            assert max(level for _, level in moved.memory(rank)) == pytest.approx(moved.peak[rank])
            assert moved.memory(rank)[-1][1] == pytest.approx(0.0, abs=1e-9)
            assert moved.peak[rank] <= plain.peak[rank] + 1e-9
            assert (moved.peak[rank] < plain.peak[rank] - 1e-9) == bool(plan.parcels[rank])
            lanes = moved.copies(rank)
            assert sum(c.size for c in lanes if c.way == "out") == pytest.approx(plan.moved(rank))
            assert sum(c.size for c in lanes if c.way == "back") == pytest.approx(plan.moved(rank))
            for way in ("out", "back"):
                row = [c for c in lanes if c.way == way]
                assert all(a.end <= b.start for a, b in itertools.pairwise(row))
    assert max(moved.peak) < 0.92 * max(plain.peak) or name == "1f1b"


def test_a_plan_at_the_costs_of_a_faster_link_makes_steps_wait() -> None:
    """So that the test above can fail: the clock does see copies that are late."""
    schedule = build("stp", p=2, m=6)
    plan = plan_offload(schedule, costs(schedule, 0.5), early_chunks(schedule))
    slow = simulate(schedule, costs(schedule, 0.1), offload=plan)
    assert slow.step_time > 1.05 * simulate(schedule, costs(schedule, 0.1)).step_time
    rank = slow.ranks[1]
    assert rank.exposed_host > 0
    total = rank.compute + rank.exposed_tp + rank.exposed_p2p + rank.exposed_dp + rank.exposed_host
    assert total + rank.bubble == pytest.approx(slow.step_time)
    path = slow.critical_path()
    assert "copy" in {item.kind for item in path}
    for one, other in itertools.pairwise(path):
        assert one.end == pytest.approx(other.start)


def test_a_slower_link_moves_less() -> None:
    schedule = build("stp", p=4, m=12)
    shares, highest = [], []
    for bandwidth in (1.0, 0.25, 0.12, 0.05, 0.01):
        load = costs(schedule, bandwidth)
        plan = plan_offload(schedule, load, early_chunks(schedule))
        shares.append([plan.share(rank) for rank in range(4)])
        highest.append(max(peaks(schedule, load, offload=plan)))
    assert all(a > b for row in zip(*shares, strict=True) for a, b in itertools.pairwise(row))
    assert highest == sorted(highest)
    nothing = plan_offload(schedule, costs(schedule, 1e-6), early_chunks(schedule))
    assert not any(nothing.parcels)


def test_a_fraction_bounds_every_micro_batch_and_numbers_choose() -> None:
    schedule = build("stp", p=2, m=6)
    load = costs(schedule, 1e9)
    half = plan_offload(schedule, load, early_chunks(schedule, 0.5))
    for rank, parcels in enumerate(half.parcels):
        assert parcels and all(0 < parcel.size <= 0.5 + 1e-9 for parcel in parcels)
        assert all(parcel.chunk == rank for parcel in parcels)
        assert half.wanted[rank] == pytest.approx(3.0)
    some = plan_offload(schedule, load, {1: Wanted(numbers=frozenset({1, 5}))})
    assert {i.number for row in some.parcels for parcel in row for i in parcel.items} == {1, 5}
    assert {parcel.chunk for row in some.parcels for parcel in row} == {1}
    one = plan_offload(schedule, load, early_chunks(schedule), ranks=[1])
    assert not one.parcels[0]
    assert one.parcels[1] == plan_offload(schedule, load, early_chunks(schedule)).parcels[1]
    with pytest.raises(ScheduleError, match="no share"):
        early_chunks(schedule, 1.5)


def test_small_storages_stay() -> None:
    schedule = build("stp", p=2, m=6)
    load = costs(schedule, 1e9)
    sizes = (0.5, 0.004, 0.496)
    load = replace(load, chunks=tuple(replace(chunk, parks=sizes) for chunk in load.chunks))
    plan = plan_offload(schedule, load, early_chunks(schedule))
    assert {i.number for row in plan.parcels for parcel in row for i in parcel.items} == {0, 2}
    assert parks(load.chunks[0]) == sizes


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parcel_leaves_is_let_go_and_is_back_before_its_backward(name: str) -> None:
    schedule = build(name, p=4, m=12)
    plan = plan_offload(schedule, costs(schedule, 0.3), early_chunks(schedule))
    for rank in range(4):
        listed = lower(schedule, rank, offload=plan)
        plain = [one for one in listed if not isinstance(one, OffloadNode | AwayNode | ReloadNode | BackNode)]
        assert plain == lower(schedule, rank)
        for parcel in plan.parcels[rank]:
            where: dict[str, int] = {}
            gone: list[int] = []
            back: list[int] = []
            for at, one in enumerate(listed):
                if isinstance(one, Run):
                    for action in parts(one.step):
                        if (action.chunk, action.microbatch) == (parcel.chunk, parcel.microbatch):
                            where[action.phase.value.replace("B", "I")] = at
                elif getattr(one, "parcel", None) is parcel:
                    where.setdefault(type(one).__name__, at)
                    gone += one.items if isinstance(one, AwayNode) else ()
                    back += one.items if isinstance(one, ReloadNode) else ()
            order = ["F", "Offload", "Away", "Reload", "Back", "I"]
            assert [where[key] for key in order] == sorted(where[key] for key in order)
            assert gone == sorted(gone) == list(range(len(parcel.items)))
            assert back == sorted(back, reverse=True) and sorted(back) == gone


def test_a_plan_that_does_not_fit_is_refused() -> None:
    schedule = build("stp", p=2, m=6)
    plan = plan_offload(schedule, costs(schedule, 1e9), early_chunks(schedule))
    (first, *rest), _ = plan.parcels
    item = first.items[0]

    def refused(*parcels: Parcel) -> str:
        with pytest.raises(ScheduleError) as error:
            lower(schedule, 0, offload=OffloadPlan((parcels, ())))
        return str(error.value)

    assert "leave twice" in refused(first, *rest, first)
    assert "its F and its backward are steps" in refused(replace(first, forward=first.forward + 1))
    assert "each once" in refused(replace(first, items=(item, item)))
    assert "behind its F" in refused(replace(first, items=(replace(item, away=first.forward),)))
    assert "behind its F" in refused(replace(first, items=(replace(item, reload=first.backward),)))
    late = Item(item.number + 1, 1.0, item.away + 1, item.reload)
    assert "gone first" in refused(replace(first, items=(late, item)))
    with pytest.raises(ScheduleError, match="for 1 ranks"):
        simulate(schedule, costs(schedule, 1.0), offload=OffloadPlan((plan.parcels[0],)))


# -- what may leave


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    return lower_tiny(qwen2(), n_chunks=4, tp_size=1)


def test_what_something_else_needs_stays_and_a_storage_goes_once(lowered: Lowered) -> None:
    for chunk in lowered.chunks.values():
        boxes = (chunk.for_I, chunk.for_W)
        found = stored(chunk)
        places = [place for one in found for place in one.places]
        assert len(places) == len(set(places))
        values = {boxes[box][index] for box, index in places}
        kept = {*chunk.joint.boundary, *chunk.joint.inputs.values(), *chunk.joint.state, *chunk.outputs}
        assert not values & kept
        assert set(chunk.joint.boundary) <= {n for box in boxes for n in box} or not chunk.joint.boundary
        assert all(chunk.joint.phase[node] is Phase.F for node in values)
        total = sum(one.nbytes for one in found)
        every = sum(span(node.meta["val"]) for node in {n for box in boxes for n in box})
        assert 0.7 * every < total <= every
        assert all(one.unit is not None for one in found)
    # Attention's output is saved for I and, as a view, for W; its logsumexp is one of its results and lies apart.
    assert any(len(one.places) > 1 for one in stored(lowered.chunks[1]))


# -- copies


class Shared(nn.Module):
    """Values as units save them, and what they were."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        base, mask = torch.randn(6, 8), torch.rand(4, 1) > 0.5
        other = torch.randn(30)
        self.for_I = [base, base.t(), mask.expand(4, 5), other[3:9].view(2, 3), torch.randn(3).double()]
        self.for_W = [base[2:4], torch.arange(7), other]
        self.wanted = [[v.clone() for v in box] for box in (self.for_I, self.for_W)]
        self.layouts = [[(v.stride(), v.storage_offset(), v.dtype) for v in box] for box in self.boxes]

    @property
    def boxes(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.for_I, self.for_W


def test_boxes_come_back_as_they_were_and_nothing_is_left_on_the_device() -> None:
    values = Shared()
    # The last: values that the graph takes for one storage, and that lie apart.
    places = [((0, 0), (0, 1), (1, 0)), ((0, 2),), ((0, 3), (1, 2)), ((1, 1), (0, 4))]
    lanes = CpuLanes()
    memory = HostMemory(lanes)
    memory.sizes = (64,)  # less than it takes: what a compiled unit saves may be larger than the graph says
    out = Offload([SimpleNamespace(places=p) for p in places], memory)  # type: ignore[misc]
    alive = [weakref.ref(v.untyped_storage()) for v in (values.for_I[0], values.for_I[3])]
    gone = [values.for_I[0].nbytes, values.for_W[2].nbytes]
    before = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for b in values.boxes for v in b}
    parked = out(values.for_I, values.for_W, 0, (0, 2, 3))
    assert values.for_I == [] and values.for_W == []

    def here() -> int:
        return sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parked.tensors()}.values()
        )

    assert here() == sum(before.values())
    parked = Away(lanes)(parked, (0, 1))
    assert here() == sum(before.values()) - sum(gone)
    assert [one() for one in alive] == [None, None]
    parked = Away(lanes)(parked, (2,))
    (buffer,) = memory.tensors()
    reload = Reload(lanes, torch.device("cpu"))
    parked = reload(reload(parked, (2, 1)), (0,))
    buffer.fill_(255)  # on the CPU a copy is done where it is asked for
    boxes = Back(lanes)(parked)
    for box, wanted, layouts in zip(boxes, values.wanted, values.layouts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(box, wanted, strict=True))
        assert [(v.stride(), v.storage_offset(), v.dtype) for v in box] == layouts
    assert boxes[0][0].data_ptr() == boxes[0][1].data_ptr()  # one storage again
    out(list(boxes[0]), list(boxes[1]), 0, (0, 2, 3))
    assert memory.tensors() == [buffer]  # used again


# -- the program


def plan_for(lowered: Lowered, schedule: Schedule, bandwidth: float) -> tuple[OffloadPlan, Workload]:
    keys = {u.key for c in lowered.chunks.values() for us in c.units.values() for u in us}
    load = workload(lowered, dict.fromkeys(keys, 1e-3), host=Link(0.0, bandwidth))
    return plan_offload(schedule, load, early_chunks(schedule)), load


Result = tuple[list[Tensor], dict[str, Tensor], int, int]


def result(
    name: str,
    p: int,
    rank: int,
    bandwidth: float | None,
    patch: pytest.MonkeyPatch,
    lowered: Lowered,
    compile: Any,
) -> Result:
    """What a rank sends and returns, its gradients, its measured peak and the bytes that left."""
    model, m = qwen2(), 3 * p
    schedule = build(name, p=p, m=m)
    plan = None
    if bandwidth is not None:
        plan, _ = plan_for(lowered, schedule, bandwidth)
        mine = {c: lowered.chunks[c] for c in schedule.placement.chunks_of(rank)}
        plan = fitted(plan, rank, SimpleNamespace(chunks=mine))  # type: ignore[arg-type]
    engine, wire = alone.engine(model, lowered, schedule, rank, patch, compile=compile, offload=plan)
    inputs = alone.inputs(lowered, {k: v[:2] for k, v in batch(2).items()}, m)
    values = [v for row in engine.run(inputs) for v in row]
    found = values + wire.sent
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    peak = measure(engine, inputs, held=list(model.parameters())).peak
    return found, grads, peak, round(plan.moved(rank)) if plan is not None else 0


@pytest.mark.parametrize("name", ["stp", "zbv", "1f1b", "dualpipev"])
def test_a_program_with_offload_computes_the_same_bits_in_less_memory(
    name: str, lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 1f1b the first rank alone has anything worth moving.
    p, ranks = (4, (0,)) if name == "1f1b" else (2, (0, 1) if name == "stp" else (0,))
    for rank in ranks:
        plain = result(name, p, rank, None, monkeypatch, lowered, False)
        fast = result(name, p, rank, 1e12, monkeypatch, lowered, False)
        same(plain, fast)
        assert fast[2] < 0.93 * plain[2]
        if name == "stp":
            slow = result(name, p, rank, 1e6, monkeypatch, lowered, False)
            same(plain, slow)
            assert 0 < slow[3] < 0.6 * fast[3] and fast[2] < slow[2] <= plain[2]


def same(one: Result, other: Result) -> None:
    assert len(one[0]) == len(other[0]) and one[1].keys() == other[1].keys()
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert all(torch.equal(one[1][key], other[1][key]) for key in one[1])


@pytest.mark.slow
def test_compiled_units_compute_the_same_bits(lowered: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stp", "dualpipev"):
        plain = result(name, 2, 0, None, monkeypatch, lowered, "unit")
        other = result(name, 2, 0, 1e12, monkeypatch, lowered, "unit")
        same(plain, other)
        assert other[2] < 0.93 * plain[2]


def test_the_verifier_sees_a_parcel_that_is_not_back(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build("stp", p=2, m=6)
    plan, _ = plan_for(lowered, schedule, 1e12)

    def made() -> Any:
        engine, _ = alone.engine(qwen2(), lowered, schedule, 0, monkeypatch, offload=plan)
        return engine.program

    def nodes(program: Any, kind: type) -> list[Any]:
        return [n for n in program.graph.nodes if isinstance(n.meta.get("instruction"), kind)]

    verify_offload(made())
    program = made()
    reload = nodes(program, ReloadNode)[0]
    reload.replace_all_uses_with(reload.args[0])
    program.graph.erase_node(reload)
    with pytest.raises(VerifyError, match="reloaded"):
        verify_offload(program)
    program = made()
    one, two = nodes(program, OffloadNode)[:2]
    two.args = (*two.args[:2], one.args[2], *two.args[3:])
    with pytest.raises(VerifyError, match="still is"):
        verify_offload(program)
    program = made()
    away = nodes(program, AwayNode)[0]
    away.replace_all_uses_with(away.args[0])
    program.graph.erase_node(away)
    with pytest.raises(VerifyError, match="gone"):
        verify_offload(program)


def test_a_step_that_fails_forgets_what_was_on_its_way(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build("stp", p=2, m=6)
    plan, _ = plan_for(lowered, schedule, 1e12)
    engine, _ = alone.engine(qwen2(), lowered, schedule, 0, monkeypatch, offload=plan)
    inputs = alone.inputs(lowered, {k: v[:2] for k, v in batch(2).items()}, 6)
    engine.run(inputs)
    assert engine.host is not None and engine.host.tensors()
    monkeypatch.setattr(engine, "_run", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    with pytest.raises(RuntimeError, match="lost"):
        engine.run(inputs)
    assert not engine.host.tensors()


def test_options_that_make_no_sense_are_refused() -> None:
    asked = {n: p.default for n, p in inspect.signature(fxbraid.braid).parameters.items() if n != "model"}
    asked |= {"example_batch": batch(4), "n_microbatches": 2, "schedule": "stp"}
    for good in (None, "chunk0", 0.3, 1, lambda chunk, unit: chunk == 0):
        checked(asked | {"offload": good})
    for bad in ("chunk1", 0, 1.01, -0.5, True, float("nan")):
        with pytest.raises(BraidError, match='use "chunk0"'):
            checked(asked | {"offload": bad})


def test_a_function_that_fails_or_answers_something_else_is_refused(lowered: Lowered) -> None:
    with pytest.raises(BraidError, match=r"offload says None of unit \w+ of chunk 0"):
        _chosen(lambda chunk, unit: None, lowered)  # type: ignore[arg-type, return-value]
    with pytest.raises(BraidError, match="offload raised ZeroDivisionError"):
        _chosen(lambda chunk, unit: chunk == 1 // 0, lowered)
    assert set(_chosen(lambda chunk, unit: chunk == 0, lowered)) == set(lowered.chunks)


def test_random_schedules_and_links() -> None:
    """Plans hold on schedules that nobody has drawn."""
    for seed in range(12):
        rng = random.Random(seed)
        schedule = alone.random_schedule(seed, Placement("v", 2, 2), rng.choice([4, 7]))
        load = costs(schedule, rng.choice([0.1, 0.4, 2.0]), rng.choice([0.0, 0.2]))
        wanted = {chunk: Wanted(rng.choice([0.3, 1.0])) for chunk in range(4) if rng.random() < 0.7}
        plan = plan_offload(schedule, load, wanted)
        plain, moved = simulate(schedule, load), simulate(schedule, load, offload=plan)
        assert moved.step_time == pytest.approx(plain.step_time, rel=1e-12)
        assert all(a <= b + 1e-9 for a, b in zip(moved.peak, plain.peak, strict=True))


# -- pictures and the command line


def test_copies_are_drawn_and_traced() -> None:
    schedule = build("stp", p=2, m=6)
    load = costs(schedule, 0.3)
    plan = plan_offload(schedule, load, early_chunks(schedule))
    plain, moved = simulate(schedule, load), simulate(schedule, load, offload=plan)
    copies = [copy for rank in range(2) for copy in moved.copies(rank)]
    for colour, way in ((OUT, "out"), (BACK, "back")):
        count = sum(copy.way == way for copy in copies)
        assert count and to_svg(moved).count(f'fill="{colour}"') == count + 1  # and the legend's
        assert colour not in to_svg(plain)
    events = json.loads(to_trace(moved))["traceEvents"]
    assert sum(event.get("cat") == "copy" for event in events) == len(copies)
    assert not any(event.get("cat") == "copy" for event in json.loads(to_trace(plain))["traceEvents"])


def test_the_commands_take_a_host_link() -> None:
    runner, command = CliRunner(), typer.Typer()
    command.command()(simulate_command)

    def run(*words: str) -> Any:
        return runner.invoke(command, ["stp", "--pp", "2", "-m", "6", *words])

    plain = json.loads(run("--json").stdout)
    moved = json.loads(run("--json", "--offload", "chunk0", "--host-link", "0.01,0.3").stdout)
    slow = json.loads(run("--json", "--offload", "0.5", "--host-link", "0.01,0.05").stdout)
    assert (
        moved["step_time"] == pytest.approx(plain["step_time"])
        and moved["peak"] < slow["peak"] < plain["peak"]
    )
    assert all(rank["exposed_host"] == 0 and 0 < rank["offloaded_share"] <= 1 for rank in moved["ranks"])
    assert "offloaded" not in plain["ranks"][0]
    text = run("--offload", "chunk0", "--host-link", "0.01,0.3").stdout
    assert "offload, of what was asked" in text
    for words, said in (
        (("--host-link", "0,1"), "give --offload too"),
        (("--offload", "chunk1"), "a share of it"),
        (("--offload", "1.5"), "no share"),
        (("--offload", "chunk0", "--host-link", "fast"), "LATENCY,BANDWIDTH"),
    ):
        result = run(*words)
        assert result.exit_code != 0 and said in " ".join((result.output + result.stderr).split())


def test_a_plan_with_offload_finds_what_did_not_fit() -> None:
    base = Request(
        load_model("qwen2-12.1b"),
        device("a800"),
        16,
        6144,
        48,
        tp=(8,),
        pp=(2,),
        micro_batch=(1,),
        schedules=("stp",),
        checkpoints=("none",),
        memory=0.42,
    )
    with pytest.raises(ScheduleError, match="nothing fits"):
        plan_devices(base)
    (found,) = plan_devices(replace(base, offload=True)).ranking
    assert found.candidate.offload and found.fits and "offload" in str(found.candidate)
    with pytest.raises(ScheduleError, match="nothing fits"):
        plan_devices(replace(base, offload=True, host=Link(1e-5, 1e8)))
