"""``fxbraid simulate``: one configuration on a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fxbraid.schedule import Costs, Schedule, ScheduleError
from fxbraid.simulate import (
    Device,
    ModelConfig,
    Result,
    Shape,
    Workload,
    analytic,
    device,
    load_model,
    peaks,
    simulate,
)
from fxbraid.simulate.analytic import CHECKPOINTS, POLICIES, Checkpoint
from fxbraid.simulate.inputs import (
    constant_workload,
    imbalanced,
    read_images,
    read_offload,
    read_schedule,
    read_times,
)
from fxbraid.simulate.memory import Memory
from fxbraid.terminal import check_outputs, refuse, write

TRACED = {"selective": "none", "full": "all"}
"""What braid() calls them: it never keeps what is cheap to make again."""


def simulate_command(
    schedule: Annotated[str, typer.Argument(help="A schedule's name, or a CSV file.")] = "stp",
    pp: Annotated[int, typer.Option("--pp", help="Pipeline ranks.")] = 4,
    m: Annotated[int, typer.Option("-m", "--microbatches", help="Micro-batches.")] = 16,
    v: Annotated[
        int | None, typer.Option("-v", "--chunks", help="Chunks a rank, where there is a choice.")
    ] = None,
    times: Annotated[str, typer.Option(help="T_F,T_I,T_W,T_AR of a chunk, without --model.")] = "1,1,1,0.25",
    units: Annotated[int, typer.Option("--layers", help="Layers of a chunk, without --model.")] = 1,
    latency: Annotated[float, typer.Option(help="Time of a message, without --model.")] = 0.0,
    model: Annotated[str, typer.Option(help="A known model or a config.json.")] = "",
    on: Annotated[str, typer.Option("--device", help="A named device.")] = "h100",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option("--micro-batch", help="Sequences of a micro-batch.")] = 1,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="none, selective, full, or a policy of braid(): mlp, attention, attention+mlp, all."
        ),
    ] = "none",
    sequence: Annotated[
        bool,
        typer.Option("--sequence-parallel", help="Norms and residuals on seq / tp tokens (with --model)."),
    ] = False,
    regather: Annotated[
        bool, typer.Option("--regather", help="With --sequence-parallel: W gathers its inputs again.")
    ] = False,
    split: Annotated[
        str,
        typer.Option(help="Layers of each chunk, for example 12,12,12,10; with images those of both towers."),
    ] = "",
    images: Annotated[
        int,
        typer.Option(
            help="Images of a sequence; default 1 for a --model with a vision tower, 0 leaves it out."
        ),
    ] = -1,
    patches: Annotated[
        int, typer.Option(help="Patches of an image, where the model takes images of any size.")
    ] = 0,
    efficiency: Annotated[float, typer.Option(help="Share of the roofline that compute reaches.")] = 1.0,
    braid: Annotated[bool, typer.Option("--braid", help="Pair neighbours where that pays.")] = False,
    blocking: Annotated[bool, typer.Option("--blocking", help="Wait for every all-reduce at once.")] = False,
    imbalance: Annotated[str, typer.Option(help="RANK:FACTOR,... on the compute of a rank.")] = "",
    offload: Annotated[str, typer.Option(help="Activations to the host: chunk0, or a share of it.")] = "",
    host_link: Annotated[
        str,
        typer.Option(
            help="To the host and back: LATENCY,BANDWIDTH (with --model s and bytes/s, default the device's; "
            "without, units of time and chunk activations per unit, default none that costs time)."
        ),
    ] = "",
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Trace --model (needs torch; a minute or more) and say what each rank holds, by what it is for.",
        ),
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(help="Draw it into an SVG file, with memory below each rank (by kind with --memory)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate one training step: its time, where it goes, memory, MFU and the critical path."""
    console = Console()
    try:
        costs = read_times(times)
        layers: list[int] | None = None
        plan = read_schedule(schedule, pp, m, v, braided=braid, costs=Costs(*costs))
        if model:
            known = load_model(model)
            seen, size = read_images(known, images, patches, seq)
            shape = Shape(
                seq,
                batch,
                tp,
                checkpoint=_checkpoint(checkpoint),
                efficiency=efficiency,
                sequence=sequence,
                regather=regather,
                images=seen,
                patches=size,
            )
            if memory and shape.images:
                raise ScheduleError(
                    "--memory traces a model of text; for one with images call fxbraid.predict_memory(model, batch), "
                    "or leave --memory out (the peaks below count both towers)"
                )
            layers = [int(part) for part in split.split(",")] if split else None
            workload = _workload(known, device(on), plan, shape, layers, braided=not blocking)
            workload = imbalanced(plan, workload, imbalance)
        else:
            if images > 0 or patches:
                raise ScheduleError("--images and --patches are of a --model with a vision tower; give one")
            if _checkpoint(checkpoint) != "none" or sequence or regather:
                raise ScheduleError(
                    "--checkpoint, --sequence-parallel and --regather change what a model's units are; give a --model "
                    "(the chunks of --times are taken as they are)"
                )
            workload = constant_workload(plan, costs, layers=units, latency=latency, imbalance=imbalance)
        workload, moved = read_offload(offload, plan, workload, host=host_link, braided=not blocking)
        result = simulate(plan, workload, braided=not blocking, offload=moved)
        held = None
        if memory:
            if not model or offload:
                raise ScheduleError(
                    "--memory traces a model on one process, where nothing says how much there is time to move: give "
                    "--model, and leave --offload out (without --memory, the peaks below count it)"
                )
            kept = TRACED.get(checkpoint, checkpoint)
            held = _trace(
                model,
                plan,
                tp,
                seq,
                batch,
                split=layers,
                sequence_parallel=sequence,
                regather=regather,
                checkpoint=kept,
            )
        if svg is not None:
            _draw(svg, result, held)
    except ScheduleError as error:
        refuse(error)
    if as_json:
        found = as_dict(result, batch)
        typer.echo(json.dumps(found if held is None else {**found, "memory": held.as_dict()}, indent=2))
        return
    _print(console, result, batch)
    if held is not None:
        Console(width=max(140, console.width)).print(str(held), highlight=False, soft_wrap=True)


