"""A measured step for the pictures: in the simulator's terms, and as a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from fxbraid.draw.layout import duration, name_of
from fxbraid.draw.tracefile import COLLECTIVE, COMPUTE, LINKS
from fxbraid.draw.tracefile import events as simulated_events
from fxbraid.schedule import Action, Schedule, parts
from fxbraid.simulate import Box, Result, StepBox
from fxbraid.timeline import Span, Timeline

SIMULATED = 1000
"""Where the process numbers of the simulated ranks start in a trace that shows both."""


@dataclass(frozen=True)
class Measured:
    """One TP rank of every pipeline rank, as the pictures read a simulation (``layout.Picture``)."""

    timeline: Timeline
    tp: int = 0

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def step_time(self) -> float:
        """Of the program, as a simulation's."""
        return self.timeline.pipeline_seconds

    def steps(self, rank: int) -> Iterator[StepBox]:
        """The blocks of a rank."""
        for span in self.timeline.spans[rank][self.tp]:
            if span.kind == "block":
                what = self.schedule.actions[rank][span.step]
                yield StepBox(rank, span.step, what, span.start, span.end)

    def boxes(self, rank: int) -> Iterator[Box]:
        """The units and collectives of a rank, block by block."""
        for step in sorted(self._by_step[rank]):
            yield from self._by_step[rank][step]

    @cached_property
    def _by_step(self) -> list[dict[int, list[Box]]]:
        return [self._rank(rank) for rank in range(self.schedule.p)]

    def _rank(self, rank: int) -> dict[int, list[Box]]:
        found: dict[int, list[Box]] = {}
        for span in self.timeline.spans[rank][self.tp]:
            if span.kind == "unit":
                found.setdefault(span.step, []).append(
                    self._box(rank, span, "compute", span.start, span.end, 0.0)
                )
        for flight in self.timeline.flights(rank, self.tp):
            box = self._box(rank, flight.launch, "collective", flight.launched, flight.end, flight.exposed)
            found.setdefault(flight.launch.step, []).append(box)
        return {step: _with_others(boxes) for step, boxes in found.items()}

    def _box(self, rank: int, span: Span, lane: Any, start: float, end: float, exposed: float) -> Box:
        known = {str(action): action for action in parts(self.schedule.actions[rank][span.step])}
        return Box(rank, lane, span.step, known[span.action], span.phase, span.name, start, end, (), exposed)


def _with_others(boxes: list[Box]) -> list[Box]:
    """Fill in which collective each unit stands beside, and the other way round."""
    others: list[list[int]] = [[] for _ in boxes]
    for k, wire in enumerate(boxes):
        for j, unit in enumerate(boxes) if wire.lane == "collective" else ():
            if unit.lane == "compute" and min(wire.end, unit.end) > max(wire.start, unit.start):
                others[k].append(j)
                others[j].append(k)
    return [
        Box(b.rank, b.lane, b.step, b.action, b.phase, b.unit, b.start, b.end, tuple(o), b.exposed)
        for b, o in zip(boxes, others, strict=True)
    ]


def caption(timeline: Timeline, result: Result) -> str:
    """Both step times and their difference in one line, with the clock."""
    plain = result.workload.time_unit != "s"
    measured, simulated = timeline.pipeline_seconds, result.step_time
    against = "" if result.schedule == timeline.schedule else f" {result.schedule.name}"
    text = (
        f"{timeline.schedule.name} · p = {timeline.p} · m = {timeline.schedule.m} · "
        f"measured {duration(measured, plain)} · simulated{against} {duration(simulated, plain)} · "
    )
    percent = round(100 * (measured / simulated - 1), 1) + 0.0 if simulated else 0.0  # no "-0.0"
    difference = f"difference {percent:+.1f} %"
    return f"{text}{difference} · {timeline.label}" + (
        "" if timeline.collectives == "overlap" else f" · collectives {timeline.collectives}"
    )


# -- trace files


