"""A measured step: what every rank did when, as data. Imports no torch.

``BraidedModel.record`` makes the spans of one rank, ``write_timeline`` merges those of all ranks into one file that
Perfetto and chrome://tracing open, and that :meth:`Timeline.load` reads back as it was. ``fxbraid draw --measured``
puts one over the simulated step.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fxbraid.metrics import Frame, RankLog, RankMetrics, divide, messages, time_frames
from fxbraid.schedule import Schedule
from fxbraid.schedule.lower import Channel
from fxbraid.simulate import ChunkCost, Link, UnitCost, Workload

Kind = Literal["block", "unit", "launch", "wait", "send", "receive", "copy"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank did from ``start`` to ``end``.

    kind: ``block``, a step of the schedule; ``unit``; ``launch`` of a collective and the ``wait`` for it, which have
    one ``name`` in their block; ``send`` and ``receive`` (the wait) of a message; ``copy``, an instruction of offload
    (``out`` and ``reload`` launch, ``away`` and ``back`` wait). step: index in the rank's list.
    action: as in the schedule, ``0F4``; of a message ``0F4`` is the result of that action. phase: F, I, W, or R for
    a unit of I that computes again what F did. key: equal for units of equal structure. nbytes: of the collective.

    In a rank's own :class:`RankTimeline` times are ticks, in a :class:`Timeline` seconds from the step's start.
    """

    kind: Kind
    name: str
    start: float
    end: float
    step: int
    action: str = ""
    phase: str = ""
    key: str = ""
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective of a rank, in flight until ``end``; its rank waits for it in the last ``exposed`` seconds.

    Nobody sees a hidden collective end: ``end`` is then when its time is over, where that is known
    (``Timeline.collective_s``), else when its rank asked for the result. ``launched`` is when it got its turn."""

    launched: float
    end: float
    exposed: float
    launch: Span


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one rank recorded in one step, in ticks of its clock; see :class:`~fxbraid.metrics.RankLog` for the times
    around the program."""

    pp: int
    tp: int
    per_second: int
    noise: int
    label: str
    log: RankLog
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """One measured step of all ranks. ``spans[pp][tp]``: in the order in which they began.

    seconds: of the slowest ``step()``; pipeline_seconds: of the program, from 0 to the last rank's end. workload: what
    each unit and link cost, for a simulation of the same step: medians of the measured units; ``ordered_by`` the costs
    that units inside blocks are ordered by (None: the paper's order). collectives: overlap, blocking or free.
    collective_s: seconds of an all-reduce by its bytes, where known.
    """

    schedule: Schedule
    label: str
    seconds: float
    pipeline_seconds: float
    ranks: tuple[RankMetrics, ...]
    spans: tuple[tuple[tuple[Span, ...], ...], ...]
    collectives: str = "overlap"
    collective_s: Mapping[int, float] = field(default_factory=dict)
    noise: float = 0.0
    workload: Workload | None = None
    ordered_by: Workload | None = None

    @property
    def p(self) -> int:
        return len(self.spans)

    @property
    def tp_size(self) -> int:
        return len(self.spans[0])

    @cached_property
    def _flights(self) -> list[list[list[Flight]]]:
        return [[list(self._fly(spans)) for spans in row] for row in self.spans]

    def flights(self, pp: int, tp: int = 0) -> list[Flight]:
        """The collectives of a rank, in order of launch."""
        return self._flights[pp][tp]

    def _fly(self, spans: Sequence[Span]) -> Iterator[Flight]:
        waits = {(s.step, s.name): s for s in spans if s.kind == "wait"}
        free = 0.0
        for launch in (s for s in spans if s.kind == "launch"):
            wait = waits[launch.step, launch.name]
            start = max(launch.end, min(free, wait.end))
            known = self.collective_s.get(launch.nbytes)
            exposed = wait.seconds if wait.seconds > self.noise else 0.0
            asked = wait.start if known is None else min(wait.start, start + known)
            end = wait.end if exposed else asked
            free = end = max(start, end)
            yield Flight(start, end, min(exposed, end - start), launch)

    def beside(self, unit: Span, pp: int, tp: int = 0) -> float:
        """Seconds of ``unit`` during which a collective of its rank was in flight."""
        covered, at = 0.0, unit.start
        for flight in self.flights(pp, tp):
            if flight.launched >= unit.end:
                break
            start, end = max(at, flight.launched), min(unit.end, flight.end)
            if end > start:
                covered += end - start
                at = end
        return covered

    # -- files

    def save(self, path: str | Path) -> None:
        """Write the trace; :meth:`load` reads it back."""
        from fxbraid.draw.measured import to_trace

        Path(path).write_text(to_trace(self), "utf-8")

    def as_dict(self) -> dict[str, Any]:
        """All but the spans, for JSON."""
        place = self.schedule.placement
        return {
            "schedule": {
                "name": self.schedule.name,
                "m": self.schedule.m,
                "p": place.p,
                "v": place.v,
                "kind": place.kind,
                "csv": self.schedule.to_csv(),
            },
            "label": self.label,
            "seconds": self.seconds,
            "pipeline_seconds": self.pipeline_seconds,
            "ranks": [_fields(rank) for rank in self.ranks],
            "collectives": self.collectives,
            "collective_s": {str(size): s for size, s in self.collective_s.items()},
            "noise": self.noise,
            "workload": None if self.workload is None else dump_workload(self.workload),
            "ordered_by": None if self.ordered_by is None else dump_workload(self.ordered_by),
        }

    @staticmethod
    def load(path: str | Path) -> Timeline:
        """Read what :meth:`save` wrote. Raises ValueError where the file is something else."""
        from fxbraid.timeline_check import DAMAGE, check_timeline, reason

        way = "write one with model.record(**batch) and model.write_timeline(path)"
        try:
            document = json.loads(Path(path).read_text("utf-8"))
            known = document["otherData"]["fxbraid_timeline"]
        except DAMAGE:
            raise ValueError(f"{path} is no measured timeline; {way}") from None
        try:
            found = _read(known, document["traceEvents"])
            check_timeline(found)
        except DAMAGE as error:
            raise ValueError(f"{path} is damaged ({reason(error)}); record the step again") from None
        return found


