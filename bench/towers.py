"""Two towers in one V: what the cut by cost is worth, and what braiding is worth with chunks that differ.

    python -m fxbraid.bench.towers                # simulated, and measured on the emulated cluster
    python -m fxbraid.bench.towers --no-measure   # simulated alone, in one process

First table: a vision tower of 0.5, 1 and 2 times the language model's cost under ``stp``. The cut by cost (the search
of ``braid(order="costs")``, which here may time an eighth of all cuts) against equal numbers of layers, and against the
best of all. All layers' costs come from the traced graphs and from modelled unit times: a decoder layer is two units of
``--unit-ms``, a vision block two shorter ones, unlike each other; merger and head take time too.

Second: ``stp`` against 1F1B-I and ZB-V's order (blocking) in the shape of Qwen2-VL-7B with ``--images`` of
``--patches`` in a sequence of ``--seq`` tokens: times of its units are shares of a decoder unit's, by the FLOPs of its
configuration, and T_AR / T_F is that of a decoder layer. The whole tower lies in the first chunk, which is the longest,
and the others are as even as they can be; all schedules get that cut. The language model alone has equal layers.
Third: the same, each schedule with the cut that is best for it.

Exits with 1 where the cut is more than 3 % from the best or slower than equal layers, or where a gain of the second
table is smaller than for the language model alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Any

import torch
import typer

import fxbraid
from fxbraid.bench.lab import markdown
from fxbraid.bench.towers_model import TwoTowers, plan, towers_batch
from fxbraid.decide import MEASURED
from fxbraid.passes.partition import alike, distinct
from fxbraid.passes.pipeline import Lowered, lower_model
from fxbraid.passes.units import Unit
from fxbraid.plan.cut import CutClock, fastest_cut
from fxbraid.runtime import emulate
from fxbraid.runtime.costs import chunk_cost
from fxbraid.runtime.emulate import Cluster, Link, Op
from fxbraid.runtime.launch import launch
from fxbraid.schedule import Schedule, build, unbraid
from fxbraid.schedule.cut import TRIALS, Row
from fxbraid.simulate import ModelConfig, Workload, load_model

SEQ, PATCHES, WIDTH, VISION = 16, 24, 32, 16
FACTORS = (0.5, 1.0, 2.0)
WITHIN = 0.03
TWO, ONE = "two towers", "language model alone"
INTERLEAVED, ZBV = "interleaved_1f1b", "zbv, blocking"
LIKE = "Qwen/Qwen2-VL-7B-Instruct"
BLOCKS, LAYERS = 9, 8
"""Of Qwen2-VL-7B's 32 and 28, as nearly as so few can be."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Times as shares of a decoder unit's: attention and MLP of a vision block, what lies between the towers, the
    head."""

    attention: float = 0.6
    mlp: float = 0.9
    merger: float = 0.6
    head: float = 1.0

    @classmethod
    def of(cls, model: ModelConfig, layers: int, seq: int, images: int, patches: int) -> Shares:
        """Those of ``model`` by its FLOPs. A decoder's two units count as equal, as everywhere here; what there is once
        counts as much less as there are fewer ``layers``."""
        tower = model.tower
        assert tower is not None
        products = model.attention_parameters + model.mlp_parameters
        unit = seq * products + float(seq) * seq * model.heads * model.head
        mlp = 2.0 * images * patches * (3 if tower.gated else 2) * tower.hidden * tower.ffn
        once = layers / model.layers / unit
        return cls(
            (images * tower.block_flops(0, patches) - mlp) / unit,
            mlp / unit,
            images * (tower.merger_flops(patches) + tower.embedding_flops(patches)) * once,
            2.0 * seq * model.hidden * model.vocab * once,
        )


def message(model: ModelConfig, seq: int, images: int, patches: int) -> float:
    """A block's all-reduce by a decoder layer's. (Here it is always PATCHES x VISION by SEQ x WIDTH.)"""
    assert model.tower is not None
    return images * patches * model.tower.hidden / (seq * model.hidden)


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
    shares: Shares = Shares()

    @property
    def m(self) -> int:
        return 4 * self.pp

    def scaled(self, cost: float) -> Shape:
        """The same with a vision tower of ``cost`` times the decoder layers' cost."""
        own = (self.shares.attention + self.shares.mlp) * self.blocks
        return replace(self, factor=cost * 2 * self.layers / own)

    def seconds(self, unit: Unit) -> float:
        """The modelled time of a unit, by the parameters that it reads or makes gradients of."""
        names = [*unit.state, *(name for name in unit.grads if name)]
        if not unit.matmuls:
            return 0.0
        if any("blocks." in name for name in names):
            share = self.shares.attention if any(".attn." in n for n in names) else self.shares.mlp
            return self.unit_s * self.factor * share
        if any("merger." in name for name in names):
            return self.unit_s * self.shares.merger
        return self.unit_s * (1.0 if any("layers." in name for name in names) else self.shares.head)

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


