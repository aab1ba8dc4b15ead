"""The formulas: eta, the division of a rank's time, clocks of several machines, contention, and how they read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from fxbraid.metrics import (
    RankLog,
    RankMetrics,
    StepMetrics,
    clock_offsets,
    divide,
    eta,
    eta_max,
    messages,
)
from fxbraid.schedule import Schedule, build
from fxbraid.schedule.lower import Arrive, lower
from fxbraid.simulate import Link, Result, constants, simulate
from fxbraid.timeline import RankTimeline, Span, contention, link_of, merge, waits

TICKS = 10**12


def test_eta_is_the_hidden_share_of_what_communication_costs() -> None:
    assert eta(blocking_s=3.0, measured_s=2.0, free_s=1.0) == 0.5
    assert eta(3.0, 1.0, 1.0) == 1.0 and eta(3.0, 3.0, 1.0) == 0.0
    assert eta(3.0, 3.5, 1.0) == -0.25  # overlap made it worse: said, not clipped
    assert eta(1.0, 1.0, 1.0) is None and eta(0.9, 1.0, 1.0) is None  # nothing to hide


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (4, 64), (8, 32)])
def test_eta_max_is_what_stp_reaches_where_chunks_are_deep(p: int, m: int) -> None:
    """The bound from the simulator: blocking, overlapped and free steps of one order. It converges from below, as the
    last all-reduce of F&F and F&I has nothing behind it (docs/simulator.md)."""
    assert eta_max(p, m) == pytest.approx(1 - (2 * p + 1) / (4 * m))
    schedule = build("stp", p=p, m=m)
    layers, ar = 16, 0.1
    steps = [
        simulate(schedule, constants(schedule, 1, 1, 1, t, layers=layers), braided=braided).step_time
        for braided, t in ((False, ar), (True, ar), (True, 0.0))
    ]
    found = eta(*steps)
    assert found is not None
    assert eta_max(p, m) - 2 / layers < found < eta_max(p, m) + 2 / layers


def test_eta_max_of_too_few_micro_batches_is_zero_and_nonsense_is_refused() -> None:
    assert eta_max(8, 2) == 0.0
    with pytest.raises(ValueError, match="p=0"):
        eta_max(0, 4)


# -- the division of a rank's time


def log_of(result: Result, rank: int, *, start: int = 0, offset: int = 0, host: int = 0) -> RankLog:
    """What a rank would write down while it does what the simulator says."""

    def ticks(time: float) -> int:
        return start + offset + round(time * TICKS)

    trace, m = result.trace, result.schedule.m
    numbers = {channel: k for k, (channel, _, _) in enumerate(trace.channels)}
    plan = messages(result.schedule)[rank]
    arrivals, now = [], 0.0
    at = 0
    for instruction in lower(result.schedule, rank):
        if isinstance(instruction, Arrive):
            message = instruction.message
            arrived = trace.arrived[numbers[message.channel] * m + message.microbatch]
            arrivals.append((ticks(now), ticks(max(now, arrived))))
            now = max(now, arrived)
        elif hasattr(instruction, "step"):
            now = trace.starts[rank][at] + trace.blocks[rank][at].length
            at += 1
    return RankLog(
        host=host,
        began=ticks(0),
        started=ticks(0),
        ended=ticks(now),
        left=ticks(now),
        waited=round(sum(block.exposed for block in trace.blocks[rank]) * TICKS),
        collective=round(result.ranks[rank].collective * TICKS),
        sent={c: [ticks(trace.sent[numbers[c] * m + k]) for k in range(m)] for c in plan.outgoing},
        arrivals=arrivals,
    )


def some_result(generator: random.Random, name: str) -> Result:
    p, m = generator.choice([2, 3, 4]), generator.randint(2, 9)
    schedule: Schedule = build(name, p=p, m=m)
    f, i, w, ar = (generator.uniform(0.2, 2.0) for _ in range(4))
    link = Link(generator.uniform(0, 0.5), generator.uniform(1.0, 20.0), generator.random() < 0.5)
    workload = constants(schedule, f, i, w, ar, layers=2, message=generator.uniform(0.5, 8), link=link)
    factors = {rank: generator.uniform(0.7, 1.5) for rank in range(p)}
    place = schedule.placement
    workload = workload.imbalanced(factors, tuple(place.rank_of(chunk) for chunk in range(place.n_chunks)))
    return simulate(schedule, workload, braided=generator.random() < 0.7)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev", "stp"])
def test_a_rank_is_divided_as_in_the_simulator_on_any_links(name: str) -> None:
    generator = random.Random(name)
    for _ in range(8):
        result = some_result(generator, name)
        origin = generator.randrange(10**18)  # clocks do not start at 0
        logs = [[log_of(result, rank, start=origin)] for rank in range(result.schedule.p)]
        plan = messages(result.schedule)
        logs = [[RankLog.of(log.row(plan[pp]), plan[pp]) for log in row] for pp, row in enumerate(logs)]
        seconds, total, ranks = divide(result.schedule, logs, per_second=TICKS)
        assert total == seconds == pytest.approx(result.step_time, rel=1e-9)
        for rank in ranks:
            times = result.ranks[rank.pp]
            for part in ("compute", "exposed_tp", "exposed_p2p", "bubble", "collective"):
                assert getattr(rank, part) == pytest.approx(getattr(times, part), abs=1e-8), (rank.pp, part)
            parts = rank.compute + (rank.exposed_tp or 0.0) + rank.exposed_p2p + rank.bubble
            assert parts == pytest.approx(total, rel=1e-9)


def test_rows_are_equally_long_on_all_ranks() -> None:
    schedule = build("interleaved_1f1b", p=4, m=8)
    widths = {len(RankLog().row(plan)) for plan in messages(schedule)}
    assert widths == {messages(schedule)[0].width}


def test_clocks_of_several_machines_are_put_right_by_the_messages() -> None:
    generator = random.Random(5)
    for name in ("1f1b", "stp"):
        schedule = build(name, p=4, m=12)
        workload = constants(schedule, 1, 1, 1, 0.25, layers=2, message=1.0, link=Link(0.05, 10.0))
        result = simulate(schedule, workload)
        offsets = [0, *(generator.randrange(-(10**15), 10**15) for _ in range(3))]
        logs = [[log_of(result, r, offset=offsets[r], host=r)] for r in range(4)]
        found = clock_offsets(messages(schedule), [row[0] for row in logs])
        for got, true in zip(found, offsets, strict=True):
            assert abs(got - true) < 0.1 * TICKS  # well under a message's 0.15
        _, total, ranks = divide(schedule, logs, per_second=TICKS)
        assert total == pytest.approx(result.step_time, abs=0.1)
        for rank in ranks:
            assert rank.exposed_p2p == pytest.approx(result.ranks[rank.pp].exposed_p2p, rel=0.35, abs=0.3)
        same = [[log_of(result, r, offset=offsets[r], host=7)] for r in range(4)]
        assert clock_offsets(messages(schedule), [row[0] for row in same]) == [0] * 4


def test_a_wait_that_did_not_wait_is_not_the_cause() -> None:
    """Two messages before one step: on a real clock taking one that is there takes a while as well."""
    schedule = build("stp", p=4, m=12)
    plan = messages(schedule)
    mine = plan[1].arrivals
    at = next(k for k in range(1, len(mine)) if mine[k][0] == mine[k - 1][0])
    (_, first, one), (_, second, two) = mine[at - 1], mine[at]
    logs = [RankLog(ended=1000, left=1000) for _ in plan]
    for own, log in zip(plan, logs, strict=True):
        log.sent = {channel: [0] * 12 for channel in own.outgoing}
        log.arrivals = [(0, 0)] * len(own.arrivals)
    logs[1].arrivals[at - 1], logs[1].arrivals[at] = (100, 200), (200, 205)
    senders = {channel: log for own, log in zip(plan, logs, strict=True) for channel in own.outgoing}
    senders[first].sent[first][one], senders[second].sent[second][two] = 150, 190
    for noise, left in ((10, 150), (2, 190)):
        ranks = divide(schedule, [[log] for log in logs], per_second=1, noise=noise)[2]
        assert ranks[1].exposed_p2p == 205 - left


# -- how it reads


def metrics(**changes: Any) -> StepMetrics:
    ranks = (RankMetrics(0, 0, 0.6, 0.1, 0.1, 0.2, 0.4), RankMetrics(1, 0, 0.7, 0.2, 0.0, 0.1, 0.4))
    known: dict[str, Any] = {
        "seconds": 1.25,
        "pipeline_seconds": 1.0,
        "samples": 4,
        "tokens": 500,
        "label": "a clock",
    }
    return StepMetrics(**{**known, "ranks": ranks, **changes})


def test_shares_are_means_over_ranks_of_the_programs_time() -> None:
    found = metrics()
    shares = (found.compute_share, found.exposed_tp_share, found.exposed_p2p_share, found.bubble_share)
    assert shares == pytest.approx((0.65, 0.15, 0.05, 0.15)) and sum(filter(None, shares)) == pytest.approx(1)
    assert found.hidden_share == pytest.approx(1 - 0.3 / 0.8)
    assert (found.tokens_per_s, found.samples_per_s) == (400, 3.2)
    assert json.loads(json.dumps(found.as_dict()))["bubble_share"] == pytest.approx(0.15)
    text = str(found)
    assert "a clock" in text and "exposed TP 15.0 %" in text and "400 tokens/s" in text


def test_what_is_not_known_is_left_out_and_not_zero() -> None:
    blind = metrics(tokens=None, ranks=(RankMetrics(0, 0, 0.7, None, 0.1, 0.2),), note="waits lie inside")
    assert blind.exposed_tp_share is None and blind.hidden_share is None and blind.tokens_per_s is None
    assert (
        "exposed TP" not in str(blind) and "3.2 samples/s" in str(blind) and "waits lie inside" in str(blind)
    )
    alone = metrics(ranks=())
    assert alone.bubble_share is None and "bubble" not in str(alone)


# -- timelines


def rank(spans: list[Span], pp: int = 0) -> RankTimeline:
    end = round(max(span.end for span in spans))
    return RankTimeline(pp, 0, 1000, 0, "a clock", RankLog(ended=end, left=end, waited=0), tuple(spans))


def unit(name: str, start: float, end: float) -> Span:
    return Span("unit", name, start, end, 0, "0F0", "F", key=name)


def test_contention_is_the_weighted_ratio_of_medians() -> None:
    """a: 10 alone, 15 beside a collective; b: 20 alone, 24 beside; c never beside one; d half beside one: left out."""
    spans = [
        *(unit("a", t, t + 10) for t in (0, 10, 20)),
        unit("b", 30, 50), unit("c", 50, 51),
        Span("launch", "x", 60, 60, 0, "0F0", "F", nbytes=8),
        unit("a", 60, 75), unit("a", 75, 90), unit("b", 90, 114), unit("d", 114, 134),
        Span("wait", "x", 124, 124, 0, "0F0", "F", nbytes=8),
        unit("d", 140, 150),
    ]  # fmt: skip
    schedule = build("gpipe", p=1, m=1)
    timeline = merge(schedule, [rank(spans)])
    assert contention(timeline) == pytest.approx((30 * 1.5 + 24 * 1.2) / 54)
    shorter = merge(schedule, [rank(spans)], collective_s={8: 0.030})  # over when the second a ends
    assert contention(shorter) == pytest.approx(1.5)
    assert contention(timeline, alone=merge(schedule, [rank([unit("b", 0, 12)])])) == pytest.approx(2.0)
    assert contention(merge(schedule, [rank([unit("a", 0, 1)])])) is None


def test_links_are_estimated_from_what_was_waited_for() -> None:
    spans = [
        Span("launch", "x", 10, 11, 0, nbytes=8), Span("launch", "y", 12, 13, 0, nbytes=8),
        Span("launch", "z", 13, 13, 0, nbytes=4),
        Span("wait", "x", 15, 21, 0, nbytes=8), Span("wait", "y", 21, 32, 0, nbytes=8),
        Span("wait", "z", 40, 40, 0, nbytes=4),
    ]  # fmt: skip
    assert sorted(waits(rank(spans))) == [(4, 27), (8, 10), (8, 11)]
    schedule = build("gpipe", p=2, m=1)
    there = rank([Span("send", "F0", 5, 6, 0, "0F0", "F"), Span("receive", "I1", 10, 40, 1, "1I0", "I")])
    back = rank([Span("receive", "F0", 2, 9, 0, "0F0", "F"), Span("send", "I1", 33, 34, 1, "1I0", "I")], pp=1)
    for part in (there, back):
        sent = {(s.name[0], int(s.name[1])): [round(s.start)] for s in part.spans if s.kind == "send"}
        plan = messages(schedule)[part.pp]
        part.log.sent = {channel: sent[channel.phase, channel.chunk] for channel in plan.outgoing}
        part.log.arrivals = [(round(s.start), round(s.end)) for s in part.spans if s.kind == "receive"]
    assert link_of(merge(schedule, [there, back])).latency == pytest.approx((0.004 + 0.007) / 2)


def test_a_rank_that_is_missing_is_said() -> None:
    schedule = build("gpipe", p=2, m=1)
    with pytest.raises(ValueError, match="1 timelines do not make 2 pipeline ranks"):
        merge(schedule, [rank([unit("a", 0, 1)])])
