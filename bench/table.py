"""A bench's result for people (a table) and for machines (JSON)."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import asdict
from importlib import metadata
from typing import Any

from rich import box
from rich.table import Table

from fxbraid.bench.config import BenchConfig, is_torch
from fxbraid.bench.ranks import GRAD_TOL, LOSS_TOL, WARMUP_STEPS, Result, Row

CLOCK = "wall, gloo on loopback"


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_table(config: BenchConfig, result: Result) -> Table:
    title = (
        f"{result.model}, {result.parameters / 1e6:.2f} M parameters, tp {config.tp} x pp {config.pp}, "
        f"m {config.microbatches}, {config.tokens} tokens a step, {'compiled' if config.compile else 'eager'}"
    )
    caption = (
        f"{CLOCK}, {config.world_size} ranks on {cores()} cores, {config.steps} interleaved rounds; peak: "
        "activations of the fullest rank; grad diff: max |g - g1| / max |g1|, g1 of the model in one process"
    )
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("schedule", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for heading in ("median\nms", "min-max\nms", "tokens\n/s", "peak\nKiB", "grad\ndiff"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(config, row), style=None if row.ok else "bold red")
    return table


def _cells(config: BenchConfig, row: Row) -> list[str]:
    name = row.name.removeprefix("Schedule") if is_torch(row.name) else row.name
    if row.skipped is not None or row.difference is None:
        return [name, "skipped", *["-"] * 5]
    median = statistics.median(row.samples_s)
    peaks = [peak for peak in row.peak_bytes if peak is not None]
    return [
        name,
        row.label,
        f"{median * 1e3:.0f}",
        f"{min(row.samples_s) * 1e3:.0f}-{max(row.samples_s) * 1e3:.0f}",
        f"{config.tokens / median:.0f}",
        f"{max(peaks) / 1024:.0f}" if peaks else "-",
        f"{row.difference.grad:.0e}",
    ]


def verdict(result: Result) -> str:
    """One sentence or more on whether the engines agree."""
    ran = [row for row in result.rows if row.skipped is None]
    wrong = [row for row in ran if not row.ok]
    lines = [f"{row.name} was skipped: {row.skipped}." for row in result.rows if row.skipped is not None]
    lines += [
        f"{row.name} differs from one process: loss by {row.difference.loss:.1e} (allowed {LOSS_TOL:.0e}), "
        f"gradients by {row.difference.grad:.1e} (allowed {GRAD_TOL:.0e}) in {row.difference.worst}."
        for row in wrong
        if row.difference is not None
    ]
    if not wrong:
        lines.append(
            f"All {len(ran)} give the loss and gradients of the model in one process "
            f"(loss {result.reference_loss:.6f})."
        )
    for name, equal in result.bitwise.items():
        lines.append(f"{name}, braided and blocking: {'bitwise equal' if equal else 'NOT BITWISE EQUAL'}.")
    return "\n".join(lines)


def as_json(config: BenchConfig, result: Result) -> dict[str, Any]:
    """Everything that was measured and on what."""
    rows = []
    for row in result.rows:
        entry = asdict(row) | {"ok": row.ok}
        if row.samples_s:
            median = statistics.median(row.samples_s)
            entry |= {
                "median_s": median,
                "min_s": min(row.samples_s),
                "max_s": max(row.samples_s),
                "tokens_per_s": config.tokens / median,
            }
        rows.append(entry)
    return {
        "config": asdict(config),
        "clock": CLOCK,
        "machine": machine(),
        "versions": versions(),
        "warmup_steps": WARMUP_STEPS,
        "tolerance": {"loss": LOSS_TOL, "grad": GRAD_TOL},
        "parameters": result.parameters,
        "reference_loss": result.reference_loss,
        "bitwise_braided_equals_blocking": dict(result.bitwise),
        "rows": rows,
        "ok": result.ok,
    }


def machine() -> dict[str, Any]:
    return {
        "cores": cores(),
        "system": platform.system(),
        "machine": platform.machine(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("fxbraid", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
