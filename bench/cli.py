"""``fxbraid bench``: the options, and what they mean together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fxbraid.bench.config import BLOCKING, DEFAULT_SCHEDULES, BenchConfig, ConfigError
from fxbraid.bench.run import run_bench
from fxbraid.bench.smollm2_run import SmolConfig
from fxbraid.bench.smollm2_run import run as run_smollm2
from fxbraid.runtime.launch import RankError

MODEL_HELP = "qwen2-tiny, llama-tiny, smollm2 (real weights), or the path of a config.json."
SCHEDULES_HELP = (
    f"Comma list: fxbraid's names (with {BLOCKING}: same order, blocking collectives) and the class names of "
    "torch.distributed.pipelining."
)
#: Parameters that ``--model smollm2`` has no use for.
NOT_FOR_SMOLLM2 = ("microbatch_size", "seq", "schedules", "steps", "compile_", "seed")


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
    schedules: Annotated[str, typer.Option(help=SCHEDULES_HELP)] = ",".join(DEFAULT_SCHEDULES),
    steps: Annotated[int, typer.Option(help="Timed rounds: one step of every schedule in each.")] = 10,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile with Inductor, not eager.")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the tokens.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 900.0,
) -> None:
    """Train one model under fxbraid and under torch.distributed.pipelining, check that all give the same loss
    and gradients as one process, and print what each costs. Exits with 1 where they differ."""
    console = Console(quiet=int(os.environ.get("RANK", "0")) != 0)
    try:
        if model == "smollm2":
            _refuse_given(ctx, NOT_FOR_SMOLLM2)
            smol = SmolConfig(
                pp=pp,
                tps=(1, 3) if tp is None else (tp,),
                microbatches=4 if microbatches is None else microbatches,
            )
            good = run_smollm2(smol, console, json_, timeout)
        else:
            config = BenchConfig(
                model=model,
                tp=2 if tp is None else tp,
                pp=pp,
                microbatches=8 if microbatches is None else microbatches,
                microbatch_size=microbatch_size,
                seq=seq,
                schedules=tuple(name.strip() for name in schedules.split(",") if name.strip()),
                steps=steps,
                compile=compile_,
                seed=seed,
            )
            good = run_bench(config, console, json_, timeout)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except RankError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    if not good:
        raise typer.Exit(1)


def _refuse_given(ctx: typer.Context, names: tuple[str, ...]) -> None:
    """An option that would be ignored is an error, not a silence."""
    given = [n for n in names if getattr(ctx.get_parameter_source(n), "name", "") == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.rstrip('_').replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{options} means nothing with --model smollm2, which runs three AdamW steps of stp, eager, on "
            "sequences of 128 tokens; leave it out"
        )
