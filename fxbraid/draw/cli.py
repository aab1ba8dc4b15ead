"""``fxbraid draw``: a schedule as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fxbraid.draw import to_html, to_svg, to_terminal, to_trace
from fxbraid.schedule import Costs, ScheduleError
from fxbraid.simulate import simulate
from fxbraid.simulate.inputs import constant_workload, read_schedule, read_times


def draw(
    schedule: Annotated[str, typer.Argument(help="A schedule's name, or a CSV file.")] = "stp",
    pp: Annotated[int, typer.Option("--pp", help="Pipeline ranks.")] = 4,
    m: Annotated[int, typer.Option("-m", "--microbatches", help="Micro-batches.")] = 12,
    v: Annotated[
        int | None, typer.Option("-v", "--chunks", help="Chunks a rank, where there is a choice.")
    ] = None,
    times: Annotated[str, typer.Option(help="T_F,T_I,T_W,T_AR of a chunk.")] = "1,1,1,0.25",
    layers: Annotated[int, typer.Option(help="Layers of a chunk; each has two units.")] = 1,
    latency: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    braid: Annotated[bool, typer.Option("--braid", help="Pair neighbours where that pays.")] = False,
    blocking: Annotated[bool, typer.Option("--blocking", help="Wait for every all-reduce at once.")] = False,
    imbalance: Annotated[str, typer.Option(help="RANK:FACTOR,... on the compute of a rank.")] = "",
    svg: Annotated[Path | None, typer.Option(help="Write an SVG file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to zoom and hover.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome or Perfetto trace.")] = None,
    width: Annotated[int | None, typer.Option(help="Columns in the terminal.")] = None,
) -> None:
    """Draw a simulated schedule in the terminal, and as SVG, HTML or a trace if asked."""
    console = Console()
    try:
        f, i, w, ar = read_times(times)
        plan = read_schedule(schedule, pp, m, v, braided=braid, costs=Costs(f, i, w, ar))
        workload = constant_workload(plan, (f, i, w, ar), layers=layers, latency=latency, imbalance=imbalance)
        result = simulate(plan, workload, braided=not blocking)
    except ScheduleError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(2) from None
    for path, make in ((svg, to_svg), (html, to_html), (trace, to_trace)):
        if path is not None:
            path.write_text(make(result), "utf-8")
            console.print(f"wrote {path}", highlight=False)
    if svg is None and html is None and trace is None:
        console.print(to_terminal(result, width or console.width), soft_wrap=True)
