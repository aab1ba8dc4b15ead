"""The step time and memory of one configuration: simulated where it matters, extrapolated in m where it is
linear.

A step is the pipeline (simulated), the reduction of gradients over the data-parallel group, and the
optimizer. The two last are counted as exposed in full: a run hides what it can of the first behind its cool-down, which
``simulate`` knows of a traced model (``ChunkCost.reduces``) and the plan leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fxbraid.plan.space import Candidate, Request
from fxbraid.schedule import Placement, Schedule, ScheduleError
from fxbraid.simulate import Result, Shape, Workload, analytic, peaks, simulate
from fxbraid.simulate.inputs import read_schedule
from fxbraid.simulate.kernels import ring
from fxbraid.simulate.offload import early_chunks, plan_offload

OPTIMIZER_BYTES = 30
"""Read and written per parameter by Adam: gradient 4, master weight and two moments 12 + 12, weight 2."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds and bytes of one candidate; shares are of the whole step."""

    candidate: Candidate
    step_time: float
    pipeline: float
    gradients: float
    optimizer: float
    bubble_share: float
    exposed_tp_share: float
    exposed_p2p_share: float
    mfu: float
    peak: float
    static: float
    limit: float

    @property
    def fits(self) -> bool:
        """Within the memory limit."""
        return self.peak <= self.limit

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        c = self.candidate
        return {
            "tp": c.tp,
            "pp": c.pp,
            "dp": c.dp,
            "v": c.v,
            "m": c.m,
            "micro_batch": c.micro_batch,
            "schedule": c.schedule,
            "checkpoint": c.checkpoint,
            "sequence": c.sequence,
            "offload": c.offload,
            "step_time": self.step_time,
            "pipeline": self.pipeline,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "bubble_share": self.bubble_share,
            "exposed_tp_share": self.exposed_tp_share,
            "exposed_p2p_share": self.exposed_p2p_share,
            "mfu": self.mfu,
            "peak_bytes": self.peak,
            "static_bytes": self.static,
            "limit_bytes": self.limit,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a candidate without simulating it. pipeline: least time of the busiest rank."""

    candidate: Candidate
    workload: Workload
    placement: Placement
    pipeline: float
    gradients: float
    optimizer: float
    static: float

    @property
    def bound(self) -> float:
        """Seconds that the step takes at least."""
        return self.pipeline + self.gradients + self.optimizer


def outlook(request: Request, candidate: Candidate) -> Outlook:
    """The workload of ``candidate`` and a lower bound of its step time."""
    placement = Placement("v" if _on_v(candidate.schedule) else "loop", candidate.pp, candidate.v)
    workload = _workload(request, candidate, placement)
    if request.host is not None:
        workload = replace(workload, host=request.host)
    factors = dict(request.imbalance)
    if factors:
        ranks = tuple(placement.rank_of(chunk) for chunk in range(placement.n_chunks))
        workload = workload.imbalanced(factors, ranks)
    static = max(
        sum(workload.static[chunk] for chunk in placement.chunks_of(rank)) for rank in range(candidate.pp)
    )
    parameters = static / (2 + 4 + 12 / candidate.dp)
    device = request.device
    inside = candidate.tp * candidate.dp <= device.node
    speed = (device.nvlink if inside else device.network) * device.wire
    gradients = 0.0 if candidate.dp == 1 else ring(candidate.dp) * parameters * 4 / speed
    optimizer = OPTIMIZER_BYTES * parameters / candidate.dp / (device.bandwidth * device.stream)
    pipeline = _bound(candidate, workload, placement)
    return Outlook(candidate, workload, placement, pipeline, gradients, optimizer, static)


UNBRAIDED = ("1f1b", "interleaved_1f1b", "zbv", "v_half")
"""Schedules in which every F stands alone, so that all its collectives are exposed."""


def _bound(candidate: Candidate, workload: Workload, placement: Placement) -> float:
    """Least seconds of the pipeline.

    The last micro-batch starts behind all others and goes through every chunk, down and back. And a rank waits
    for the first one to come down to it, does its work and, where every backward is whole, waits for the last
    one to go back up.
    """
    chunks, before, behind = workload.chunks, 0.0, 0.0
    through = sum(chunk.seconds("FI") for chunk in chunks)
    least = (candidate.m - 1) * chunks[0].seconds("F") + through
    alone = candidate.schedule in UNBRAIDED
    whole = candidate.schedule in ("1f1b", "interleaved_1f1b")
    for first in range(candidate.pp):  # in both placements rank r's first chunk is chunk r
        busy = 0.0
        for chunk in placement.chunks_of(first):
            busy += chunks[chunk].seconds() + (chunks[chunk].collective("F") if alone else 0.0)
        after = max(0.0, behind - chunks[first].seconds("W")) if whole else 0.0
        least = max(least, before + candidate.m * busy + after)
        before += chunks[first].seconds("F")
        behind += chunks[first].seconds("I")
    return least


LIVE = {
    "1f1b": lambda p, v: p,
    "interleaved_1f1b": lambda p, v: (v + 1) * p - 1,
    "zbv": lambda p, v: 2 * p,
    "braid:dualpipev": lambda p, v: 2 * p,
    "v_half": lambda p, v: p,
    "stp_low_memory": lambda p, v: 2 * p,
    "stp": lambda p, v: 3 * p,
}
"""Chunk activations that a schedule holds at least at its peak, where there are enough micro-batches."""


REACH = 0.5
"""Share of its activations that a rank may hope to get rid of by offload: the second chunk's stay, and some are always
on their way.
"""


def least_memory(view: Outlook, *, offload: bool = False) -> float:
    """Bytes that the fullest rank needs at least, without building the schedule."""
    c, chunks, place = view.candidate, view.workload.chunks, view.placement
    live = min(LIVE[c.schedule](c.pp, c.v), c.v * c.m)
    saved = min(chunk.saved for chunk in chunks) * (1 - REACH * offload)
    weights = min(sum(view.workload.static[chunk] for chunk in place.chunks_of(rank)) for rank in range(c.pp))
    return max(view.static, weights + live * saved)


def _workload(request: Request, candidate: Candidate, placement: Placement) -> Workload:
    shape = Shape(
        seq=request.seq,
        batch=candidate.micro_batch,
        tp=candidate.tp,
        dp=candidate.dp,
        checkpoint=candidate.checkpoint,
        efficiency=request.efficiency,
        sequence=candidate.sequence != "whole",
        regather=candidate.sequence == "gathered",
        images=request.images,
        patches=request.patches,
    )
    return analytic(request.model, request.device, placement, shape)


def peak_memory(view: Outlook) -> float:
    """Bytes on the fullest rank; after the first few p micro-batches it grows no more."""
    c = view.candidate
    first, second = _span(c.pp)
    m = c.m if c.m <= second else first  # those that ``predict`` builds as well
    return max(peaks(_schedule(c.schedule, c.pp, m, c.v), view.workload))


def offloaded(view: Outlook, peak: float, limit: float) -> tuple[Outlook, float]:
    """The same with offload, and the peak that it then has; ``view`` and ``peak`` where that can't get below
    ``limit``. No step waits for a copy, so its time is that of ``view``."""
    c = view.candidate
    if peak - REACH * (peak - view.static) > limit:
        return view, peak
    first, second = _span(c.pp)
    schedule = _schedule(c.schedule, c.pp, c.m if c.m <= second else first, c.v)
    moved = plan_offload(schedule, view.workload, early_chunks(schedule))
    lower = max(peaks(schedule, view.workload, offload=moved))
    if lower > limit:
        return view, peak
    return replace(view, candidate=replace(c, offload=True)), lower


def predict(request: Request, view: Outlook, peak: float) -> Prediction:
    """Simulate a candidate, and add what is not the pipeline."""
    c = view.candidate
    first, second = _span(c.pp)
    if c.m <= second:
        totals = _totals(simulate(_schedule(c.schedule, c.pp, c.m, c.v), view.workload))
    else:
        one = _totals(simulate(_schedule(c.schedule, c.pp, first, c.v), view.workload))
        two = _totals(simulate(_schedule(c.schedule, c.pp, second, c.v), view.workload))
        totals = two.extended(one, (c.m - second) / (second - first))
    step = totals.time + view.gradients + view.optimizer
    return Prediction(
        candidate=c,
        step_time=step,
        pipeline=totals.time,
        gradients=view.gradients,
        optimizer=view.optimizer,
        bubble_share=totals.bubble / step,
        exposed_tp_share=totals.exposed_tp / step,
        exposed_p2p_share=totals.exposed_p2p / step,
        mfu=view.workload.flops * c.m / (step * request.device.peak * c.pp),
        peak=peak,
        static=view.static,
        limit=request.limit,
    )


def _span(p: int) -> tuple[int, int]:
    """Micro-batches of the two simulations that a longer step is extrapolated from."""
    return max(3 * p, 8), max(5 * p, 16)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Seconds: the step, means over ranks, and how long each rank is busy (compute and exposed TP)."""

    time: float
    compute: float
    exposed_tp: float
    exposed_p2p: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        return self.time - self.compute - self.exposed_tp - self.exposed_p2p

    def extended(self, shorter: _Totals, scale: float) -> _Totals:
        """This step with ``scale`` times as many micro-batches more as it has more than ``shorter``.

        In the long run every micro-batch adds the same: at least what the busiest rank does for it, which a
        short step does not always show (a rank that is a little less busy is ahead at first).
        """
        busiest = max(b - a for a, b in zip(shorter.busy, self.busy, strict=True))
        return _Totals(
            time=self.time + scale * max(self.time - shorter.time, busiest),
            compute=self.compute + scale * (self.compute - shorter.compute),
            exposed_tp=self.exposed_tp + scale * (self.exposed_tp - shorter.exposed_tp),
            exposed_p2p=self.exposed_p2p + scale * max(0.0, self.exposed_p2p - shorter.exposed_p2p),
            busy=self.busy,
        )


def _totals(result: Result) -> _Totals:
    ranks, count = result.ranks, len(result.ranks)
    return _Totals(
        time=result.step_time,
        compute=sum(rank.compute for rank in ranks) / count,
        exposed_tp=sum(rank.exposed_tp for rank in ranks) / count,
        exposed_p2p=sum(rank.exposed_p2p for rank in ranks) / count,
        busy=tuple(rank.compute + rank.exposed_tp for rank in ranks),
    )


def _on_v(schedule: str) -> bool:
    return schedule.removeprefix("braid:") in ("zbv", "dualpipev", "v_half", "v_min", "stp", "stp_low_memory")


@lru_cache(maxsize=256)
def _schedule(name: str, p: int, m: int, v: int) -> Schedule:
    """Schedules are equal for equal arguments, so many candidates share one."""
    base = name.removeprefix("braid:")
    try:
        return read_schedule(base, p, m, v, braided=base != name)
    except ScheduleError as error:
        raise ScheduleError(f"{name} for p={p}, m={m}, v={v}: {error}") from None
