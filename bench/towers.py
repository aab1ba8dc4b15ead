"""Two towers in one V: what the cut by cost is worth, and what braiding is worth with chunks that differ.

    python -m fxbraid.bench.towers                # simulated, and measured on the emulated cluster
    python -m fxbraid.bench.towers --no-measure   # simulated alone, in one process

First table: a vision tower of 0.5, 1 and 2 times the language model's cost under ``stp``. The cut by cost against equal
numbers of layers, and against the best of all cuts. Second: ``stp`` against 1F1B-I and ZB-V's order (blocking), each
cut as is best for it, with the vision tower and for the language model alone. All layers' costs come from the traced
graphs and from modelled unit times: a decoder layer is two units of ``--unit-ms``, a vision block two shorter ones,
unlike each other, whose all-reduces are shorter as well; merger and head take time too. Exits with 1 where the cut is
more than 3 % from the best or slower than equal layers, or a gain is smaller than for the language model alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

import torch
import typer

import fxbraid
from fxbraid.bench.lab import markdown
from fxbraid.bench.towers_model import TwoTowers, plan, towers_batch
from fxbraid.passes.cost import StretchCost
from fxbraid.passes.cutting import searched
from fxbraid.passes.partition import alike, distinct
from fxbraid.passes.pipeline import Lowered, lower_model
from fxbraid.passes.stretches import Stretches
from fxbraid.passes.units import Unit
from fxbraid.plan.cut import CutClock
from fxbraid.runtime import emulate
from fxbraid.runtime.costs import chunk_cost
from fxbraid.runtime.emulate import Cluster, Link, Op
from fxbraid.runtime.launch import launch
from fxbraid.schedule import Schedule, build, unbraid
from fxbraid.simulate import Workload

SEQ, PATCHES, WIDTH, VISION = 16, 24, 32, 16
FACTORS = (0.5, 1.0, 2.0)
WITHIN = 0.03
TWO, ONE = "two towers", "language model alone"
INTERLEAVED, ZBV = "interleaved_1f1b", "zbv, blocking"
#: Shares of a unit's time: attention and MLP of a vision block, and what no layer holds.
ATTENTION, MLP, MERGER, HEAD = 0.6, 0.9, 0.6, 1.0

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its times. factor: vision units are so much longer. unit_s: a decoder's unit; ratio: T_AR / T_F."""

    blocks: int
    layers: int
    factor: float
    unit_s: float
    ratio: float
    tp: int
    pp: int

    @property
    def m(self) -> int:
        return 4 * self.pp

    def scaled(self, cost: float) -> Shape:
        """The same with a vision tower of ``cost`` times the decoder layers' cost."""
        factor = cost * 2 * self.layers / ((ATTENTION + MLP) * self.blocks)
        return Shape(self.blocks, self.layers, factor, self.unit_s, self.ratio, self.tp, self.pp)

    def seconds(self, unit: Unit) -> float:
        """The modelled time of a unit, by the parameters that it reads or makes gradients of."""
        names = [*unit.state, *(name for name in unit.grads if name)]
        if not unit.matmuls:
            return 0.0
        if any("blocks." in name for name in names):
            share = ATTENTION if any(".attn." in name for name in names) else MLP
            return self.unit_s * self.factor * share
        if any("merger." in name for name in names):
            return self.unit_s * MERGER
        return self.unit_s * (1.0 if any("layers." in name for name in names) else HEAD)

    def collective(self, nbytes: int) -> float:
        """Seconds of an all-reduce: in proportion to its bytes, ``ratio`` of a unit for a decoder's."""
        return self.ratio * self.unit_s * nbytes / (SEQ * WIDTH * 8)

    def model(self) -> torch.nn.Module:
        return TwoTowers(self.blocks, self.layers, vision=VISION, width=WIDTH)

    def batch(self) -> dict[str, torch.Tensor]:
        return towers_batch(self.m, SEQ, patches=PATCHES)


def pieces(shape: Shape) -> tuple[Workload, tuple[str, ...]]:
    """Costs of every layer, from the traced graphs, and the layers' paths."""
    lowered = traced(shape)
    made = {index: _cost(shape, lowered, index) for index in lowered.chunks}
    return Workload(tuple(made[first] for first in alike(lowered.partition))), lowered.partition.names


def _cost(shape: Shape, lowered: Lowered, index: int) -> Any:
    chunk = lowered.chunks[index]
    seconds = {unit.key: shape.seconds(unit) for units in chunk.units.values() for unit in units}
    return chunk_cost(chunk, seconds, shape.collective)


