"""Memory over time, as a strip of stacked areas below each rank of a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxbraid.draw.layout import size
from fxbraid.schedule import ScheduleError
from fxbraid.simulate import Result
from fxbraid.simulate.memory import KINDS, Memory

COLOURS = {
    "parameters": "#8b949e",
    "gradients": "#b0b8c1",
    "optimizer": "#cfd5db",
    "activations": "#4d9bf7",
    "hand-over": "#72c267",
    "communication": "#b07be0",
    "temporaries": "#f58f2f",
}
MOST = 6000
"""Points of a rank's strip; where there would be more, each step is one."""

Point = tuple[float, tuple[float, ...]]
"""A time, and the levels by kind from then on."""


@dataclass(frozen=True, slots=True)
class Strips:
    """kinds: what is stacked, from below. curves: of each rank. unit: of the levels."""

    kinds: tuple[str, ...]
    curves: tuple[tuple[Point, ...], ...]
    unit: str

    @property
    def highest(self) -> float:
        """Of all ranks."""
        return max((sum(levels) for curve in self.curves for _, levels in curve), default=0.0)


def of_result(result: Result) -> Strips:
    """What the simulator counts: chunk activations, and static bytes where the workload has them."""
    curves = tuple(
        tuple((time, (level,)) for time, level in result.memory(rank)) for rank in range(result.schedule.p)
    )
    return Strips(("activations",), curves, result.workload.memory_unit)


def of_memory(memory: Memory, result: Result) -> Strips:
    """A prediction by kind, on the clock of ``result``: the nodes of a step share its time evenly. Raises
    ScheduleError where the two are not of one schedule."""
    if len(memory.ranks) != result.schedule.p or any(
        len(rank.steps) != len(row) for rank, row in zip(memory.ranks, result.schedule.actions, strict=False)
    ):
        raise ScheduleError(
            f"the memory is that of {len(memory.ranks)} ranks of {memory.schedule}, the picture that of "
            f"{result.schedule}; predict all ranks of the schedule that is drawn"
        )
    return Strips(
        KINDS, tuple(tuple(_points(memory, result, rank)) for rank in range(result.schedule.p)), "bytes"
    )


def _points(memory: Memory, result: Result, rank: int) -> Iterator[Point]:
    own = memory.ranks[rank]
    steps = list(result.steps(rank))
    by_step: dict[int, list[tuple[int, ...]]] = {}
    if len(own.samples) > MOST:
        by_step = {step: [levels] for step, levels in own.curve()}
    else:
        for sample in own.samples:
            by_step.setdefault(sample.step, []).append(sample.high)
    yield 0.0, own.samples[0].levels
    for at, box in enumerate(steps):
        found = by_step.get(at, [])
        for k, levels in enumerate(found):
            yield box.start + (box.end - box.start) * k / len(found), levels
    yield result.step_time, own.samples[-1].levels


def strip(strips: Strips, rank: int, box: tuple[float, float, float, float], total: float) -> Iterator[str]:
    """The SVG of a rank's strip in ``box`` (x, y, width, height), for times from 0 to ``total``."""
    x, y, width, height = box
    curve, highest = strips.curves[rank], strips.highest or 1.0
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="r" rx="2"/>'
    if not curve:
        return
    base = [0.0] * len(curve)
    times = [x + width * time / (total or 1.0) for time, _ in curve]
    for k, kind in enumerate(strips.kinds):
        top = [low + levels[k] for low, (_, levels) in zip(base, curve, strict=True)]
        if any(levels[k] for _, levels in curve):
            upper = _steps(times, [y + height * (1 - level / highest) for level in top], x + width)
            lower = _steps(times, [y + height * (1 - level / highest) for level in base], x + width)
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in [*upper, *reversed(lower)])
            yield f'<path d="M{path}Z" fill="{COLOURS[kind]}"><title>{kind}</title></path>'
        base = top
    peak = max(sum(levels) for _, levels in curve)
    yield (
        f'<text class="t" x="{x + 4:.1f}" y="{y + 11:.1f}" font-size="11">peak '
        f"{size(peak, strips.unit)}</text>"
    )


def _steps(times: Sequence[float], heights: Sequence[float], end: float) -> list[tuple[float, float]]:
    """A level stays until the next one."""
    points: list[tuple[float, float]] = []
    for k, (time, height) in enumerate(zip(times, heights, strict=True)):
        until = times[k + 1] if k + 1 < len(times) else end
        points += [(time, height), (until, height)]
    return points


def legend(strips: Strips, x: float, y: float) -> Iterator[str]:
    """What the colours mean, of the kinds that occur."""
    for k, kind in enumerate(strips.kinds):
        if any(levels[k] for curve in strips.curves for _, levels in curve):
            yield f'<rect x="{x:.1f}" y="{y:.1f}" width="15" height="13" rx="2.5" fill="{COLOURS[kind]}"/>'
            yield f'<text class="t" x="{x + 21:.1f}" y="{y + 11:.1f}" font-size="13">{kind}</text>'
            x += 21 + 6.5 * len(kind) + 22