def to_trace(timeline: Timeline, result: Result | None = None) -> str:
    """The step of all ranks as Chrome trace JSON, in the form of a simulated one (``tracefile``), with ``result``
    below it where one is given. ``Timeline.load`` reads it back."""
    found: list[dict[str, Any]] = []
    for pp in range(timeline.p):
        for tp in range(timeline.tp_size):
            found += _rank_events(timeline, pp, tp)
    for tp in range(timeline.tp_size):
        found += _messages(timeline, tp)
    other: dict[str, Any] = {
        "schedule": str(timeline.schedule),
        "workload": timeline.label,
        "fxbraid_timeline": timeline.as_dict(),
    }
    if result is not None:
        other["simulated"] = result.workload.label
        found += [_simulated(event) for event in simulated_events(result)]
    document = {"traceEvents": found, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _simulated(event: dict[str, Any]) -> dict[str, Any]:
    moved = {**event, "pid": event["pid"] + SIMULATED}
    if event.get("name") == "process_name":
        moved["args"] = {"name": f"simulated, {event['args']['name']}"}
    elif event.get("name") == "process_sort_index":
        moved["args"] = {"sort_index": event["args"]["sort_index"] + SIMULATED}
    if "id" in event:
        moved["id"] = f"simulated {event['id']}"
    return moved


def _rank_events(timeline: Timeline, pp: int, tp: int) -> Iterator[dict[str, Any]]:
    pid = pp * timeline.tp_size + tp
    name = f"pipeline rank {pp}" + (f", TP rank {tp}" if timeline.tp_size > 1 else "")
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for lane, title in {COMPUTE: "compute", COLLECTIVE: "tensor-parallel collectives"}.items():
        yield {"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": {"name": title}}
    for span in timeline.spans[pp][tp]:
        yield {
            "ph": "X",
            "pid": pid,
            "tid": COMPUTE,
            "cat": span.phase if span.kind == "unit" else span.kind,
            "name": _title(span),
            "ts": span.start * 1e6,
            "dur": span.seconds * 1e6,
            "args": {**_where(timeline, pp, span), "span": asdict(span)},
        }
    for flight in timeline.flights(pp, tp):
        yield {
            "ph": "X",
            "pid": pid,
            "tid": COLLECTIVE,
            "cat": "collective",
            "name": f"all-reduce {flight.launch.name}",
            "ts": flight.launched * 1e6,
            "dur": (flight.end - flight.launched) * 1e6,
            "args": {
                **_where(timeline, pp, flight.launch),
                "exposed": flight.exposed,
                "bytes": flight.launch.nbytes,
            },
        }


def _title(span: Span) -> str:
    if span.kind in ("launch", "wait"):
        return f"{span.kind} all-reduce {span.name}"
    if span.kind in ("send", "receive"):
        return f"{span.kind} {span.action}"
    if span.kind == "copy":
        return f"{span.name} {span.action}"
    return span.action if span.kind == "block" else span.name


def _where(timeline: Timeline, pp: int, span: Span) -> dict[str, Any]:
    """As a simulated box says it: which action of the schedule."""
    if span.kind not in ("unit", "launch", "wait"):
        return {}
    action = Action.parse(span.action)
    return {
        "action": span.action,
        "phase": name_of(action),
        "chunk": action.chunk,
        "microbatch": action.microbatch,
    }


def _messages(timeline: Timeline, tp: int) -> Iterator[dict[str, Any]]:
    """A thread per link: each message from its sending, or the end of the one before it, until it was taken."""
    sent: dict[tuple[str, str], tuple[int, Span]] = {}
    for pp, row in enumerate(timeline.spans):
        sent.update({(s.name, s.action): (pp, s) for s in row[tp] if s.kind == "send"})
    free: dict[tuple[int, int], float] = {}
    taken = [(s.end, pp, s) for pp, row in enumerate(timeline.spans) for s in row[tp] if s.kind == "receive"]
    for number, (end, destination, receive) in enumerate(sorted(taken, key=lambda one: one[:2])):
        source, send = sent[receive.name, receive.action]
        pid, lane = source * timeline.tp_size + tp, LINKS + destination
        if (pid, lane) not in free:
            free[pid, lane] = 0.0
            title = {"name": f"to rank {destination}"}
            yield {"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": title}
        began = min(end, max(send.start, free[pid, lane]))
        free[pid, lane] = end
        common = {"cat": "message", "name": receive.action}
        yield {
            "ph": "X",
            "pid": pid,
            "tid": lane,
            "ts": began * 1e6,
            "dur": (end - began) * 1e6,
            "args": {"sent": send.start, "taken": end, "waited": receive.seconds},
            **common,
        }
        # Arrows of another TP rank's messages must not meet this one's.
        flow = {**common, "id": f"{tp}.{number}"}
        yield {"ph": "s", "pid": pid, "tid": lane, "ts": began * 1e6, **flow}
        target = destination * timeline.tp_size + tp
        yield {"ph": "f", "bp": "e", "pid": target, "tid": COMPUTE, "ts": end * 1e6, **flow}
