"""Families of the zoo in real processes: sums over tensor-parallel ranks, shared heads, frozen chunks, schedules.

The whole zoo runs with ``-m slow``, as it does for ``python -m tests.zoo``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from . import odd, zoo
from .families import CORE, FAMILIES, IMAGES, MORE
from .parity import Case
from .test_parity import run, same
from .test_zoo import REFUSED


def ordered(base: Case, *schedules: str) -> list[Case]:
    """Two schedules whose sums are made in one order."""
    return [replace(base, schedule=name, reproducible=True) for name in schedules]


@pytest.mark.slow
def test_parts_are_summed_once_and_to_the_bit_and_what_broke_elsewhere_is_right() -> None:
    base = Case(model="qwen3", dtype=torch.float64, m=3, steps=2)
    broken = replace(base, model="odd", options=(("tp_plan", odd.PLAN),))
    frozen = replace(base, model="llama-frozen", steps=1)
    # A parameter that many layers read is summed within a chunk first: to the bit for the same number of chunks.
    outcomes = run([*ordered(base, "1f1b", "stp"), *ordered(broken, "zbv", "stp"), frozen])
    assert same(*outcomes[:2]) and same(*outcomes[2:4])


@pytest.mark.slow  # in lockstep by default: test_zoo.py
def test_four_ranks_share_two_heads() -> None:
    run([Case(model="qwen3", tp=4, pp=1, dtype=torch.float64, m=2, layers=2, steps=2)])


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), zoo.LAYOUTS)
@pytest.mark.parametrize("name", [f.name for f in (*CORE, *MORE, *IMAGES) if f.name not in REFUSED])
def test_families(name: str, tp: int, pp: int) -> None:
    """Three steps under two schedules, and to the bit the same where sums are made in one order."""
    assert zoo.run_ranks(FAMILIES[name], tp, pp) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", [f.name for f in CORE])
def test_families_in_float32(name: str) -> None:
    base = Case(model=f"zoo:{name}", m=3, steps=3)
    run([replace(base, schedule=schedule) for schedule in zoo.SCHEDULES])


@pytest.mark.slow
def test_a_pipeline_alone_of_a_model_without_a_plan() -> None:
    run([Case(model="zoo:gpt2", tp=1, dtype=torch.float64, m=3, schedule=s) for s in zoo.SCHEDULES])


@pytest.mark.slow
def test_experts_compiled() -> None:
    run([Case(model="mixtral", compile="unit", m=2, steps=1, dtype=torch.float64)])
