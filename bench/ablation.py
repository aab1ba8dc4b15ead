"""What checkpointing costs and saves: step time and peak by policy, measured and predicted (docs/memory.md).

    python -m fxbraid.bench.ablation

First as simulated for a 12.1B model on A800, where peaks have parameters, gradients and the optimizer's state in them.
Then on an emulated cluster with the virtual clock, units taking time in proportion to their FLOPs: the step, as run and
as simulated, and the fullest rank's peak activations, as measured (``BraidedModel.measure_peak``) and as predicted.
Exits with 1 where a prediction is off by more than 5 %, or losses differ between policies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from fxbraid import schedule as schedules
from fxbraid.bench.ablation_ranks import POLICIES, Cell, Plan, measure
from fxbraid.bench.lab import emulated_config, markdown
from fxbraid.passes.checkpoint import Named
from fxbraid.runtime.launch import launch
from fxbraid.simulate import Shape, analytic, device, load_model, simulate
from fxbraid.simulate.analytic import Checkpoint

ANALYTIC: dict[Named, Checkpoint] = {
    "none": "selective",
    "mlp": "mlp",
    "attention+mlp": "attention+mlp",
    "all": "all",
}
"""What the analytic model calls them: its "none" keeps also what fxbraid always makes again."""
OFF = 0.05
RATIO = 0.2

app = typer.Typer(add_completion=False)

HEADINGS = ("checkpoint", "step, ms", "step", "simulated", "peak, kB", "peak", "predicted")


def table(ranks: Sequence[Sequence[Cell]]) -> list[list[str]]:
    """A row for each policy: the slowest rank's time, the fullest one's peak."""
    rows = []
    plain = ranks[0][0].seconds, max(rank[0].peak for rank in ranks)
    for cells in zip(*ranks, strict=True):
        first, full = cells[0], max(cells, key=lambda cell: cell.peak)
        rows.append(
            [
                f'"{first.policy}"',
                f"{first.seconds * 1e3:.2f}",
                _change(first.seconds, plain[0]),
                _change(first.simulated, first.seconds),
                f"{full.peak / 1e3:.1f}",
                _change(full.peak, plain[1]),
                _change(full.predicted, full.peak),
            ]
        )
    return rows


def problems(ranks: Sequence[Sequence[Cell]]) -> list[str]:
    """Predictions that are off, and losses that differ."""
    missed = []
    for rank, cells in enumerate(ranks):
        for cell in cells:
            pairs = (("step", cell.simulated, cell.seconds), ("peak", cell.predicted, cell.peak))
            missed += [
                f"MISSED rank {rank}, {cell.policy}: {name} predicted {_change(said, found)} off"
                for name, said, found in pairs
                if abs(said / found - 1) > OFF
            ]
            if abs(cell.loss - cells[0].loss) > 1e-5 * abs(cells[0].loss):
                missed.append(
                    f"MISSED rank {rank}, {cell.policy}: loss {cell.loss}, and {cells[0].loss} without"
                )
    return missed


def large(name: str, model: str, on: str, tp: int, pp: int, m: int, seq: int) -> list[list[str]]:
    """A row for each policy, simulated: step time and the fullest rank's memory."""
    plan = schedules.build(name, p=pp, m=m)
    rows: list[list[str]] = []
    plain = (0.0, 0.0)
    for policy in POLICIES:
        shape = Shape(seq, 1, tp, checkpoint=ANALYTIC[policy])
        result = simulate(plan, analytic(load_model(model), device(on), plan.placement, shape))
        peak = max(rank.peak for rank in result.ranks)
        plain = plain if rows else (result.step_time, peak)
        rows.append(
            [
                f'"{policy}"',
                f"{result.step_time:.3f}",
                _change(result.step_time, plain[0]),
                f"{peak / 1e9:.1f}",
                _change(peak, plain[1]),
            ]
        )
    return rows


def _change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f} %"


@app.command()
def main(
    schedule: Annotated[str, typer.Option(help="The schedule.")] = "stp",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers per chunk.")] = 1,
    ratio: Annotated[float, typer.Option(help="T_AR / T_F, which sets the TP link.")] = RATIO,
    unit_ms: Annotated[float, typer.Option(help="Milliseconds of a mean attention or MLP forward.")] = 2.0,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 3600.0,
) -> None:
    """The table of docs/memory.md."""
    start = time.monotonic()

    def on_line(rank: int, line: str) -> None:
        typer.echo(f"{time.monotonic() - start:5.0f} s  {line}", err=True)

    rows = large(schedule, "qwen2-12.1b", "a800", 8, 2, 12, 6144)
    typer.echo(f"qwen2-12.1b on A800, {schedule}, tp 8 x pp 2, m = 12, 6144 tokens, simulated\n")
    typer.echo(markdown(("checkpoint", "step, s", "step", "memory, GB", "memory"), rows))
    config = emulated_config(
        tp, pp, layers, unit_ms=unit_ms, clock="virtual", arithmetic=True, pp_link="0,inf"
    )
    plan = Plan(config, schedule, 3 * pp, ratio)
    ranks = launch(measure, (plan,), nproc=tp * pp, timeout_s=timeout, on_line=on_line)
    typer.echo(
        f"\n{schedule}, tp {tp} x pp {pp}, m = {3 * pp}, {layers} layers per chunk, T_AR / T_F = {ratio:g}, emulated, "
        "virtual clock; peak activations of the fullest rank\n"
    )
    typer.echo(markdown(HEADINGS, table(ranks)))
    if missed := problems(ranks):
        typer.echo("\n" + "\n".join(missed))
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
