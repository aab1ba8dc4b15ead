"""Receive buffers: never reused while anything can read them, whatever the schedule; sends held until they are gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxbraid import compat
from fxbraid.passes import buffers
from fxbraid.passes.buffers import Call, Layout, Received, assign, may_alias
from fxbraid.passes.errors import VerifyError
from fxbraid.passes.pipeline import Lowered
from fxbraid.runtime.launch import launch
from fxbraid.runtime.p2p import Buffers, Outbox, Release
from fxbraid.schedule import FAMILIES, Action, Placement, Schedule, build, parts
from fxbraid.schedule import lower as lowering
from fxbraid.schedule.received import received
from fxbraid.simulate import Link, constants, simulate

from .alone import Done, engine, inputs, random_schedule
from .parity import Case, merge, run_cases
from .tiny import batch, lower, qwen2

aten = torch.ops.aten


def drawn(seed: int) -> Schedule:
    return random_schedule(seed, Placement("v" if seed % 2 else "loop", 3, 2), m=4)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return qwen2()


@pytest.fixture(scope="module")
def lowered(model: nn.Module) -> Lowered:
    return lower(model, n_chunks=4, tp_size=1)


@pytest.fixture(scope="module")
def halves(model: nn.Module) -> Lowered:
    return lower(model, n_chunks=2, tp_size=1)


def run(
    model: nn.Module,
    lowered: Lowered,
    schedule: Schedule,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> tuple[list[Tensor], list[int]]:
    """Gradients of ``rank`` after two steps with poisoned buffers and what it sent, and the addresses that it received
    into."""
    model.zero_grad()
    made, wire = engine(model, lowered, schedule, rank, monkeypatch, **options)
    for _ in range(2):  # the second step finds the buffers of the first, full of NaN
        made.run(inputs(lowered, batch(2), schedule.m))
    mine = [p for p in model.parameters() if p.grad is not None]
    assert mine
    return [p.grad for p in mine if p.grad is not None] + wire.sent, wire.received


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_makes_a_buffer_be_read_after_its_release(
    model: nn.Module, lowered: Lowered, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement("v" if seed % 2 else "loop", 2, 2)
    schedule = random_schedule(seed, placement, m=3 + seed % 4)
    for rank in range(2):
        grads, received = run(model, lowered, schedule, rank, monkeypatch, seed=seed)
        assert all(grad.isfinite().all() for grad in grads)
        assert received


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "stp", "zbv", "interleaved_1f1b"])
def test_named_schedules_reuse_their_buffers(
    model: nn.Module, lowered: Lowered, halves: Lowered, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build(name, p=2, m=8)
    lowered = lowered if schedule.n_chunks == 4 else halves
    for rank in range(2):
        grads, received = run(model, lowered, schedule, rank, monkeypatch)
        assert all(grad.isfinite().all() for grad in grads)
        in_flight, per_step = len(set(received)), len(received) // 2
        assert set(received[:per_step]) == set(received[per_step:]), (
            "the second step has the buffers of the first"
        )
        # GPipe keeps every micro-batch; of 1F1B two are alive at most, and one more is posted.
        most = {"gpipe": 8, "1f1b": 3}.get(name, per_step - 1)
        assert in_flight <= most, "too few buffers are used twice"


def test_buffers_do_not_change_a_bit(
    model: nn.Module, lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a new buffer for every receive."""
    schedule = random_schedule(3, Placement("v", 2, 2), m=6)
    shared = [[g.clone() for g in run(model, lowered, schedule, r, monkeypatch)[0]] for r in range(2)]
    monkeypatch.setattr(buffers._Readers, "last", lambda self, value: None)
    for rank in range(2):
        fresh, _ = run(model, lowered, schedule, rank, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(shared[rank], fresh, strict=True))


def first_reader(self: Any, value: fx.Node) -> fx.Node:
    """A planted error: free behind the first reader."""
    return min(value.users, key=self.order.__getitem__)


