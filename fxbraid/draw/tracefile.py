"""A simulated step as Chrome trace JSON, which Perfetto and chrome://tracing open.

One process per rank with a thread for compute and one for its collectives, a thread per link, a counter for
memory, two threads for copies to the host and back where there are any, and an arrow from each send to the block that
its message reaches. One unit of a workload made from constants is shown as one millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fxbraid.draw.layout import collective_name, name_of
from fxbraid.simulate import Box, Result
from fxbraid.simulate.result import REDUCTION

COMPUTE, COLLECTIVE, LINKS = 0, 1, 2
HOST = {"out": 100_000, "back": 100_001}


def to_trace(result: Result) -> str:
    """The trace as JSON text."""
    document = {
        "traceEvents": events(result),
        "displayTimeUnit": "ms",
        "otherData": {"schedule": str(result.schedule), "workload": result.workload.label},
    }
    return json.dumps(document, separators=(",", ":"))


def events(result: Result) -> list[dict[str, Any]]:
    """The events of all ranks and links."""
    found = [event for rank in range(result.schedule.p) for event in _rank(result, rank)]
    return found + _messages(result)


def microseconds(result: Result) -> float:
    """Factor from the workload's time to the trace's."""
    return 1e6 if result.workload.time_unit == "s" else 1e3


def _rank(result: Result, rank: int) -> Iterator[dict[str, Any]]:
    scale = microseconds(result)
    names = {COMPUTE: "compute", COLLECTIVE: "tensor-parallel collectives"}
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for lane, name in names.items():
        yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
    for step in result.steps(rank):
        yield {
            "ph": "X",
            "pid": rank,
            "tid": COMPUTE,
            "cat": "block",
            "name": str(step.what),
            "ts": step.start * scale,
            "dur": (step.end - step.start) * scale,
        }
    for box in result.boxes(rank):
        if box.end <= box.start:
            continue
        yield {
            "ph": "X",
            "pid": rank,
            "tid": COMPUTE if box.lane == "compute" else COLLECTIVE,
            "cat": box.phase if box.lane == "compute" else "collective",
            "name": box.unit if box.lane == "compute" else _collective(result, box),
            "ts": box.start * scale,
            "dur": (box.end - box.start) * scale,
            "args": {
                "action": str(box.action),
                "phase": name_of(box.action),
                "chunk": box.action.chunk,
                "microbatch": box.action.microbatch,
                "exposed": box.exposed,
            },
        }
    yield from _copies(result, rank)
    for time, level in result.memory(rank):
        yield {"ph": "C", "pid": rank, "name": "memory", "ts": time * scale, "args": {"live": level}}


def _copies(result: Result, rank: int) -> Iterator[dict[str, Any]]:
    scale = microseconds(result)
    copies = result.copies(rank)
    for way, lane in HOST.items() if copies else ():
        title = {"name": "copies to the host" if way == "out" else "copies back"}
        yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": title}
    for copy in copies:
        yield {
            "ph": "X",
            "pid": rank,
            "tid": HOST[copy.way],
            "cat": "copy",
            "name": f"{copy.chunk}F{copy.microbatch}",
            "ts": copy.start * scale,
            "dur": (copy.end - copy.start) * scale,
            "args": {"size": copy.size, "waited": (copy.start - copy.launched) * scale},
        }


def _collective(result: Result, box: Box) -> str:
    return box.unit if box.unit == REDUCTION else f"{collective_name(result)} {box.unit}"


def _messages(result: Result) -> list[dict[str, Any]]:
    scale = microseconds(result)
    events: list[dict[str, Any]] = []
    named: set[tuple[int, int]] = set()
    for number, message in enumerate(result.messages()):
        lane = LINKS + message.destination
        if (message.source, lane) not in named:
            named.add((message.source, lane))
            title = {"name": f"to rank {message.destination}"}
            events.append(
                {"ph": "M", "pid": message.source, "tid": lane, "name": "thread_name", "args": title}
            )
        name = f"{message.channel.chunk}{message.channel.phase}{message.microbatch}"
        began, arrived = message.began * scale, message.arrived * scale
        events.append(
            {
                "ph": "X",
                "pid": message.source,
                "tid": lane,
                "cat": "message",
                "name": name,
                "ts": began,
                "dur": arrived - began,
                "args": {"sent": message.sent, "waited": message.began - message.sent},
            }
        )
        flow = {"cat": "message", "name": name, "id": number}
        events.append({"ph": "s", "pid": message.source, "tid": lane, "ts": began, **flow})
        events.append(
            {"ph": "f", "bp": "e", "pid": message.destination, "tid": COMPUTE, "ts": arrived, **flow}
        )
    return events
