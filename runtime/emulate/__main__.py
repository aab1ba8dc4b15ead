"""``python -m fxbraid.runtime.emulate``: measure how true the emulation is on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tabulate import tabulate

from fxbraid.runtime.emulate.fidelity import ASKED_MS, KINDS, RANKS, Point, busy, measure
from fxbraid.runtime.launch import launch

app = typer.Typer(add_completion=False)


def _numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise typer.BadParameter(f"{text!r} is no comma list of numbers above 0, such as 2,4,8")
    return values


def _choices(text: str, allowed: tuple[str, ...]) -> list[str]:
    values = text.split(",")
    if wrong := [value for value in values if value not in allowed]:
        raise typer.BadParameter(f"{wrong[0]!r} is none of {', '.join(allowed)}")
    return values


@app.command()
def fidelity(
    ms: Annotated[str, typer.Option(help="Durations to ask for, in milliseconds.")] = ",".join(
        map(str, ASKED_MS)
    ),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks; even ones.")] = ",".join(map(str, RANKS)),
    clock: Annotated[str, typer.Option(help="paced, wall, or both: paced,wall.")] = "paced,wall",
    load: Annotated[
        str, typer.Option(help="idle, loaded (a busy process per core), or both.")
    ] = "idle,loaded",
    timeout: Annotated[float, typer.Option(help="Seconds for one combination.")] = 300.0,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every point to this file.")] = None,
) -> None:
    """Ask the emulated cluster for durations and print what it gives, for units, collectives, messages and a
    collective hidden behind a unit. The virtual clock needs no such table: it is exact."""
    console = Console()
    asked = [value / 1000 for value in _numbers(ms)]
    counts = [int(value) for value in _numbers(ranks)]
    if odd := [count for count in counts if count % 2]:
        raise typer.BadParameter(f"--ranks holds {odd[0]}; messages go between pairs, so give even numbers")
    found: list[Point] = []
    for name in _choices(clock, ("paced", "wall")):
        for state in _choices(load, ("idle", "loaded")):
            for count in counts:
                with busy(state == "loaded"):
                    points = launch(measure, (name, state, asked), nproc=count, timeout_s=timeout)[0]
                found += points
                _show(console, points)
    if json_ is not None:
        json_.write_text(json.dumps([asdict(point) for point in found], indent=1) + "\n")


def _show(console: Console, points: list[Point]) -> None:
    first = points[0]
    console.print(
        f"emulated, {first.clock} clock, {first.ranks} ranks, {first.load}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f}; got, in ms (error; worst single lateness)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    kinds = [kind for kind in KINDS if any(point.kind == kind for point in points)]
    rows = []
    for asked in dict.fromkeys(point.asked_s for point in points):
        row = [f"{asked * 1e3:g}"]
        for kind in kinds:
            point = next(p for p in points if p.kind == kind and p.asked_s == asked)
            row.append(f"{point.got_s * 1e3:.2f} ({point.error:+.1%}; {point.worst_s * 1e3:.1f})")
        rows.append(row)
    console.print(tabulate(rows, ["asked", *kinds]) + "\n", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
