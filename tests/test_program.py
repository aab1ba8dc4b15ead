"""The rank's program: every action once, receives posted ahead, values freed, order as the schedule says."""

from __future__ import annotations

import operator
import re
from collections import Counter
from typing import Any

import pytest
from torch import fx, nn

from fxbraid.passes.block import Block, braid
from fxbraid.passes.pipeline import Lowered
from fxbraid.passes.program import Program, program
from fxbraid.schedule import Action, Phase, Schedule, build, check, parts
from fxbraid.schedule.lower import Arrive, Channel, Post, Run, channels, lower

from .tiny import context, qwen2
from .tiny import lower as lower_tiny


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    return lower_tiny(qwen2(), n_chunks=4)


def make(lowered: Lowered, schedule: Schedule, rank: int) -> Program:
    place = schedule.placement
    mine = {c: lowered.chunks[c] for c in place.chunks_of(rank)}
    modules: dict[str, nn.Module] = {}
    sends = []
    for channel, source, target in channels(schedule):
        label = f"{channel.phase}{channel.chunk}"
        if rank == source:
            sends.append(f"send_{label}")
        if rank == target:
            modules |= {f"post_{label}": nn.Identity(), f"arrive_{label}": nn.Identity()}
    blocks: dict[str, Block] = {}

    def block(actions: tuple[Action, ...]) -> Block:
        made = braid(actions, context(lowered, sends=tuple(sends)))
        return blocks.setdefault(made.name, made)

    return program(schedule, rank, chunks=mine, block=block, modules=modules)


def instructions(made: Program) -> list[Any]:
    return [n.meta["instruction"] for n in made.graph_module.graph.nodes if "instruction" in n.meta]


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_every_action_runs_once_in_the_order_of_the_schedule(lowered: Lowered, m: int) -> None:
    schedule = build("stp", p=2, m=m)
    for rank in range(2):
        steps = [i.step for i in instructions(make(lowered, schedule, rank)) if isinstance(i, Run)]
        assert steps == list(schedule.actions[rank])
        done = Counter((a.phase, a.chunk, a.microbatch) for step in steps for a in parts(step))
        assert set(done.values()) == {1}
        for chunk in schedule.placement.chunks_of(rank):
            for mb in range(m):
                assert done[Phase.F, chunk, mb] == 1
                assert done[Phase.B, chunk, mb] + done[Phase.I, chunk, mb] == 1
                assert done[Phase.I, chunk, mb] == done[Phase.W, chunk, mb]


def test_a_receive_is_posted_one_step_before_the_step_that_needs_it() -> None:
    for name in ("1f1b", "stp"):
        schedule = build(name, p=4, m=8)
        for rank in range(4):
            listed = lower(schedule, rank)
            for i, instruction in enumerate(listed):
                if isinstance(instruction, Arrive):
                    posted = listed.index(Post(instruction.message))
                    between = [x for x in listed[posted:i] if isinstance(x, Run)]
                    first = not any(isinstance(x, Run) for x in listed[:i])
                    assert len(between) == (0 if first else 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "stp", "interleaved_1f1b", "dualpipev"])
def test_both_ends_of_a_channel_agree_on_its_messages(name: str) -> None:
    schedule = build(name, p=4, m=8)
    check(schedule)
    sent: dict[Channel, list[int]] = {}
    received: dict[Channel, list[int]] = {}
    ends = {channel: (source, target) for channel, source, target in channels(schedule)}
    for rank in range(4):
        for instruction in lower(schedule, rank):
            if isinstance(instruction, Post):
                received.setdefault(instruction.message.channel, []).append(instruction.message.microbatch)
                assert ends[instruction.message.channel][1] == rank
            elif isinstance(instruction, Run):
                for action in parts(instruction.step):
                    phase = "F" if action.phase is Phase.F else "I"
                    channel = Channel(phase, action.chunk)  # type: ignore[arg-type]
                    if action.phase is not Phase.W and channel in ends:
                        sent.setdefault(channel, []).append(action.microbatch)
    assert sent == received
    assert all(order == list(range(8)) for order in sent.values())


def test_the_turn_of_a_V_is_no_message() -> None:
    schedule = build("stp", p=2, m=4)
    assert {(c.phase, c.chunk) for c, *_ in channels(schedule)} == {("F", 0), ("I", 1), ("F", 2), ("I", 3)}
    one = build("stp", p=1, m=2)
    assert channels(one) == []


def test_values_are_freed_behind_their_last_use(lowered: Lowered) -> None:
    made = make(lowered, build("stp", p=2, m=4), 0)
    code = made.graph_module.code
    assert code.count("handed") > 0
    for name in re.findall(r"(for_[IW]_\d+_\d+|handed_\d+_\d+)\]? = ", code):
        lines = [line for line in code.splitlines() if re.search(rf"\b{name}\b", line)]
        assert re.search(rf";.*\b{name}\b.* = None", lines[-1]), lines[-1]


def test_outputs_are_the_losses_in_the_order_of_micro_batches(lowered: Lowered) -> None:
    made = make(lowered, build("stp", p=2, m=3), 0)
    (values,) = made.graph_module.graph.output_node().args
    assert [v[0].name for v in values] == ["y0_3_0", "y0_3_1", "y0_3_2"]  # type: ignore[index, union-attr]
    other = make(lowered, build("stp", p=2, m=3), 1)
    assert list(other.graph_module.graph.output_node().args[0]) == []  # type: ignore[arg-type]


def test_nothing_is_computed_outside_blocks(lowered: Lowered) -> None:
    graph: fx.Graph = make(lowered, build("stp", p=2, m=3), 0).graph_module.graph
    targets = {n.target for n in graph.nodes if n.op == "call_function"}
    assert targets == {operator.getitem}
