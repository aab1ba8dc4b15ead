"""What every picture shares: the strands of a block, how times are written, the headline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fxbraid.schedule import Action, Phase, Schedule
from fxbraid.simulate import Box, Result, StepBox


@dataclass(frozen=True, slots=True)
class Strand:
    """One action inside a step, with its units. row 0 is the upper half of the lane, row 1 the lower; a step
    of one action has both (``rows`` = 1).
    """

    action: Action
    row: int
    rows: int
    start: float
    end: float
    units: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A step with its strands and its collectives."""

    step: StepBox
    strands: tuple[Strand, ...]
    collectives: tuple[Box, ...]

    @property
    def braided(self) -> bool:
        """More than one action."""
        return len(self.strands) > 1


class Picture(Protocol):
    """What the pictures read of a step: a simulated one (``Result``) or a measured one (``measured.Measured``)."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def step_time(self) -> float: ...

    def steps(self, rank: int) -> Iterator[StepBox]: ...

    def boxes(self, rank: int) -> Iterator[Box]: ...


def collective_name(result: Picture) -> str:
    """What a tensor-parallel collective is called: under sequence parallelism there are two kinds."""
    workload = getattr(result, "workload", None)
    return "collective" if "sequence parallel" in getattr(workload, "label", "") else "all-reduce"


def blocks(result: Picture, rank: int) -> Iterator[Block]:
    """The steps of a rank, ready to draw. In a block of two or three actions F is on top, all others
    below.
    """
    steps = list(result.steps(rank))
    grouped: list[list[Box]] = [[] for _ in steps]
    for box in result.boxes(rank):
        grouped[box.step].append(box)
    for step, boxes in zip(steps, grouped, strict=True):
        actions = list(dict.fromkeys(box.action for box in boxes))
        strands = []
        for at, action in enumerate(actions):
            units = tuple(b for b in boxes if b.action == action and b.lane == "compute" and b.end > b.start)
            first, last = (units[0].start, units[-1].end) if units else (step.start, step.end)
            rows = 1 if len(actions) == 1 else 2
            strands.append(Strand(action, min(at, rows - 1), rows, first, last, units))
        yield Block(step, tuple(strands), tuple(b for b in boxes if b.lane == "collective"))


def headline(result: Result) -> str:
    """The numbers of a simulation in one line."""
    s = result.schedule
    text = (
        f"{s.name} · p = {s.p} · m = {s.m} · step {number(result.step_time)} · "
        f"bubble {100 * result.bubble_share:.1f} % · exposed TP {100 * result.exposed_tp_share:.1f} %"
    )
    if result.exposed_p2p_share > 0.0005:
        text += f" · exposed P2P {100 * result.exposed_p2p_share:.1f} %"
    if result.exposed_dp_share > 0.0005:
        text += f" · exposed DP {100 * result.exposed_dp_share:.1f} %"
    if result.offload is not None:
        text += f" · peak {size(max(result.peak), result.workload.memory_unit)} with offload"
    if result.exposed_host_share > 0.0005:
        text += f" · exposed copies {100 * result.exposed_host_share:.1f} %"
    if result.mfu is not None:
        text += f" · MFU {100 * result.mfu:.1f} %"
    return text + ("" if result.braided else " · blocking")


def number(value: float) -> str:
    """Four significant digits, no exponent for the sizes that occur."""
    return f"{value:.4g}" if abs(value) < 10000 else f"{value:.0f}"


def duration(value: float, constants: bool) -> str:
    """A time: plain where the workload is made from constants, else with a unit."""
    if constants:
        return number(value)
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"


def size(value: float, unit: str) -> str:
    """An amount of memory in the workload's unit."""
    if unit != "bytes":
        return f"{value:.4g} {unit}"
    for power, name in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if value >= 1000**power:
            return f"{value / 1000**power:.4g} {name}"
    return f"{value:.0f} B"


def name_of(action: Action) -> str:
    """``backward`` and so on, for tooltips and legends."""
    return {
        Phase.F: "forward",
        Phase.I: "input gradient",
        Phase.W: "weight gradient",
        Phase.B: "backward",
    }[action.phase]
