"""Orders of torch's classes on fxbraid's executor: torch's own where it can be had, always checked."""

from __future__ import annotations

import itertools

import pytest

from fxbraid import schedule as schedules
from fxbraid.bench.orders import torch_csv, torch_order
from fxbraid.bench.pippy import SCHEDULES
from fxbraid.schedule import Phase, ScheduleError, parts

#: Those whose own table fxbraid's checker refuses, and what it says.
REFUSED = {"Schedule1F1B": "instead of", "ScheduleLoopedBFS": "each chunk's I or B run in micro-batch order"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_is_valid_and_says_where_it_is_from(name: str) -> None:
    tried = 0
    for p, m in itertools.product((2, 3, 4), (4, 6, 8, 12, 16)):
        if SCHEDULES[name].refuses(p, m):
            continue
        tried += 1
        order = torch_order(name, p, m)
        schedules.check(order.schedule)
        assert (order.schedule.p, order.schedule.m) == (p, m)
        assert order.schedule.n_chunks == p * SCHEDULES[name].chunks_per_rank
        assert all(len(parts(step)) == 1 for row in order.schedule.actions for step in row)
        if name in REFUSED:
            assert "torch's own order is refused" in order.source and REFUSED[name] in order.source
        else:
            assert order.source == "torch's pipeline_order"
    assert tried >= 8


def test_the_order_is_torchs_own_step_by_step() -> None:
    order = torch_order("ScheduleZBVZeroBubble", 2, 8).schedule
    assert order.to_csv() == torch_csv(SCHEDULES["ScheduleZBVZeroBubble"], 2, 8)
    assert {a.phase for row in order.actions for s in row for a in parts(s)} == {Phase.F, Phase.I, Phase.W}
    dual = torch_csv(SCHEDULES["ScheduleDualPipeV"], 2, 8)
    assert "OVERLAP_F_B" in dual  # taken apart, since torch runs the parts one after the other
    assert "OVERLAP" not in torch_order("ScheduleDualPipeV", 2, 8).schedule.to_csv()


def test_a_refused_m_is_an_error_with_numbers() -> None:
    with pytest.raises(ScheduleError, match="ScheduleDualPipeV cannot run: it needs m >= 2p = 8, and m is 5"):
        torch_order("ScheduleDualPipeV", 4, 5)
