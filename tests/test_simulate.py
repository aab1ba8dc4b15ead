"""The simulator against figures that are known by hand, and against itself."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxbraid.schedule import (
    Action,
    Phase,
    Placement,
    Schedule,
    ScheduleError,
    braid,
    build,
    makespan,
    parts,
    peak_live,
)
from fxbraid.schedule.weave import weave
from fxbraid.simulate import (
    ChunkCost,
    Link,
    Result,
    UnitCost,
    Workload,
    constants,
    peaks,
    simulate,
)
from fxbraid.simulate.block import time_block
from fxbraid.simulate.workload import strand

SLOW_LINK = Link(latency=0.1, bandwidth=4.0)


def run(name: str, p: int, m: int, times: tuple[float, ...] = (1, 1, 1, 0), **more: object) -> Result:
    schedule = build(name, p=p, m=m)
    return simulate(schedule, constants(schedule, *times, **more))  # type: ignore[arg-type]


def test_stp_at_unit_cost_takes_its_work_and_three() -> None:
    result = run("stp", 4, 12)
    assert result.step_time == 75
    assert [rank.compute for rank in result.ranks] == [72] * 4
    assert result.bubble_share == pytest.approx(3 / 75)


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_interleaved_exposes_every_forward_all_reduce(layers: int) -> None:
    result = run("interleaved_1f1b", 4, 64, (1, 1, 1, 0.25), layers=layers)
    assert result.step_time == 425.75
    assert [rank.exposed_tp for rank in result.ranks] == [2 * 64 * 0.25] * 4


@pytest.mark.parametrize("layers", [1, 2, 4, 16, 64])
def test_stp_tends_to_the_formula_as_chunks_grow(layers: int) -> None:
    """The formula takes a block's last all-reduce as hidden. In F&F and F&I nothing stands behind it: that is
    1/(2 x layers) of T_AR in each of them, 1/layers in all on the critical path."""
    result = run("stp", 4, 64, (1, 1, 1, 0.25), layers=layers)
    assert result.step_time == pytest.approx(389.75 + 1 / layers)


def test_braided_dualpipev_and_zbv() -> None:
    schedule = braid(build("dualpipev", p=4, m=64))
    assert simulate(schedule, constants(schedule, 1, 1, 1, 0.25)).step_time == pytest.approx(394.75)
    # Split backwards leave nothing for I's all-reduces to hide behind.
    assert run("zbv", 4, 64, (1, 1, 1, 0.25)).step_time > 425.75


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "v_half", "stp"])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 16), (3, 8)])
def test_agrees_with_the_action_clock(name: str, p: int, m: int) -> None:
    """Without composites and collectives the two clocks are one; a braided block sends early and is no
    slower."""
    schedule = build(name, p=p, m=m)
    found = simulate(schedule, constants(schedule)).step_time
    known = makespan(schedule)
    if all(
        isinstance(step, Action) and step.phase is not Phase.B for row in schedule.actions for step in row
    ):
        assert found == pytest.approx(known)
    else:
        assert found <= known + 1e-9


def test_units_run_in_the_order_of_weave() -> None:
    schedule = build("stp", p=2, m=8)
    workload = constants(schedule, 1, 1, 1, 0.3, layers=2)
    step = next(s for row in schedule.actions for s in row if [a.phase for a in parts(s)] == ["F", "B"])
    forward, backward = parts(step)
    rows = [
        (workload.chunks[forward.chunk].f, "F", False),
        (workload.chunks[backward.chunk].i, "I", False),
        (workload.chunks[backward.chunk].w, "W", True),
    ]
    order = weave([strand(*row) for row in rows])
    slots = [s for s in time_block(parts(step), workload).slots if s.lane == "compute"]
    assert [(s.phase, s.name) for s in slots] == [(rows[s][1], rows[s][0][u].name) for s, u in order]


def test_a_braided_block_hides_and_blocking_exposes_everything() -> None:
    schedule = build("stp", p=2, m=8)
    workload = constants(schedule, 1, 1, 1, 0.25)
    braided, blocking = simulate(schedule, workload), simulate(schedule, workload, braided=False)
    assert blocking.step_time > braided.step_time
    for fast, slow in zip(braided.ranks, blocking.ranks, strict=True):
        assert slow.exposed_tp == pytest.approx(slow.collective)
        assert fast.exposed_tp < 0.4 * fast.collective


def test_what_hides_what() -> None:
    schedule = build("stp", p=2, m=8)
    result = simulate(schedule, constants(schedule, 1, 1, 1, 0.25))
    boxes = list(result.boxes(0))
    first = {box.step: k for k, box in reversed(list(enumerate(boxes)))}
    hidden = [box for box in boxes if box.lane == "collective" and not box.exposed]
    assert hidden
    for box in hidden:
        others = [boxes[first[box.step] + k] for k in box.others]
        covered = sum(min(box.end, o.end) - max(box.start, o.start) for o in others)
        assert covered == pytest.approx(box.end - box.start)
        assert all(o.lane == "compute" for o in others)


def test_contention_slows_what_runs_beside_a_collective() -> None:
    f = (UnitCost("a", 1, 0, True, 1.0), UnitCost("tail", 0, 1, heavy=False))
    other = ChunkCost(f, (), ())
    actions = (Action(Phase.F, 0, 0), Action(Phase.F, 0, 1))
    free = time_block(actions, Workload((other,)))
    slow = time_block(actions, Workload((other,), contention=0.5))
    assert free.length == 3  # a, a beside the first all-reduce, the second one's exposed
    # Beside the first all-reduce half of the second unit is done, the rest runs alone.
    assert slow.length == pytest.approx(1 + 1.5 + 1)


def test_messages_queue_on_their_link_and_wait_for_their_receive() -> None:
    schedule = build("1f1b", p=2, m=2)
    result = simulate(schedule, constants(schedule, message=2.0, link=Link(0.25, 4.0)))
    first = next(m for m in result.messages() if m.channel.phase == "F" and m.microbatch == 0)
    assert (first.sent, first.began, first.arrived) == (1, 1, 1.75)
    assert result.step_time == pytest.approx(makespan(schedule) + 2 * 0.75)
    posted_late = build("gpipe", p=2, m=4)
    waits = list(simulate(posted_late, constants(posted_late, t_f=1)).messages())
    assert all(m.began >= m.sent for m in waits)
    eager = simulate(posted_late, constants(posted_late, link=Link(rendezvous=False)))
    assert all(m.began == m.sent for m in eager.messages())


@pytest.mark.parametrize("name", ["stp", "interleaved_1f1b", "zbv", "1f1b", "dualpipev"])
@pytest.mark.parametrize("link", [Link(), SLOW_LINK])
def test_the_critical_path_has_no_gap(name: str, link: Link) -> None:
    schedule = build(name, p=4, m=12)
    result = simulate(schedule, constants(schedule, 1, 1.5, 0.7, 0.4, message=1.0, link=link))
    path = result.critical_path()
    assert path[0].start == 0
    assert path[-1].end == pytest.approx(result.step_time)
    for before, after in pairwise(path):
        assert before.end == pytest.approx(after.start)


def test_imbalance_stretches_one_rank() -> None:
    schedule = build("1f1b", p=4, m=16)
    plain = constants(schedule)
    slow = plain.imbalanced({0: 1.5}, (0, 1, 2, 3))
    one, two = simulate(schedule, plain), simulate(schedule, slow)
    assert two.ranks[0].compute == pytest.approx(1.5 * one.ranks[0].compute)
    assert two.step_time > one.step_time + 0.4 * one.ranks[0].compute
    with pytest.raises(ScheduleError, match=r"ranks are 0\.\.3"):
        plain.imbalanced({7: 1.2}, (0, 1, 2, 3))


def test_memory_of_stp_with_release_in_block() -> None:
    """3p chunk activations, and the unit that is made before its place is freed."""
    for layers in (1, 4):
        peak = run("stp", 4, 12, layers=layers).peak
        assert peak == tuple([12 + 1 / (2 * layers)] * 4)
    handed = run("stp", 4, 12, handed=1.0, layers=16).peak
    live = peak_live(build("stp", p=4, m=12))
    assert all(a <= b <= a + 0.1 for a, b in zip(live, handed, strict=True))


def test_errors_say_what_to_do() -> None:
    schedule = build("stp", p=2, m=4)
    with pytest.raises(ScheduleError, match="3 chunks, but stp"):
        simulate(schedule, constants(3))
    wrong = Schedule(
        "wrong",
        Placement("loop", 2, 1),
        1,
        (
            (Action(Phase.B, 0, 0), Action(Phase.F, 0, 0)),
            (Action(Phase.F, 1, 0), Action(Phase.B, 1, 0)),
        ),
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(wrong, constants(wrong))
    with pytest.raises(ScheduleError, match="bandwidth > 0"):
        Link(bandwidth=0)
    with pytest.raises(ScheduleError, match="layers >= 1"):
        constants(schedule, layers=0)


NAMES = ("1f1b", "interleaved_1f1b", "zbv", "dualpipev", "stp", "stp_low_memory", "v_half")
TIMES = st.tuples(*[st.floats(0.1, 2.0)] * 3, st.floats(0.0, 1.0))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 9), TIMES, st.integers(1, 3), st.booleans())
def test_the_books_balance(
    name: str, p: int, m: int, times: tuple[float, float, float, float], layers: int, slow: bool
) -> None:
    schedule = build(name, p=p, m=m)
    link = SLOW_LINK if slow else Link()
    workload = constants(schedule, *times, layers=layers, handed=0.5, message=1.0, link=link)
    result = simulate(schedule, workload)
    work = m * sum(times[:3])
    for rank, row in enumerate(result.ranks):
        total = row.compute + row.exposed_tp + row.exposed_p2p + row.bubble
        assert total == pytest.approx(result.step_time)
        assert row.compute == pytest.approx(work * schedule.v)
        curve = result.memory(rank)
        assert curve[-1][1] == pytest.approx(0, abs=1e-9)
        assert max(level for _, level in curve) <= row.peak + 1e-9
    assert peaks(schedule, workload) == result.peak
    blocking = simulate(schedule, workload, braided=False)
    assert blocking.step_time >= result.step_time - 1e-9
    assert result.critical_path()[-1].end == pytest.approx(result.step_time)


def test_imports_no_torch() -> None:
    code = (
        "import sys, fxbraid.simulate.cli, fxbraid.draw.cli, fxbraid.plan.cli; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_a_large_schedule_keeps_the_closed_form() -> None:
    schedule = build("stp", p=64, m=1024)
    result = simulate(schedule, constants(schedule, 1, 1, 1, 0))
    assert result.critical_path()
    assert result.step_time == pytest.approx(makespan(schedule))
