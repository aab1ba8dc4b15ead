"""The proofs' verdicts, on made-up times: what counts as missed, invalid or different. (Their runs are in the docs.)"""

from __future__ import annotations

import re

import pytest

from fxbraid.bench import bitwise, gains, hiding, netlink, paced, reallink
from fxbraid.bench.config import BenchConfig
from fxbraid.bench.lab import Cell, Found, Plan

SIZES = BenchConfig(pp=2, layers=8, unit_ms=2.0)


def cells(ratio: float = 0.5, m: int = 8, error: float = 0.0, **times: float) -> Found:
    """Times in ms by name, ``_`` for ``:``; predicted as measured unless ``predicted`` says otherwise."""
    predicted = times.pop("predicted", 0.0)
    made = tuple(
        Cell(
            name.replace("__", ":"),
            m,
            ratio,
            (ms / 1e3,) * 3,
            (error,) * 3,
            (predicted or ms) / 1e3,
            shares={"exposed_tp": 0.05},
        )
        for name, ms in times.items()
    )
    return Found("emulated, virtual clock", made)


GOOD = {
    "stp": 112.0,
    "stp__blocking": 200.0,
    "stp__free": 100.0,
    "auto": 110.0,
    "auto__free": 100.0,
    "interleaved_1f1b": 140.0,
    "order__ZBVZeroBubble": 170.0,
    "order__GPipe": 220.0,
}


def plan(ratio: float = 0.5) -> Plan:
    return Plan(SIZES, tuple(name.replace("__", ":") for name in GOOD), (8,), (ratio,))


def test_hiding_misses_what_it_should() -> None:
    assert hiding.problems(cells(**GOOD), plan()) == []
    (row,) = hiding.hiding_rows(cells(**GOOD), plan())
    assert row == ["8", "0.5", "200.00", "112.00", "100.00", "0.880", "0.844", "1.043"]
    (best,) = hiding.best_rows(cells(**GOOD), plan())
    assert best[3:] == ["order:ZBVZeroBubble", "170.00", "54.5 % faster"]
    slow = hiding.problems(cells(**GOOD | {"stp": 125.0}), plan())
    assert slow == ["MISSED m 8, ratio 0.5: eta is 0.889 eta_max, wanted 0.95"]
    auto = hiding.problems(cells(**GOOD | {"auto": 172.0}), plan())
    assert auto == ["MISSED m 8, ratio 0.5: auto is 1.2 % slower than order:ZBVZeroBubble"]
    apart = hiding.problems(cells(**{**GOOD, "predicted": 110.0}), plan())
    assert any(re.search(r"order:GPipe is \+100.0 % from the simulator", text) for text in apart)
    flat = cells(**dict.fromkeys(GOOD, 100.0))
    assert hiding.problems(flat, plan()) == [] and hiding.hiding_rows(flat, plan())[0][5] == "-"


def test_gains_have_targets_at_two_and_four_ranks() -> None:
    some = plan(1.0)
    found = cells(1.0, **GOOD)
    assert [gains.gain(found.at(8, 1.0), name) for name in ("stp", "interleaved_1f1b")] == [0.0, 0.25]
    missed = gains.problems(
        Found("", (*found.cells, *cells(0.37, **GOOD).cells)), Plan(SIZES, some.names, (8,), (0.37, 1.0))
    )
    assert missed == []
    less = Found("", (*cells(1.0, **GOOD | {"interleaved_1f1b": 120.0}).cells, *cells(0.37, **GOOD).cells))
    assert gains.problems(less, Plan(SIZES, some.names, (8,), (0.37, 1.0))) == [
        "MISSED: at 1 stp is 7.1 % faster than interleaved_1f1b, wanted 24 %"
    ]
    # 2 layers a chunk, four units of 2 ms: T_AR is 8 ms.
    assert gains.exposed(found.at(8, 1.0), "stp", "stp:free", some, 1.0) == pytest.approx(1.5)
    assert "| 1            | stp        | 0.70" in gains.exposed_text(found, some)


def test_paced_refuses_times_that_are_the_emulations_own() -> None:
    assert paced.problems(cells(**GOOD), plan()) == []
    invalid = paced.problems(cells(error=0.07, **GOOD), plan())
    assert len(invalid) == len(GOOD)
    assert invalid[0] == "INVALID: 7.0 % of stp at 0.5 is the emulation's own, 5 % allowed"
    assert "INVALID" in paced.rows_of(cells(error=0.07, **GOOD), plan())[0][2]
    assert any(
        "from the simulator" in text for text in paced.problems(cells(**{**GOOD, "predicted": 150.0}), plan())
    )


def test_bits_are_compared_where_gradients_add_up_in_one_order() -> None:
    def one(name: str, digest: str, order: str = "micro-batch order") -> bitwise.Outcome:
        return bitwise.Outcome(name, digest, order)

    same = {"a": [one("zbv", "1"), one("stp", "2", "x")], "b": [one("zbv", "1"), one("1f1b", "1")]}
    assert bitwise.differences(same) == []
    other = {"a": [one("zbv", "1")], "b": [one("1f1b", "3")]}
    assert bitwise.differences(other) == ["DIFFERENT: 1f1b, b and zbv, a"]


def test_the_real_link_says_why_where_it_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr(netlink, "reason", lambda: "a real slow link needs root")
    done = CliRunner().invoke(reallink.app, [])
    assert done.exit_code == 1 and "needs root" in done.output
