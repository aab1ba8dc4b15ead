"""``fxbraid draw``: a schedule as a picture, alone or with a measured step below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fxbraid.draw import to_html, to_svg, to_terminal, to_trace
from fxbraid.draw.measured import Measured
from fxbraid.draw.measured import to_trace as to_measured_trace
from fxbraid.draw.memory import of_result
from fxbraid.plan.choose import mean_costs
from fxbraid.schedule import Costs, Schedule, ScheduleError
from fxbraid.simulate import Result, Workload, simulate
from fxbraid.simulate.inputs import (
    constant_workload,
    imbalanced,
    read_offload,
    read_schedule,
    read_times,
)
from fxbraid.terminal import check_outputs, given, refuse, write
from fxbraid.timeline import Timeline

NARROWEST = 30
"""Columns below which the terminal's picture shows nothing."""


def draw(
    ctx: typer.Context,
    schedule: Annotated[
        str | None,
        typer.Argument(help="A schedule's name, or a CSV file. Default: the measured one, or stp."),
    ] = None,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline ranks.")] = 4,
    m: Annotated[int, typer.Option("-m", "--microbatches", help="Micro-batches.")] = 12,
    v: Annotated[
        int | None, typer.Option("-v", "--chunks", help="Chunks a rank, where there is a choice.")
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            help="T_F,T_I,T_W,T_AR of a chunk. Default: as measured (then in seconds), or 1,1,1,0.25."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of a chunk; each has two units.")] = 1,
    latency: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    braid: Annotated[bool, typer.Option("--braid", help="Pair neighbours where that pays.")] = False,
    blocking: Annotated[bool, typer.Option("--blocking", help="Wait for every all-reduce at once.")] = False,
    imbalance: Annotated[str, typer.Option(help="RANK:FACTOR,... on the compute of a rank.")] = "",
    offload: Annotated[str, typer.Option(help="Activations to the host: chunk0, or a share of it.")] = "",
    host_link: Annotated[
        str,
        typer.Option(
            help="To the host and back: LATENCY,BANDWIDTH in units of time and chunk activations per unit."
        ),
    ] = "",
    measured: Annotated[
        Path | None,
        typer.Option(help="A timeline that model.write_timeline wrote: drawn below the simulated step."),
    ] = None,
    tp_rank: Annotated[int, typer.Option("--tp-rank", help="Whose lanes to draw of a measured step.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write an SVG file.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="In the SVG, what each rank holds, below its lanes.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to zoom and hover.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome or Perfetto trace.")] = None,
    width: Annotated[int | None, typer.Option(help="Columns in the terminal.")] = None,
) -> None:
    """Draw a simulated schedule, or a measured step over it, in the terminal, and as SVG, HTML or a trace if asked."""
    ask = Ask(schedule, pp, m, v, times, layers, latency, braid, blocking, imbalance, offload, host_link)
    try:
        if width is not None and width < NARROWEST:
            raise ScheduleError(f"--width {width}: a picture takes {NARROWEST} columns or more")
        ask.check_used(given(ctx), measured=measured is not None)
        if memory and svg is None:
            raise ScheduleError(
                "--memory is drawn in the SVG; give --svg FILE too (the HTML page shows it anyway)"
            )
        check_outputs([svg, html, trace])
        lanes = None if measured is None else read_measured(measured, tp_rank)
        result = ask.simulate() if lanes is None else ask.beside(lanes)
        timeline = None if lanes is None else lanes.timeline
        made: list[tuple[Path | None, Callable[[], str]]] = [
            (svg, lambda: to_svg(result, measured=lanes, memory=of_result(result) if memory else None)),
            (html, lambda: to_html(result, measured=lanes)),
            (trace, lambda: to_trace(result) if timeline is None else to_measured_trace(timeline, result)),
        ]
        for path, make in made:
            if path is not None:
                write(path, make())
                typer.echo(f"wrote {path}")
    except ScheduleError as error:
        refuse(error)
    if svg is None and html is None and trace is None:
        console = Console()
        console.print(to_terminal(result, width or console.width, measured=lanes), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Ask:
    """What the command line says about the step to simulate."""

    schedule: str | None
    pp: int
    m: int
    v: int | None
    times: str | None
    layers: int
    latency: float
    braid: bool
    blocking: bool
    imbalance: str
    offload: str = ""
    host_link: str = ""

    def check_used(self, asked: frozenset[str], *, measured: bool) -> None:
        """Raises ScheduleError where one of the ``asked`` options would change nothing."""
        if not measured:
            if "tp_rank" in asked:
                raise ScheduleError(
                    "--tp-rank says whose lanes of a measured step to draw; give --measured too"
                )
            return
        options = {
            "pp": "--pp",
            "m": "-m",
            "v": "-v",
            "layers": "--layers",
            "latency": "--latency",
            "braid": "--braid",
            "offload": "--offload",
            "host_link": "--host-link",
        }

        def unused(names: tuple[str, ...], why: str) -> None:
            if found := [options[name] for name in names if name in asked]:
                raise ScheduleError(f"{' and '.join(found)} would change nothing here: {why}")

        unused(("pp", "m"), "a step is simulated on as many ranks and micro-batches as were measured")
        unused(("offload", "host_link"), "a measured step has no copies to draw beside")
        if self.times is None:
            unused(
                ("layers", "latency"),
                "the simulation takes its costs from the measured step; give --times T_F,T_I,T_W,T_AR in seconds "
                "to take others",
            )
            if self.schedule is None:
                unused(
                    ("v", "braid"),
                    "the measured schedule is simulated as it ran; name a schedule to draw another",
                )

    def simulate(self, seconds: bool = False) -> Result:
        """On constants. seconds: they are times of a clock, not units of time."""
        f, i, w, ar = read_times(self.times or "1,1,1,0.25")
        costs = Costs(f, i, w, ar)
        plan = read_schedule(self.schedule or "stp", self.pp, self.m, self.v, braided=self.braid, costs=costs)
        workload = constant_workload(
            plan, (f, i, w, ar), layers=self.layers, latency=self.latency, imbalance=self.imbalance
        )
        if seconds:
            workload = replace(workload, time_unit="s")
        workload, moved = read_offload(
            self.offload, plan, workload, host=self.host_link, braided=not self.blocking
        )
        return simulate(plan, workload, braided=not self.blocking, offload=moved)

    def beside(self, lanes: Measured) -> Result:
        """The step to put a measured one over: the same schedule at the costs of its own file, unless the command line
        names another schedule or times (then on as many ranks and micro-batches)."""
        timeline = lanes.timeline
        known = timeline.schedule
        here = replace(self, pp=known.p, m=known.m)
        if self.times is not None:
            return replace(here, schedule=self.schedule or known.name).simulate(seconds=True)
        if timeline.workload is None:
            raise ScheduleError(
                "this timeline has no costs of units, as it was recorded with compiled blocks; say --times T_F,T_I,T_W,"
                "T_AR in seconds"
            )
        plan = known if self.schedule is None else self._other(here, timeline.workload)
        workload = imbalanced(plan, timeline.workload, self.imbalance)
        braided = timeline.collectives != "blocking" and not self.blocking
        return simulate(plan, workload, braided=braided, ordered_by=timeline.ordered_by)

    def _other(self, here: Ask, costs: Workload) -> Schedule:
        """Another schedule than the measured one, made for the ``costs`` that were measured."""
        known = len(costs.chunks) // here.pp
        name = self.schedule or ""
        v = known if here.v is None and name == "auto" else here.v
        plan = read_schedule(name, here.pp, here.m, v, braided=self.braid, costs=mean_costs(costs))
        if plan.p != here.pp or plan.n_chunks != len(costs.chunks):
            raise ScheduleError(
                f"{plan.name} has {plan.n_chunks} chunks on {plan.p} ranks, and the measured step has costs of "
                f"{len(costs.chunks)} chunks on {here.pp}; name a schedule with {known} chunks a rank, or give the "
                "costs of its chunks with --times T_F,T_I,T_W,T_AR in seconds"
            )
        return plan


def read_measured(path: Path, tp_rank: int) -> Measured:
    """The lanes of one TP rank of a file; raises ScheduleError where there are none."""
    try:
        timeline = Timeline.load(path)
    except (OSError, ValueError) as error:
        raise ScheduleError(str(error)) from None
    if not 0 <= tp_rank < timeline.tp_size:
        raise ScheduleError(f"--tp-rank {tp_rank} is none of the {timeline.tp_size} TP ranks of {path}")
    return Measured(timeline, tp_rank)
