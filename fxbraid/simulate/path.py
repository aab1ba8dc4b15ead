"""The critical path of a simulated step: what its time is the sum of."""

from __future__ import annotations

from typing import Literal

from fxbraid.schedule import parts
from fxbraid.simulate.engine import Trace
from fxbraid.simulate.result import REDUCTION, PathItem, Result, blocks_end, end_of


def critical_path(result: Result) -> list[PathItem]:
    """From the end of the slowest rank back to the start, in order of time and without a gap."""
    trace, m = result.trace, result.schedule.m
    rank = max(range(result.schedule.p), key=lambda r: end_of(trace, r))
    items: list[PathItem] = []
    at = _behind_reductions(trace, rank, items)
    slot = trace.blocks[rank][at].last if at >= 0 else -1
    while at >= 0:
        block, start = trace.blocks[rank][at], trace.starts[rank][at]
        while slot >= 0:
            found = block.slots[slot]
            action = parts(result.schedule.actions[rank][at])[found.part]
            what = f"{found.name} of {action.chunk}{found.phase}{action.microbatch}"
            kind: Literal["unit", "collective"] = "unit" if found.lane == "compute" else "collective"
            if found.end > found.start:
                items.append(PathItem(kind, rank, what, start + found.start, start + found.end))
            slot = found.cause
        waited = trace.hosts[rank].waits.get(at)
        if waited is not None:
            items.append(PathItem("copy", rank, "copies to and from the host", start - waited, start))
        message = trace.causes[rank][at]
        if message < 0:
            at -= 1
            slot = trace.blocks[rank][at].last if at >= 0 else -1
            continue
        rank, at, slot = _follow(trace, m, message, items)
    return items[::-1]


def _follow(trace: Trace, m: int, message: int, items: list[PathItem]) -> tuple[int, int, int]:
    """Back along a message, and along those that held its link up, to the (rank, step, slot) that let it
    go.
    """
    until = trace.arrived[message]
    while True:
        channel, source, destination = trace.channels[message // m]
        began = trace.began[message]
        if until > began:
            what = f"{channel.chunk}{channel.phase}{message % m} from rank {source} to rank {destination}"
            items.append(PathItem("message", source, what, began, until))
        held = trace.before[message]
        if held < 0:
            return _origin(trace, message)
        until, message = began, held


def _origin(trace: Trace, message: int) -> tuple[int, int, int]:
    if trace.posted[message] > trace.sent[message] and trace.began[message] >= trace.posted[message]:
        rank, at = trace.receiver[
            message
        ]  # its receive was posted last: behind the step before the one before
        at -= 1
        return rank, at, trace.blocks[rank][at].last if at >= 0 else -1
    rank, at, part = trace.sender[message]
    leaves = trace.blocks[rank][at].sends[part]
    return rank, at, -1 if leaves is None else leaves[1]


def _behind_reductions(trace: Trace, rank: int, items: list[PathItem]) -> int:
    """Back along the sums over replicas at the end of ``rank``, to the step behind which the path goes on."""
    if end_of(trace, rank) == blocks_end(trace, rank):
        return len(trace.starts[rank]) - 1
    found = trace.reductions[rank]
    at = len(found) - 1
    while True:
        one = found[at]
        items.append(PathItem("collective", rank, f"{REDUCTION}, chunk {one.chunk}", one.start, one.end))
        if at == 0 or found[at - 1].end < one.start:
            return one.step
        at -= 1