def _workload(
    model: ModelConfig,
    on: Device,
    plan: Schedule,
    shape: Shape,
    layers: list[int] | None,
    *,
    braided: bool,
) -> Workload:
    """Of two towers, with chunks that begin where this schedule's step is shortest."""
    if not shape.images or layers is not None:
        return analytic(model, on, plan.placement, shape, layers)
    from fxbraid.plan.cut import CutClock, fastest_cut
    from fxbraid.simulate.two_towers import both, stretched

    made = stretched(model, on, shape)
    if made.row.layers < plan.n_chunks:
        return analytic(model, on, plan.placement, shape)  # which says so
    clock = CutClock(plan, Workload(made.pieces), braided)
    return both(model, on, plan.placement, shape, at=fastest_cut(clock, made.row))


def _trace(
    model: str,
    plan: Schedule,
    tp: int,
    seq: int,
    batch: int,
    *,
    split: list[int] | None,
    **options: Any,
) -> Memory:
    from fxbraid.memory import imagined, predict_memory  # needs torch

    wanted = {"split": split or "auto", **options}
    made, example = imagined(model, seq, batch * plan.m)
    try:
        return predict_memory(
            made, example, tp_size=tp, pp_size=plan.p, n_microbatches=plan.m, schedule=plan, **wanted
        )
    except ValueError as error:
        raise ScheduleError(str(error)) from None


def _draw(path: Path, result: Result, held: Memory | None) -> None:
    from fxbraid.draw import to_svg
    from fxbraid.draw.memory import of_memory, of_result

    check_outputs([path])
    write(path, to_svg(result, memory=of_result(result) if held is None else of_memory(held, result)))


def as_dict(result: Result, batch: int = 1) -> dict[str, object]:
    """What ``--json`` prints."""
    ranks = [
        {
            "compute": rank.compute,
            "exposed_tp": rank.exposed_tp,
            "exposed_p2p": rank.exposed_p2p,
            **({"exposed_dp": rank.exposed_dp} if any(result.trace.reductions) else {}),
            **_moved(result, at),
            "bubble": rank.bubble,
            "peak": rank.peak,
        }
        for at, rank in enumerate(result.ranks)
    ]
    return {
        "schedule": str(result.schedule),
        "workload": result.workload.label,
        "memory_unit": result.workload.memory_unit,
        **result.summary(),
        "samples_per_time": result.schedule.m * batch / result.step_time,
        "critical_path": path_by_kind(result),
        "ranks": ranks,
    }


def _moved(result: Result, rank: int) -> dict[str, float]:
    """What offload does on a rank, if there is any."""
    plan = result.offload
    if plan is None:
        return {}
    own = result.ranks[rank]
    return {
        "exposed_host": own.exposed_host,
        "offloaded": plan.moved(rank),
        "offloaded_share": plan.share(rank),
    }


def path_by_kind(result: Result) -> dict[str, float]:
    """How much of the critical path is compute, collectives and messages."""
    total: dict[str, float] = {}
    for item in result.critical_path():
        total[item.kind] = total.get(item.kind, 0.0) + item.end - item.start
    return total


def _checkpoint(text: str) -> Checkpoint:
    for known in (*CHECKPOINTS, *POLICIES):
        if text == known:
            return known
    raise ScheduleError(f"checkpoint is one of {', '.join((*CHECKPOINTS, *POLICIES))}, not {text!r}")


def _print(console: Console, result: Result, batch: int) -> None:
    from fxbraid.draw.layout import duration, headline, size

    plain = result.workload.time_unit != "s"
    console.print(Text(headline(result), style="bold"))
    console.print(Text(result.workload.label, style="dim"))
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("rank", "compute", "exposed TP", "exposed P2P", "bubble", "peak memory"):
        table.add_column(name, justify="right")
    for rank, times in enumerate(result.ranks):
        row = (times.compute, times.exposed_tp, times.exposed_p2p, times.bubble)
        table.add_row(
            str(rank), *(duration(x, plain) for x in row), size(times.peak, result.workload.memory_unit)
        )
    console.print(table)
    if (plan := result.offload) is not None:
        before = peaks(result.schedule, result.workload, ordered_by=result.ordered_by)
        unit = result.workload.memory_unit
        said = ", ".join(
            f"rank {r} {100 * plan.share(r):.0f} % (peak {size(before[r], unit)} without)"
            for r in range(len(before))
        )
        console.print(f"offload, of what was asked: {said}", highlight=False)
    path = ", ".join(f"{kind} {duration(x, plain)}" for kind, x in path_by_kind(result).items())
    console.print(f"critical path: {path}", highlight=False)
    if not plain:
        rate = result.schedule.m * batch / result.step_time
        console.print(f"{rate:.3f} sequences a second per pipeline", highlight=False)
