"""What a step was worth, for ``BraidedModel``: metrics of every step, and a timeline of a recorded one."""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .metrics import RankLog, StepMetrics, divide
from .passes.block import TIMING_ONLY, Collectives
from .passes.errors import BraidError
from .runtime import emulate, ranks
from .runtime.costs import chunk_cost
from .runtime.engine import Engine
from .runtime.measure import predict_peak
from .runtime.mesh import Mesh
from .runtime.record import Rows, share, share_bytes
from .runtime.record_step import Recording, rank_timeline
from .simulate import ChunkCost, Link, Workload
from .timeline import RankTimeline, Timeline, link_of, merge, waits

BLIND = "waits lie inside compiled blocks, so exposed TP counts as compute"
UNTIMED = "on a GPU a step is timed as a whole, on this rank; model.record(**batch) gives the shares"


@dataclass(slots=True)
class Watch:
    """``step()`` under way: when it began, on the clock that counts."""

    engine: Engine
    began: int
    events: tuple[Any, Any] | None = None


def watch(engine: Engine) -> Watch:
    """``step()`` begins."""
    if engine.meter.host_times_count:
        return Watch(engine, engine.meter.clock.now())
    events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    events[0].record()  # type: ignore[no-untyped-call]
    return Watch(engine, engine.meter.clock.now(), events)


@dataclass(slots=True)
class Observed:
    """A step that is over. Its numbers are on their way to all ranks; whoever asks waits for them."""

    engine: Engine
    collectives: Collectives
    samples: int
    tokens: int | None
    label: str
    rows: Rows | None = None
    events: tuple[Any, Any] | None = None
    timeline: RankTimeline | None = None
    ordered_by: Workload | None = None
    found: StepMetrics | None = None

    def metrics(self) -> StepMetrics:
        """Local: no rank needs to join."""
        if self.found is None:
            self.found = self._divide()
        meter = self.engine.meter
        peak = predict_peak(self.engine)
        return replace(self.found, peak_predicted=peak, peak_measured=meter.peak_measured)

    def _divide(self) -> StepMetrics:
        meter, schedule = self.engine.meter, self.engine.schedule
        notes = [TIMING_ONLY] if self.collectives == "free" else []
        if self.rows is None:
            assert self.events is not None
            self.events[1].synchronize()
            seconds = self.events[0].elapsed_time(self.events[1]) / 1e3
            return self._made(seconds, seconds, (), [*notes, UNTIMED])
        logs = [
            [RankLog.of(row, meter.plan[pp]) for row in column] for pp, column in enumerate(self.rows.get())
        ]
        found = divide(schedule, logs, per_second=meter.clock.per_second, noise=meter.clock.noise)
        return self._made(*found, [*notes, *([BLIND] if meter.blind else [])])

    def _made(self, seconds: float, pipeline: float, ranks: Any, notes: Sequence[str]) -> StepMetrics:
        return StepMetrics(
            seconds=seconds,
            pipeline_seconds=pipeline,
            samples=self.samples,
            tokens=self.tokens,
            label=self.label,
            ranks=ranks,
            note="; ".join(notes),
        )


def observed(
    begun: Watch,
    batch: Mapping[str, Any],
    collectives: Collectives,
    recording: Recording | None = None,
    *,
    ordered_by: Workload | None = None,
) -> Observed:
    """``step()`` ends. Sends this rank's numbers to all others, without waiting; collective."""
    engine, meter = begun.engine, begun.engine.meter
    ids, replicas = batch.get("input_ids"), engine.mesh.dp_size
    result = Observed(
        engine=engine,
        collectives=collectives,
        samples=replicas * next((v.shape[0] for v in batch.values() if isinstance(v, Tensor)), 0),
        tokens=replicas * ids.numel() if isinstance(ids, Tensor) else None,
        label=meter.label(),
        events=begun.events,
        ordered_by=ordered_by,
    )
    if begun.events is not None:
        begun.events[1].record()
    log = meter.log(begun.began)
    if recording is not None:
        result.timeline = rank_timeline(engine, recording, log)
        log = result.timeline.log
    if meter.host_times_count or recording is not None:
        result.rows = share(engine.mesh, log.row(meter.mine))
    return result


