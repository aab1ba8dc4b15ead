"""What each rank of a bench does: one reference, then every engine checked, measured and timed in turn."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fxbraid.bench.config import BLOCKING, BenchConfig, skip_reason
from fxbraid.bench.engines import Engine, make_engine
from fxbraid.bench.models import build_model, load_config, make_batch
from fxbraid.bench.parity import Difference, Reference, compare, run_reference
from fxbraid.runtime.launch import process_group

LOSS_TOL = 1e-6
GRAD_TOL = 1e-5
WARMUP_STEPS = 2  # torch's first step also sets up its buffers and connections
GROUP_TIMEOUT_S = 120.0
MARK = "@fxbraid "  # a line of rank 0 that is news for the progress bar, not output

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine's results. Times are of the slowest rank, bytes per rank."""

    name: str
    label: str = ""
    skipped: str | None = None
    loss: float = 0.0
    difference: Difference | None = None
    samples_s: tuple[float, ...] = ()
    peak_bytes: tuple[int | None, ...] = ()
    memory_source: str = ""

    @property
    def ok(self) -> bool:
        return self.skipped is not None or (
            self.difference is not None and self.difference.within(LOSS_TOL, GRAD_TOL)
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The whole bench, the same on every rank. ``bitwise``: braided equals blocking, per schedule."""

    model: str
    parameters: int
    reference_loss: float
    rows: tuple[Row, ...]
    bitwise: Mapping[str, bool] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows) and all(self.bitwise.values())


def tell(done: int, total: int, text: str) -> None:
    """Progress for a parent that reads this rank's lines."""
    print(MARK + json.dumps([done, total, text]), flush=True)


def run_ranks(config: BenchConfig, progress: Progress | None = None) -> Result:
    """Run the bench in this rank of ``config.world_size``; joins and leaves the process group."""
    with process_group(timeout_s=GROUP_TIMEOUT_S, device_type="cpu"):
        report = progress or tell
        if dist.get_rank() != 0:
            report = _silent
        return _Bench(config, report).run()


def _silent(done: int, total: int, text: str) -> None:
    pass


class _Bench:
    def __init__(self, config: BenchConfig, progress: Progress) -> None:
        self._config = config
        self._skipped = {name: skip_reason(config, name) for name in config.schedules}
        self._names = [name for name in config.schedules if self._skipped[name] is None]
        self._total = 1 + 2 * len(self._names) + config.steps
        self._done = 0
        self._progress = progress
        self._hf = load_config(config.model)
        self._mesh = init_device_mesh("cpu", (config.pp, config.tp), mesh_dim_names=("pp", "tp"))
        self._batch = make_batch(self._hf.vocab_size, config.batch, config.seq, config.seed + 1, ragged=True)

    def run(self) -> Result:
        self._next("the model in one process")
        model = build_model(self._hf, self._config.seed)
        reference = run_reference(model, self._batch)
        n_parameters = sum(p.numel() for p in model.parameters())
        del model
        engines: dict[str, Engine] = {}
        rows: dict[str, Row] = {}
        digests: dict[str, bytes] = {}
        for name in self._names:
            self._next(f"{name}: build")
            engine = make_engine(
                build_model(self._hf, self._config.seed), name, self._config, self._mesh, self._batch
            )
            engines[name] = engine
            self._next(f"{name}: check against one process")
            rows[name], digests[name] = self._check(name, engine, reference)
        times = self._time(engines)
        return Result(
            model=self._config.model,
            parameters=n_parameters,
            reference_loss=reference.loss,
            rows=tuple(self._row(name, rows, times) for name in self._config.schedules),
            bitwise=_bitwise_pairs(digests),
        )

    def _next(self, text: str) -> None:
        self._progress(self._done, self._total, text)
        self._done += 1

    def _row(self, name: str, rows: Mapping[str, Row], times: Mapping[str, tuple[float, ...]]) -> Row:
        if name not in rows:
            return Row(name, skipped=self._skipped[name])
        row = rows[name]
        return Row(
            name, row.label, None, row.loss, row.difference, times[name], row.peak_bytes, row.memory_source
        )

    def _check(self, name: str, engine: Engine, reference: Reference) -> tuple[Row, bytes]:
        """Warm up, compare the last warm-up step with the reference, measure memory in a step of its own."""
        loss = torch.zeros(())
        for _ in range(WARMUP_STEPS):
            engine.zero_grad()
            loss = engine.step(self._batch)
        parts = list(engine.parts())
        difference = compare(loss, parts, reference)
        digest = hashlib.sha256(loss.detach().numpy().tobytes())
        for part in sorted(parts, key=lambda part: part.name):
            assert part.grad is not None  # compare() has seen to it
            digest.update(part.grad.detach().contiguous().numpy().tobytes())
        del parts
        engine.zero_grad()
        peaks: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, engine.peak_bytes(self._batch))
        row = Row(name, engine.label, None, float(loss), difference, (), tuple(peaks), engine.memory_source)
        return row, digest.digest()

    def _time(self, engines: Mapping[str, Engine]) -> dict[str, tuple[float, ...]]:
        """Rounds of one step of every engine, so that a slow moment of the machine hits them all alike."""
        samples: dict[str, list[float]] = {name: [] for name in engines}
        for round_number in range(self._config.steps):
            self._next(f"timing, round {round_number + 1} of {self._config.steps}")
            for name, engine in engines.items():
                engine.zero_grad()
                dist.barrier()
                start = time.perf_counter()
                engine.step(self._batch)
                samples[name].append(time.perf_counter() - start)
        slowest = {}
        for name, values in samples.items():
            seconds = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            slowest[name] = tuple(seconds.tolist())
        return slowest


def _bitwise_pairs(digests: Mapping[str, bytes]) -> dict[str, bool]:
    """For each schedule that ran braided and blocking: the same bits of loss and gradients on all ranks?"""
    pairs = {}
    for name in digests:
        if name + BLOCKING in digests:
            equal: Tensor = torch.tensor(int(digests[name] == digests[name + BLOCKING]))
            dist.all_reduce(equal, op=dist.ReduceOp.MIN)
            pairs[name] = bool(equal)
    return pairs
