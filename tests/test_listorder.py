"""Orders from costs: the best there is on small blocks, never worse than the paper's, and the simulator's clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxbraid.schedule import Action, Phase, parts
from fxbraid.schedule.listorder import CostOrder, Orders, UnitTime, leaving, order_units, play
from fxbraid.schedule.weave import Order, Strand, weave
from fxbraid.simulate import ChunkCost, UnitCost, Workload, constants, simulate
from fxbraid.simulate.block import time_block

SECONDS = st.integers(1, 6).map(float)
GAPS = st.sampled_from([0.0, 1.0, 2.0, 3.5, 8.0])


@st.composite
def timed(draw: st.DrawFn, phase: str, *, own: bool = False, size: int = 3) -> Strand:
    n = draw(st.integers(1, size))
    seconds = tuple(draw(SECONDS) for _ in range(n))
    if phase == "W":
        heavy = tuple(draw(st.booleans()) for _ in range(n))
        return Strand("W", (False,) * n, heavy, tuple(range(n)), own, seconds, (0.0,) * n)
    launches = tuple(draw(st.booleans()) for _ in range(n))
    gaps = tuple(draw(GAPS) if launch else 0.0 for launch in launches)
    return Strand(phase, launches, (True,) * n, tuple(range(n)), False, seconds, gaps)


@st.composite
def blocks(draw: st.DrawFn, size: int = 3) -> list[Strand]:
    made = []
    for phase in draw(st.sampled_from(["F", "B", "FB", "FI", "FW", "FF", "IW", "FIW"])):
        if phase == "B":
            made += [draw(timed("I", size=size)), draw(timed("W", own=True, size=size))]
        else:
            made.append(draw(timed(phase, size=size)))
    return made


def all_orders(strands: list[Strand]) -> Iterator[Order]:
    """Every order that dependencies allow, the W's among themselves in the order that they keep: their own as I makes
    their gradients, queued ones heavy first."""

    def go(order: Order, left: list[list[int]]) -> Iterator[Order]:
        if not any(left):
            yield list(order)
        for s, units in enumerate(left):
            for unit in units[:1]:
                if strands[s].own:
                    made = next(k for k, one in enumerate(strands) if one.phase == "I")
                    if any(strands[made].depth[u] <= strands[s].depth[unit] for u in left[made]):
                        continue
                rest = [[u for u in us if (t, u) != (s, unit)] for t, us in enumerate(left)]
                yield from go([*order, (s, unit)], rest)

    start = [list(range(len(one))) for one in strands]
    for one, units in zip(strands, start, strict=True):
        if one.phase == "W" and not one.own:
            units.sort(key=lambda unit, heavy=one.heavy: (not heavy[unit], unit))  # type: ignore[misc]
    yield from go([], start)


@settings(max_examples=80, deadline=None)
@given(blocks())
def test_the_order_is_valid_and_no_other_is_shorter(strands: list[Strand]) -> None:
    order = order_units(strands)
    found = play(strands, order)
    assert sorted(order) == sorted(weave(strands))
    for s, line in enumerate(strands):
        if line.phase != "W":
            assert [u for t, u in order if t == s] == list(range(len(line)))
    assert found.length == pytest.approx(min(play(strands, one).length for one in all_orders(strands)))


@settings(max_examples=60, deadline=None)
@given(blocks(size=9), st.sampled_from([0.0, 0.3]))
def test_never_worse_than_the_papers_order(strands: list[Strand], contention: float) -> None:
    mine = play(strands, order_units(strands, contention), contention)
    paper = play(strands, weave(strands), contention)
    assert mine.length <= paper.length * (1 + 1e-9)
    if mine.length > paper.length * (1 - 1e-9):
        assert mine.sent <= paper.sent * (1 + 1e-9)


def chunk_of(strands: list[Strand]) -> tuple[list[Action], Workload]:
    """A block of the simulator with the units of ``strands``, each strand on a chunk of its own."""
    actions, chunks = [], []
    for s, one in enumerate(strands):
        units = tuple(
            UnitCost(f"u{k}", seconds, k, launch, gap, heavy)
            for k, (seconds, launch, gap, heavy) in enumerate(
                zip(one.seconds, one.launches, one.collective, one.heavy, strict=True)
            )
        )
        empty: tuple[UnitCost, ...] = ()
        place = {"F": (units, empty, empty), "I": (empty, units, empty), "W": (empty, empty, units)}
        chunks.append(ChunkCost(*place[one.phase]))
        actions.append(Action(Phase(one.phase), s, 0))
    return actions, Workload(tuple(chunks))


@settings(max_examples=60, deadline=None)
@given(blocks().filter(lambda strands: not any(one.own for one in strands)))
def test_the_clock_is_the_simulators(strands: list[Strand]) -> None:
    actions, workload = chunk_of(strands)
    block = time_block(actions, workload, ordered_by=workload)
    order = order_units(strands)
    assert block.length == pytest.approx(play(strands, order).length)
    length, ends = leaving(strands, order)
    assert length == pytest.approx(block.length)
    for one, end, sent in zip(strands, ends, block.sends, strict=True):
        if one.phase != "W":
            assert sent is not None and sent[0] == pytest.approx(end)


def test_results_leave_before_the_weights_that_hide_nothing() -> None:
    schedule_costs = constants(4, 1, 1, 1, 0.25, layers=2)
    actions = (Action(Phase.F, 0, 1), Action(Phase.B, 3, 0))
    paper, costs = (time_block(actions, schedule_costs, ordered_by=by) for by in (None, schedule_costs))
    assert costs.length == paper.length == 3
    for early, late in zip(costs.sends, paper.sends, strict=True):
        assert early is not None and late is not None and early[0] <= late[0] - 0.7


def test_queued_weights_go_where_a_collective_is_exposed() -> None:
    """The paper's order spreads them evenly; here only the second collective is worth hiding."""
    f = Strand("F", (True, True, False), (True,) * 3, (0, 1, 2), False, (1, 1, 1), (0.1, 4, 0))
    w = Strand("W", (False,) * 2, (True,) * 2, (0, 1), False, (2, 2), (0, 0))
    assert order_units([f, w]) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    assert play([f, w], order_units([f, w])).length == pytest.approx(7.1)
    assert play([f, w], weave([f, w])).length > 7.9


def test_without_all_times_the_order_is_the_papers() -> None:
    strand = Strand("F", (True, False), (True, True), (0, 1))
    order = CostOrder({"a": UnitTime(1.0)}, Orders())
    assert not order.timed(strand, ["a", "b"]).timed
    both = [strand, strand]
    assert order(both) == weave(both)


def test_a_simulated_step_keeps_the_order_that_other_costs_made() -> None:
    """The program's order comes from the profile it was built with, whatever it is simulated at."""
    from fxbraid.schedule import build

    schedule = build("dualpipev", p=2, m=6)
    built, now = (constants(schedule, 1, 1, 1, ar, layers=2) for ar in (1.5, 0.1))
    result = simulate(schedule, now, ordered_by=built)
    step = next(k for k, s in enumerate(schedule.actions[0]) if [a.phase for a in parts(s)] == ["F", "B"])
    boxes = [b for b in result.boxes(0) if b.lane == "compute" and b.step == step]
    slots = [
        s
        for s in time_block(parts(schedule.actions[0][step]), built, ordered_by=built).slots
        if s.lane == "compute"
    ]
    assert [(b.phase, b.unit) for b in boxes] == [(s.phase, s.name) for s in slots]
