"""``fxbraid plan``: which way to split a model over a number of devices."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from fxbraid.plan.report import to_json, to_table
from fxbraid.plan.search import plan
from fxbraid.plan.space import Request
from fxbraid.schedule import ScheduleError
from fxbraid.simulate import DEVICES, device, load_model
from fxbraid.simulate.inputs import read_host_link, read_images, read_imbalance
from fxbraid.simulate.memory import read_amount
from fxbraid.terminal import refuse

WIDTH = 110
"""Columns that the table needs; a narrower terminal wraps instead of losing some."""


def plan_command(
    model: Annotated[str, typer.Option(help="A known model or a config.json.")],
    gpus: Annotated[int, typer.Option(help="Devices.")],
    on: Annotated[str, typer.Option("--device", help=f"One of {', '.join(DEVICES)}.")] = "h100",
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    global_batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 512,
    tp: Annotated[str, typer.Option(help="Tensor-parallel sizes to consider, for example 4,8.")] = "",
    pp: Annotated[str, typer.Option(help="Pipeline sizes to consider.")] = "",
    micro_batch: Annotated[str, typer.Option(help="Micro-batch sizes to consider.")] = "1,2,4",
    schedules: Annotated[str, typer.Option(help="Schedules to consider.")] = "",
    memory: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.92,
    budget: Annotated[
        str,
        typer.Option("--memory-budget", help="Memory that a device may use, as 60GiB; in place of --memory."),
    ] = "",
    efficiency: Annotated[float, typer.Option(help="Share of the roofline that compute reaches.")] = 1.0,
    imbalance: Annotated[str, typer.Option(help="RANK:FACTOR,... on the compute of a pipeline rank.")] = "",
    sequence: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Consider sequence parallelism too, W's inputs kept or gathered again.",
        ),
    ] = False,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Where memory is short, activations of first chunks to the host."),
    ] = False,
    host_link: Annotated[
        str,
        typer.Option(help="With --offload: LATENCY,BANDWIDTH to the host, s and bytes/s; else the device's."),
    ] = "",
    images: Annotated[
        int,
        typer.Option(
            help="Images of a sequence; default 1 for a model with a vision tower, 0 leaves it out."
        ),
    ] = -1,
    patches: Annotated[
        int, typer.Option(help="Patches of an image, where the model takes images of any size.")
    ] = 0,
    top: Annotated[int, typer.Option(help="Configurations to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank tp, pp, dp, v, m, schedule and checkpointing by predicted step time under the memory limit."""
    console = Console()
    wide = Console(width=max(WIDTH, console.width))
    try:
        if host_link and not offload:
            raise ScheduleError("--host-link is what --offload moves activations over; give --offload too")
        known = load_model(model)
        seen, size = read_images(known, images, patches, seq)
        request = Request(
            known,
            device(on),
            gpus,
            seq,
            global_batch,
            tp=_numbers(tp),
            pp=_numbers(pp),
            micro_batch=_numbers(micro_batch),
            schedules=tuple(filter(None, schedules.split(","))),
            memory=memory,
            budget=read_amount(budget) if budget else None,
            efficiency=efficiency,
            imbalance=tuple(read_imbalance(imbalance).items()),
            sequence=("whole", "kept", "gathered") if sequence else ("whole",),
            offload=offload,
            host=read_host_link(host_link),
            images=seen,
            patches=size,
        )
        found = plan(request, top=top)
    except ScheduleError as error:
        refuse(error)
    if as_json:
        typer.echo(to_json(found))
    else:
        wide.print(to_table(found), soft_wrap=True)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ScheduleError(f"sizes are whole numbers with commas, for example 4,8, not {text!r}") from None
