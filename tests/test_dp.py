"""Data parallelism: replicas in real processes against one process, and its parts without any."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fxbraid.schedule as schedules
from fxbraid.passes.errors import BraidError
from fxbraid.runtime.buckets import ALIGN, Reducer
from fxbraid.runtime.launch import launch
from fxbraid.runtime.mesh import _sizes
from fxbraid.runtime.unit import GradSlot
from fxbraid.schedule import Action, Phase, parts
from fxbraid.schedule.lower import Reduce, Run, lower
from fxbraid.simulate import simulate
from fxbraid.simulate.inputs import constant_workload

from .replicas import Found, Layout, emulated, merge, run_checks, run_layouts

NAMES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
    "stp",
)
EVERY = (*NAMES, "stp_plus", "stp_low_memory", "v_half", "v_min")

PIPELINE = Layout(tp=1, pp=2, m=2, reproducible=True, steps=2, rows=1)


def good(found: list[Found]) -> None:
    for one in found:
        assert one.loss <= 1e-6, one
        assert one.grad <= 1e-5, one
        assert one.norm <= 1e-6, one


def test_replicas_agree_with_one_process() -> None:
    layouts = [
        PIPELINE,
        replace(PIPELINE, schedule="zbv"),
        Layout(tp=2, pp=1, m=2, schedule="zbv", rows=1, layers=2),
    ]
    per_rank = launch(run_checks, (layouts,), nproc=4, timeout_s=400)
    found = [merge([ran[i] for ran, _ in per_rank]) for i in range(len(layouts))]
    good(found)
    assert found[0].bits == found[1].bits  # reproducible: to the bit, whatever the schedule
    for _, said in per_rank:
        assert said["accumulates"] <= 1e-5
        assert said["takes_a_mesh"] <= 1e-5
        assert max(said["ignores"]) <= 1e-5
        assert said["shares_out"] == {"same": True, "moved": True, "share": True}
        assert said["refuses"] == per_rank[0][1]["refuses"]
        assert said["explains"] == {**EXPLAINED, "simulated": said["explains"]["simulated"]}
    refused = per_rank[0][1]["refuses"]
    for name, wanted in REFUSALS.items():
        assert wanted in refused[name], name
    assert per_rank[0][1]["explains"]["simulated"] == [2, 2]


PRECISIONS = ((), (("master_weights", True),), (("grad_dtype", None),))

EXPLAINED = {"reduces": True, "samples": 4, "ranks": (2, 1), "report": True, "link": True}
REFUSALS = {
    "shapes": "input 'attention_mask' differs between ranks ((2, 16) torch.int64 on ranks 0, 1; (2, 14) torch.int64 on",
    "missing": "input 'attention_mask' differs between ranks",
    "rows": "n_microbatches=2 does not divide the batch of 1; use 1 (on rank 2",
    "gradient": "input 'attention_mask' wants a gradient, and fxbraid gives none to inputs; detach() it (on rank 2, so",
    "count": "differs between ranks (100 tokens of all replicas together on ranks 0, 1; 101 tokens",
    "weights": "model.norm.weight of replica 1 has not the values that it has in replica 0 (1 of ",
    "bucket": "bucket_mb=0: give a size in MiB above 0",
    "sizes": "tp_size=1 x pp_size=2 x dp_size=3 needs 6 processes, but there are 4",
    "no dp": "pass dp_size=2 for as many replicas",
    "loss": "True",
}


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_every_schedule(tp: int, pp: int) -> None:
    base = Layout(tp=tp, pp=pp, m=4)
    layouts = [replace(base, schedule=name) for name in EVERY]
    layouts += [replace(base, schedule=name, reproducible=True) for name in EVERY]
    layouts += [replace(base, model="llama", tied=False, compile="unit"), replace(base, compile="block")]
    layouts += [replace(base, options=(("bucket_mb", 1e-3),)), replace(base, braided=False)]
    layouts += [replace(base, options=(("sequence_parallel", True),), mask=False)] if tp > 1 else []
    per_rank = launch(run_layouts, (layouts,), nproc=4, timeout_s=1800)
    found = [merge([ran[i] for ran in per_rank]) for i in range(len(layouts))]
    good(found)
    for one in found[len(EVERY) : 2 * len(EVERY)]:
        assert one.losses == found[len(EVERY)].losses, one.layout


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "dp", "nproc"), [(2, 2, 2, 8), (1, 1, 4, 4), (1, 2, 3, 6)])
def test_more_replicas_and_all_axes(tp: int, pp: int, dp: int, nproc: int) -> None:
    base = Layout(tp=tp, pp=pp, dp=dp, m=4, reproducible=True)
    layouts = [replace(base, schedule=name) for name in ("1f1b", "zbv", "stp")]
    layouts += [replace(base, model="zoo:mixtral", tied=False, reproducible=False)]
    layouts += [replace(base, dtype=torch.bfloat16, steps=1, options=o) for o in PRECISIONS]
    per_rank = launch(run_layouts, (layouts,), nproc=nproc, timeout_s=1800)
    found = [merge([ran[i] for ran in per_rank]) for i in range(len(layouts))]
    good(found[:3])
    assert found[3].loss <= 1e-6 and found[3].grad <= 1e-4
    for one in found[4:]:  # what is summed over replicas is float32, so they agree to the bit (``merge``)
        assert one.loss <= 1e-2 and one.grad <= 0.1 and one.norm <= 0.05, one
    assert found[1].bits == found[2].bits
    untied = [{k: v for k, v in one.bits.items() if "embed" not in k} for one in found[:2]]
    assert untied[0] == untied[1]


@pytest.mark.slow
def test_an_emulated_step_takes_what_the_simulator_says() -> None:
    for found in launch(emulated, (), nproc=4, timeout_s=400):
        for name, (measured, predicted) in found.items():
            assert measured == pytest.approx(predicted, rel=1e-3), (
                name
            )  # padding of buckets, counts, the loss


# -- without processes


def test_sizes_and_what_the_world_leaves() -> None:
    assert _sizes(8, None, None, None) == (1, 8, 1)
    assert _sizes(8, 2, None, None) == (2, 4, 1)
    assert _sizes(8, 2, 2, None) == (2, 2, 2)
    assert _sizes(8, 2, None, 4) == (2, 1, 4)
    assert _sizes(8, None, 2, None) == (1, 2, 4)
    with pytest.raises(BraidError, match=r"tp_size=2 x pp_size=2 needs 4 .* there are 8; .* pass dp_size=2"):
        _sizes(8, None, 2, 2)
    with pytest.raises(BraidError, match="x dp_size=3 needs 6 processes, but there are 8"):
        _sizes(8, 3, 1, 2)
    with pytest.raises(BraidError, match="dp_size=0 must be a whole number"):
        _sizes(8, 0, 1, 2)


@pytest.mark.parametrize("name", EVERY)
def test_a_chunk_is_reduced_once_behind_its_last_w(name: str) -> None:
    schedule = schedules.build(name, p=2, m=4)
    for rank in range(2):
        left = {
            chunk: sum(
                a.chunk == chunk and a.phase in (Phase.W, Phase.B)
                for step in schedule.actions[rank]
                for a in parts(step)
            )
            for chunk in schedule.placement.chunks_of(rank)
        }
        reduced = []
        for instruction in lower(schedule, rank, reduce=True):
            if isinstance(instruction, Run):
                for action in parts(instruction.step):
                    left[action.chunk] -= action.phase in (Phase.W, Phase.B)
            elif isinstance(instruction, Reduce):
                assert left[instruction.chunk] == 0
                reduced.append(instruction.chunk)
        assert sorted(reduced) == sorted(schedule.placement.chunks_of(rank))
        assert not any(isinstance(one, Reduce) for one in lower(schedule, rank))


def slots_of(*names: str, numel: int = 40) -> dict[str, GradSlot]:
    return {name: GradSlot(nn.Parameter(torch.zeros(numel)), shared=True) for name in names}


def reducer(chunks: dict[int, dict[str, GradSlot]], **more: Any) -> Reducer:
    layers = {name: int(name[0]) for own in chunks.values() for name in own}
    return Reducer(chunks, layers, group=None, apart={"2tied"}, **more)  # type: ignore[arg-type]


def test_buckets_do_not_depend_on_chunks() -> None:
    """A bucket holds one layer's, so two chunks have the buckets that one would have."""
    names = ("0a", "0b", "1a", "1b", "2a", "2tied")
    one = reducer({0: slots_of(*names)}).buckets[0]
    two = reducer({0: slots_of(*names[:2]), 1: slots_of(*names[2:])}).buckets
    assert [b.nbytes for b in one] == [b.nbytes for b in (*two[1], *two[0])]
    assert [len(b._slots) for b in one] == [1, 1, 2, 2]  # what is tied is alone
    small = reducer({0: slots_of(*names, numel=64)}, bucket_mb=300 / 2**20).buckets[0]
    assert [len(b._slots) for b in small] == [1] * 6
    assert all(b.nbytes % ALIGN == 0 for b in (*one, *small))


