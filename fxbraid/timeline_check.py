"""Is a timeline that came out of a file one that a run can have written? Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

from fxbraid.schedule import check, parts

if TYPE_CHECKING:
    from fxbraid.simulate import Workload
    from fxbraid.timeline import Span, Timeline

#: What reading a file that somebody changed can raise.
DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


def reason(error: Exception) -> str:
    """A few words for a reader of the file, from what reading it raised."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def check_timeline(timeline: Timeline) -> None:
    """Raises ValueError (or another of ``DAMAGE``) for times that are none, spans of no step of the schedule, ends
    without a beginning and ranks that are missing."""
    check(timeline.schedule)
    p, tp_size = timeline.p, timeline.tp_size
    places = [(rank.pp, rank.tp) for rank in timeline.ranks]
    if sorted(places) != [(pp, tp) for pp in range(p) for tp in range(tp_size)]:
        raise ValueError(f"its ranks are not {p} pipeline ranks x {tp_size} TP ranks, each once")
    _times("step times", [timeline.seconds, timeline.pipeline_seconds, timeline.noise])
    _times("times of all-reduces", timeline.collective_s.values())
    for rank in timeline.ranks:
        for value in _numbers(rank):
            if value is not None and not _time(value):
                raise ValueError(f"the times of rank {rank.pp} hold {value!r}, which is none")
    for pp in range(p):
        for tp in range(tp_size):
            _spans(timeline, pp, tp)
    for tp in range(tp_size):
        column = [span for row in timeline.spans for span in row[tp]]
        sent = {(span.name, span.action) for span in column if span.kind == "send"}
        if lost := [s for s in column if s.kind == "receive" and (s.name, s.action) not in sent]:
            raise ValueError(f"the message {lost[0].action} is received and never sent")
    for costs in (timeline.workload, timeline.ordered_by):
        if costs is not None:
            _workload(costs, timeline.schedule.n_chunks)


def _spans(timeline: Timeline, pp: int, tp: int) -> None:
    from fxbraid.timeline import Kind

    actions, spans = timeline.schedule.actions[pp], timeline.spans[pp][tp]
    where = f"rank {pp}, TP rank {tp}"
    for span in spans:
        if span.kind not in get_args(Kind):
            raise ValueError(f"{where}: {span.kind!r} is no kind of span")
        if not (_time(span.start) and _time(span.end) and span.start <= span.end):
            raise ValueError(f"{where}: {span.kind} {span.name} from {span.start} to {span.end} is no time")
        if span.kind in ("unit", "launch", "wait") and span.action not in map(
            str, parts(actions[_step(span)])
        ):
            raise ValueError(f"{where}: {span.kind} {span.name} belongs to no action of step {span.step}")
    blocks = sorted(span.step for span in spans if span.kind == "block")
    if blocks != list(range(len(actions))):
        raise ValueError(f"{where}: {len(blocks)} blocks for the {len(actions)} steps of the schedule")
    waits = {(span.step, span.name) for span in spans if span.kind == "wait"}
    if lost := [s for s in spans if s.kind == "launch" and (s.step, s.name) not in waits]:
        raise ValueError(f"{where}: the all-reduce {lost[0].name} of step {lost[0].step} is never waited for")


def _step(span: Span) -> int:
    if not isinstance(span.step, int) or span.step < 0:
        raise ValueError(f"{span.kind} {span.name} has no step")
    return span.step


def _workload(costs: Workload, n_chunks: int) -> None:
    if len(costs.chunks) != n_chunks:
        raise ValueError(f"costs of {len(costs.chunks)} chunks for a schedule with {n_chunks}")
    _times("contention", [costs.contention])
    for chunk in costs.chunks:
        _times("bytes of boundaries", [chunk.sends_f, chunk.sends_i])
        for unit in (*chunk.f, *chunk.i, *chunk.w):
            _times(f"costs of unit {unit.name}", [unit.seconds, unit.collective, unit.saves, unit.frees])


def _numbers(rank: Any) -> Iterable[Any]:
    return (getattr(rank, name) for name in rank.__dataclass_fields__ if name not in ("pp", "tp"))


def _time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _times(what: str, values: Iterable[Any]) -> None:
    for value in values:
        if not (_time(value) and value >= 0):
            raise ValueError(f"{what}: {value!r} is no number of 0 or more")
