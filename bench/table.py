"""A bench's result for people: a table, and sentences on whether the engines agree."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from fxbraid.bench.config import BenchConfig
from fxbraid.bench.entries import BLOCKING, FREE, short
from fxbraid.bench.pippy import SCHEDULES
from fxbraid.bench.ranks import ERROR_TOL, GRAD_TOL, LOSS_TOL, Result, Row
from fxbraid.metrics import eta, eta_max
from fxbraid.schedule.stp import below_closed_form

STP = "stp"
SHARES = {"exposed_tp": "exp.\nTP %", "exposed_p2p": "exp.\nP2P %", "bubble": "bubble\n%"}


@dataclass(frozen=True, slots=True)
class Eta:
    """How much of what blocking collectives cost ``schedule`` hides, from three rows of one run. ``best``: the bound
    for stp, else None. ``value`` is None where there is nothing to hide."""

    schedule: str
    value: float | None
    best: float | None


def etas(config: BenchConfig, result: Result) -> list[Eta]:
    """For every schedule that ran overlapped, blocking and free, and whose three times are valid."""
    found = []
    for rows in trios(result):
        if all(row.valid for row in rows):
            measured, blocking, free = (statistics.median(row.samples_s) for row in rows)
            value, best = eta(blocking, measured, free), None
            if rows[0].name == STP and config.tp > 1:
                best = eta_max(config.pp, config.microbatches)
            found.append(Eta(rows[0].name, value, best))
    return found


def trios(result: Result) -> list[tuple[Row, Row, Row]]:
    """For every schedule that ran in all three ways, its rows: overlapped, blocking, free."""
    rows = {row.name: row for row in result.rows if row.samples_s}
    return [
        (row, rows[name + BLOCKING], rows[name + FREE])
        for name, row in rows.items()
        if name + BLOCKING in rows and name + FREE in rows
    ]


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers; it is left out where no row has one."""

    heading: str
    cell: Callable[[Row], str | None]


def columns(config: BenchConfig) -> list[Column]:
    """From step time to parity."""

    def median(row: Row) -> float:
        return statistics.median(row.samples_s)

    def predicted(row: Row) -> str | None:
        return None if row.prediction is None else f"{row.prediction.step_s * 1e3:.{_digits(config)}f}"

    def apart(row: Row) -> str | None:
        return None if row.prediction is None else f"{100 * (median(row) / row.prediction.step_s - 1):+.2f}"

    def share(name: str) -> Callable[[Row], str | None]:
        return lambda row: f"{100 * row.shares[name]:.1f}" if name in row.shares else None

    def predicted_peak(row: Row) -> str | None:
        return None if row.prediction is None else f"{row.prediction.peak / 1024:.0f}"

    return [
        Column("median\nms", lambda row: f"{median(row) * 1e3:.{_digits(config)}f}"),
        Column("min-max\nms", lambda row: _range(row.samples_s, config)),
        Column("tokens\n/s", lambda row: f"{config.tokens / median(row):.0f}"),
        Column("simul.\nms", predicted),
        Column("diff.\n%", apart),
        *(Column(heading, share(name)) for name, heading in SHARES.items()),
        Column("peak\nKiB", lambda row: f"{max(p) / 1024:.0f}" if (p := peaks(row)) else None),
        Column("simul.\nKiB", predicted_peak),
        Column("grad\ndiff", lambda row: f"{row.difference.grad:.0e}" if row.difference else None),
    ]


def peaks(row: Row) -> list[int]:
    """Activation bytes of the ranks that could say."""
    return [peak for peak in row.peak_bytes if peak is not None]


def _digits(config: BenchConfig) -> int:
    return 2 if config.clock_name == "virtual" else 0


def _range(samples: Sequence[float], config: BenchConfig) -> str | None:
    if config.clock_name == "virtual" and min(samples) == max(samples):
        return None
    return f"{min(samples) * 1e3:.0f}-{max(samples) * 1e3:.0f}"


