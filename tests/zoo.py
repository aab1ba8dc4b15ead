"""The zoo: every family of ``tests.families`` against its unsplit self; ``python -m tests.zoo`` writes docs/zoo.md.

A row has two sources. A float64 model, lowered and run with all ranks in one process (``tests.lockstep``), gives the
plan, the units, the collectives and the errors of one step. Four real processes give the errors of three AdamW steps
with clipping under two schedules (``tests.parity``). Both on tp 2 x pp 2 and on tp 4 x pp 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxbraid.passes.errors import BraidError
from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_collective
from fxbraid.passes.pipeline import Lowered
from fxbraid.passes.shard import has_plan
from fxbraid.passes.vocab import COLUMNS_STYLE, ROWS_STYLE
from fxbraid.runtime.launch import RankError, launch

from . import lockstep, parity
from .families import CORE, FAMILIES, SIZES, Family, make, whole_loss

SCHEDULES = ("1f1b", "stp")
LAYOUTS = ((2, 2), (4, 1))


@dataclass
class Row:
    """What is known about one family. ``forward``, ``backward``, ``weight``: collectives per layer in F, I and W."""

    name: str
    plan: str = ""
    loss: float = 0.0
    grad: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    units: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: layout -> largest error in one process, and in four, or why it does not run
    one: dict[str, float | str] = field(default_factory=dict)
    ranks: dict[str, float | str] = field(default_factory=dict)
    #: why the family does not run at tp 2
    refused: str = ""


def reference(model: nn.Module, batch: Mapping[str, Tensor], m: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model."""
    loss = whole_loss(model, batch, m)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def run(family: Family, *, tp: int = 2, n_chunks: int = 2, m: int = 2, **overrides: Any) -> Row:
    """One step of the family on tp x n_chunks ranks in one process against the unsplit model."""
    model = make(family, **overrides)
    batch = parity.batches_of(model_name(family), 2, m, mask=True, steps=1)[0]
    with parity.KeepDouble():
        loss, grads = reference(model, batch, m)
        ranks = lockstep.step(model, batch, tp=tp, n_chunks=n_chunks, m=m, verify=True)
    errors = lockstep.errors(model, ranks, loss, grads)
    return describe(family, model, ranks.lowered, *errors)


def model_name(family: Family) -> str:
    """The family's name among those of ``parity``."""
    return f"images:{family.name}" if family.images else f"zoo:{family.name}"


def describe(family: Family, model: nn.Module, lowered: Lowered, loss: float, grad: float) -> Row:
    """Count units and collectives in the graphs."""
    marks: Counter[Phase] = Counter()
    units: Counter[str] = Counter()
    for chunk in lowered.chunks.values():
        marks.update(q for n, q in chunk.joint.phase.items() if is_collective(n))
        units.update(
            re.sub(r"\d+$|_c\d+.*$|\d+_.*$", "", u.name) for u in chunk.units[Phase.F] if u.index >= 0
        )
    layers = lowered.partition.layers
    forward, backward = of_vocabulary(lowered)
    quiet = ("rows of the vocabulary", "inferred from the graph")
    return Row(
        name=family.name,
        plan="its own" if has_plan(model) else "inferred",
        loss=loss,
        grad=grad,
        forward=(marks[Phase.F] - forward) / layers,
        backward=(marks[Phase.I] - backward) / layers,
        weight=marks[Phase.W] / layers,
        units=dict(units),
        notes=[n for n in lowered.plan.notes if not any(text in n for text in quiet)],
    )


def of_vocabulary(lowered: Lowered) -> tuple[int, int]:
    """All-reduces, forward and backward, of embedding, head and loss where they are cut: the embedding's sum; the
    loss's maximum and sums, and the sum of the gradient that the head's columns give."""
    styles = set(lowered.plan.styles.values())
    rows, columns = ROWS_STYLE in styles, COLUMNS_STYLE in styles
    return rows + 2 * columns, int(columns)


# -- real processes ----------------------------------------------------------------------------------------------


def cases(name: str, tp: int, pp: int) -> list[parity.Case]:
    """Three steps in float64 under every schedule, plain and with sums in micro-batch order."""
    base = parity.Case(
        model=model_name(FAMILIES.get(name, Family(name))), tp=tp, pp=pp, dtype=torch.float64, m=3, steps=3
    )
    plain = [replace(base, schedule=schedule) for schedule in SCHEDULES]
    return [*plain, *(replace(case, reproducible=True) for case in plain)]


def run_ranks(family: Family, tp: int, pp: int) -> float:
    """The largest error of any loss, gradient and norm. Raises where two schedules that add up in micro-batch order
    differ in any bit, and ``RankError`` where a rank fails."""
    wanted = cases(family.name, tp, pp)
    per_rank = launch(parity.run_cases, (wanted,), nproc=tp * pp, timeout_s=300, on_line=lambda *_: None)
    outcomes = [parity.merge([outcomes[i] for outcomes in per_rank]) for i in range(len(wanted))]
    ordered = [outcome.digests for outcome in outcomes if outcome.case.reproducible]
    if any(digests != ordered[0] for digests in ordered):
        raise AssertionError("two schedules that add up in micro-batch order differ")
    return max(max(outcome.loss, outcome.grad, outcome.norm) for outcome in outcomes)


def measure(family: Family) -> Row:
    """The row without real processes; what fails becomes a sentence in it."""
    try:
        row = run(family)
    except BraidError as error:
        return Row(family.name, refused=shorten(str(error)))
    except Exception as error:  # no refusal but a bug: the page shows it as well
        return Row(family.name, refused=shorten(f"{type(error).__name__}: {error}"))
    row.one["2x2"] = max(row.loss, row.grad)
    try:
        four = run(family, tp=4, n_chunks=1)
        row.one["4x1"] = max(four.loss, four.grad)
    except Exception as error:
        row.one["4x1"] = shorten(str(error))
    return row


