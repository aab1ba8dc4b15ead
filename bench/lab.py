"""What the proofs of this folder share: an emulated mesh on which many schedules, ratios and m's share one build.

A *cell* is one schedule at one T_AR / T_F and one m, timed on the emulation's clock beside what the simulator says.
Runs inside ranks; the proofs' ``main`` functions launch them and print markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

from fxbraid import simulate
from fxbraid.bench import timing
from fxbraid.bench.config import BenchConfig
from fxbraid.bench.devices import Times, equal_times
from fxbraid.bench.engines import BraidEngine, Engine, Workshop
from fxbraid.bench.entries import AUTO, ORDER, Entry, parse, short
from fxbraid.bench.models import build_model, make_batch
from fxbraid.bench.pippy import SCHEDULES
from fxbraid.bench.ranks import group, tell
from fxbraid.runtime import emulate
from fxbraid.schedule import FAMILIES, Schedule

#: What eta is made of.
TRIO = ("stp", "stp:blocking", "stp:free")
OURS = (*TRIO, AUTO, *(name for name in FAMILIES if name != "stp"))
ORDERS = tuple(ORDER + short(name) for name in SCHEDULES)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every engine of ``names`` at every m and ratio, ``rounds`` interleaved steps of each.

    ``config``: sizes, clock and unit times; its m and ratio are overridden. Travels to the ranks by pickle.
    """

    config: BenchConfig
    names: tuple[str, ...]
    ms: tuple[int, ...]
    ratios: tuple[float, ...]
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """``predicted_s`` is None for torch's own classes. errors: as in ``ranks.Row``. note: where an order is from.
    shares: as in ``ranks.Row``."""

    name: str
    m: int
    ratio: float
    samples_s: tuple[float, ...]
    errors: tuple[float, ...]
    predicted_s: float | None
    note: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def error(self) -> float:
        """The median share that is the emulation's own."""
        return statistics.median(self.errors)

    @property
    def apart(self) -> float | None:
        """Relative difference to the prediction."""
        return None if self.predicted_s is None else self.seconds / self.predicted_s - 1


@dataclass(frozen=True, slots=True)
class Found:
    """All cells of a plan; ``label`` names the clock and what was left out."""

    label: str
    cells: tuple[Cell, ...]

    def at(self, m: int, ratio: float) -> dict[str, Cell]:
        return {cell.name: cell for cell in self.cells if cell.m == m and cell.ratio == ratio}


def measure(plan: Plan) -> Found:
    """In each rank: all cells of ``plan``, the same on every rank."""
    times = equal_times(plan.config.unit_ms * 1e-3)
    config = replace(plan.config, compute="modelled", ratio=plan.ratios[0])
    with group(config, times):
        return _Lab(plan, config, times).run()


class _Lab:
    def __init__(self, plan: Plan, config: BenchConfig, times: Times) -> None:
        self._plan, self._config, self._times = plan, config, times
        self._hf = config.hf()
        mesh = init_device_mesh("cpu", (config.pp, config.tp), mesh_dim_names=("pp", "tp"))
        self._workshop = Workshop(config, mesh, partial(build_model, self._hf, config.seed), times=times)
        self._message = config.microbatch_size * config.seq * self._hf.hidden_size * 4
        self._rank = mesh.get_rank()

    def run(self) -> Found:
        cells: list[Cell] = []
        label = ""
        for m in self._plan.ms:
            rows = m * self._config.microbatch_size
            batch = make_batch(
                self._hf.vocab_size, rows, self._config.seq, self._config.seed + 1, ragged=True
            )
            engines: dict[str, Engine] = {}
            notes: dict[str, str] = {}
            for ratio in self._plan.ratios:
                emulate.change(tp_link=self._times.link(ratio))
                for name in (name for name in self._plan.names if self._runs(parse(name), m)):
                    if name not in engines or parse(name).schedule == AUTO:
                        self._say(f"m {m}, ratio {ratio:g}: build {name}")
                        engines[name] = self._workshop.make(parse(name), batch, m)
                        if parse(name).engine == "torch":
                            engines[name].step(batch)  # sets its buffers and connections up
                        notes[name] = engines[name].note
                found = timing.interleaved(engines, batch, self._plan.rounds, self._say)
                label = emulate.label()
                for name, (samples, errors) in found.items():
                    self._say(f"m {m}, ratio {ratio:g}: {name} {statistics.median(samples) * 1e3:.2f} ms")
                    predicted = self._predict(parse(name), engines[name], ratio)
                    shares = timing.shares(engines[name])
                    cells.append(Cell(name, m, ratio, samples, errors, predicted, notes[name], shares))
        return Found(label, tuple(cells))

    def _runs(self, entry: Entry, m: int) -> bool:
        """torch's classes refuse some m."""
        return entry.engine == "fxbraid" or SCHEDULES[entry.schedule].refuses(self._config.pp, m) is None

    def _say(self, text: str) -> None:
        if self._rank == 0:
            tell(0, 0, text)

    def _predict(self, entry: Entry, engine: Engine, ratio: float) -> float | None:
        if not isinstance(engine, BraidEngine):
            return None
        model = engine.model
        layers = self._hf.num_hidden_layers // model.schedule.n_chunks
        costs = model._ordered_by is not None
        return simulated(model.schedule, entry, self._times, ratio, layers, self._message, costs=costs)


def simulated(
    schedule: Schedule,
    entry: Entry,
    times: Times,
    ratio: float,
    layers: int,
    message: float,
    *,
    costs: bool = False,
) -> float:
    """The simulator's step time for chunks of ``layers`` layers, at the links of this rank's cluster. costs: units in
    blocks are ordered by them, not as in the paper.

    From four constants, not from the traced graph: an independent description of the same run.
    """
    unit, pp = times.forward, emulate.change().pp_link
    chunk, ar = 2 * layers * unit, 0.0 if entry.free else 2 * layers * unit * ratio
    link = simulate.Link(pp.alpha_s, pp.beta_bytes_per_s, pp.rendezvous)
    load = simulate.constants(schedule, chunk, chunk, chunk, ar, layers=layers, message=message, link=link)
    return simulate.simulate(
        schedule, load, braided=entry.collectives != "blocking", ordered_by=load if costs else None
    ).step_time


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for a terminal and for the docs."""
    return tabulate(list(rows), headers=list(headings), tablefmt="github", disable_numparse=True)


def emulated_config(
    tp: int, pp: int, layers_per_chunk: int, *, unit_ms: float, clock: str, arithmetic: bool, pp_link: str
) -> BenchConfig:
    """The tiny Qwen2 of the proofs, two chunks a rank on the V."""
    return BenchConfig(
        tp=tp,
        pp=pp,
        layers=2 * pp * layers_per_chunk,
        hidden=32,
        microbatch_size=1,
        seq=16,
        unit_ms=unit_ms,
        clock=clock,
        arithmetic=arithmetic,
        pp_link=pp_link,
    )