def make_table(config: BenchConfig, result: Result) -> Table:
    title = (
        f"{result.model}, {result.parameters / 1e6:.2f} M parameters, tp {config.tp} x pp {config.pp}, "
        f"m {config.microbatches}, {config.tokens} tokens a step, {'compiled' if config.compile else 'eager'}"
    )
    caption = (
        f"{result.clock}; compute: {result.times}; {config.world_size} ranks on {cores()} cores, {config.steps} "
        "interleaved rounds; peak: activations of the fullest rank; grad diff: max |g - g1| / max |g1|, g1 of the "
        "model in one process"
    )
    ran = [row for row in result.rows if row.samples_s]
    shown = [c for c in columns(config) if any(c.cell(row) is not None for row in ran)]
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("schedule", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for column in shown:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in result.rows:
        name = short(row.name) if row.name in SCHEDULES else row.name
        if row.samples_s:
            cells = [column.cell(row) or "-" for column in shown]
            label = row.label if row.valid else f"{row.label} INVALID"
        else:
            cells, label = ["-"] * len(shown), "skipped"
        table.add_row(name, label, *cells, style=None if row.ok and row.valid else "bold red")
    return table


def verdict(config: BenchConfig, result: Result) -> str:
    """Sentences: what was skipped or is invalid, whether the engines agree, what is hidden."""
    ran = [row for row in result.rows if row.skipped is None]
    checked = [row for row in ran if row.difference is not None]
    wrong = [row for row in ran if not row.ok]
    lines = [f"{row.name} was skipped: {row.skipped}." for row in result.rows if row.skipped is not None]
    lines += [
        f"{row.name} is INVALID: {100 * statistics.median(row.errors):.1f} % of its time is the emulation's own, and "
        f"{100 * ERROR_TOL:.0f} % is allowed; take longer units (--unit-ms) or fewer ranks."
        for row in ran
        if not row.valid
    ]
    lines += [f"{row.name}: {row.note}." for row in ran if row.note]
    lines += [
        f"{row.name} differs from one process: loss by {row.difference.loss:.1e} (allowed {LOSS_TOL:.0e}), "
        f"gradients by {row.difference.grad:.1e} (allowed {GRAD_TOL:.0e}) in {row.difference.worst}."
        for row in wrong
        if row.difference is not None
    ]
    if checked and not wrong:
        lines.append(
            f"All {len(checked)} give the loss and gradients of the model in one process "
            f"(loss {result.reference_loss:.6f})."
        )
    if unchecked := [row.name for row in ran if row.timing_only]:
        lines.append(f"Timing only, numbers not checked: {', '.join(unchecked)}.")
    for pair, equal in result.bitwise.items():
        lines.append(f"{pair}: {'bitwise equal' if equal else 'NOT BITWISE EQUAL'}.")
    lines += [_hidden(found) for found in etas(config, result)]
    lines += [
        f"{rows[0].name}: no eta, since {' and '.join(row.name for row in rows if not row.valid)} "
        f"{'is' if sum(not row.valid for row in rows) == 1 else 'are'} INVALID."
        for rows in trios(result)
        if not all(row.valid for row in rows)
    ]
    if any(row.name in (STP, STP + BLOCKING, STP + FREE) for row in ran):
        lines += below_closed_form(config.pp, config.microbatches)
    return "\n".join(lines)


def _hidden(found: Eta) -> str:
    if found.value is None:
        return f"{found.schedule}: blocking collectives cost nothing here, so there is nothing to hide."
    bound = ""
    if found.best == 0:
        bound = ", eta_max 0 (so few micro-batches leave nothing to hide behind)"
    elif found.best is not None:
        bound = f", eta_max {found.best:.3f}, eta / eta_max {found.value / found.best:.3f}"
    return f"{found.schedule}: eta {found.value:.3f}{bound}."