def test_a_gradient_lies_in_its_bucket_and_what_has_none_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(
        "fxbraid.runtime.buckets.dist.all_reduce", lambda flat, group, async_op: sent.append(flat.clone())
    )
    own = slots_of("0a", "0b", "0c", numel=5)
    own["0c"] = GradSlot(nn.Parameter(torch.zeros(1, 5)), shared=True)
    made = reducer({0: own})
    own["0a"].add(torch.full((5,), 2.0))
    own["0c"].add_product(torch.ones(1, 1), torch.ones(1, 5))
    own["0c"].add(torch.ones(1, 5))
    made.launch(0)
    assert torch.equal(sent[0].view(3, -1)[:, :5], torch.tensor([[2.0] * 5, [0.0] * 5, [2.0] * 5]))
    assert float(sent[0].sum()) == 20.0  # padding is zero
    first = own["0a"].total
    made.wait()
    own["0a"].total = own["0c"].total = None
    made.launch(0)
    assert len(sent) == 1  # nothing was added
    own["0a"].add(torch.ones(5))
    assert first is not None and float(first.sum()) == 10.0  # every step has its own buffer


def test_the_simulator_hides_what_it_can_of_the_sums_over_replicas() -> None:
    schedule = schedules.build("zbv", p=4, m=8)
    plain = constant_workload(schedule, (1.0, 1.0, 1.0, 0.0))
    base = simulate(schedule, plain)
    assert base.exposed_dp_share == 0 and "exposed_dp_share" not in base.summary()
    for seconds in (0.5, 40.0):
        chunks = tuple(replace(chunk, reduces=seconds) for chunk in plain.chunks)
        found = simulate(schedule, replace(plain, chunks=chunks))
        assert all(len(row) == 2 for row in found.trace.reductions)
        for rank, times in enumerate(found.ranks):
            total = times.compute + times.exposed_tp + times.exposed_p2p + times.exposed_dp + times.bubble
            assert total == pytest.approx(found.step_time)
            first, second = found.trace.reductions[rank]
            assert second.start >= first.end
            boxes = [box for box in found.boxes(rank) if box.unit.startswith("gradients")]
            assert sum(box.exposed for box in boxes) == pytest.approx(times.exposed_dp)
        path = found.critical_path()
        assert path[-1].end == found.step_time
        assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(path))
        assert base.step_time + seconds <= found.step_time <= base.step_time + 2 * seconds


def test_the_action_that_completes_a_chunk() -> None:
    row = (Action(Phase.B, 0, 0), Action(Phase.I, 1, 0), Action(Phase.W, 1, 0), Action(Phase.B, 0, 1))
    from fxbraid.schedule.lower import complete

    assert complete(row) == {2: [1], 3: [0]}
