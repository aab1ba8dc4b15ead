"""Long skips and two towers in real processes: every schedule exact, and equal to the bit among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from fxbraid.schedule import FAMILIES

from .parity import Case, Outcome
from .test_parity import run, same

BASE = Case(tp=1, pp=2, dtype=torch.float64, m=4, steps=2, reproducible=True)


def check(model: str, names: Iterable[str]) -> None:
    """Each schedule is exact, and those with as many chunks agree to the bit."""
    cases = [replace(BASE, model=f"towers:{model}", schedule=name) for name in names]
    groups: dict[int, list[Outcome]] = {}
    for case, outcome in zip(cases, run(cases, timeout_s=1200), strict=True):
        groups.setdefault(FAMILIES[case.schedule].v, []).append(outcome)
    assert all(same(*outcomes) for outcomes in groups.values())


def test_an_encoders_output_that_every_later_layer_reads() -> None:
    check("encoder-decoder", ["stp", "interleaved_1f1b"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["encoder-decoder", "towers", "towers-deep", "unet"])
def test_skips_under_every_schedule(model: str) -> None:
    check(model, FAMILIES)
