"""Run a bench: start the ranks (or be one, under torchrun), show progress, print and write."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from fxbraid.bench.config import BenchConfig, ConfigError, check_config
from fxbraid.bench.pippy import SCHEDULES, try_compiled
from fxbraid.bench.plot import check_plot, plot
from fxbraid.bench.ranks import MARK, Progress, Result, run_ranks
from fxbraid.bench.record import as_csv, as_json
from fxbraid.bench.table import make_table, verdict
from fxbraid.runtime.launch import launch, under_torchrun


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write, each None for not."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None


def run_bench(config: BenchConfig, console: Console, outputs: Outputs, timeout_s: float) -> bool:
    """Check, run, print and write; whether all engines agree and all times count."""
    check_config(config)
    if outputs.plot is not None:
        check_plot(outputs.plot)
    check_world(config.world_size, f"--tp {config.tp} x --pp {config.pp}")
    with progress_bar(console) as show:
        if under_torchrun():
            result = run_ranks(config, show)
        else:
            result = run_local(run_ranks, (config,), config.world_size, show, console, timeout_s)[0]
            result = _with_failures(config, result, timeout_s)
    console.print(make_table(config, result))
    console.print(verdict(config, result), markup=False, highlight=False)
    if not console.quiet:
        _write(config, result, outputs)
    return result.ok and result.valid


def check_outputs(outputs: Outputs) -> None:
    """Raise ``ConfigError`` for files that could not be written, before anything runs."""
    found: dict[Path, str] = {}
    for option in ("json", "csv", "plot"):
        path: Path | None = getattr(outputs, option)
        if path is None:
            continue
        whole = path.absolute().resolve()
        if other := found.get(whole):
            raise ConfigError(f"--{other} and --{option} are one file, {path}; give each its own")
        found[whole] = option
        if whole.is_dir():
            raise ConfigError(f"--{option} {path} is a folder; give the name of a file")
        if not whole.parent.is_dir():
            raise ConfigError(f"--{option} {path}: there is no folder {whole.parent}; make it first")
        if not os.access(whole if whole.exists() else whole.parent, os.W_OK):
            raise ConfigError(f"--{option} {path} may not be written by this user; give another place")


def _with_failures(config: BenchConfig, result: Result, timeout_s: float) -> Result:
    """Say of torch's schedules that ran eagerly, because they split the backward, how they fail compiled: each is
    tried in a process of its own."""
    rows = []
    for row in result.rows:
        tried = config.compile and row.samples_s and row.name in SCHEDULES
        if tried and SCHEDULES[row.name].splits_backward:
            said = launch(try_compiled, (row.name,), nproc=1, timeout_s=timeout_s, on_line=lambda *_: None)[0]
            row = replace(
                row, note=f"runs eagerly here, since it splits the backward; tried on one rank, {said}"
            )
        rows.append(row)
    return replace(result, rows=tuple(rows))


def _write(config: BenchConfig, result: Result, outputs: Outputs) -> None:
    content = as_json(config, result)
    if outputs.json is not None:
        write_json(outputs.json, content)
    if outputs.csv is not None:
        outputs.csv.write_text(as_csv(config, result))
    if outputs.plot is not None:
        plot(content, outputs.plot)


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

    return launch(target, args, nproc=nproc, timeout_s=timeout_s, on_line=show_line(show, console))


def show_line(show: Progress, console: Console) -> Callable[[int, str], None]:
    """What ``launch`` does with a rank's line: progress goes to ``show``, anything else to ``console``."""

    def on_line(rank: int, line: str) -> None:
        if line.startswith(MARK):
            show(*json.loads(line.removeprefix(MARK)))
        else:
            console.print(f"[rank {rank}] {line}", markup=False, highlight=False)

    return on_line


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
