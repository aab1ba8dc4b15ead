"""Sequence parallelism in real processes: schedules, compile modes, both choices for the inputs of W."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid.runtime import emulate
from fxbraid.runtime.launch import launch

from .parity import Case, make_batches, make_model
from .test_parity import run, same

CLUSTER = emulate.Cluster(emulate.Link(2e-4, 4e6), emulate.Link(0.5e-3, 4e6))
ON = (("sequence_parallel", True),)
AGAIN = (*ON, ("regather", True))


def test_schedules_and_choices_agree_with_one_process_and_to_the_bit() -> None:
    base = Case(model="qwen3", dtype=torch.float64, m=3, tied=False, steps=1, options=ON)
    cases = [replace(base, schedule=name, reproducible=True) for name in ("1f1b", "stp")]
    again = replace(cases[1], options=AGAIN)
    unbraided = replace(cases[1], braided=False)
    plain = replace(base, schedule="stp", steps=3, options=AGAIN)
    outcomes = run([*cases, again, unbraided, plain])
    assert same(*outcomes[:4])


@pytest.mark.slow
def test_compiled_units_and_blocks() -> None:
    base = Case(model="qwen2", m=3, steps=2, options=AGAIN)
    run([replace(base, compile=mode) for mode in ("unit", "block")])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "mixtral"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (4, 1)])
def test_families(model: str, tp: int, pp: int) -> None:
    base = Case(model=model, tp=tp, pp=pp, dtype=torch.float64, m=3, tied=False, options=ON)
    named = [replace(base, schedule=name) for name in ("1f1b", "stp")]
    fixed = [replace(case, reproducible=True, steps=1) for case in named]
    outcomes = run([*named, *fixed, replace(base, options=AGAIN, schedule="stp")])
    assert same(*outcomes[2:4])


@pytest.mark.slow
def test_float32() -> None:
    base = Case(model="llama", options=ON)
    run([replace(base, schedule=name) for name in ("1f1b", "stp")])
    run([replace(base, tp=4, pp=1, schedule=name) for name in ("1f1b", "stp")])


def emulated(options: dict[str, bool]) -> list[tuple[float, float]]:
    """In each of 2 x 2 ranks: seconds of a step, and those of the simulator, for two schedules."""
    torch.set_num_threads(1)
    batch = make_batches(1, 4, mask=False, steps=1)[0]
    found = []
    with emulate.process_group(CLUSTER, timeout_s=60):
        for schedule in ("stp", "1f1b"):
            plain = make_model("qwen2", tied=False, layers=4, dtype=torch.float32)
            made: dict[str, Any] = {
                "schedule": schedule,
                "compile": False,
                "vocab_parallel": False,
                **options,
            }
            model = fxbraid.braid(plain, batch, tp_size=2, pp_size=2, n_microbatches=4, **made)
            emulate.unit_times(lambda unit: 2e-3 if unit.matmuls else 1e-4, arithmetic=False)
            with emulate.stopwatch() as reading:
                model.step(**batch)
            found.append((reading.seconds, model.simulate(model.profile()).step_time))
    return found


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_take_the_simulated_time(again: bool) -> None:
    for rank in launch(emulated, ({"sequence_parallel": True, "regather": again},), nproc=4, timeout_s=240):
        for measured, predicted in rank:
            loss = CLUSTER.pp_link.alpha_s + 4 / CLUSTER.pp_link.beta_bytes_per_s  # its broadcast
            assert measured == pytest.approx(predicted + loss, rel=1e-9)