def add_ranks(row: Row) -> None:
    """What real processes say, where it is not known yet."""
    layouts: Iterable[tuple[int, int]] = ((1, 4),) if row.refused else LAYOUTS
    for tp, pp in layouts:
        if isinstance(row.one.get(f"{tp}x{pp}"), str) or f"{tp}x{pp}" in row.ranks:
            continue
        try:
            row.ranks[f"{tp}x{pp}"] = run_ranks(FAMILIES.get(row.name, Family(row.name)), tp, pp)
        except RankError as error:
            row.ranks[f"{tp}x{pp}"] = shorten(re.sub(r"^\w+: ", "", error.message))
        except AssertionError as error:
            row.ranks[f"{tp}x{pp}"] = shorten(str(error))


def shorten(text: str, limit: int = 420) -> str:
    """One line, without folders of this machine."""
    text = re.sub(r"/\S*/site-packages/", "", " ".join(text.split()))
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " ..."


# -- the page ----------------------------------------------------------------------------------------------------

HEAD = """# The zoo

Made by `python -m tests.zoo`: tiny float64 models of the families below, split and compared with the unsplit model.
Ragged labels, padding, every parameter away from its initial value.

- **TP plan**: the model's own (`_tp_plan` of transformers), or inferred from its graph where it has none.
- **all-reduces**: per decoder layer, forward + backward, counted in the graphs of {layers} layers on tp 2 x pp 2,
  without those of embedding, head and loss. None lies in W, of any family.
- **one process**: all ranks in one process, one step: the largest relative error of the loss and any gradient on
  tp 2 x pp 2, and on tp 4 x pp 1 (with half as many key-value heads as ranks).
- **four processes**: three AdamW steps with clipping under `1f1b` and under `stp`: the largest error of any loss,
  gradient and norm on the same two layouts. With `reproducible=True` the two schedules agreed to the bit in every loss
  and gradient of every step, or the row would say so. Rows without a number were not run so for this page;
  `python -m tests.zoo --all-processes` runs them all, and so does `pytest -m slow tests/test_zoo_ranks.py`.

"""


def table(rows: Iterable[Row]) -> str:
    """The families that run, in Markdown."""
    lines = [
        "| family | TP plan | all-reduces | units of the forward | one process | four processes | notes |",
        "|---|---|---|---|---|---|---|",
    ]
    reasons: list[str] = []

    def shown(values: Mapping[str, float | str]) -> str:
        cells = []
        for value in (values[layout] for layout in ("2x2", "4x1") if layout in values):
            if isinstance(value, str):
                reasons.append(value)
                cells.append(f"[{len(reasons)}]")
            else:
                cells.append(f"{value:.0e}")
        return ", ".join(cells)

    for row in rows:
        family = FAMILIES.get(row.name, Family(row.name))
        units = ", ".join(f"{count} {name}" for name, count in row.units.items())
        notes = "; ".join(filter(None, [family.remark, "auxiliary loss" * family.aux, *row.notes]))
        counts = f"{row.forward:g} + {row.backward:g}"
        lines.append(
            f"| {row.name} | {row.plan} | {counts} | {units} | {shown(row.one)} | {shown(row.ranks)} | {notes} |"
        )
    refusals = [f"- [{i}] {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *refusals, ""] if refusals else [*lines, ""])


REFUSED = """
## Refused with tp 2, and why

These raise before any collective. Pipeline parallelism alone is the way out where tp 1 x pp 4 has a number (four
processes, as above).

"""


def refused(rows: Iterable[Row]) -> str:
    """The families that don't run with tensor parallelism, each with what it says."""
    lines = ["| family | tp 1 x pp 4 | with tp 2 |", "|---|---|---|"]
    for row in rows:
        alone = row.ranks.get("1x4", "")
        alone = f"{alone:.0e}" if isinstance(alone, float) else alone and "refused as well"
        lines.append(f"| {row.name} | {alone} | {row.refused.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def page(rows: list[Row]) -> str:
    """docs/zoo.md."""
    order = {name: i for i, name in enumerate(FAMILIES)}
    rows = sorted(rows, key=lambda row: order.get(row.name, len(order)))
    text = HEAD.format(layers=SIZES["num_hidden_layers"]) + table(row for row in rows if not row.refused)
    left = [row for row in rows if row.refused]
    return text + REFUSED + refused(left) if left else text


def main() -> int:
    """Run the families named on the command line (all by default); write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "zoo.md")
    parser.add_argument(
        "--rows", type=Path, help="rows are kept here as JSON, and those here already are not run"
    )
    parser.add_argument("--all-processes", action="store_true", help="real processes for every family")
    parser.add_argument("--no-processes", action="store_true", help="for none")
    options = parser.parse_args()
    rows: dict[str, Row] = {}
    if options.rows and options.rows.exists():
        rows = {row["name"]: Row(**row) for row in map(json.loads, options.rows.read_text().splitlines())}
    core = {family.name for family in CORE}
    for name in options.families:
        if name not in rows:
            rows[name] = measure(FAMILIES.get(name, Family(name)))
        row = rows[name]
        if options.all_processes or (not options.no_processes and (name in core or row.refused)):
            add_ranks(row)
        print(row, file=sys.stderr, flush=True)
        if options.rows:
            options.rows.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows.values()))
    options.out.write_text(page(list(rows.values())))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise SystemExit(main())
