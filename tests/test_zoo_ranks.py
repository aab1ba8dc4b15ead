"""Families of the zoo in real processes: sums over tensor-parallel ranks, shared heads, frozen chunks, schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .parity import Case
from .test_parity import run, same


def variants(base: Case) -> list[Case]:
    """Two schedules with other numbers of chunks: to the bit the same where the order of sums is asked for.

    One step there: the norm that scales the second is a float64 sum in the order of the ranks' parameters.
    """
    named = [replace(base, schedule=name) for name in ("1f1b", "stp")]
    return [*named, *(replace(case, reproducible=True, steps=1) for case in named)]


def test_partial_gradients_are_summed_once_and_to_the_bit() -> None:
    base = Case(model="qwen3", dtype=torch.float64, m=3, tied=False)
    outcomes = run(variants(base))
    assert same(*outcomes[2:])


def test_four_ranks_share_two_heads_and_a_frozen_chunk_sends_nothing() -> None:
    run([Case(model="qwen3", tp=4, pp=1, dtype=torch.float64, m=2, tied=False, steps=2)])
    run([Case(model="llama-frozen", dtype=torch.float64, m=3, schedule=s) for s in ("1f1b", "stp")])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["phi3", "gpt_neox", "olmo2", "gemma2", "mixtral", "qwen3_moe", "gpt2"])
def test_families(model: str) -> None:
    base = Case(model=model, dtype=torch.float64, m=3)
    outcomes = run(variants(base))
    assert same(*outcomes[2:])
    outcomes = run([replace(case, tp=4, pp=1) for case in variants(base)])
    assert same(*outcomes[2:])


@pytest.mark.slow
def test_experts_compiled() -> None:
    run([Case(model="mixtral", compile="unit", m=2, steps=1, dtype=torch.float64)])
