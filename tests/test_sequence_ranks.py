"""Sequence parallelism in real processes: schedules, compile modes, both choices for the inputs of W."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .parity import Case
from .test_parity import run, same

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
