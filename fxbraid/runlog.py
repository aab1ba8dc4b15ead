"""``RunLog``: one line per step on the first rank: loss, gradient norm, tokens/s, MFU, what was hidden and what not.

>>> with fxbraid.RunLog(model, "run.jsonl", total=1000) as log:  # doctest: +SKIP
...     for batch in loader:
...         loss = model.step(**batch)
...         norm = model.clip_grad_norm_(1.0)
...         optimizer.step(); optimizer.zero_grad()
...         log(loss=loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from .passes.cost import training_flops
from .passes.errors import BraidError
from .runtime import ranks
from .simulate.device import DEVICES

if TYPE_CHECKING:
    from .model import BraidedModel

Value = float | int | str | None


class RunLog:
    """Call it after every step, on every rank: the first one writes, the others do nothing.

    Args:
        model: what :func:`fxbraid.braid` made.
        path: a file of JSON lines, which is appended to: a resumed run goes on in it. A line has ``step``, what the
            call was given, ``seconds`` (since the line before, so data and optimizer are in it), ``step_seconds`` (of
            ``model.step`` alone), ``tokens_per_s`` (over ``seconds``), ``mfu``, ``hidden_share``, ``exposed_share``,
            ``bubble_share``, ``skipped_steps`` and ``label`` (which clock; null is what is not known).
        total: steps of the run, for the progress bar.
        every: write each n-th step only; reading a loss waits for the device.
        peak: FLOP/s of one device in the type that the model computes in; default: the data sheet's for bfloat16, where
            the GPU is one that ``fxbraid plan`` knows. Without it there is no MFU.
        console: default: the standard output. On a terminal there is a progress bar, else one line per step.

    MFU is the model's own FLOPs (three times the forward's matrix products, twice where a weight is frozen; nothing
    that is recomputed) over ``step_seconds`` and the peak of all devices (Chowdhery et al. 2022, appendix B).

    Raises :class:`BraidError`, on every rank, where the file can't be written. Making one is collective.
    """

    def __init__(
        self,
        model: BraidedModel,
        path: str | Path | None = None,
        *,
        total: int | None = None,
        every: int = 1,
        first_step: int = 1,
        peak: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1 or (total is not None and total < 1):
            raise BraidError(f"every={every} and total={total} must be 1 or more")
        self._model, self._every, self._clock = model, every, clock
        self._next = first_step
        self._writes = model.mesh.world_rank == 0
        self._last = clock()
        self._since = 0
        self._peak = peak if peak is not None else known_peak(model)
        self._file: TextIO | None = None
        self._bar: Progress | None = None
        self._console = console or Console(highlight=False)
        failed: str | None = None
        if self._writes and path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                failed = f"the log can't be written to {path}: {error.strerror or error}"
        ranks.raise_together(failed)
        if not self._writes:
            return
        if self._console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[said]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=False)
            self._task = self._bar.add_task("", total=total, completed=first_step - 1, said="")
            self._bar.start()

    def __call__(self, **values: Tensor | Value) -> None:
        """The step that was just made. ``values``: numbers, 0-d tensors or short texts; "loss" and "grad_norm" come
        first in the line."""
        step = self._next
        self._next += 1
        self._since += 1
        if not self._writes or step % self._every:
            return
        record = self._record(step, values)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        said = line(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, said=said)
        else:
            self._console.print(said, markup=False, soft_wrap=True)

    def _record(self, step: int, values: dict[str, Tensor | Value]) -> dict[str, Value]:
        metrics = self._model.last_step
        now = self._clock()
        seconds, self._last = (now - self._last) / self._since, now
        self._since = 0
        exposed = [s for s in (metrics.exposed_tp_share, metrics.exposed_p2p_share) if s is not None]
        record: dict[str, Value] = {"step": step}
        record |= {name: _plain(value) for name, value in values.items()}
        replicas = self._model.mesh.dp_size
        tokens = metrics.tokens * replicas if metrics.tokens is not None else None
        record |= {
            "seconds": seconds,
            "step_seconds": metrics.seconds,
            "tokens_per_s": tokens / seconds if tokens and seconds > 0 else None,
            "mfu": self._mfu(metrics.seconds),
            "hidden_share": metrics.hidden_share,
            "exposed_share": sum(exposed) if exposed else None,
            "bubble_share": metrics.bubble_share,
            "skipped_steps": self._model.skipped_steps,
            "label": metrics.label,
        }
        return record

    def _mfu(self, seconds: float) -> float | None:
        if self._peak is None or seconds <= 0:
            return None
        lowered, schedule = self._model.lowered, self._model.schedule
        # Of one tensor-parallel rank, over all chunks; a replica's pipeline shares the work of its ranks.
        work = sum(training_flops(chunk.graph_module.graph) for chunk in lowered.partition.chunks)
        return work * schedule.m / (seconds * self._peak * schedule.p)

    def close(self) -> None:
        """Take the bar down and close the file."""
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def line(record: dict[str, Any]) -> str:
    """A record as one line of text."""
    said = [f"step {record['step']}"]
    known = ("step", "seconds", "step_seconds", "tokens_per_s", "mfu", "skipped_steps", "label")
    for name, value in record.items():
        if name in known or name.endswith("_share") or value is None:
            continue
        said.append(f"{name.replace('_', ' ')} {_short(value)}")
    said.append(f"{record['seconds'] * 1e3:,.1f} ms")
    if record["tokens_per_s"] is not None:
        said.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    shares = (
        ("MFU", "mfu"),
        ("hidden", "hidden_share"),
        ("exposed", "exposed_share"),
        ("bubble", "bubble_share"),
    )
    said += [f"{word} {100 * record[name]:.1f} %" for word, name in shares if record[name] is not None]
    if record["skipped_steps"]:
        said.append(f"skipped {record['skipped_steps']}")
    return "  ".join(said)


def _short(value: Value) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def _plain(value: Tensor | Value) -> Value:
    """For JSON, which knows no NaN: what is not finite is its name."""
    if isinstance(value, Tensor):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def known_peak(model: BraidedModel) -> float | None:
    """The data sheet's bfloat16 FLOP/s of this GPU, for a model that computes in bfloat16; None where not known."""
    device = model.mesh.device
    if device.type != "cuda" or model.compute_dtype is not torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device).lower()
    # The longest name first: "h200" is not an "h20".
    found = next(
        (known for known in sorted(DEVICES, key=len, reverse=True) if known.split("-")[0] in name), None
    )
    return DEVICES[found].peak if found is not None else None
