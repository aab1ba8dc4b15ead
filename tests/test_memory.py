"""What was predicted of a step's memory, against what lives while it runs; and what schedules promise, kept."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fxbraid
from fxbraid.passes.checkpoint import NAMES
from fxbraid.passes.pipeline import Cut, Lowered, recut
from fxbraid.runtime.costs import chunk_cost, workload
from fxbraid.runtime.ghosts import Library, size_of
from fxbraid.runtime.launch import launch
from fxbraid.runtime.measure import LiveStorages, Measured, measure
from fxbraid.runtime.predict import Setting, predict_memory
from fxbraid.schedule import FAMILIES, build, check, peak_memory
from fxbraid.schedule.offload import OffloadPlan
from fxbraid.schedule.weave import weave
from fxbraid.simulate.memory import KINDS, Memory, RankMemory, amount, read_amount
from fxbraid.simulate.offload import early_chunks, plan_offload
from fxbraid.simulate.workload import ChunkCost, strand

from .alone import engine, inputs
from .tiny import batch, lower, qwen2

#: What is computed again.
POLICIES = NAMES
#: Schedules whose memory grows with the micro-batches: they hold all of them.
ALL_OF_THEM = ("gpipe", "looped_bfs")


#: Those of the grid that every run of the tests looks at: each policy under some schedule.
FEW = (
    ("1f1b", "mlp"),
    ("zbv", "attention+mlp"),
    ("stp", "none"),
    ("stp", "all"),
    ("stp_low_memory", "none"),
    ("v_half", "attention"),
)
GRID = [
    pytest.param(name, policy, marks=() if (name, policy) in FEW else pytest.mark.slow)
    for name in FAMILIES
    for policy in POLICIES
]


@cache
def traced(policy: str, n_chunks: int) -> tuple[nn.Module, Lowered]:
    if policy != "none":
        model, lowered = traced("none", n_chunks)
        return model, recut(lowered, Cut(tp_size=1, checkpoint=policy))  # type: ignore[arg-type]
    model = qwen2()
    return model, lower(model, n_chunks=n_chunks, tp_size=1)


def predicted(policy: str, name: str, p: int, m: int, offload: OffloadPlan | None = None) -> Memory:
    schedule = build(name, p=p, m=m)
    setting = Setting(compile=False, offload=offload)
    return predict_memory(traced(policy, schedule.n_chunks)[1], schedule, setting)


def measured(
    policy: str,
    name: str,
    p: int,
    m: int,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    offload: OffloadPlan | None = None,
) -> tuple[Measured, int]:
    """Of a rank alone, and the bytes of its receive buffers."""
    schedule = build(name, p=p, m=m)
    model, lowered = traced(policy, schedule.n_chunks)
    made, _ = engine(model, lowered, schedule, rank, monkeypatch, keeps=False, offload=offload)
    found = measure(made, inputs(lowered, batch(2), m), held=[*model.parameters(), *model.buffers()])
    model.zero_grad()
    return found, sum(map(size_of, made.compiled.slots))


def bound(policy: str, name: str, p: int, m: int, rank: int) -> float:
    """Bytes that the schedule promises not to exceed: so many chunk activations, each the most that a chunk of the rank
    keeps of a micro-batch between its blocks (behind F, and behind I where W waits); what a backward under way has
    beyond that; and what is on its way (two receives posted ahead, a message that leaves, one that has just arrived).
    """
    schedule = build(name, p=p, m=m)
    promise = peak_memory(schedule)[rank]
    chunks = [traced(policy, schedule.n_chunks)[1].chunks[c] for c in schedule.placement.chunks_of(rank)]
    second = {u.key: 1.0 for c in chunks for us in c.units.values() for u in us}
    costs = [chunk_cost(c, second, lambda _: 0.0) for c in chunks]
    message = max(max(c.sends_f, c.sends_i) for c in costs)
    kept = max(max(c.saved, handed_over(c) if promise.queued else 0.0) for c in costs)
    under_way = max(highest(c, own) for c in costs for own in {True, not promise.queued})
    return kept * promise.live + max(0.0, under_way - kept) + 4 * message


def handed_over(chunk: ChunkCost) -> float:
    """Bytes that wait for a queued W."""
    return chunk.saved + sum(unit.saves - unit.frees for unit in chunk.i)


def highest(chunk: ChunkCost, own: bool) -> float:
    """The most bytes of a chunk and micro-batch while its backward runs alone. own: its W's run with its I's."""
    units = [chunk.i, chunk.w] if own else [chunk.i]
    strands = [strand(of, phase, own=phase == "W") for of, phase in zip(units, "IW", strict=False)]
    now = most = chunk.saved
    for unit in (units[s][u] for s, u in weave(strands)):
        most = max(most, now + unit.saves)
        now += unit.saves - unit.frees
    return most


def leaving(policy: str, name: str, p: int, m: int) -> OffloadPlan:
    """The first chunk of each rank goes to the host, over a link that takes no time; units take what their FLOPs do."""
    schedule = build(name, p=p, m=m)
    lowered = traced(policy, schedule.n_chunks)[1]
    units = [u for c in lowered.chunks.values() for us in c.units.values() for u in us]
    costs = workload(lowered, {u.key: 1e-6 + 1e-10 * u.flops for u in units})
    return plan_offload(schedule, costs, early_chunks(schedule))


@pytest.mark.parametrize(("name", "policy"), GRID)
def test_the_predicted_peak_is_the_measured_one_and_the_promise_is_kept(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, m = 2, 6
    memory = predicted(policy, name, p, m)
    for rank, promise in enumerate(peak_memory(build(name, p=p, m=m))):
        said = memory.ranks[rank]
        found, buffers = measured(policy, name, p, m, rank, monkeypatch)
        assert said.activations == pytest.approx(found.peak, rel=0.05), (rank, found)
        assert said.activations_inside == pytest.approx(found.inside, rel=0.05), (rank, found)
        # What the schedule counts, counted in the run.
        assert 0 < found.live <= promise.live and 0 < found.kept <= promise.activations, (rank, found)
        assert found.peak <= 1.05 * bound(policy, name, p, m, rank), (
            rank,
            found,
            bound(policy, name, p, m, rank),
        )
        # Nothing is left behind the step but the buffers that the next one uses again.
        assert found.after == buffers, (rank, found)


OFFLOADED = (("stp", "none"), ("zbv", "attention+mlp"))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=() if (name, policy) in OFFLOADED else pytest.mark.slow)
        for name in ("zbv", "stp", "stp_low_memory", "v_half", "gpipe")
        for policy in ("none", "attention+mlp", "all")
    ],
)
def test_with_chunk0_on_the_host_the_predicted_peak_is_the_measured_one(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, m = 2, 6
    plan = leaving(policy, name, p, m)
    here, gone = predicted(policy, name, p, m), predicted(policy, name, p, m, plan)
    assert any(plan.parcels), plan
    for rank in range(p):
        said = gone.ranks[rank]
        found, buffers = measured(policy, name, p, m, rank, monkeypatch, plan)
        assert said.activations == pytest.approx(found.peak, rel=0.05), (rank, found)
        assert said.activations_inside == pytest.approx(found.inside, rel=0.05), (rank, found)
        assert said.activations <= here.ranks[rank].activations
        assert found.after == buffers, (rank, found)
    assert min(b.activations / a.activations for a, b in zip(here.ranks, gone.ranks, strict=True)) < 0.97


def enough(name: str, p: int) -> tuple[int, int, int]:
    """Micro-batches from which on the peak does not grow. Interleaved schedules hold a chunk more where p does not
    divide m; ``stp_plus`` uses what memory there is to fill its bubble, up to 8p."""
    if name == "stp_plus":
        return 8 * p, 9 * p, 10 * p + 1
    if name.startswith("interleaved"):
        return 3 * p, 4 * p, 6 * p
    return 3 * p, 4 * p, 6 * p + 1


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ALL_OF_THEM])
@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_peak_does_not_depend_on_m(name: str, p: int) -> None:
    count = p * FAMILIES[name].v
    _, lowered = many_chunks() if count > 4 else traced("none", count)
    numbers = enough(name, p)
    library = Library(fused=False)
    few, *more = (
        predict_memory(lowered, build(name, p=p, m=m), Setting(compile=False), library=library)
        for m in numbers
    )
    for memory, m in zip(more, numbers[1:], strict=True):
        for a, b in zip(few.ranks, memory.ranks, strict=True):
            # A loss, 4 bytes, is kept of every micro-batch.
            assert b.activations <= a.activations + 4 * (m - numbers[0]), (name, m)


@cache
def many_chunks() -> tuple[nn.Module, Lowered]:
    model = qwen2(num_hidden_layers=8)
    return model, lower(model, n_chunks=8, tp_size=1)


def grows(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps of rank 0 of 2; from the second on, each leaves behind exactly what the one before did."""
    m = 3
    model, lowered = traced("none", 2 * FAMILIES[name].v)
    made, _ = engine(model, lowered, build(name, p=2, m=m), 0, monkeypatch, keeps=False)
    given = inputs(lowered, batch(2), m)
    mode, left = LiveStorages([*model.parameters(), *model.buffers()]), []
    for _ in range(steps):
        with mode:
            made.run(given)
        left.append(mode.bytes())
    model.zero_grad()
    assert len(set(left[1:])) == 1, left


