"""The ranking: candidates in order of their lower bound, simulated until no other can be among the best."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

from fxbraid.plan.predict import (
    Outlook,
    Prediction,
    least_memory,
    offloaded,
    outlook,
    peak_memory,
    predict,
)
from fxbraid.plan.space import Candidate, Request, candidates, explain_none
from fxbraid.schedule import ScheduleError

NEAREST = 8
"""Of those that do not fit, how many are looked at for one that would be faster."""


@dataclass(frozen=True, slots=True)
class Plan:
    """ranking: the fastest configurations that fit, fastest first; why[i]: why i+1 comes behind i. too_big:
    one that would be faster if there was a little more memory. considered, simulated: how many there were,
    and how many the clock decided.
    """

    request: Request
    ranking: tuple[Prediction, ...]
    why: tuple[str, ...]
    too_big: Prediction | None
    considered: int
    simulated: int


def plan(request: Request, *, top: int = 10, budget: int = 400) -> Plan:
    """The ``top`` fastest configurations.

    A candidate is simulated if it fits and its lower bound is below the slowest of the best found so far, up
    to ``budget`` of them; so the ranking is exact, up to the model's error, unless the budget ends. Where a
    configuration fits, the same with more recomputation is left out: it can only be slower. Raises
    ScheduleError if nothing divides or nothing fits.
    """
    views, considered = _views(request)
    limit = request.limit
    best: list[tuple[float, int, Prediction]] = []
    big: list[tuple[float, int, Outlook]] = []
    settled: set[Candidate] = set()
    simulated = 0
    for number, view in enumerate(views):
        if (len(best) == top and view.bound >= -best[0][0]) or simulated >= budget:
            break
        same = replace(view.candidate, checkpoint="none")
        if same in settled:
            continue
        if least_memory(view, offload=request.offload) > limit:
            continue
        peak = peak_memory(view)
        if peak > limit and request.offload:
            view, peak = offloaded(view, peak, limit)
        if peak > limit:
            big.append((peak, number, view))
            continue
        settled.add(same)
        found = predict(request, view, peak)
        simulated += 1
        heapq.heappush(best, (-found.step_time, -number, found))
        if len(best) > top:
            heapq.heappop(best)
    if not best:
        raise ScheduleError(_nothing_fits(request, views, limit))
    ranking = tuple(entry[2] for entry in sorted(best, reverse=True))
    too_big = _nearest(request, sorted(big)[:NEAREST], ranking[0].step_time)
    why = tuple(compare(a, b) for a, b in pairwise(ranking))
    return Plan(request, ranking, why, too_big, considered, simulated)


def _views(request: Request) -> tuple[list[Outlook], int]:
    """The outlooks of all candidates by their bound, and how many candidates there were."""
    views: list[Outlook] = []
    considered = 0
    for candidate in candidates(request):
        considered += 1
        try:
            views.append(outlook(request, candidate))
        except ScheduleError:
            continue  # too few layers for its chunks
    if not views:
        raise ScheduleError(explain_none(request))
    return sorted(views, key=lambda view: view.bound), considered


def _nearest(request: Request, big: list[tuple[float, int, Outlook]], best: float) -> Prediction | None:
    """The leanest of those that do not fit that would be faster than the best."""
    for peak, _, view in big:
        if view.bound < best:
            found = predict(request, view, peak)
            if found.step_time < best:
                return found
    return None


def compare(better: Prediction, worse: Prediction) -> str:
    """Why ``worse`` is behind: the parts of its step that are longer, largest first."""
    parts = {
        "compute": lambda x: x.pipeline - _lost(x),
        "bubble": lambda x: x.bubble_share * x.step_time,
        "exposed TP": lambda x: x.exposed_tp_share * x.step_time,
        "exposed P2P": lambda x: x.exposed_p2p_share * x.step_time,
        "gradient reduction": lambda x: x.gradients,
        "optimizer": lambda x: x.optimizer,
    }
    total = worse.step_time - better.step_time
    longer = {name: part(worse) - part(better) for name, part in parts.items()}
    told = [
        f"{name} {1e3 * extra:+.0f} ms"
        for name, extra in sorted(longer.items(), key=lambda item: -abs(item[1]))
        if abs(extra) > max(5e-4, 0.1 * total)
    ]
    return f"{100 * total / better.step_time:+.1f} %: " + (", ".join(told[:3]) or "the same within 0.5 ms")


def _lost(found: Prediction) -> float:
    return (found.bubble_share + found.exposed_tp_share + found.exposed_p2p_share) * found.step_time


def _nothing_fits(request: Request, views: list[Outlook], limit: float) -> str:
    lean = min(views, key=least_memory)
    return (
        f"nothing fits: on {request.gpus} {request.device.name}, {request.model.name} needs at least "
        f"{least_memory(lean) / 1e9:.1f} GB a device ({lean.candidate}), "
        f"and {limit / 1e9:.1f} GB may be used, {(least_memory(lean) - limit) / 1e9:.1f} GB too few; "
        "take more devices, a shorter sequence, a smaller micro-batch or checkpoint=full"
    )
