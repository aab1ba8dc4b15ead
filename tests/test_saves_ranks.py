"""Checkpointing in real processes: schedules, compile modes, other options; against one process, and to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxbraid
from fxbraid import BraidError
from fxbraid.agree import disagreement, facts
from fxbraid.passes.checkpoint import NAMES, ForwardUnit
from fxbraid.runtime.launch import launch, process_group

from .parity import Case, make_batches, make_model
from .test_parity import run, same
from .tiny import batch, qwen2

SPLIT = (("sequence_parallel", True), ("regather", True))


def under(case: Case, policy: str, *more: tuple[str, Any]) -> Case:
    return replace(case, options=(("checkpoint", policy), *more))


def test_schedules_agree_with_one_process_and_to_the_bit() -> None:
    base = Case(m=3, steps=1, tied=False, layers=4, reproducible=True)
    outcomes = run([base, under(base, "all"), under(replace(base, schedule="1f1b"), "attention+mlp")])
    assert same(*outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "llama", "gpt2", "mixtral"])
def test_every_policy_under_every_schedule(model: str) -> None:
    base = Case(model=model, m=5, steps=2, tied=False, reproducible=True)
    if model in ("gpt2", "mixtral"):
        base = replace(base, model=f"zoo:{model}", schedule="stp")
    named = [replace(base, schedule=name) for name in ("stp", "zbv", "1f1b")]
    outcomes = run([under(case, policy) for policy in NAMES for case in named])
    assert same(*outcomes)
    run([under(replace(base, schedule="stp", reproducible=False, m=m), "all") for m in (1, 2, 8)])


@pytest.mark.slow
def test_other_options() -> None:
    base = Case(m=3, steps=2)
    cases = [under(replace(base, compile=mode), "attention+mlp") for mode in ("unit", "block")]
    cases += [under(base, "all", ("vocab_parallel", whole)) for whole in (True, False)]
    cases += [under(base, "all", *SPLIT[:k]) for k in (1, 2)]
    cases += [under(base, "mlp", ("order", "costs")), under(replace(base, backend=True), "mlp")]
    run(cases)


def refuse(answers: int) -> str:
    """In a rank: a policy that says yes on rank ``answers`` alone. What ``braid`` says of it."""
    with process_group(timeout_s=60):
        mine = dist.get_rank() == answers
        with pytest.raises(BraidError) as raised:
            fxbraid.braid(
                make_model("qwen2", tied=False, layers=2, dtype=torch.float32),
                make_batches(2, 1, mask=False, steps=1)[0],
                tp_size=2,
                pp_size=1,
                n_microbatches=1,
                schedule="1f1b",
                compile=False,
                checkpoint=lambda unit: mine and unit.kind == "mlp",
            )
    return str(raised.value)


@pytest.mark.slow
def test_a_function_that_answers_by_rank_is_refused_on_all() -> None:
    said = launch(refuse, (1,), nproc=2, timeout_s=120)
    assert len(set(said)) == 1 and "checkpoint answers differently on ranks 0 and 1" in said[0]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(BraidError, match='checkpoint=\'some\': use "none", "mlp"'):
        fxbraid.braid(qwen2(), batch(2), n_microbatches=1, checkpoint="some")  # type: ignore[arg-type]

    def broken(unit: ForwardUnit) -> bool:
        raise KeyError("mine")

    with pytest.raises(BraidError, match="checkpoint raised KeyError when it was asked of unit"):
        fxbraid.braid(
            qwen2(num_hidden_layers=1),
            batch(2),
            n_microbatches=1,
            schedule="1f1b",
            compile=False,
            checkpoint=broken,
        )

    def one(unit: ForwardUnit) -> bool:
        return unit.kind == "mlp"

    def two(unit: ForwardUnit) -> bool:
        return unit.layer == 0

    told = disagreement([facts({"checkpoint": policy}) for policy in ("mlp", "all")])
    assert told is not None and told.startswith(
        "checkpoint differs between ranks ('mlp' on rank 0; 'all' on rank 1)"
    )
    assert disagreement([facts({"checkpoint": policy}) for policy in (one, two)])
    assert not disagreement([facts({"checkpoint": policy}) for policy in (one, one)])


def test_the_predicted_peak_is_the_measured_one() -> None:
    data = batch(6)
    model = fxbraid.braid(
        qwen2(num_hidden_layers=2), data, n_microbatches=3, schedule="1f1b", compile=False, checkpoint="all"
    )
    measured = model.measure_peak(**data)
    assert model.memory().ranks[0].activations == pytest.approx(measured, rel=0.05)
    # The simulator has what a unit makes before what it frees, so it is above where units make much again.
    units = {u.key for c in model.lowered.chunks.values() for us in c.units.values() for u in us}
    assert measured <= 1.01 * model.simulate(dict.fromkeys(units, 1.0)).peak[0] <= 1.3 * measured
    report = str(model.report())
    assert "R: 7 units, 11 matmuls, 0 all-reduces" in report
