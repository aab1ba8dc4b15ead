"""Actions, placements, CSV: text and data, no torch needed except where torch is the oracle."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxbraid.schedule as S
from fxbraid.schedule import Action, Composite, Phase, Placement, Schedule, ScheduleError

actions = st.builds(Action, st.sampled_from(Phase), st.integers(0, 99), st.integers(0, 9999))
composites = st.sampled_from(["FF", "FB", "FI", "FW", "IW", "FIW"]).flatmap(
    lambda phases: st.tuples(
        *(st.builds(Action, st.just(Phase(x)), st.integers(0, 9), st.integers(0, 99)) for x in phases)
    ).map(Composite)
)


def test_importing_the_package_imports_no_torch():
    code = "import sys, fxbraid.schedule; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(S.__file__).parents[2], check=True)


def test_the_package_docstring_runs():
    assert doctest.testmod(S).failed == 0


def test_action_text_is_torchs():
    assert str(Action(Phase.F, 2, 5)) == "2F5"
    assert Action.parse(" 12W340 ") == Action(Phase.W, 12, 340)
    both = Composite((Action(Phase.F, 0, 4), Action(Phase.B, 1, 3)))
    assert str(both) == "(0F4;1B3)OVERLAP_F_B"
    assert S.parse_step("(1B3;0F4)OVERLAP_F_B") == both  # parts in any order


@given(st.one_of(actions, composites))
def test_text_round_trip(step):
    assert S.parse_step(str(step)) == step


@given(st.one_of(actions, composites.filter(lambda c: [x.phase for x in c.parts] == [Phase.F, Phase.B])))
@settings(deadline=None)  # torch's import counts as the first example
def test_torch_reads_our_text_and_we_read_its(step):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = schedules._Action.from_str(str(step))
    assert str(theirs) == str(step)
    assert S.parse_step(str(theirs)) == step


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F5",
        "2X5",
        "2F",
        "(0F4;1B3)",
        "(0F4;1B3)OVERLAP_F_I",
        "(0F4)OVERLAP_F",
        "(0B4;1B3)OVERLAP_B_B",
        "(0F4;0F5;1B1)OVERLAP_F_F_B",
        "(0I4;1W2;0W1)OVERLAP_I_W_W",
        "2F-1",
        "2SEND_F5",
        "()OVERLAP_F_B",
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ScheduleError, match=r"\w"):
        S.parse_step(text)


@given(st.sampled_from(["loop", "v"]), st.integers(1, 9), st.integers(1, 5))
def test_placement_covers_every_chunk_once(kind, p, v):
    placement = Placement(kind, p, v)
    owner = {chunk: rank for rank in range(p) for chunk in placement.chunks_of(rank)}
    assert sorted(owner) == list(range(p * v)) and placement.n_chunks == p * v
    assert all(placement.rank_of(chunk) == rank for chunk, rank in owner.items())
    steps = {placement.rank_of(c + 1) - placement.rank_of(c) for c in range(p * v - 1)}
    assert steps <= ({1, 1 - p} if kind == "loop" else {-1, 0, 1})


def test_v_with_two_chunks():
    assert [Placement("v", 4, 2).chunks_of(r) for r in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize("bad", [("ring", 2, 2), ("loop", 0, 1), ("v", 2, 0)])
def test_impossible_placements(bad):
    with pytest.raises(ScheduleError):
        Placement(*bad)


@pytest.mark.parametrize("name", list(S.FAMILIES))
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 5), (3, 8), (4, 3)])
def test_csv_round_trip(name, p, m, tmp_path):
    one = S.build(name, p=p, m=m)
    assert Schedule.from_csv(one.to_csv(), one.placement, name=one.name) == one
    path = tmp_path / "one.csv"
    path.write_text(one.to_csv())
    back = Schedule.from_csv(path)  # on one rank loop and V are the same
    assert (back.m, back.actions) == (one.m, one.actions)
    assert p == 1 or back.placement == one.placement or one.v == 1
    S.check(back)


def test_csv_with_empty_cells_and_fsdp_marks():
    one = Schedule.from_csv("0UNSHARD,0F0,,0B0,0REDUCE_GRAD\n,1F0,1B0,1RESHARD\n")
    assert [[str(step) for step in row] for row in one.actions] == [["0F0", "0B0"], ["1F0", "1B0"]]
    S.check(one)


COMMS = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
COMMS += "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"


def test_csv_with_communication():
    one = Schedule.from_csv(COMMS)
    assert one.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "rank 1 runs 1F0 without 1RECV_F0"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "rank 0 has 0SEND_F0 before"),
        (",1SEND_B1\n", "\n", "sends nothing"),
        ("0RECV_B0,0B0,0RECV_B1", "0RECV_B1,0RECV_B0,0B0", "message 0 from rank 1 to rank 0"),
        ("1RECV_F0,", "1RECV_F0,1RECV_F0,", "twice"),
        ("1SEND_B0", "1SEND_F0", "never leaves the rank"),
        ("1SEND_B0", "0SEND_B0", "chunk 0 is on rank 0"),
        ("0F1,0SEND_F1", "0F1", "receiver has 1RECV_F1"),
    ],
)
def test_csv_with_communication_that_disagrees(old, new, says):
    assert old in COMMS
    with pytest.raises(ScheduleError, match=says):
        Schedule.from_csv(COMMS.replace(old, new))


def test_csv_errors():
    with pytest.raises(ScheduleError, match="no compute action"):
        Schedule.from_csv("\n\n")
    with pytest.raises(ScheduleError, match="rank 1: '1X0' is no action"):
        Schedule.from_csv("0F0,0B0\n1X0,1B0\n")
    with pytest.raises(ScheduleError, match="neither a loop nor a V"):
        Schedule.from_csv("0F0,1F0\n2F0,3F0\n")
    with pytest.raises(ScheduleError, match="2 rows but 3 chunks"):
        Schedule.from_csv("0F0,2F0\n1F0\n")


def test_build_names():
    assert S.build("ScheduleGPipe", p=2, m=2) == S.build("gpipe", p=2, m=2)
    assert S.build("Schedule1F1B", p=2, m=2) == S.build("1F1B", p=2, m=2)
    with pytest.raises(ScheduleError, match="no schedule is named 'gpip'; there are gpipe, 1f1b"):
        S.build("gpip", p=2, m=2)
    with pytest.raises(ScheduleError, match="v=1"):
        S.build("gpipe", p=2, m=2, v=2)
    with pytest.raises(ScheduleError, match="m=0"):
        S.build("gpipe", p=2, m=0)


def test_everything_is_frozen_and_hashable():
    one = S.build("stp", p=2, m=5)
    assert hash(one) == hash(S.build("stp", p=2, m=5))
    with pytest.raises(AttributeError):
        one.m = 3
    assert str(one) == f"stp: p=2, v=2 (v), m=5, {sum(map(len, one.actions))} steps"
