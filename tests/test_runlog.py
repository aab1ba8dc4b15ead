"""The running log: what a line says, on a terminal, in a file, over a resumed run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fxbraid
from fxbraid.passes.cost import training_flops
from fxbraid.passes.errors import BraidError
from fxbraid.runlog import known_peak, line

from .tiny import SEQ, batch, qwen2

pytestmark = pytest.mark.usefixtures("shared_traces")


class Seconds:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def model() -> fxbraid.BraidedModel:
    return fxbraid.braid(qwen2(), batch(4), n_microbatches=2, compile=False)


def run(model: fxbraid.BraidedModel, log: fxbraid.RunLog, steps: int) -> list[float]:
    losses = []
    for seed in range(steps):
        loss = model.step(**batch(4, seed=seed))
        norm = model.clip_grad_norm_(1.0)
        model.zero_grad()
        log(loss=loss, grad_norm=norm, lr=1e-4)
        losses.append(float(loss))
    return losses


def test_a_line_per_step_and_the_same_numbers_in_the_file(
    model: fxbraid.BraidedModel, tmp_path: Path
) -> None:
    text, file = io.StringIO(), tmp_path / "run.jsonl"
    console = Console(file=text, width=40)
    with fxbraid.RunLog(model, file, console=console, clock=Seconds(), peak=1e9) as log:
        losses = run(model, log, 3)
    with fxbraid.RunLog(model, file, console=console, clock=Seconds(), first_step=4) as log:
        losses += run(model, log, 1)
    records = [json.loads(row) for row in file.read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r["loss"] for r in records] == losses
    for record, printed in zip(records, text.getvalue().splitlines(), strict=True):
        assert printed == line(record)
        assert record["seconds"] == 1.0 and record["tokens_per_s"] == 4 * SEQ
        assert record["step_seconds"] > 0 and record["lr"] == 1e-4
        assert f"loss {record['loss']:.4f}" in printed and "64 tokens/s" in printed
    work = sum(training_flops(c.graph_module.graph) for c in model.plan.partition.chunks) * 2
    assert records[0]["mfu"] == pytest.approx(work / (records[0]["step_seconds"] * 1e9))
    assert records[3]["mfu"] is None  # nothing is known of this machine


def test_work_is_counted_as_by_hand(model: fxbraid.BraidedModel) -> None:
    """Two rows of 16 tokens, hidden 32, inner 48, 4 heads of 8, 2 key-value heads, 4 layers, vocabulary 96."""
    tokens = 2 * SEQ
    weights = 4 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48) + 32 * 96
    scores = 4 * 2 * 2 * tokens * SEQ * 32
    found = sum(training_flops(c.graph_module.graph) for c in model.plan.partition.chunks)
    assert found == 3 * (2 * tokens * weights + scores)
    frozen = qwen2()
    frozen.model.requires_grad_(False)  # type: ignore[union-attr, operator]
    half = fxbraid.braid(frozen, batch(4), n_microbatches=2, compile=False)
    found = sum(training_flops(c.graph_module.graph) for c in half.plan.partition.chunks)
    assert found == 2 * 2 * tokens * (weights - 32 * 96) + 3 * 2 * tokens * 32 * 96 + 3 * scores


def test_every_nth_step_and_a_bar_on_a_terminal(model: fxbraid.BraidedModel, tmp_path: Path) -> None:
    text, file = io.StringIO(), tmp_path / "run.jsonl"
    console = Console(file=text, width=200, force_terminal=True)
    with fxbraid.RunLog(model, file, total=4, every=2, console=console, clock=Seconds()) as log:
        run(model, log, 4)
    records = [json.loads(row) for row in file.read_text().splitlines()]
    assert [(r["step"], r["seconds"]) for r in records] == [(2, 0.5), (4, 0.5)]
    assert "4/4" in text.getvalue() and "tokens/s" in text.getvalue()


def test_what_is_not_finite_or_not_known_can_still_be_read(
    model: fxbraid.BraidedModel, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    with fxbraid.RunLog(model, file, console=Console(file=io.StringIO())) as log:
        model.step(**batch(4))
        log(loss=torch.tensor(float("nan")), grad_norm=float("inf"), note="warm-up")
    record = json.loads(file.read_text())
    assert (record["loss"], record["grad_norm"], record["note"]) == ("nan", "inf", "warm-up")
    assert record["mfu"] is None and known_peak(model) is None


def test_what_cannot_be_written_or_counted_is_said(model: fxbraid.BraidedModel, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="the log can't be written to"):
        fxbraid.RunLog(model, tmp_path)
    with pytest.raises(BraidError, match="every=0"):
        fxbraid.RunLog(model, every=0)