def cost_cut(clock: CutClock, trials: int = TRIALS) -> tuple[int, ...]:
    """Layers of each chunk, cut by cost as ``braid(order="costs")`` does it."""
    row = Row(len(clock.pieces.chunks))
    at = fastest_cut(clock, row, near=MEASURED, trials=trials)
    return sizes([one // 2 for one in at], row.layers)


def first_chunk(clock: CutClock, blocks: int) -> tuple[int, ...]:
    """The whole tower in the first chunk, which is the longest, and the others as even as they can be; without a tower
    the last one, which has the head, may be longer."""
    count = len(clock.pieces.chunks)

    def cost(at: tuple[int, ...]) -> tuple[bool, float, float]:
        took = [chunk.seconds() for chunk in clock.workload(at).chunks]
        others = took[1:] if blocks else took[1:-1]
        return max(others) > took[0] * (1 + 1e-9), max(took), sum(one * one for one in took)

    cuts = (at for at in combinations(range(1, count), clock.schedule.n_chunks - 1) if at[0] >= blocks)
    best = min(cuts, key=cost)
    return sizes(best, count)


def sizes(bounds: Sequence[int], count: int) -> tuple[int, ...]:
    """Layers of each chunk, from the first layer of each but the first."""
    return tuple(b - a for a, b in zip((0, *bounds), (*bounds, count), strict=True))


def bounds(split: Sequence[int]) -> tuple[int, ...]:
    """The first layer of each chunk but the first."""
    found = [0]
    for size in split[:-1]:
        found.append(found[-1] + size)
    return tuple(found[1:])


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
        schedule = build("stp", p=own.pp, m=own.m)
        clock = CutClock(schedule, load)
        every = list(combinations(range(1, len(names)), schedule.n_chunks - 1))
        cuts = {
            "by cost": cost_cut(clock, trials=len(every) // 8),
            "equal layers": tuple(Row(len(names)).equal(schedule.n_chunks)),
            "best of all": sizes(min(every, key=clock), len(names)),
        }
        for name, split in cuts.items():
            lines.append(Line(f"{cost:g}", name, Run(own, schedule, True, split), clock(bounds(split))))
    return lines


def gain_lines(shape: Shape, *, own_cut: bool) -> list[Line]:
    """Every schedule with the vision tower and without it. own_cut: each with the cut that is best for it, else all
    with the tower in the first chunk."""
    alone = replace(shape, blocks=0)
    lines = []
    for what, own in ((TWO, shape), (ONE, alone)):
        load, _ = pieces(own)
        same: tuple[int, ...] | None = None
        for name, (schedule, braided) in schedules(own).items():
            clock = CutClock(schedule, load, braided)
            if own_cut:
                split = cost_cut(clock)
            else:
                split = same = same or first_chunk(clock, own.blocks)
            lines.append(Line(what, name, Run(own, schedule, braided, split), clock(bounds(split))))
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
    blocks: Annotated[int, typer.Option(help="Vision blocks of the first table.")] = 8,
    layers: Annotated[int, typer.Option(help="Decoder layers of the first table.")] = 10,
    unit_ms: Annotated[float, typer.Option(help="Milliseconds of a decoder's attention or MLP unit.")] = 2.0,
    ratio: Annotated[float, typer.Option(help="T_AR / T_F.")] = 0.37,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence of Qwen2-VL's shape.")] = 4096,
    images: Annotated[int, typer.Option(help="Images of a sequence.")] = 4,
    patches: Annotated[int, typer.Option(help="Patches of an image; 46 x 46 are 644 x 644 pixels.")] = 46
    * 46,
    measured: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Run it on the emulated cluster.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 3600.0,
) -> None:
    """Cuts and gains of a model of two towers."""
    begun = time.monotonic()
    unit_s, like = unit_ms * 1e-3, load_model(LIKE)
    shape = Shape(blocks, layers, 1.0, unit_s, ratio, tp, pp)
    shares = Shares.of(like, LAYERS, seq, images, patches)
    vision = Shape(BLOCKS, LAYERS, 1.0, unit_s, ratio, tp, pp, shares)
    cuts = cut_lines(shape)
    gains, best = (gain_lines(vision, own_cut=own) for own in (False, True))
    typer.echo(f"{time.monotonic() - begun:5.0f} s  simulated", err=True)
    if measured:
        lines = [*cuts, *gains, *best]
        runs = list(dict.fromkeys(line.run for line in lines))
        took = launch(measure, (runs,), nproc=tp * pp, timeout_s=timeout)[0]
        of = dict(zip(runs, took, strict=True))
        lines = [replace(line, measured=of[line.run]) for line in lines]
        cuts, gains, best = (
            lines[: len(cuts)],
            lines[len(cuts) : len(cuts) + len(gains)],
            lines[len(cuts) + len(gains) :],
        )
        typer.echo(f"{time.monotonic() - begun:5.0f} s  measured {len(runs)} steps", err=True)
    typer.echo(
        f"emulated: tp {tp} x pp {pp}, m {shape.m}, T_AR / T_F {ratio:g}; {blocks} vision blocks and {layers} decoder "
        "layers\n"
    )
    typer.echo(table(cuts, "best of all", "tower / language model"))
    said = PATCHES * VISION / (SEQ * WIDTH), message(like, seq, images, patches)
    typer.echo(
        f"\n{LIKE}'s shape, {images} images of {patches} patches in {seq} tokens: {BLOCKS} blocks of "
        f"{shares.attention:.2f} and {shares.mlp:.2f} decoder units, {LAYERS} decoder layers, merger "
        f"{shares.merger:.2f}, head {shares.head:.2f}; a block's message is {said[0]:.2f} of a layer's (of the model's "
        f"{said[1]:.2f})\n"
    )
    typer.echo(table(gains, "stp", "the tower in the first chunk"))
    typer.echo("\n" + table(best, "stp", "each at its best cut"))
    missed = problems(cuts, gains)
    typer.echo("\n".join(["", *missed]) if missed else "\nEvery target is met.")
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    from fxbraid.bench.towers import app as importable  # what ranks run is found by its name

    importable()