def test_nothing_grows_over_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    grows("stp", 4, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv", "stp", "stp_low_memory"])
def test_nothing_grows_over_200_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grows(name, 200, monkeypatch)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_the_low_memory_schedules_promise_what_they_say(p: int) -> None:
    for m in (2 * p, 3 * p, 4 * p + 1):
        check(build("stp_low_memory", p=p, m=m), max_live=2 * p + 1)
        check(build("dualpipev", p=p, m=m), max_live=2 * p + 1)
        check(build("v_half", p=p, m=m), max_live=max(4, p + 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stp_low_memory", "v_half", "v_min", "dualpipev", "stp"])
def test_promises_are_kept_on_four_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, m = 4, 12
    schedule = build(name, p=p, m=m)
    model, lowered = many_chunks()
    memory = predict_memory(lowered, schedule, Setting(compile=False))
    for rank, promise in enumerate(peak_memory(schedule)):
        made, _ = engine(model, lowered, schedule, rank, monkeypatch, keeps=False)
        found = measure(made, inputs(lowered, batch(2), m), held=[*model.parameters(), *model.buffers()])
        model.zero_grad()
        assert found.live <= promise.live and found.kept <= promise.activations, (rank, found)
        assert memory.ranks[rank].activations == pytest.approx(found.peak, rel=0.05), (rank, found)


def test_a_model_on_the_meta_device_is_predicted_as_the_one_that_runs() -> None:
    data = batch(8)
    real = fxbraid.braid(qwen2(), data, n_microbatches=4, schedule="1f1b", compile=False)
    with torch.device("meta"):
        imagined = qwen2().to("meta")
    memory = fxbraid.predict_memory(imagined, data, n_microbatches=4, schedule="1f1b", compile=False)
    assert memory.as_dict()["ranks"] == real.memory().as_dict()["ranks"]
    rank = memory.ranks[0]
    assert rank.activations == pytest.approx(real.measure_peak(**data), rel=0.05)
    # Static bytes are those of the tensors themselves.
    parameters = sum(p.nbytes for p in real.parameters())
    real.step(**data)
    assert rank.split["parameters"] == pytest.approx(parameters, rel=0.01)
    last = dict(zip(KINDS, rank.samples[-1].levels, strict=True))
    assert last["gradients"] == sum(p.grad.nbytes for p in real.parameters() if p.grad is not None)
    optimizer = torch.optim.AdamW(real.parameters(), foreach=False)
    optimizer.step()
    state = sum(
        v.nbytes
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor) and v.ndim
    )
    assert last["optimizer"] == state
    assert last["activations"] == last["hand-over"] == last["temporaries"] == 0
    json.dumps(memory.as_dict())
    assert f"fullest: rank 0 with {amount(memory.peak)}" in str(memory)
    with pytest.raises(fxbraid.BraidError, match="adamw"):
        real.memory(optimizer="lion")


def test_types_and_replicas_count() -> None:
    data = batch(4)
    plain = {"n_microbatches": 2, "schedule": "1f1b", "compile": False}
    model = qwen2(num_hidden_layers=2).to(torch.bfloat16)

    def split(**more: Any) -> dict[str, int]:
        rank = fxbraid.predict_memory(model, data, **plain, **more).ranks[0]
        return dict(zip(KINDS, rank.samples[-1].levels, strict=True))

    size = sum(p.numel() for p in model.parameters())
    narrow, wide, masters = split(grad_dtype=None), split(), split(master_weights=True)
    assert (narrow["gradients"], wide["gradients"], masters["gradients"]) == (2 * size, 6 * size, 4 * size)
    assert (narrow["optimizer"], masters["optimizer"]) == (4 * size, 8 * size)
    assert masters["parameters"] - narrow["parameters"] == 4 * size
    assert split(dp_size=4, zero=True)["optimizer"] == size
    assert split(optimizer="sgd")["optimizer"] == 0 and split(optimizer=12)["optimizer"] == 12 * size


def test_any_world_size_in_one_process() -> None:
    model = qwen2(num_hidden_layers=8)
    memory = fxbraid.predict_memory(model, batch(24), tp_size=2, pp_size=4, n_microbatches=12)
    assert [rank.rank for rank in memory.ranks] == [0, 1, 2, 3]
    assert all(rank.split["communication"] > 0 for rank in memory.ranks)
    assert memory.fullest.where.startswith("step ")
    with pytest.raises(fxbraid.BraidError, match="takes no depth"):
        fxbraid.predict_memory(model, batch(24), n_microbatches=12, depth=3)


def in_ranks(name: str, compile: Any) -> tuple[int, int, int]:
    """In each of 2 x 2 ranks: what was predicted for it, what lived, and what ``last_step`` says was predicted."""
    torch.set_num_threads(1)
    data = batch(12)
    model = fxbraid.braid(
        qwen2(), data, tp_size=2, pp_size=2, n_microbatches=6, schedule=name, compile=compile
    )
    model.step(**data)
    found = model.measure_peak(**data)
    rank: RankMemory = model.memory().ranks[model.mesh.pp_rank]
    return rank.activations, found, model.last_step.peak_predicted or 0


def test_tensor_parallel_ranks_need_what_was_predicted() -> None:
    for said, found, told in launch(in_ranks, ("stp", False), nproc=4, timeout_s=240):
        assert said == pytest.approx(found, rel=0.05) and told == said


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["unit", False])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "stp_low_memory", "dualpipev", "v_half"])
def test_tensor_parallel_ranks_under_every_schedule(name: str, compile: Any) -> None:
    for said, found, told in launch(in_ranks, (name, compile), nproc=4, timeout_s=500):
        assert said == pytest.approx(found, rel=0.05) and told == said


def test_amounts_are_read_as_they_are_written() -> None:
    assert [read_amount(text) for text in ("60GiB", "1.5 kB", 7, "1e3", "2mib")] == [
        60 * 2**30,
        1500,
        7,
        1000,
        2 * 2**20,
    ]
    for wrong in ("", "sixty", "0GiB", "-1GB", "1PB", "nan", "inf", 0.5):
        with pytest.raises(ValueError, match="no amount of memory"):
            read_amount(wrong)
