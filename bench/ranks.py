"""What each rank of a bench does: one reference, then every engine checked, measured and timed in turn."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxbraid.bench import timing
from fxbraid.bench.bitwise_pairs import accumulation, digest_of, equal_pairs
from fxbraid.bench.config import REAL, BenchConfig, skip_reason
from fxbraid.bench.devices import (
    INSTANT,
    Prediction,
    Times,
    count_flops,
    equal_times,
    flops_times,
    measure_times,
    parse_link,
    predict,
)
from fxbraid.bench.engines import BraidEngine, Engine, Workshop
from fxbraid.bench.entries import Entry
from fxbraid.bench.models import build_model, make_batch
from fxbraid.bench.parity import Difference, Reference, compare, run_reference
from fxbraid.runtime import emulate
from fxbraid.runtime.launch import process_group
from fxbraid.runtime.ranks import gather

LOSS_TOL = 1e-6
GRAD_TOL = 1e-5
WARMUP_STEPS = 2  # torch's first step also sets up its buffers and connections
GROUP_TIMEOUT_S = 120.0
MARK = "@fxbraid "  # a line of rank 0 that is news for the progress bar, not output
#: Share of an emulated time that may be the emulation's own doing; what was taken under more is marked invalid.
ERROR_TOL = 0.05

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine's results. Times are of the slowest rank, bytes per rank.

    difference: to the unsplit model; None where the run left arithmetic or collectives out (``timing_only``).
    errors: for each sample the share of it that is the emulation's own. shares: of the step time, by name, as
    measured (``bubble``, ``exposed_tp``, ``exposed_p2p``).
    """

    name: str
    label: str = ""
    skipped: str | None = None
    loss: float = 0.0
    difference: Difference | None = None
    samples_s: tuple[float, ...] = ()
    peak_bytes: tuple[int | None, ...] = ()
    memory_source: str = ""
    note: str = ""
    timing_only: bool = False
    errors: tuple[float, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    prediction: Prediction | None = None

    @property
    def ok(self) -> bool:
        return (
            self.skipped is not None
            or self.timing_only
            or (self.difference is not None and self.difference.within(LOSS_TOL, GRAD_TOL))
        )

    @property
    def valid(self) -> bool:
        """Was the median sample taken under no more emulation error than stated (``ERROR_TOL``)?"""
        return not self.errors or sorted(self.errors)[len(self.errors) // 2] <= ERROR_TOL


@dataclass(frozen=True, slots=True)
class Result:
    """The whole bench, the same on every rank. clock: what every output says of clock and links. bitwise: engines
    that add gradients up in one order, and whether they gave the same bits."""

    model: str
    parameters: int
    reference_loss: float
    rows: tuple[Row, ...]
    bitwise: Mapping[str, bool] = field(default_factory=dict)
    clock: str = ""
    times: str = "real"

    @property
    def ok(self) -> bool:
        """Do all engines agree, with one process and to the bit where they must?"""
        return all(row.ok for row in self.rows) and all(self.bitwise.values())

    @property
    def valid(self) -> bool:
        """Were all times taken under no more emulation error than stated?"""
        return all(row.valid for row in self.rows)


def tell(done: int, total: int, text: str) -> None:
    """Progress for a parent that reads this rank's lines."""
    print(MARK + json.dumps([done, total, text]), flush=True)


def run_ranks(config: BenchConfig, progress: Progress | None = None, clock: str = "") -> Result:
    """Run the bench in this rank of ``config.world_size``; joins and leaves the process group. clock: what to call
    a link that is real but not loopback."""
    times = chosen_times(config)
    with group(config, times):
        report = progress or tell
        if dist.get_rank() != 0:
            report = _silent
        return _Bench(config, report, times, clock or timing.LOOPBACK).run()


def _silent(done: int, total: int, text: str) -> None:
    pass


def chosen_times(config: BenchConfig) -> Times | None:
    """The modelled seconds of units, or None where they are real."""
    if not config.modelled:
        return None
    unit_s = config.unit_ms * 1e-3
    if config.times == "equal":
        return equal_times(unit_s)
    return flops_times(count_flops(*_one_layer(config), config.tp), unit_s)


def _one_layer(config: BenchConfig) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    hf = config.hf(num_hidden_layers=1)
    return build_model(hf, config.seed), make_batch(hf.vocab_size, config.microbatch_size, config.seq, 0)


@contextlib.contextmanager
def group(config: BenchConfig, times: Times | None) -> Iterator[None]:
    """The process group that ``config`` asks for: gloo, or an emulated cluster around it."""
    if not config.emulated:
        with process_group(timeout_s=GROUP_TIMEOUT_S, device_type="cpu"):
            yield
        return
    tp_link = INSTANT if config.link == REAL else parse_link(config.link)
    pp_link = tp_link if config.pp_link is None else parse_link(config.pp_link)
    if config.ratio is not None and times is not None:
        tp_link = times.link(config.ratio)
    host_link = None if config.host_link is None else parse_link(config.host_link)
    cluster = emulate.Cluster(tp_link, pp_link, clock=config.clock_name, host_link=host_link)  # type: ignore[arg-type]
    with emulate.process_group(cluster, timeout_s=GROUP_TIMEOUT_S):
        if times is not None:
            emulate.unit_times(times.of, arithmetic=config.arithmetic)
        elif config.ratio is not None:
            measured = measure_times(*_one_layer(config), config.tp, compile=config.compile)
            emulate.change(tp_link=measured.link(config.ratio))
        yield


class _Bench:
    def __init__(self, config: BenchConfig, progress: Progress, times: Times | None, clock: str) -> None:
        self._config, self._times, self._clock = config, times, clock
        entries = config.entries()
        self._skipped = {entry.name: skip_reason(config, entry) for entry in entries}
        self._order = [entry.name for entry in entries]
        self._entries = [entry for entry in entries if self._skipped[entry.name] is None]
        self._total = 1 + 2 * len(self._entries) + config.steps
        self._done = 0
        self._progress = progress
        self._hf = config.hf()
        self._mesh = init_device_mesh("cpu", (config.pp, config.tp), mesh_dim_names=("pp", "tp"))
        self._batch = make_batch(self._hf.vocab_size, config.batch, config.seq, config.seed + 1, ragged=True)
        self._workshop = Workshop(
            config, self._mesh, partial(build_model, self._hf, config.seed), times=times
        )

    def run(self) -> Result:
        self._next("the model in one process")
        model = build_model(self._hf, self._config.seed)
        reference = run_reference(model, self._batch)
        n_parameters = sum(p.numel() for p in model.parameters())
        del model
        engines: dict[str, Engine] = {}
        rows: dict[str, Row] = {}
        digests: dict[str, tuple[str, str]] = {}
        for entry in self._entries:
            self._next(f"{entry.name}: build")
            engine = engines[entry.name] = self._workshop.make(entry, self._batch, self._config.microbatches)
            self._next(f"{entry.name}: {'check against one process' if self._checks(entry) else 'warm up'}")
            rows[entry.name], digest = self._check(entry, engine, reference)
            if self._checks(entry) and isinstance(engine, BraidEngine):
                digests[entry.name] = accumulation(engine.model.schedule, self._config.compile), digest
        times = timing.interleaved(engines, self._batch, self._config.steps, self._next)
        for name, row in rows.items():
            samples, errors = times[name]
            rows[name] = replace(
                row, samples_s=samples, errors=errors, prediction=self._predict(engines[name])
            )
        return Result(
            model=self._config.model,
            parameters=n_parameters,
            reference_loss=reference.loss,
            rows=tuple(rows.get(name, Row(name, skipped=self._skipped[name])) for name in self._order),
            bitwise=equal_pairs(digests),
            clock=emulate.label() if self._config.emulated else self._clock,
            times="real" if self._times is None else self._times.label,
        )

    def _next(self, text: str) -> None:
        self._progress(self._done, self._total, text)
        self._done += 1

    def _checks(self, entry: Entry) -> bool:
        """Do this entry's numbers mean anything?"""
        return self._config.arithmetic and not entry.free

    def _check(self, entry: Entry, engine: Engine, reference: Reference) -> tuple[Row, str]:
        """Warm up, compare the last warm-up step with the reference, measure memory in a step of its own."""
        loss = torch.zeros(())
        for _ in range(WARMUP_STEPS):
            engine.zero_grad()
            loss = engine.step(self._batch)
        shares = timing.shares(engine)
        difference, digest = None, ""
        if self._checks(entry):
            parts = list(engine.parts())
            difference = compare(loss, parts, reference)
            digest = digest_of(loss, parts)
            del parts
        engine.zero_grad()
        peaks: list[int | None] = gather(engine.peak_bytes(self._batch))
        row = Row(
            entry.name,
            engine.label,
            loss=float(loss),
            difference=difference,
            peak_bytes=tuple(peaks),
            memory_source=engine.memory_source,
            note=engine.note,
            timing_only=difference is None,
            shares=shares,
        )
        return row, digest

    def _predict(self, engine: Engine) -> Prediction | None:
        """The simulator's, made on rank 0, where compute is modelled."""
        if self._times is None or not isinstance(engine, BraidEngine):
            return None
        found = [predict(engine.model, self._times, emulate.change()) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]
