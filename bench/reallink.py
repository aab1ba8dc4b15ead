"""Nothing modelled: real matmuls, a real slow link (``bench/netlink.py``), tp 2 x pp 2 ranks. Needs root.

    python -m fxbraid.bench.reallink

First the ranks measure T_F on loopback, all at once, as they will compute; then the link is built so that T_AR / T_F
is near ``--ratio``; then every engine is checked against one process and timed in turn. Reported, not gated: other
work on the machine counts, and so does sharing of cores. Where there are fewer cores than ranks, two TP ranks reach a
launch up to a unit's time apart, which no order of units hides; ``--pp 1`` gives each of two ranks a core of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from fxbraid.bench import netlink
from fxbraid.bench.config import BenchConfig, check_config, skip_reason
from fxbraid.bench.devices import KINDS, measure_times
from fxbraid.bench.models import build_model, make_batch
from fxbraid.bench.pippy import SCHEDULES
from fxbraid.bench.ranks import run_ranks
from fxbraid.bench.record import as_json
from fxbraid.bench.run import progress_bar, show_line, write_json
from fxbraid.bench.table import etas, make_table, verdict
from fxbraid.runtime.launch import launch, process_group

OURS = ("stp", "stp:blocking", "stp:free")

app = typer.Typer(add_completion=False)


def measure_units(config: BenchConfig) -> dict[tuple[str, str], float]:
    """In each rank: seconds of attention and MLP units by phase, while all ranks compute."""
    hf = config.hf(num_hidden_layers=1)
    with process_group(timeout_s=120, device_type="cpu"):
        batch = make_batch(hf.vocab_size, config.microbatch_size, config.seq, 0)
        found = measure_times(build_model(hf, 0), batch, config.tp, compile=config.compile)
        return dict(found.seconds)


def measure_reduce(nbytes: int, rounds: int = 5) -> float:
    """In each rank: seconds of one all-reduce in TP pairs, all pairs at once, the median of the slowest."""
    import statistics
    import time

    torch.set_num_threads(1)
    with process_group(timeout_s=120, device_type="cpu"):
        rank = dist.get_rank()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
        x = torch.ones(nbytes // 4)
        took = []
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(x, group=pairs[rank // 2])
            took.append(time.perf_counter() - start)
        slowest = torch.tensor(statistics.median(took[1:]), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


@app.command()
def main(
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 1024,
    seq: Annotated[int, typer.Option(help="Tokens in a micro-batch.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers, in two chunks for each of the pipeline's ranks.")] = 4,
    pp: Annotated[int, typer.Option(help="Ranks of the pipeline; tp is 2.")] = 2,
    m: Annotated[int, typer.Option("-m", help="Micro-batches a step.")] = 8,
    ratio: Annotated[float, typer.Option(help="T_AR / T_F to aim at.")] = 0.5,
    rounds: Annotated[int, typer.Option(help="Steps of each engine, in turn.")] = 5,
    torch_: Annotated[bool, typer.Option("--torch/--no-torch", help="Run torch's classes too.")] = True,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 1800.0,
) -> None:
    """Measure hiding where nothing is modelled."""
    if why := netlink.reason():
        typer.echo(why, err=True)
        raise typer.Exit(1)
    config = BenchConfig(
        pp=pp,
        hidden=hidden,
        seq=seq,
        layers=layers,
        microbatch_size=1,
        microbatches=m,
        steps=rounds,
        schedules=OURS,
    )
    named = replace(config, schedules=(*OURS, *SCHEDULES) if torch_ else OURS)
    names = tuple(entry.name for entry in named.entries() if skip_reason(named, entry) is None)
    config = replace(config, schedules=names)
    check_config(config)
    seconds = launch(f"{NAME}:measure_units", (config,), nproc=config.world_size, timeout_s=timeout)[0]
    forward = sum(seconds[kind, "F"] for kind in KINDS) / len(KINDS)
    nbytes = seq * hidden * 4
    # Two ranks exchange the whole buffer, once each way; netlink's own measurement is 0.9 of the nominal rate.
    rate = round(nbytes / (ratio * forward) / 0.9 * 8 / 1e6)
    console = Console(width=150, emoji=False)
    units = ", ".join(f"{kind} {phase} {1e3 * took:.0f}" for (kind, phase), took in seconds.items())
    console.print(f"units alone on all ranks at once, ms: {units}", highlight=False)
    with netlink.Network(config.world_size, f"{rate}mbit") as network:
        reduce = network.launch(f"{NAME}:measure_reduce", (nbytes,), timeout_s=timeout)[0]
        console.print(
            f"all-reduce of {nbytes / 1e6:g} MB {1e3 * reduce:.1f} ms, mean forward unit {1e3 * forward:.1f} ms: "
            f"T_AR / T_F = {reduce / forward:.2f}",
            highlight=False,
        )
        with progress_bar(console) as show:
            result = network.launch(
                run_ranks,
                (config, None, network.label),
                timeout_s=timeout,
                on_line=show_line(show, console),
            )[0]
    console.print(make_table(config, result))
    console.print(verdict(config, result), markup=False, highlight=False)
    if json_ is not None:
        content = as_json(config, result) | {"units_s": {" ".join(k): v for k, v in seconds.items()}}
        write_json(json_, content | {"all_reduce_s": reduce, "ratio": reduce / forward})
    for found in etas(config, result):
        if found.value is not None and found.best and found.value < 0.8 * found.best:
            console.print(
                f"Hoped for eta >= 0.8 eta_max; it is {found.value / found.best:.2f}.", highlight=False
            )


#: How ranks import this file, also when it is run by ``python -m``.
NAME = __spec__.name if __spec__ else __name__

if __name__ == "__main__":
    app()