# -- all ranks' timelines


def save(timeline: Timeline, path: str | Path | None, mesh: Mesh) -> None:
    """Write ``timeline`` on the first rank, None to nowhere. Collective: where that fails, it raises on every rank,
    so that none goes on alone."""
    why: str | None = None
    if path is not None and mesh.dp_rank == mesh.pp_rank == mesh.tp_rank == 0:
        try:
            timeline.save(path)
        except OSError as error:
            why = f"the timeline can't be written to {path}: {error.strerror or error}"
    ranks.raise_together(why)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank gives to the timeline of all. costs: of its chunks, at the median times of their units.
    collective_s: seconds of an all-reduce by its bytes; ``known``, or estimated from the waits."""

    timeline: RankTimeline
    costs: dict[int, ChunkCost]
    collective_s: dict[int, float]
    known: bool


def gather(seen: Observed) -> Timeline:
    """The timeline of all ranks of the step that ``seen`` recorded. Collective."""
    if seen.timeline is None:
        raise BraidError(
            "the last step was not recorded; call record(**batch) in place of step(**batch), on all ranks"
        )
    engine = seen.engine
    payloads = share_bytes(engine.mesh, pickle.dumps(_part(seen)))
    parts: list[Part] = [pickle.loads(payload) for payload in payloads]
    known = {size: s for part in parts for size, s in part.collective_s.items()} if parts[0].known else {}
    timeline = merge(
        engine.schedule,
        [part.timeline for part in parts],
        collectives=seen.collectives,
        collective_s=known,
        ordered_by=seen.ordered_by,
    )
    # Several TP ranks hold a chunk: the first one speaks for it.
    costs = {chunk: cost for part in reversed(parts) for chunk, cost in part.costs.items()}
    if sorted(costs) != list(range(engine.schedule.n_chunks)):
        return timeline
    chunks = tuple(costs[chunk] for chunk in sorted(costs))
    label = f"medians of a recorded step ({seen.label})"
    return replace(timeline, workload=Workload(chunks, link=_link(engine) or link_of(timeline), label=label))


def _part(seen: Observed) -> Part:
    engine, timeline = seen.engine, seen.timeline
    assert timeline is not None
    meter = engine.meter
    times: dict[str, list[float]] = {}
    sizes: dict[int, list[float]] = {}
    for span in timeline.spans:
        if span.kind == "unit":
            times.setdefault(span.key, []).append(span.seconds / timeline.per_second)
    for size, ticks in waits(timeline):
        sizes.setdefault(size, []).append(ticks / timeline.per_second)
    seconds = {key: statistics.median(found) for key, found in times.items()}
    known = meter.collective_s
    collective = {size: known(size) if known else statistics.median(found) for size, found in sizes.items()}

    def collective_seconds(size: int) -> float:
        return collective.get(size, 0.0) if engine.mesh.tp_size > 1 else 0.0

    costs = {
        index: chunk_cost(chunk, seconds, collective_seconds)
        for index, chunk in engine.lowered.chunks.items()
        if all(unit.key in seconds for units in chunk.units.values() for unit in units)
    }
    return Part(timeline, costs, collective, known is not None)


def _link(engine: Engine) -> Link | None:
    """The emulated link between neighbours; None where links are real."""
    session = emulate.active()
    if session is None or engine.mesh.pp_size < 2:
        return None
    ends = [row[engine.mesh.tp_rank] for row in engine.mesh.ranks[:2]]
    link = session.cluster.link(ends, message=True)
    return Link(link.alpha_s, link.beta_bytes_per_s, link.rendezvous)