def test_a_slot_that_is_freed_too_early_is_found(
    model: nn.Module, halves: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build("1f1b", p=2, m=6)
    right = [grad.clone() for grad in run(model, halves, schedule, 1, monkeypatch)[0]]
    monkeypatch.setattr(buffers._Readers, "last", first_reader)
    with pytest.raises(VerifyError, match=r"was released, but is still held [0-9]+ times"):
        run(model, halves, schedule, 1, monkeypatch)
    monkeypatch.setattr(compat, "holders", lambda tensor: -100)  # where nobody counts, the numbers show it
    wrong = run(model, halves, schedule, 1, monkeypatch)[0]
    assert not all(torch.equal(a, b) for a, b in zip(right, wrong, strict=True))


def test_random_schedules_train_as_one_process_does() -> None:
    """Real messages between ranks, two steps, every loss and gradient against the unsplit model."""
    base = Case(tp=1, pp=2, m=5, layers=4, tied=False, steps=2)
    schedules = [
        random_schedule(seed, Placement("v" if seed % 2 else "loop", 2, 2), m=5) for seed in (21, 22)
    ]
    cases = [replace(base, schedule=one) for one in schedules]  # type: ignore[arg-type]
    per_rank = launch(run_cases, (cases,), nproc=2, timeout_s=240)
    for i in range(len(cases)):
        outcome = merge([outcomes[i] for outcomes in per_rank])
        assert outcome.loss <= 1e-6 and outcome.grad <= 1e-5, outcome


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_of_four_ranks_train_as_one_process_does(seed: int) -> None:
    base = Case(tp=1, pp=4, m=6, layers=8, tied=bool(seed % 2), steps=2)
    kinds = [Placement("v", 4, 2), Placement("loop", 4, 2), Placement("loop", 4, 1)]
    cases = [
        replace(base, schedule=random_schedule(100 * seed + k, kind, m=6)) for k, kind in enumerate(kinds)
    ]  # type: ignore[arg-type]
    per_rank = launch(run_cases, (cases,), nproc=4, timeout_s=500)
    for i in range(len(cases)):
        outcome = merge([outcomes[i] for outcomes in per_rank])
        assert outcome.loss <= 1e-6 and outcome.grad <= 1e-5, outcome


# -- the analysis itself, on chunks made by hand


def chunk(save: Any, out: Any = None, *, index: int = 1) -> tuple[Any, fx.Node]:
    """A chunk that saves ``save(x)`` for W and returns ``out(x)`` (default: something new)."""
    graph = fx.Graph()
    x, dy = graph.placeholder("x"), graph.placeholder("dy")
    saved = save(graph, x)
    result = out(graph, x) if out else graph.call_function(aten.mm.default, (x, x))
    grad = graph.call_function(aten.mm.default, (dy, dy))
    joint = SimpleNamespace(boundary=[x], tangents=[dy])
    made = SimpleNamespace(
        joint=joint, index=index, outputs=[result], input_grads=[grad], for_I=[], for_W=[saved], handed=[dy]
    )
    return made, x


def test_a_slot_is_taken_until_the_last_reader_of_any_view() -> None:
    def view(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(
            aten.t.default, (graph.call_function(aten._unsafe_view.default, (x, [4])),)
        )

    def copy(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.clone.default, (x,))

    assert free_behind(chunk(view)[0]) == ["W"]
    assert free_behind(chunk(copy)[0]) == ["F"]
    assert free_behind(chunk(lambda graph, x: x)[0]) == ["W"]


def test_a_value_that_leaves_has_no_slot() -> None:
    def passed_on(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.view.default, (x, [4]))

    def new(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.clone.default, (x,))

    assert (
        free_behind(chunk(new, passed_on)[0]) is None
    )  # sent to the next rank: no y among the block's outputs
    assert free_behind(chunk(new, passed_on)[0], stays=True) is None  # the program returns it
    assert free_behind(chunk(new)[0], stays=True) == ["F"]


def free_behind(made: Any, *, stays: bool = False) -> list[str] | None:
    """After which block the slot of the boundary that F receives is free; None where it has none."""
    graph = fx.Graph()
    post = graph.call_module("post")
    value = graph.call_function(getitem, (post, 0))
    f = graph.call_module("F", (value,), {})
    outs = [["y0", "for_W"] if stays else ["for_W"]]
    items = [graph.call_function(getitem, (f, k)) for k in range(len(outs[0]))]
    w = graph.call_module("W", (items[-1],))
    graph.output((items[0],) if stays else ())
    calls = {
        f: Call(SimpleNamespace(outputs=outs), (Action.parse("1F0"),), ((("x0", value),),)),  # type: ignore[arg-type]
        w: Call(SimpleNamespace(outputs=[[]]), (Action.parse("1W0"),), ((("for_W", items[-1]),),)),  # type: ignore[arg-type]
    }
    layout = Layout((4,), torch.float32, torch.device("cpu"))
    slots = assign(graph, [Received(post, value, layout)], calls, {1: made})
    if slots.of[post] == [None]:
        assert not slots.layouts and not slots.free_behind
        return None
    return [str(node.target) for node in slots.free_behind]


def test_what_may_share_storage() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    shares = [
        aten.t.default,
        aten.view.default,
        aten.split.Tensor,
        aten._unsafe_view.default,
        aten.detach.default,
    ]
    for target in (*shares, torch.relu):  # the last: nothing is known of it
        assert may_alias(graph.call_function(target, (x,))), target
    for target in (aten.clone.default, aten.mm.default, aten._to_copy.default, aten.add.Tensor):
        assert not may_alias(graph.call_function(target, (x,))), target


# -- ahead


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "stp", "dualpipev"])
def test_one_step_ahead_hides_as_much_as_buffers_everywhere(
    name: str, p: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receive that is posted one step ahead never holds its message up; one that is posted when it is needed does."""
    schedule = build(name, p=p, m=4 * p)
    costs = constants(schedule, 1, 1, 1, 0.37, message=1.0)

    def time(link: Link) -> float:
        return simulate(schedule, replace(costs, link=link)).step_time

    late = 0
    for latency, bandwidth in ((0.05, 1e9), (0.25, 1e9), (0.0, 2.0), (0.1, 4.0)):
        buffered = time(Link(latency, bandwidth, rendezvous=False))
        assert time(Link(latency, bandwidth)) == pytest.approx(buffered, rel=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(lowering, "_instructions", posted_when_needed)
            late += time(Link(latency, bandwidth)) > buffered * 1.001
    assert late


def posted_when_needed(row: Any, wanted: Any, complete: Any, moved: Any) -> Iterator[Any]:
    assert not complete and not moved  # nothing is reduced or offloaded here
    for step, messages in zip(row, wanted, strict=True):
        yield from (lowering.Post(message) for message in messages)
        yield from (lowering.Arrive(message) for message in messages)
        yield lowering.Run(step)


# -- run time


def test_release_fills_with_nan_and_says_who_still_reads() -> None:
    made = Buffers()
    made.layouts = [
        Layout((2, 3), torch.float32, torch.device("cpu")),
        Layout((2,), torch.int64, torch.device("cpu")),
    ]
    first = made.get(0)
    assert made.get(0) is first and made.get(1).dtype is torch.int64
    first.zero_()
    made.get(1).zero_()
    del first
    Release(made)(0, 1)
    assert made.get(0).isnan().all() and made.get(1)[0] == torch.iinfo(torch.int64).max
    row = made.get(0)[1]  # a view
    with pytest.raises(VerifyError, match=r"buffer 0 was released, but is still held [12] times"):
        Release(made)(0)
    del row
    box = [made.get(0)]  # the tensor itself
    with pytest.raises(VerifyError, match="buffer 0 was released, but is still held 1 times"):
        Release(made)(0)
    made.drop()
    assert made.get(0) is not box[0]


def test_after_a_step_that_failed_no_old_buffer_is_used(
    model: nn.Module, lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = engine(model, lowered, build("stp", p=2, m=4), 1, monkeypatch)
    values = inputs(lowered, batch(2), 4)
    made.run(values)
    held = dict(made.buffers._made)
    assert held
    broken = {name: rows[:2] for name, rows in values.items()}
    with pytest.raises(IndexError):
        made.run(broken)
    made.run(values)
    assert made.buffers._made and all(made.buffers.get(k) is not held.get(k) for k in made.buffers._made)


def test_the_outbox_holds_a_tensor_until_it_is_sent() -> None:
    outbox = Outbox()
    works = [Done(arrived=False) for _ in range(3)]
    tensors = [torch.ones(1) for _ in works]
    for work, tensor in zip(works, tensors, strict=True):
        outbox.put([work], [tensor])  # type: ignore[list-item]
    assert len(outbox.tensors()) == 3
    works[0].arrived = works[1].arrived = True
    outbox.put([Done(arrived=False)], [torch.zeros(1)])  # type: ignore[list-item]
    assert [t.item() for t in outbox.tensors()] == [1.0, 0.0]
    outbox.flush()
    assert works[2].arrived and outbox.tensors() == []


@pytest.mark.parametrize(
    "schedule", [*(build(name, p=3, m=9) for name in FAMILIES), *map(drawn, range(6))], ids=str
)
def test_what_is_let_go_of_has_arrived_in_any_order_of_events(schedule: Schedule) -> None:
    """Against the graph of what must happen before what."""
    before: dict[Any, set[Any]] = {}
    lists = [lowering.lower(schedule, rank) for rank in range(schedule.p)]
    senders = {
        message: (source, at)
        for channel, source, _ in lowering.channels(schedule)
        for at, one in enumerate(lists[source])
        if isinstance(one, lowering.Run)
        for action in parts(one.step)
        if ("I" if action.phase.value == "B" else action.phase.value, action.chunk)
        == (channel.phase, channel.chunk)
        and (message := lowering.Message(channel, action.microbatch))
    }
    over = {one.message: (r, at) for r, own in enumerate(lists) for at, one in enumerate(own) if arrives(one)}
    assert set(senders) == set(over)

    def earlier(event: Any) -> set[Any]:
        if event not in before:
            rank, at = event
            before[event] = {event}
            if at:
                before[event] |= earlier((rank, at - 1))
            if arrives(lists[rank][at]):
                before[event] |= earlier(senders[lists[rank][at].message])
        return before[event]

    for rank in range(schedule.p):
        mine = [at for at, one in enumerate(lists[rank]) if arrives(one)]
        claims = received(schedule, rank)
        assert len(claims) == len(mine)
        total = 0
        for at, claim in zip(mine, claims, strict=True):
            for channel, count in claim.items():
                assert over[lowering.Message(channel, count - 1)] in earlier((rank, at))
                total += 1
        assert total or not mine or schedule.name == "gpipe"


def arrives(one: Any) -> bool:
    return isinstance(one, lowering.Arrive)
