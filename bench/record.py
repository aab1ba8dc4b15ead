"""A bench's result for machines: JSON with every sample, and CSV with one line per engine."""

from __future__ import annotations

import csv
import io
import os
import platform
import statistics
from dataclasses import asdict
from importlib import metadata
from typing import Any

from fxbraid.bench.config import BenchConfig
from fxbraid.bench.ranks import ERROR_TOL, GRAD_TOL, LOSS_TOL, WARMUP_STEPS, Result, Row
from fxbraid.bench.table import cores, etas, peaks


def as_json(config: BenchConfig, result: Result) -> dict[str, Any]:
    """Everything that was measured and on what."""
    return {
        "config": asdict(config),
        "clock": result.clock,
        "clock_name": config.clock_name,
        "times": result.times,
        "machine": machine(),
        "versions": versions(),
        "warmup_steps": WARMUP_STEPS,
        "tolerance": {"loss": LOSS_TOL, "grad": GRAD_TOL, "emulation_error": ERROR_TOL},
        "parameters": result.parameters,
        "reference_loss": result.reference_loss,
        "bitwise": dict(result.bitwise),
        "rows": [_row(config, row) for row in result.rows],
        "eta": [asdict(found) for found in etas(config, result)],
        "ok": result.ok,
        "valid": result.valid,
    }


def _row(config: BenchConfig, row: Row) -> dict[str, Any]:
    entry = asdict(row) | {"ok": row.ok, "valid": row.valid}
    if row.samples_s:
        median = statistics.median(row.samples_s)
        entry |= {
            "median_s": median,
            "min_s": min(row.samples_s),
            "max_s": max(row.samples_s),
            "tokens_per_s": config.tokens / median,
        }
        if row.prediction is not None:
            entry["prediction_difference"] = median / row.prediction.step_s - 1
    return entry


#: Heading -> what of a row of the JSON.
CSV_COLUMNS = (
    "name",
    "label",
    "skipped",
    "median_s",
    "min_s",
    "max_s",
    "tokens_per_s",
    "predicted_s",
    "prediction_difference",
    "exposed_tp",
    "exposed_p2p",
    "bubble",
    "peak_bytes",
    "predicted_peak_bytes",
    "loss",
    "loss_difference",
    "grad_difference",
    "ok",
    "valid",
    "clock",
)


def as_csv(config: BenchConfig, result: Result) -> str:
    """One line per engine; empty cells where there is nothing to say."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in result.rows:
        more: dict[str, Any] = {"clock": result.clock, "peak_bytes": max(peaks(row), default="")}
        if row.prediction is not None:
            more |= {"predicted_s": row.prediction.step_s, "predicted_peak_bytes": row.prediction.peak}
        if row.difference is not None:
            more |= {"loss_difference": row.difference.loss, "grad_difference": row.difference.grad}
        writer.writerow(_row(config, row) | dict(row.shares) | more)
    return out.getvalue()


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
