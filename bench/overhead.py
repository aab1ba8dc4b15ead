"""``python -m fxbraid.bench.overhead``: what the host does between two units.

The program, blocks, boxes, collectives and messages of a step are those of a real run, but every unit returns tensors
that were made beforehand, every weight gradient goes nowhere, and the process group is torch's fake one, which does
nothing: what is left is the time of fxbraid's own Python and of torch's launching, one rank at a time. A step's Python
outside of the program (splitting the batch, checks, the loss, metrics) is given as a share of a step whose attention,
MLP and head units take 2 ms each.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from tabulate import tabulate
from torch import Tensor, fx, nn

import fxbraid
from fxbraid import compat
from fxbraid.model import BraidedModel
from fxbraid.passes.compile import Artefact, Artefacts
from fxbraid.passes.joint import Phase
from fxbraid.passes.launches import LAUNCHES
from fxbraid.passes.products import SumArtefact, products
from fxbraid.passes.units import Unit
from fxbraid.runtime.launch import launch
from fxbraid.runtime.unit import GradSlot
from fxbraid.schedule.lower import Arrive

UNIT_S = 2e-3
TARGET_US = 30.0
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


class EmptyArtefacts(Artefacts):
    """Artefacts that compute nothing: each returns the same tensors every time."""

    def __init__(self) -> None:
        super().__init__(False)

    def get(self, unit: Unit) -> Artefact:
        if unit.phase is Phase.W:
            plan = products(unit)
            if plan.products:
                if plan.rest is None:
                    return SumArtefact(plan, None)
                outs = plan.rest.graph.output_node().args[0]
                return SumArtefact(plan, _constant([node.meta["val"] for node in outs]))  # type: ignore[union-attr]
        return _constant([node.meta["val"] for node in unit.outs])


def _constant(values: list[Tensor]) -> Artefact:
    made = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
    for tensor in made:
        tensor.zero_()
    return lambda *_: made


class NullSlot(GradSlot):
    """Where gradients go nowhere."""

    __slots__ = ()

    def add(self, grad: Tensor) -> None: ...

    def add_product(self, left: Tensor, right: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Overhead:
    """Medians over steps. ``unit_us``: of the program, per unit call, with the quartiles. ``module_us``: the same when
    the program is called as an nn.Module. ``step_us``: of a step outside of its program. ``share``: of all that in a
    step with units of 2 ms (``heavy`` of the ``units`` calls). ``python_share``: of ``step_us`` alone."""

    tp: int
    pp: int
    units: int
    heavy: int
    launches: int
    messages: int
    unit_us: float
    low_us: float
    high_us: float
    module_us: float
    step_us: float

    @property
    def share(self) -> float:
        host = self.step_us + self.units * self.unit_us
        return host / (host + self.heavy * UNIT_S * 1e6)

    @property
    def python_share(self) -> float:
        return self.step_us / (self.step_us + self.units * self.unit_us + self.heavy * UNIT_S * 1e6)


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """This process is rank 0 of ``world`` ranks that are not there."""
    dist.init_process_group("fake", store=compat.FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_model(layers: int) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def empty_model(
    tp: int, pp: int, *, layers: int, m: int, schedule: str = "stp"
) -> tuple[BraidedModel, Mapping[str, Any]]:
    """A braided model whose units do nothing, and a batch for it."""
    ids = torch.zeros((m, 16), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    model = fxbraid.braid(
        make_model(layers), batch, tp_size=tp, pp_size=pp, n_microbatches=m, schedule=schedule, compile=False
    )
    for slots in model._gradients.slots.values():
        for name, slot in slots.items():
            slots[name] = NullSlot(slot.parameter, shared=slot.shared)  # type: ignore[index]
    model._artefacts = EmptyArtefacts()
    model._engines.clear()
    return model, batch


def measure(tp: int, pp: int, layers: int, m: int, repeats: int) -> Overhead:
    """In a process of its own: the overhead of rank 0 of ``tp`` x ``pp``."""
    torch.set_num_threads(1)
    with fake_ranks(tp * pp):
        model, batch = empty_model(tp, pp, layers=layers, m=m)
        model.step(**batch)
        engine = model._last
        inputs = model._prepare(batch, training=True)[1]
        graphs = _blocks(model)
        calls: list[Unit] = [n.meta["unit"] for graph in graphs for n in graph.nodes if "unit" in n.meta]
        bound, plain, whole = [], [], []
        gc.collect()
        gc.freeze()
        for _ in range(repeats):
            whole.append(_seconds(lambda: model.step(**batch)))
            bound.append(_seconds(lambda: engine.run(inputs)))
            with _as_modules(engine):
                plain.append(_seconds(lambda: engine.run(inputs)))
    count = len(calls)
    unit = [s / count * 1e6 for s in bound]
    low, _, high = statistics.quantiles(unit, n=4)
    return Overhead(
        tp=tp,
        pp=pp,
        units=count,
        heavy=sum(unit.matmuls > 0 for unit in calls),
        launches=sum(node.target in LAUNCHES for graph in graphs for node in graph.nodes),
        messages=sum(isinstance(n.meta.get("instruction"), Arrive) for n in engine.program.graph.nodes),
        unit_us=statistics.median(unit),
        low_us=low,
        high_us=high,
        module_us=statistics.median(plain) / count * 1e6,
        step_us=statistics.median(w - b for w, b in zip(whole, bound, strict=True)) * 1e6,
    )


@contextmanager
def _as_modules(engine: Any) -> Iterator[None]:
    bound = engine._run
    engine._run = engine.program
    try:
        yield
    finally:
        engine._run = bound


def _blocks(model: BraidedModel) -> list[fx.Graph]:
    """The graph of every block call of the program, in order."""
    program = model.program
    children = [
        program.get_submodule(str(node.target)) for node in program.graph.nodes if node.op == "call_module"
    ]
    return [child.graph for child in children if isinstance(child, fx.GraphModule)]


def _seconds(body: Callable[[], object]) -> float:
    """Seconds of this thread on its core: nothing here sleeps, and others on the machine do not count."""
    start = time.thread_time()
    body()
    return time.thread_time() - start


def table(rows: list[Overhead]) -> str:
    """One line per layout."""
    head = [
        "tp x pp",
        "unit calls",
        "all-reduces",
        "receives",
        "us per unit call",
        "quartiles",
        "as nn.Module",
        "step outside program",
        "its share at 2 ms",
        "all of it at 2 ms",
    ]
    return tabulate(
        [
            (
                f"{r.tp} x {r.pp}",
                r.units,
                r.launches,
                r.messages,
                f"{r.unit_us:.1f}",
                f"{r.low_us:.1f} to {r.high_us:.1f}",
                f"{r.module_us:.1f}",
                f"{r.step_us / 1e3:.2f} ms",
                f"{r.python_share:.2%}",
                f"{r.share:.2%}",
            )
            for r in rows
        ],
        headers=head,
        tablefmt="github",
        disable_numparse=True,
    )


def main(
    layers: Annotated[int, typer.Option(help="of the model, over all ranks")] = 8,
    microbatches: Annotated[int, typer.Option("-m", "--microbatches")] = 8,
    repeats: Annotated[int, typer.Option(help="steps, of which the median is taken")] = 40,
) -> None:
    """Time that the host takes between units, and whether it is under the target."""
    rows: list[Overhead] = []
    for tp, pp in LAYOUTS:
        rows += launch(measure, (tp, pp, layers, microbatches, repeats), nproc=1, timeout_s=600)
    print(
        f"empty units, {layers} layers, schedule stp, {microbatches} micro-batches, median of {repeats} steps\n"
    )
    print(table(rows))
    worst = max(row.unit_us for row in rows)
    verdict = "under" if worst < TARGET_US else "OVER"
    print(f"\nslowest layout: {worst:.1f} us per unit call, {verdict} the target of {TARGET_US:.0f} us")


if __name__ == "__main__":
    # Ranks import the function by its name, which __main__ does not have.
    from fxbraid.bench.overhead import main as run

    typer.run(run)