def _read(known: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Timeline:
    from fxbraid.schedule import Placement

    s = known["schedule"]
    placement = Placement(s["kind"], s["p"], s["v"])
    schedule = Schedule.from_csv(s["csv"] if "," in s["csv"] else s["csv"] + "\n", placement, name=s["name"])
    tp_size = 1 + max(rank["tp"] for rank in known["ranks"])
    spans: list[list[list[Span]]] = [[[] for _ in range(tp_size)] for _ in range(placement.p)]
    for event in events:
        if "span" in event.get("args", {}):
            span = Span(**event["args"]["span"])
            spans[event["pid"] // tp_size][event["pid"] % tp_size].append(span)
    return Timeline(
        schedule=schedule,
        label=known["label"],
        seconds=known["seconds"],
        pipeline_seconds=known["pipeline_seconds"],
        ranks=tuple(RankMetrics(**rank) for rank in known["ranks"]),
        spans=tuple(tuple(tuple(column) for column in row) for row in spans),
        collectives=known["collectives"],
        collective_s={int(size): seconds for size, seconds in known["collective_s"].items()},
        noise=known["noise"],
        workload=None if known["workload"] is None else load_workload(known["workload"]),
        ordered_by=None if known["ordered_by"] is None else load_workload(known["ordered_by"]),
    )


def _fields(value: Any) -> dict[str, Any]:
    """A flat dataclass as a dict, whatever fields it has."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def dump_workload(workload: Workload) -> dict[str, Any]:
    """A workload with one link for all ranks, for JSON (which has no infinity)."""
    return {
        "chunks": [
            {**_fields(chunk), **{ph: [_fields(u) for u in getattr(chunk, ph)] for ph in ("f", "i", "w")}}
            for chunk in workload.chunks
        ],
        "link": _dump_link(workload.link),
        "host": _dump_link(workload.host),
        "label": workload.label,
        "contention": workload.contention,
    }


def load_workload(known: Mapping[str, Any]) -> Workload:
    """What :func:`dump_workload` wrote."""
    chunks = tuple(
        ChunkCost(
            **{
                **chunk,
                **{ph: tuple(UnitCost(**u) for u in chunk[ph]) for ph in ("f", "i", "w")},
                "parks": tuple(chunk.get("parks", ())),
            }
        )
        for chunk in known["chunks"]
    )
    link, host = _load_link(known["link"]), _load_link(known.get("host", {}))
    return Workload(chunks, link=link, host=host, label=known["label"], contention=known["contention"])


def _dump_link(link: Link) -> dict[str, Any]:
    return {k: None if v == math.inf else v for k, v in _fields(link).items()}


def _load_link(known: Mapping[str, Any]) -> Link:
    fields: dict[str, Any] = {k: math.inf if v is None else v for k, v in known.items()}
    return Link(**fields)


# -- from ranks to the whole


def merge(
    schedule: Schedule,
    parts: Sequence[RankTimeline],
    *,
    collectives: str = "overlap",
    collective_s: Mapping[int, float] | None = None,
    workload: Workload | None = None,
    ordered_by: Workload | None = None,
) -> Timeline:
    """One timeline from those of all ranks of a model, in any order: clocks of different machines are aligned
    (``metrics.clock_offsets``), and each rank's time is divided as in every step's metrics."""
    p, tp_size = 1 + max(part.pp for part in parts), 1 + max(part.tp for part in parts)
    at = {(part.pp, part.tp): part for part in parts}
    if len(at) != p * tp_size or p != schedule.p:
        raise ValueError(
            f"{len(parts)} timelines do not make {schedule.p} pipeline ranks x {tp_size} TP ranks; give each once"
        )
    table = [[at[pp, tp] for tp in range(tp_size)] for pp in range(p)]
    per_second, noise = table[0][0].per_second, table[0][0].noise
    known = dict(collective_s or {})
    seconds, total, ranks = divide(
        schedule,
        [[part.log for part in row] for row in table],
        per_second=per_second,
        noise=noise,
    )
    frames = time_frames(messages(schedule), [[part.log for part in row] for row in table])
    spans = [[_in_seconds(table[pp][tp], frames[tp], pp) for tp in range(tp_size)] for pp in range(p)]
    return Timeline(
        schedule=schedule,
        label=table[0][0].label,
        seconds=seconds,
        pipeline_seconds=total,
        ranks=ranks,
        spans=tuple(tuple(row) for row in spans),
        collectives=collectives,
        collective_s=known,
        noise=noise / per_second,
        workload=workload,
        ordered_by=ordered_by,
    )


def _in_seconds(part: RankTimeline, frame: Frame, pp: int) -> tuple[Span, ...]:
    """The spans of a rank in seconds from the step's start."""
    origin = frame.start + frame.shift[pp]

    def seconds(ticks: float) -> float:
        return (ticks - origin) / part.per_second

    return tuple(
        Span(s.kind, s.name, seconds(s.start), seconds(s.end), s.step, s.action, s.phase, s.key, s.nbytes)
        for s in part.spans
    )


def log_of(spans: Sequence[Span], channels: Sequence[Channel], log: RankLog) -> RankLog:
    """``log`` with waits and messages as ``spans`` (in ticks) have them: for clocks that only a recording reads."""
    log.waited = round(sum(span.end - span.start for span in spans if span.kind == "wait"))
    log.arrivals = [(round(s.start), round(s.end)) for s in spans if s.kind == "receive"]
    log.sent = {
        channel: [
            round(s.start) for s in spans if s.kind == "send" and s.name == f"{channel.phase}{channel.chunk}"
        ]
        for channel in channels
    }
    return log


# -- estimates, where nobody knows the links


def waits(part: RankTimeline) -> Iterator[tuple[int, float]]:
    """(bytes, ticks) of each collective of a rank: from its turn (its launch, or the end of the one before it) to the
    end of its wait if that was exposed; where none of a size was, from launch to the asking for it (an upper bound).
    """
    ends: dict[tuple[int, str], Span] = {(s.step, s.name): s for s in part.spans if s.kind == "wait"}
    exposed: list[tuple[int, float]] = []
    hidden: list[tuple[int, float]] = []
    free = float("-inf")
    for launch in (s for s in part.spans if s.kind == "launch"):
        wait = ends[launch.step, launch.name]
        if wait.seconds > part.noise:
            exposed.append((launch.nbytes, wait.end - min(max(launch.end, free), wait.end)))
            free = wait.end
        else:
            hidden.append((launch.nbytes, wait.start - launch.end))
    seen = {size for size, _ in exposed}
    least: dict[int, float] = {}
    for size, ticks in hidden:
        least[size] = min(ticks, least.get(size, ticks))
    yield from exposed
    yield from ((size, ticks) for size, ticks in least.items() if size not in seen)


def link_of(timeline: Timeline) -> Link:
    """A link of the latency that messages showed: the median, over those that were waited for, of the time from their
    sending to their taking; where none was, the least of all."""
    waited: list[float] = []
    every: list[float] = []
    for tp in range(timeline.tp_size):
        sent = {
            (span.name, span.action): span.start
            for row in timeline.spans
            for span in row[tp]
            if span.kind == "send"
        }
        for span in (span for row in timeline.spans for span in row[tp] if span.kind == "receive"):
            took = span.end - sent[span.name, span.action]
            every.append(took)
            if span.seconds > max(timeline.noise, 0):
                waited.append(took)
    return Link(max(0.0, statistics.median(waited) if waited else min(every, default=0.0)))


# -- contention


def contention(timeline: Timeline, alone: Timeline | None = None) -> float | None:
    """How much longer a unit takes beside a collective: (time overlapped) / (time alone), 1 = no contention.

    Per distinct unit (its structure, ``Span.key``) the median time of those that a collective accompanied for at least
    nine tenths, over the median of those that it accompanied for at most one tenth; then the mean over units,
    weighted by their overlapped time. ``alone``: another timeline of the same model for the second median, e.g.
    recorded with ``collectives="free"`` or ``"blocking"``. None where no unit was seen both ways.
    """
    beside: dict[str, list[float]] = {}
    apart: dict[str, list[float]] = {}
    for which, found in ((timeline, beside), (alone or timeline, apart)):
        for pp, row in enumerate(which.spans):
            for tp, spans in enumerate(row):
                for span in (s for s in spans if s.kind == "unit" and s.end > s.start):
                    share = which.beside(span, pp, tp) / span.seconds
                    if (share >= 0.9) if found is beside else (share <= 0.1):
                        found.setdefault(span.key, []).append(span.seconds)
    weights = {key: sum(times) for key, times in beside.items() if key in apart}
    if not weights:
        return None
    ratio = sum(
        weight * statistics.median(beside[key]) / statistics.median(apart[key])
        for key, weight in weights.items()
    )
    return ratio / sum(weights.values())
