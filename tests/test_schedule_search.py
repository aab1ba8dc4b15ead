"""``auto``: never slower than the best named schedule under the same memory limit, and often faster."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxbraid.schedule as S
from fxbraid.schedule import Costs, Schedule, ScheduleError
from fxbraid.schedule.local import ActionTimes, ListClock

COSTS = [Costs(1, 1, 1, 0), Costs(1, 1, 1, 0.25), Costs(1, 1.25, 0.75, 0.5), Costs(1, 2, 1, 0.125)]


def named(p: int, m: int, v: int, costs: Costs, max_live: int | None) -> list[float]:
    """Makespans of the named schedules that fit."""
    found = []
    for name, family in S.FAMILIES.items():
        if family.any_v or family.v == v:
            one = S.build(name, p=p, m=m, v=v)
            if max_live is None or max(S.peak_live(one)) <= max_live:
                found.append(S.makespan(one, *costs))
    return found


def gain(p: int, m: int, v: int, costs: Costs, max_live: int | None, effort: int = 100_000) -> float:
    """By how much auto beats the best named schedule, in percent; checks that it is valid and fits."""
    one = S.auto(p=p, m=m, v=v, costs=costs, max_live=max_live, effort=effort)
    S.check(one, max_live=max_live)
    assert (one.p, one.m, one.v) == (p, m, v)
    best = min(named(p, m, v, costs, max_live), default=float("inf"))
    mine = S.makespan(one, *costs)
    assert mine <= best
    return 0.0 if best == float("inf") else 100 * (1 - mine / best)


@pytest.mark.parametrize(
    ("p", "m", "v", "costs", "cap"),
    [
        (1, 2, 2, 1, None),
        (2, 8, 2, 1, 4),
        (3, 5, 2, 0, None),
        (3, 6, 2, 1, 6),
        (2, 5, 1, 2, None),
        (2, 3, 3, 3, None),
    ],
)
def test_never_slower_than_named(p, m, v, costs, cap):
    assert gain(p, m, v, COSTS[costs], cap) >= 0


def test_gains_where_memory_is_short():
    """At 2p activations nothing named is braided well: auto gains more than 5 % there."""
    assert gain(2, 8, 2, COSTS[1], 4) > 5


def test_same_arguments_same_result():
    once, again = (S.auto(p=2, m=5, costs=COSTS[1], max_live=5) for _ in range(2))
    assert once == again and once.name == "auto"


def test_impossible_memory_says_what_is_possible():
    with pytest.raises(ScheduleError, match="max_live=1 is below v=2"):
        S.auto(p=2, m=4, max_live=1)
    for p, v in [(1, 1), (2, 2), (3, 3), (4, 2)]:  # one micro-batch at a time always fits
        S.check(S.auto(p=p, m=4, v=v, max_live=v, effort=0), max_live=v)


def test_build_knows_auto():
    S.check(S.build("auto", p=2, m=3))
    S.check(S.build("auto", p=2, m=3, v=1))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(S.FAMILIES)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(COSTS),
    st.booleans(),
)
def test_the_fast_clock_is_the_clock(name, p, m, costs, braided):
    one = S.build(name, p=p, m=m)
    one = S.braid(one) if braided else one
    found = ListClock(one, ActionTimes(costs)).run(one.actions)
    assert found is not None and found[0] == pytest.approx(S.makespan(one, *costs), rel=1e-12)


def test_the_fast_clock_sees_a_deadlock():
    one = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert ListClock(one, ActionTimes(COSTS[0])).run(one.actions) is None


@pytest.mark.slow
def test_a_grid_of_more_than_200_cases():
    cases = list(itertools.product((1, 2, 3, 4, 6), (1, 4, 8, 16), COSTS, ("none", "2p", "2p+1")))
    assert len(cases) >= 200
    gains = {}
    for p, m, costs, cap in cases:
        max_live = {"none": None, "2p": 2 * p, "2p+1": 2 * p + 1}[cap]
        gains.setdefault((costs, cap), []).append(gain(p, m, 2, costs, max_live, effort=50_000))
    for (costs, cap), found in gains.items():
        print(f"{tuple(costs)} cap {cap}: mean {sum(found) / len(found):.2f} %, most {max(found):.2f} %")
    assert max(max(found) for found in gains.values()) > 5
