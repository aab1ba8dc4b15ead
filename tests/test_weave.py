"""The order of units in a block, on strands of any length."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxbraid.schedule import ScheduleError
from fxbraid.schedule.listorder import play
from fxbraid.schedule.weave import Strand, weave


def strand(phase: str, pattern: str, *, own: bool = False) -> Strand:
    """``pattern``: "L" a unit that launches, "." one that does not."""
    n = len(pattern)
    return Strand(phase, tuple(c == "L" for c in pattern), (True,) * n, tuple(range(n)), own)


PATTERNS = st.text(alphabet="L.", min_size=1, max_size=8)


@st.composite
def blocks(draw: st.DrawFn) -> list[Strand]:
    kind = draw(st.sampled_from(["F", "I", "B", "W", "FB", "FI", "FW", "FF", "IW", "FIW"]))
    made = []
    for phase in kind:
        pattern = draw(PATTERNS)
        if phase == "B":
            made += [strand("I", pattern), strand("W", "." * len(pattern), own=True)]
        else:
            made.append(strand(phase, pattern if phase != "W" else "." * len(pattern)))
    return made


@given(blocks())
def test_every_unit_once_and_each_strand_in_its_order(strands: list[Strand]) -> None:
    order = weave(strands)
    assert sorted(order) == [(s, u) for s, line in enumerate(strands) for u in range(len(line))]
    for s, line in enumerate(strands):
        if line.phase != "W":
            assert [u for t, u in order if t == s] == list(range(len(line)))


@given(blocks())
def test_an_own_W_never_runs_before_the_I_that_makes_its_gradients(strands: list[Strand]) -> None:
    order = weave(strands)
    owns = [s for s, line in enumerate(strands) if line.own]
    for s in owns:
        for unit, depth in enumerate(strands[s].depth):
            needed = [(s - 1, u) for u in range(len(strands[s - 1])) if strands[s - 1].depth[u] <= depth]
            assert all(order.index(one) < order.index((s, unit)) for one in needed)


@given(st.integers(1, 8))
def test_two_strands_of_equal_length_alternate(n: int) -> None:
    order = weave([strand("F", "L" * n + "."), strand("I", "L" * n + ".")])
    assert [s for s, _ in order] == [0, 1] * (n + 1)


def test_queued_weights_are_spread_behind_the_launches() -> None:
    order = weave([strand("F", "LLLL."), strand("W", "....")])
    assert [s for s, _ in order] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    order = weave([strand("F", "LL."), strand("W", "....")])
    assert [s for s, _ in order] == [0, 1, 1, 0, 1, 1, 0]


def test_light_weights_come_last() -> None:
    light = Strand("W", (False,) * 3, (True, False, True), (0, 1, 2))
    assert weave([strand("F", "LL."), light]) == [(0, 0), (1, 0), (0, 1), (1, 2), (0, 2), (1, 1)]


def test_too_many_strands() -> None:
    with pytest.raises(ScheduleError, match="at most two"):
        weave([strand("F", "L")] * 3)


def test_what_is_computed_again_hides_the_collective_of_its_own_strand() -> None:
    """I launches, and what F did not save is made again before the next unit of I waits."""
    again = (True, False, True, False)
    line = Strand(
        "I",
        (False, True, False, True),
        (True,) * 4,
        (0, 1, 2, 3),
        again=again,
        seconds=(1.0,) * 4,
        collective=(0, 3.0, 0, 3.0),
    )
    weights = Strand(
        "W", (False,) * 2, (True,) * 2, (1, 3), own=True, seconds=(1.0,) * 2, collective=(0.0,) * 2
    )
    order = weave([line, weights])
    assert order == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]
    # Units 0 and 1, then W and 2 beside the collective of 1, which ends at 5; unit 3 ends at 6, its collective at 9.
    assert play([line, weights], order).length == pytest.approx(9.0)
    waits = replace(line, again=())
    assert play([waits, weights], order).length == pytest.approx(10.0)
