"""Parity in real processes: every layout and schedule against the unsplit model, and bitwise among themselves.

Each test starts its ranks once and runs many cases in them. Random weights and tokens, ragged labels with -100,
padded attention masks, three AdamW steps with clipping: see ``tests.parity``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxbraid.runtime.launch import launch

from .parity import Case, Outcome, merge, run_cases

SCHEDULES = ("gpipe", "1f1b", "stp")


def run(cases: list[Case], *, timeout_s: float = 540) -> list[Outcome]:
    """Run ``cases`` (all of one layout) in one set of ranks, check each against one process, and return them."""
    nproc = cases[0].tp * cases[0].pp
    assert {case.tp * case.pp for case in cases} == {nproc}
    per_rank = launch(run_cases, (cases,), nproc=nproc, timeout_s=timeout_s)
    outcomes = [merge([outcomes[i] for outcomes in per_rank]) for i in range(len(cases))]
    for outcome in outcomes:
        double = outcome.case.dtype is torch.float64
        loss, grad = (1e-12, 1e-12) if double else (1e-6, 1e-5)
        assert outcome.loss <= loss, outcome
        assert outcome.grad <= grad, outcome
        assert outcome.norm <= grad, outcome
    return outcomes


def same(*outcomes: Outcome) -> bool:
    """Equal to the bit: losses and every gradient of every step."""
    return all(outcome.digests == outcomes[0].digests for outcome in outcomes)


def variants(case: Case) -> list[Case]:
    """One case in the forms that must agree to the bit, and each schedule in its reproducible form."""
    return [
        case,
        replace(case, braided=False),
        *(replace(case, schedule=name, reproducible=True) for name in SCHEDULES),
    ]


def test_2x2_schedules_braids_and_micro_batches() -> None:
    base = Case(tp=2, pp=2, tied=True)
    some = ((1, "stp"), (2, "1f1b"), (3, "gpipe"), (8, "stp"))  # all of them: test_the_whole_matrix
    cases = [*(replace(base, schedule=s, m=m) for m, s in some), *variants(replace(base, m=5))]
    outcomes = run(cases)
    plain, unbraided, *reproducible = outcomes[-5:]
    assert same(plain, unbraided)
    assert same(*reproducible)
    # The published order adds up chunk gradients out of micro-batch order: were this equal, the test above
    # would show nothing.
    assert not same(plain, reproducible[0])


@pytest.mark.slow  # the double-precision test has the untied Llama by default
def test_2x2_untied_llama_with_biases_and_no_mask() -> None:
    base = Case(tp=2, pp=2, model="llama", tied=False, m=5)
    outcomes = run(
        [*variants(base), replace(base, mask=False, schedule="1f1b"), replace(base, model="qwen2")]
    )
    assert same(*outcomes[:2]) and same(*outcomes[2:5])


def test_2x2_in_double_precision() -> None:
    run(
        [
            Case(dtype=torch.float64, m=5, steps=2),
            Case(dtype=torch.float64, m=3, steps=2, model="llama", tied=False, schedule="1f1b"),
        ]
    )


@pytest.mark.slow
def test_1x4_pipeline_alone() -> None:
    base = Case(tp=1, pp=4, layers=8, m=5)
    outcomes = run([*variants(base), replace(base, tied=False, m=12, steps=2, schedule="1f1b")])
    assert same(*outcomes[:2]) and same(*outcomes[2:5])


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_smaller_layouts(tp: int, pp: int) -> None:
    base = Case(tp=tp, pp=pp, m=3)
    outcomes = run([*variants(base), replace(base, model="llama", tied=False, m=8)])
    assert same(*outcomes[:2]) and same(*outcomes[2:5])


def test_2x2_compiled() -> None:
    base = Case(tp=2, pp=2, compile="unit", m=5)
    outcomes = run(variants(base))
    assert same(*outcomes[:2])
    assert same(*outcomes[2:])


@pytest.mark.slow
@pytest.mark.parametrize("compile_", [False, "unit"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", ["qwen2", "llama"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_the_whole_matrix(tp: int, pp: int, model: str, tied: bool, compile_: str | bool) -> None:
    base = Case(tp=tp, pp=pp, model=model, tied=tied, layers=8 if pp == 4 else 4, compile=compile_)
    for m in (1, 2, 3, 5, 8):
        case = replace(base, m=m)
        cases = [replace(case, schedule=s, braided=b) for s in SCHEDULES for b in (True, False)]
        cases += [replace(case, schedule=s, reproducible=True) for s in SCHEDULES]
        outcomes = run([*cases, replace(case, mask=False)], timeout_s=1800)
        for i in range(0, 6, 2):
            assert same(*outcomes[i : i + 2])
        assert same(*outcomes[6:9])
