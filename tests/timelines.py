"""Measured timelines for tests that start no ranks: what ranks would record while they do what a simulation says."""

from __future__ import annotations

from fxbraid.metrics import RankMetrics
from fxbraid.schedule import build
from fxbraid.simulate import Link, Result, Workload, constants, simulate
from fxbraid.timeline import Span, Timeline


def timeline(result: Result, *, planned: Workload | None = None, tp_size: int = 1) -> Timeline:
    """``result`` as a measured step of ``tp_size`` equal TP ranks. planned: the costs to put into the file."""
    spans = [[tuple(_spans(result, pp))] * tp_size for pp in range(result.schedule.p)]
    ranks = tuple(
        RankMetrics(pp, tp, t.compute, t.exposed_tp, t.exposed_p2p, t.bubble, t.collective)
        for pp, t in enumerate(result.ranks)
        for tp in range(tp_size)
    )
    return Timeline(
        schedule=result.schedule,
        label="a clock",
        seconds=result.step_time,
        pipeline_seconds=result.step_time,
        ranks=ranks,
        spans=tuple(tuple(row) for row in spans),
        collectives="overlap" if result.braided else "blocking",
        workload=planned,
    )


def _spans(result: Result, pp: int) -> list[Span]:
    found: list[Span] = []
    for step in result.steps(pp):
        found.append(Span("block", "block", step.start, step.end, step.step, str(step.what)))
    for at, box in enumerate(result.boxes(pp)):
        action, phase = str(box.action), box.phase
        if box.lane == "compute":
            found.append(
                Span("unit", box.unit, box.start, box.end, box.step, action, phase, box.unit + phase)
            )
            continue
        name, start = f"{box.unit}{at}", box.end - box.exposed
        found.append(Span("launch", name, box.start, box.start, box.step, action, phase, nbytes=64))
        found.append(Span("wait", name, start, box.end, box.step, action, phase, nbytes=64))
    for message in result.messages():
        channel = message.channel
        name, action = (
            f"{channel.phase}{channel.chunk}",
            f"{channel.chunk}{channel.phase}{message.microbatch}",
        )
        if message.source == pp:
            found.append(Span("send", name, message.sent, message.sent, 0, action, channel.phase))
        if message.destination == pp:
            found.append(Span("receive", name, message.began, message.arrived, 0, action, channel.phase))
    return sorted(found, key=lambda span: (span.start, -span.end))


def straggling(name: str = "stp", *, p: int = 2, m: int = 6, factor: float = 1.5) -> tuple[Timeline, Result]:
    """A step whose rank 1 is slower than planned, and the simulation of the plan; times in seconds."""
    schedule = build(name, p=p, m=m)
    costs = constants(schedule, 4e-3, 4e-3, 4e-3, 1e-3, layers=2, message=1e3, link=Link(1e-4, 1e7))
    costs = Workload(costs.chunks, link=costs.link, label="planned")
    place = schedule.placement
    slow = costs.imbalanced({1: factor}, tuple(place.rank_of(chunk) for chunk in range(place.n_chunks)))
    return timeline(simulate(schedule, slow), planned=costs, tp_size=2), simulate(schedule, costs)