_known: dict[tuple[int, int, int], Lowered] = {}


def traced(shape: Shape) -> Lowered:
    """Every layer as a chunk; times change nothing in it."""
    key = shape.blocks, shape.layers, shape.tp
    if key not in _known:
        model, count = shape.model(), shape.blocks + shape.layers
        micro = {name: value[:1] for name, value in shape.batch().items()}
        _known[key] = lower_model(
            model,
            micro,
            n_chunks=count,
            split_layers=[1] * count,
            only=distinct,
            tp_size=shape.tp,
            tp_plan=plan(model),
            vocab_parallel=False,
        )
    return _known[key]


def schedules(shape: Shape) -> dict[str, tuple[Schedule, bool]]:
    """By name: the schedule, and whether its collectives are hidden."""
    made = {name: build(name, p=shape.pp, m=shape.m) for name in ("stp", INTERLEAVED, "zbv")}
    return {
        "stp": (made["stp"], True),
        INTERLEAVED: (made[INTERLEAVED], True),
        ZBV: (unbraid(made["zbv"]), False),
    }


def cost_cut(clock: CutClock, n_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk, cut by cost as ``braid(order="costs")`` does it."""
    chunks = clock.pieces.chunks
    row = Stretches({}, tuple(map(str, range(len(chunks)))), ())
    costs = [StretchCost()] * row.count
    for index, piece in enumerate(chunks):
        costs[2 * index + 1] = StretchCost(*(piece.seconds(phase) for phase in "FIW"))
    cut = searched(costs, row, n_chunks, lambda cut: clock(tuple(at // 2 for at in cut.at)), trials=300)
    return sizes(tuple(at // 2 for at in cut.at), len(chunks))


def sizes(bounds: Sequence[int], count: int) -> tuple[int, ...]:
    """Layers of each chunk, from the first layer of each but the first."""
    return tuple(b - a for a, b in zip((0, *bounds), (*bounds, count), strict=True))


def bounds(split: Sequence[int]) -> tuple[int, ...]:
    """The first layer of each chunk but the first."""
    found = [0]
    for size in split[:-1]:
        found.append(found[-1] + size)
    return tuple(found[1:])


def equal(count: int, n_chunks: int) -> tuple[int, ...]:
    """As equal numbers of layers as there can be."""
    return tuple(count * (c + 1) // n_chunks - count * c // n_chunks for c in range(n_chunks))


@dataclass(frozen=True, slots=True)
class Run:
    """One braid to measure: ``shape`` under ``schedule``, cut to ``split``."""

    shape: Shape
    schedule: Schedule
    braided: bool
    split: tuple[int, ...]


def measure(runs: Sequence[Run]) -> list[float]:
    """In each rank: virtual seconds of a step of every run."""
    torch.set_num_threads(1)
    found = []
    shape = runs[0].shape
    moved = emulate.factor(Op.ALL_REDUCE, shape.tp)
    beta = moved * SEQ * WIDTH * 8 / (shape.ratio * shape.unit_s)
    cluster = Cluster(Link(0.0, beta), Link(0.0))
    with emulate.process_group(cluster, timeout_s=600):
        for run in runs:
            emulate.unit_times(run.shape.seconds)
            model, batch = run.shape.model(), run.shape.batch()
            braided = fxbraid.braid(
                model,
                batch,
                tp_size=shape.tp,
                pp_size=shape.pp,
                n_microbatches=shape.m,
                schedule=run.schedule,
                split=run.split,
                braided=run.braided,
                tp_plan=plan(model),
                vocab_parallel=False,
                compile=False,
            )
            with emulate.stopwatch() as reading:
                braided.step(**batch)
            found.append(reading.seconds)
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a table. predicted, measured: seconds of a step; measured 0 where it was not."""

    what: str
    name: str
    run: Run
    predicted: float
    measured: float = 0.0


def cut_lines(shape: Shape) -> list[Line]:
    """The cut by cost, equal layers, and the best of all, for every tower's cost."""
    lines = []
    for cost in FACTORS:
        own = shape.scaled(cost)
        load, names = pieces(own)
        schedule, n_chunks = build("stp", p=own.pp, m=own.m), 2 * own.pp
        clock = CutClock(schedule, load)
        every = combinations(range(1, len(names)), n_chunks - 1)
        cuts = {
            "by cost": cost_cut(clock, n_chunks),
            "equal layers": equal(len(names), n_chunks),
            "best of all": sizes(min(every, key=clock), len(names)),
        }
        for name, split in cuts.items():
            lines.append(Line(f"{cost:g}", name, Run(own, schedule, True, split), clock(bounds(split))))
    return lines


def gain_lines(shape: Shape) -> list[Line]:
    """Every schedule with its own cut, with the vision tower and without it."""
    alone = Shape(0, shape.blocks + shape.layers, 1.0, shape.unit_s, shape.ratio, shape.tp, shape.pp)
    lines = []
    for what, own in ((TWO, shape), (ONE, alone)):
        load, names = pieces(own)
        for name, (schedule, braided) in schedules(own).items():
            clock = CutClock(schedule, load, braided)
            split = cost_cut(clock, schedule.n_chunks)
            lines.append(Line(what, name, Run(own, schedule, braided, split), clock(bounds(split))))
            assert len(names) == sum(split)
    return lines


def table(lines: Sequence[Line], against: str, heading: str) -> str:
    """Markdown: a row per line, and how much longer it takes than ``against`` of the same group."""
    rows = []
    for line in lines:
        base = next(one for one in lines if one.what == line.what and one.name == against)
        took = [f"{line.predicted * 1e3:.2f}", f"{100 * (line.predicted / base.predicted - 1):+.1f} %"]
        if line.measured:
            took += [f"{line.measured * 1e3:.2f}", f"{100 * (line.measured / base.measured - 1):+.1f} %"]
        rows.append([line.what, line.name, "-".join(map(str, line.run.split)), *took])
    headings = [heading, "", "layers of each chunk", "predicted ms", f"than {against}"]
    return markdown([*headings, *(["measured ms", f"than {against}"] if lines[0].measured else [])], rows)


def problems(cuts: Sequence[Line], gains: Sequence[Line]) -> list[str]:
    """What is missed."""
    found = []
    of: Callable[[Line], float] = lambda line: line.measured or line.predicted  # noqa: E731
    for cost in dict.fromkeys(line.what for line in cuts):
        took = {line.name: of(line) for line in cuts if line.what == cost}
        if took["by cost"] > (1 + WITHIN) * took["best of all"]:
            found.append(f"MISSED: at {cost} the cut by cost is over {WITHIN:.0%} from the best of all")
        if took["by cost"] > took["equal layers"] * (1 + 1e-9):
            found.append(f"MISSED: at {cost} the cut by cost is slower than equal layers")
    two, one = (
        {line.name: of(line) for line in gains if line.what == what}
        for what in ("two towers", "language model alone")
    )
    for name in (INTERLEAVED, ZBV):
        mine, wanted = two[name] / two["stp"] - 1, one[name] / one["stp"] - 1
        if mine < wanted - 1e-9:
            found.append(f"MISSED: stp gains {mine:.1%} on {name} with two towers, {wanted:.1%} with one")
    return found


@app.command()
def main(
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 2,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 2,
    blocks: Annotated[int, typer.Option(help="Vision blocks.")] = 8,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 10,
    unit_ms: Annotated[float, typer.Option(help="Milliseconds of a decoder's attention or MLP unit.")] = 2.0,
    ratio: Annotated[float, typer.Option(help="T_AR / T_F.")] = 0.37,
    measured: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Run it on the emulated cluster.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 3600.0,
) -> None:
    """Cuts and gains of a model of two towers."""
    begun = time.monotonic()
    shape = Shape(blocks, layers, 1.0, unit_ms * 1e-3, ratio, tp, pp)
    lines = [*cut_lines(shape), *gain_lines(shape)]
    typer.echo(f"{time.monotonic() - begun:5.0f} s  simulated", err=True)
    if measured:
        took = launch(measure, ([line.run for line in lines],), nproc=tp * pp, timeout_s=timeout)[0]
        lines = [Line(x.what, x.name, x.run, x.predicted, t) for x, t in zip(lines, took, strict=True)]
    cuts, gains = lines[: 3 * len(FACTORS)], lines[3 * len(FACTORS) :]
    typer.echo(
        f"tp {tp} x pp {pp}, m {shape.m}, {blocks} vision blocks and {layers} decoder layers, T_AR / T_F {ratio:g}\n"
    )
    typer.echo(table(cuts, "best of all", "tower / language model"))
    typer.echo("\n" + table(gains, "stp", "model"))
    missed = problems(cuts, gains)
    typer.echo("\n".join(["", *missed]) if missed else "\nEvery target is met.")
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
