"""Run a bench: start the ranks (or be one, under torchrun), show progress, print and write."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from fxbraid.bench.config import BenchConfig, ConfigError, check_config
from fxbraid.bench.ranks import MARK, Progress, Result, run_ranks
from fxbraid.bench.table import as_json, make_table, verdict
from fxbraid.runtime.launch import launch, under_torchrun


def run_bench(config: BenchConfig, console: Console, json_path: Path | None, timeout_s: float) -> bool:
    """Check, run, print and write; whether all engines agree."""
    check_config(config)
    check_world(config.world_size, f"--tp {config.tp} x --pp {config.pp}")
    with progress_bar(console) as show:
        if under_torchrun():
            result = run_ranks(config, show)
        else:
            result = run_local(run_ranks, (config,), config.world_size, show, console, timeout_s)[0]
    _print(config, result, console)
    if json_path is not None and not console.quiet:
        write_json(json_path, as_json(config, result))
    return result.ok


def check_world(world_size: int, sizes: str) -> None:
    """Under torchrun the number of ranks is given, and has to fit."""
    if under_torchrun() and (given := int(os.environ["WORLD_SIZE"])) != world_size:
        raise ConfigError(
            f"{sizes} is {world_size} ranks, and this launcher started {given}; "
            f"use --nproc-per-node {world_size} or other sizes"
        )


def run_local(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    nproc: int,
    show: Progress,
    console: Console,
    timeout_s: float,
) -> list[Any]:
    """``launch``, with the ranks' progress on ``show`` and whatever else they print on the console."""

    def on_line(rank: int, line: str) -> None:
        if line.startswith(MARK):
            show(*json.loads(line.removeprefix(MARK)))
        else:
            console.print(f"[rank {rank}] {line}", markup=False, highlight=False)

    return launch(target, args, nproc=nproc, timeout_s=timeout_s, on_line=on_line)


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A bar on a terminal; on anything else a line per stage, so that logs stay readable."""
    if not console.is_terminal:
        start = time.monotonic()

        def line(done: int, total: int, text: str) -> None:
            seconds = time.monotonic() - start
            console.print(f"[{done + 1}/{total}] {seconds:4.0f} s  {text}", markup=False, highlight=False)

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting the ranks", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _print(config: BenchConfig, result: Result, console: Console) -> None:
    console.print(make_table(config, result))
    console.print(verdict(result), markup=False, highlight=False)
