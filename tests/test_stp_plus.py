"""Running ahead: valid for every size, repeatable, and below the published bound where that is promised."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxbraid.bench.bound import measure
from fxbraid.schedule import Costs, Placement, ScheduleError, build, check, peak_live
from fxbraid.schedule.ahead import Pace, run_ahead
from fxbraid.schedule.local import ActionTimes, ListClock
from fxbraid.schedule.stp_plus import REFERENCE, stp_plus
from fxbraid.schedule.uniform import UniformTimes
from fxbraid.schedule.weave import weave
from fxbraid.simulate import BlockClock, at_clock, constants


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5), st.integers(1, 14))
def test_valid_and_never_slower_than_stp(p: int, m: int) -> None:
    one = build("stp_plus", p=p, m=m)
    check(one, max_live=max(4 * p - 1, 7 * p, 3))
    assert one == build("stp_plus", p=p, m=m)
    clocks = (UniformTimes(REFERENCE), UniformTimes(REFERENCE, orders=weave))

    def total(schedule):  # type: ignore[no-untyped-def]
        return sum(ListClock(schedule, clock).run(schedule.actions)[0] for clock in clocks)

    assert total(one) <= total(build("stp", p=p, m=m)) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["loop", "v"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(["never", "later", "always"]),
    st.integers(0, 4),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from([0.0, 0.7]),
)
def test_running_ahead_is_valid_under_any_limits(kind, p, v, m, together, keep, more, deep, patience):  # type: ignore[no-untyped-def]
    pace = Pace(v + more, v + more + keep, keep, together, deep, patience)
    one = run_ahead("x", Placement(kind, p, v), m, pace, ActionTimes(Costs(1, 1.2, 0.9, 0.4)))
    check(one, max_live=pace.max_live)


def test_limits_that_no_micro_batch_fits_through() -> None:
    with pytest.raises(ScheduleError, match="running ahead needs v=2"):
        run_ahead("x", Placement("v", 2, 2), 3, Pace(1, 4, 1), ActionTimes(Costs()))


@pytest.mark.parametrize("ratio", [0.2, 0.37, 0.5, 1.0])
@pytest.mark.parametrize("p", [2, 4])
def test_less_than_the_published_bound_stays_exposed(p: int, ratio: float) -> None:
    """Bubble included, below what is published as exposed TP alone."""
    made = stp_plus(p, 4 * p, Costs(1, 1, 1, ratio), order="costs")
    row = measure("stp_plus", made, ratio, by_costs=True)
    assert row.exposed <= row.over + 1e-9 and row.over < 2 * p + 1
    assert row.step < measure("stp", build("stp", p=p, m=4 * p), ratio, by_costs=True).step


def test_the_named_one_beats_stp_in_the_papers_order_too() -> None:
    for p in (2, 4):
        for ratio in (0.37, 0.5, 1.0):
            rows = [measure(n, build(n, p=p, m=4 * p), ratio, by_costs=False) for n in ("stp", "stp_plus")]
            assert rows[1].over < 2 * p + 1 < rows[0].over
    assert max(peak_live(build("stp_plus", p=4, m=16))) <= 28


@pytest.mark.parametrize("orders", [None, weave])
def test_uniform_times_are_the_simulators(orders) -> None:  # type: ignore[no-untyped-def]
    costs = Costs(1, 1.3, 0.8, 0.6)
    times = UniformTimes(costs, 3) if orders is None else UniformTimes(costs, 3, orders)
    schedule = build("stp", p=3, m=9)
    workload = constants(schedule, *costs, layers=3)
    clock = BlockClock(workload, ordered_by=workload if orders is None else None)
    found = ListClock(schedule, times).run(schedule.actions)
    assert found is not None and found[0] == pytest.approx(at_clock(schedule, clock).step_time)
