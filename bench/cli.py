"""``fxbraid bench``: the options, and what they mean together; ``fxbraid bench compare``: the regression gate."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fxbraid.bench.compare import TOLERANCE, CompareError, compare_files
from fxbraid.bench.config import DEFAULT_SCHEDULES, REAL, UNIT_MS, BenchConfig, ConfigError
from fxbraid.bench.devices import LINKS
from fxbraid.bench.entries import BLOCKING, FREE, GROUPS, ORDER
from fxbraid.bench.run import Outputs, check_outputs, run_bench
from fxbraid.bench.smollm2_run import SmolConfig
from fxbraid.bench.smollm2_run import run as run_smollm2
from fxbraid.runtime.launch import RankError, under_torchrun

MODEL_HELP = "qwen2-tiny, llama-tiny, smollm2 (real weights), or the path of a config.json."
SCHEDULES_HELP = (
    f"Comma list: fxbraid's names and auto (stp{BLOCKING} is stp's order with blocking collectives, stp{FREE} without "
    f"any, timing only), the class names of torch.distributed.pipelining, {ORDER}ZBVZeroBubble for a class's order on "
    f"fxbraid's executor; {', '.join(GROUPS)} stand for many."
)
LINK_HELP = (
    f"TP link: {REAL} (gloo on loopback), or emulated: {', '.join(LINKS)}, or alpha,beta in s and bytes/s. With "
    "--ratio, which sets it, messages alone take this one."
)
#: Parameters that ``--model smollm2`` has a use for.
FOR_SMOLLM2 = ("model", "tp", "pp", "microbatches", "json_", "timeout")
#: A year: a larger limit is a slip.
MOST_TIMEOUT = 366 * 86400.0

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen2-tiny",
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks (2; smollm2: 1, then 3).")] = None,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 2,
    microbatches: Annotated[
        int | None, typer.Option("-m", "--microbatches", help="Micro-batches a step (8; smollm2: 4).")
    ] = None,
    microbatch_size: Annotated[int, typer.Option(help="Sequences in a micro-batch.")] = 2,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 64,
    layers: Annotated[int | None, typer.Option(help="Another depth than the model's.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Another width than the model's.")] = None,
    schedules: Annotated[str, typer.Option(help=SCHEDULES_HELP)] = ",".join(DEFAULT_SCHEDULES),
    link: Annotated[str, typer.Option(help=LINK_HELP)] = REAL,
    pp_link: Annotated[str | None, typer.Option(help="PP link, emulated; like --link by default.")] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Set the TP link so that T_AR / T_F of a chunk has this value.")
    ] = None,
    compute: Annotated[
        str, typer.Option(help="real, or modelled: units take their time on an emulated device.")
    ] = "real",
    times: Annotated[str, typer.Option(help="Modelled times: equal (T_F = T_I = T_W) or flops.")] = "equal",
    unit_ms: Annotated[float, typer.Option(help="Modelled ms of a mean attention or MLP forward.")] = UNIT_MS,
    clock: Annotated[
        str | None, typer.Option(help="Of the emulation: virtual or paced (modelled compute), wall (real).")
    ] = None,
    arithmetic: Annotated[
        bool, typer.Option("--arithmetic/--timing-only", help="Compute the numbers, or only their times.")
    ] = True,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="fxbraid's engines with sequence parallelism.")
    ] = False,
    offload: Annotated[
        str | None,
        typer.Option(help="fxbraid's engines with activations on the host: chunk0, or a share of it."),
    ] = None,
    host_link: Annotated[
        str | None, typer.Option(help="Link to the host, emulated: a name or alpha,beta, as --link.")
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", "--steps", help="Timed rounds, a step of each schedule (10; virtual: 2)."),
    ] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile with Inductor, not eager.")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line per schedule to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture to this file (needs matplotlib).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the tokens.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 900.0,
) -> None:
    """Train one model under fxbraid and under torch.distributed.pipelining, check that all give the same loss
    and gradients as one process, and print what each costs. Exits with 1 where they differ, and where a time is
    invalid."""
    if ctx.invoked_subcommand is not None:
        return
    # Without the launcher's other variables a RANK is somebody else's, and this process starts its own ranks.
    console = Console(quiet=under_torchrun() and os.environ["RANK"] != "0", emoji=False)
    if not console.is_terminal:
        console.width = 150  # a log cuts no column off
    try:
        if not 0 < timeout <= MOST_TIMEOUT:
            raise ConfigError(f"--timeout is {timeout:g}; give seconds above 0, at most {MOST_TIMEOUT:g}")
        outputs = Outputs(json_, csv, plot)
        check_outputs(outputs)
        if model == "smollm2":
            _refuse_given(ctx)
            smol = SmolConfig(
                pp=pp,
                tps=(1, 3) if tp is None else (tp,),
                microbatches=4 if microbatches is None else microbatches,
            )
            good = run_smollm2(smol, console, json_, timeout)
        else:
            if compute == "real":
                _refuse_modelled(ctx)
            if repeat is None:
                repeat = 2 if compute == "modelled" and clock in (None, "virtual") else 10
            config = BenchConfig(
                model=model,
                tp=2 if tp is None else tp,
                pp=pp,
                microbatches=8 if microbatches is None else microbatches,
                microbatch_size=microbatch_size,
                seq=seq,
                layers=layers,
                hidden=hidden,
                schedules=tuple(name.strip() for name in schedules.split(",") if name.strip()),
                steps=repeat,
                compile=compile_,
                seed=seed,
                link=link,
                pp_link=pp_link,
                compute=compute,  # type: ignore[arg-type]
                times=times,  # type: ignore[arg-type]
                unit_ms=unit_ms,
                ratio=ratio,
                clock=clock,
                arithmetic=arithmetic,
                sequence_parallel=sequence_parallel,
                offload=_offload(offload),
                host_link=host_link,
            )
            good = run_bench(config, console, outputs, timeout)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except RankError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    if not good:
        raise typer.Exit(1)


def _offload(text: str | None) -> str | float | None:
    """A fraction as a number; anything else as it is, for the check to refuse."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="What --json wrote before.")],
    new: Annotated[Path, typer.Argument(help="What --json wrote now.")],
    tolerance: Annotated[str, typer.Option(help="How much slower is fine, such as 5%.")] = f"{TOLERANCE:.0%}",
    baseline: Annotated[
        str | None,
        typer.Option(help="The schedule that times are relative to (default: torch's, else a blocking one)."),
    ] = None,
) -> None:
    """The regression gate: exits with 1 where NEW is slower than OLD by more than the tolerance and the spread,
    where losses or gradients no longer agree, or where a schedule is gone. Refuses files of different runs."""
    try:
        found = compare_files(_read(old), _read(new), _fraction(tolerance), baseline)
    except CompareError as error:
        raise typer.BadParameter(str(error)) from error
    if found.own is not None:
        typer.echo(
            f"baseline {found.baseline}: {1e3 * found.own.old:.3f} -> {1e3 * found.own.new:.3f} ms, which two machines "
            "may differ in"
        )
        if not found.own.name.startswith("Schedule"):
            typer.echo(
                "None of torch's schedules is in both files: what slows all of fxbraid down does not show."
            )
    for change in found.changes:
        unit = "ms" if found.baseline is None else f"x {found.baseline}"
        was, now = (v * (1e3 if found.baseline is None else 1) for v in (change.old, change.new))
        typer.echo(f"{change.name}: {was:.3f} -> {now:.3f} {unit} (spread {100 * change.spread:.1f} %)")
    for problem in found.problems:
        typer.echo(f"WORSE: {problem}")
    if not found.ok:
        raise typer.Exit(1)
    typer.echo(f"No worse: {len(found.changes)} schedules within {tolerance} and their spread.")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CompareError(f"{path} cannot be read as JSON: {error}") from error


def _fraction(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise CompareError(f"--tolerance {text} is no share; write 5% or 0.05")
    if value > 1 and not text.endswith("%"):
        raise CompareError(
            f"--tolerance {text} would be {100 * value:g} %; write {text}% or {value / 100:g} for {text} %, and "
            f"{100 * value:g}% if you mean that"
        )
    return value


def _refuse_given(ctx: typer.Context) -> None:
    """An option that would be ignored is an error, not a silence."""
    given = _given(ctx, [name for name in ctx.params if name not in FOR_SMOLLM2])
    if given:
        raise ConfigError(
            f"{given} means nothing with --model smollm2, which runs three AdamW steps of stp, eager, on "
            "sequences of 128 tokens; leave it out"
        )


def _refuse_modelled(ctx: typer.Context) -> None:
    """With real compute, nothing reads the options of modelled compute."""
    if given := _given(ctx, ["times", "unit_ms"]):
        raise ConfigError(f"{given} is for modelled compute, and here it is real; add --compute modelled")


def _given(ctx: typer.Context, names: Iterable[str]) -> str:
    """Those of ``names`` that the user wrote, as options."""
    given = [name for name in names if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    return ", ".join(f"--{name.rstrip('_').replace('_', '-')}" for name in given)
