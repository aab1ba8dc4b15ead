"""What braiding is worth: stp against torch's schedules, two chunks a rank, T_F = T_I = T_W, m = 4p, emulated devices.

    python -m fxbraid.bench.gains --pp 2
    python -m fxbraid.bench.gains --pp 4
    python -m fxbraid.bench.gains --pp 8 --layers 1 --pp-link 100e-6,inf --no-torch

A gain is t(other) / t(stp) - 1: how much faster stp is. ``interleaved_1f1b`` is fxbraid's, which hides the
backward's all-reduces behind its own W's, as the paper's 1F1B-I does; ``order:`` is torch's order with blocking
collectives; ``Schedule...`` is torch's real class. Exits with 1 where a target is missed: at T_AR / T_F = 0.37 12 %
over 1F1B-I and 15 % over ZB-V's order, at 1.0 24 % and 40 % (p = 2 and 4; beyond that, any gain).
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from fxbraid.bench.entries import ORDER
from fxbraid.bench.lab import ORDERS, TRIO, Cell, Found, Plan, emulated_config, markdown, measure
from fxbraid.bench.pippy import SCHEDULES
from fxbraid.runtime.launch import launch

RATIOS = (0.37, 1.0)
INTERLEAVED, ZBV = "interleaved_1f1b", f"{ORDER}ZBVZeroBubble"
#: At each ratio, what stp must gain.
TARGETS = {(0.37, INTERLEAVED): 0.12, (0.37, ZBV): 0.15, (1.0, INTERLEAVED): 0.24, (1.0, ZBV): 0.40}
AUTO_TRIO = ("auto", "auto:free")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 2,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers per chunk, two chunks a rank.")] = 2,
    pp_link: Annotated[str, typer.Option(help="PP link: alpha,beta.")] = "0,inf",
    unit_ms: Annotated[float, typer.Option(help="Milliseconds of an attention or MLP unit.")] = 2.0,
    torch: Annotated[bool, typer.Option(help="Run torch's real classes too.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 3600.0,
) -> None:
    """Measure gains on the virtual clock."""
    config = emulated_config(
        tp, pp, layers, unit_ms=unit_ms, clock="virtual", arithmetic=False, pp_link=pp_link
    )
    names = (*TRIO, *AUTO_TRIO, INTERLEAVED, *ORDERS, *(SCHEDULES if torch else ()))
    plan = Plan(config, names, (4 * pp,), RATIOS)
    start = time.monotonic()

    def on_line(rank: int, line: str) -> None:
        typer.echo(f"{time.monotonic() - start:5.0f} s  {line}", err=True)

    found = launch(measure, (plan,), nproc=tp * pp, timeout_s=timeout, on_line=on_line)[0]
    typer.echo(
        f"tp {tp} x pp {pp}, m {4 * pp}, {layers} layers per chunk, {unit_ms:g} ms per unit: {found.label}\n"
    )
    typer.echo(
        markdown(
            ("schedule", *(f"ms at {r:g}" for r in RATIOS), *(f"stp gains at {r:g}" for r in RATIOS)),
            gain_rows(found, plan),
        )
    )
    typer.echo("\n" + exposed_text(found, plan))
    missed = problems(found, plan)
    typer.echo("\n".join(["", *missed]) if missed else "\nEvery target is met.")
    if missed:
        raise typer.Exit(1)


def gain_rows(found: Found, plan: Plan) -> list[list[str]]:
    """One for each schedule that ran."""
    m = plan.ms[0]
    cells = [found.at(m, ratio) for ratio in plan.ratios]
    rows = []
    for name in (name for name in plan.names if name in cells[0]):
        times = [f"{at[name].seconds * 1e3:.2f}" for at in cells]
        gains = [f"{100 * gain(at, name):+.1f} %" for at in cells]
        rows.append([name, *times, *gains])
    return rows


def gain(cells: dict[str, Cell], name: str) -> float:
    """How much faster stp is than ``name``."""
    return cells[name].seconds / cells["stp"].seconds - 1


def t_ar(plan: Plan, ratio: float) -> float:
    """Seconds of a chunk's all-reduces in one F or I."""
    layers = (plan.config.layers or 0) / (2 * plan.config.pp)
    return ratio * plan.config.unit_ms * 1e-3 * 2 * layers


def exposed(cells: dict[str, Cell], name: str, free: str, plan: Plan, ratio: float) -> float:
    """How far the step of ``name`` is above that of ``free``, in T_AR of a chunk."""
    return (cells[name].seconds - cells[free].seconds) / t_ar(plan, ratio)


def exposed_text(found: Found, plan: Plan) -> str:
    """Against the published (2p + 1) T_AR that a rank waits for, and p - 1 more in the bubble."""
    p, m = plan.config.pp, plan.ms[0]
    rows = []
    for ratio in plan.ratios:
        cells = found.at(m, ratio)
        for name in ("stp", "auto"):
            own, above = (exposed(cells, name, free, plan, ratio) for free in (f"{name}:free", "stp:free"))
            waits = cells[name].shares.get("exposed_tp", 0.0) * cells[name].seconds / t_ar(plan, ratio)
            rows.append([f"{ratio:g}", name, f"{waits:.2f}", f"{own:.2f}", f"{above:.2f}"])
    headings = ("T_AR / T_F", "schedule", "a rank waits", "step above its own free", "step above stp:free")
    return (
        f"In T_AR of a chunk, of {4 * m} T_AR that each rank runs (published for stp: a rank waits 2p + 1 = "
        f"{2 * p + 1}, and p - 1 = {p - 1} more lie in the bubble):\n\n"
    ) + markdown(headings, rows)


def problems(found: Found, plan: Plan) -> list[str]:
    """The targets that are missed."""
    return [
        f"MISSED: at {ratio:g} stp is {100 * got:.1f} % faster than {name}, wanted {100 * wanted:.0f} %"
        for (ratio, name), target in TARGETS.items()
        if (got := gain(found.at(plan.ms[0], ratio), name))
        < (wanted := target if plan.config.pp <= 4 else 0.0)
    ]


if __name__ == "__main__":
    app()
