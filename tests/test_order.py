"""Orders and schedules from costs, in ranks: the same on all of them, no bit changed, and as fast as predicted."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid.plan.choose import TORCH, choose, settle
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link
from fxbraid.runtime.launch import launch
from fxbraid.schedule import build, unbraid
from fxbraid.simulate import simulate

from .parity import Case, Outcome, make_batches, make_model, merge, run_case, share_traces

PP_LINK = Link(0.4e-3, 4e6)
CLUSTER = Cluster(Link(1.6e-3), PP_LINK)
LAYERS, M = 4, 6

#: seconds by kind and phase: uneven, as real units are
TIMES = {"attn": (1e-3, 1.5e-3, 0.6e-3), "mlp": (2e-3, 2.2e-3, 2.4e-3)}


def seconds(unit: Any) -> float:
    for kind, times in TIMES.items():
        if unit.name.startswith(kind):
            return times["FIW".index(unit.phase.value)]
    return 0.1e-3 if unit.matmuls else 0.0


def steps(options: dict[str, dict[str, Any]], cases: list[Case]) -> tuple[dict[str, Any], list[Outcome]]:
    """In each rank, by name: (virtual seconds of a step, predicted, schedule as CSV, code of its blocks, report,
    profile); and the outcomes of ``cases``."""
    torch.set_num_threads(1)
    share_traces()
    batch = make_batches(1, M, mask=False, steps=1)[0]
    found: dict[str, Any] = {}
    with emulate.process_group(CLUSTER, timeout_s=60):
        emulate.unit_times(seconds)
        for name, more in options.items():
            plain = make_model("qwen2", tied=False, layers=LAYERS, dtype=torch.float32)
            model = fxbraid.braid(
                plain, batch, tp_size=2, pp_size=2, n_microbatches=M, compile=False, split=[1] * 4, **more
            )
            profile = fxbraid.profile(model)
            with emulate.stopwatch() as reading:
                model.step(**batch)
            codes = {key: block.code for key, block in model.blocks.items()}
            predicted = model.simulate(profile).step_time
            report = str(model.report())
            found[name] = (
                reading.seconds,
                predicted,
                model.schedule.to_csv(),
                codes,
                report,
                asdict(profile),
            )
        return found, [run_case(case) for case in cases]


SPLIT = ("split", (1, 1, 1, 1))
CASES = [
    Case(schedule="stp", options=(SPLIT,)),
    Case(schedule="stp", options=(SPLIT, ("order", "costs"))),
    Case(schedule="stp", reproducible=True, options=(SPLIT,)),
    Case(schedule="auto", reproducible=True, options=(SPLIT,)),
]


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, Any], list[Outcome]]]:
    options: dict[str, dict[str, Any]] = {
        "paper": {"schedule": "dualpipev"},
        "costs": {"schedule": "dualpipev", "order": "costs"},
        "auto": {"schedule": "auto"},
    }
    cases = [replace(case, m=M, steps=2, rows=1, mask=False, tied=False, layers=LAYERS) for case in CASES]
    return launch(steps, (options, cases), nproc=4, timeout_s=240)


@pytest.fixture(scope="module")
def measured(ranks: list[tuple[dict[str, Any], list[Outcome]]]) -> list[dict[str, Any]]:
    return [found for found, _ in ranks]


LOSS_S = PP_LINK.alpha_s + 4 / PP_LINK.beta_bytes_per_s  # its broadcast, which the simulator leaves out


@pytest.mark.parametrize("name", ["paper", "costs", "auto"])
def test_a_step_takes_what_the_simulator_predicts(measured: list[dict[str, Any]], name: str) -> None:
    for rank in measured:
        took, predicted, *_ = rank[name]
        assert took == pytest.approx(predicted + LOSS_S, rel=1e-6)


def test_all_ranks_decide_the_same(measured: list[dict[str, Any]]) -> None:
    for name in ("costs", "auto"):
        assert len({rank[name][2] for rank in measured}) == 1
        assert all(rank[name][5] == measured[0][name][5] for rank in measured)
    for first, second in ((0, 1), (2, 3)):  # the two ranks of a TP group run the same blocks
        for name in ("costs", "auto"):
            assert measured[first][name][3] == measured[second][name][3]


def test_costs_change_the_order_and_make_it_faster(measured: list[dict[str, Any]]) -> None:
    for rank in measured:
        assert rank["costs"][3] != rank["paper"][3]
        assert rank["costs"][0] < rank["paper"][0]


def test_auto_is_no_slower_than_anything_known_and_says_so(measured: list[dict[str, Any]]) -> None:
    for rank in measured:
        assert rank["auto"][0] <= 1.002 * min(rank["costs"][0], rank["paper"][0])
        assert (
            "schedule 'auto'" in rank["auto"][4] and "against torch's fastest order here" in rank["auto"][4]
        )


def test_order_and_choice_change_no_bit(ranks: list[tuple[dict[str, Any], list[Outcome]]]) -> None:
    outcomes = [merge([rank[1][i] for rank in ranks]) for i in range(len(CASES))]
    for outcome in outcomes:
        assert outcome.loss <= 1e-6 and outcome.grad <= 1e-5
    assert outcomes[0].digests == outcomes[1].digests
    assert outcomes[2].digests == outcomes[3].digests


def test_the_choice_is_never_slower_than_torchs_orders() -> None:
    from fxbraid.simulate import Link as SimLink
    from fxbraid.simulate import constants

    for p, m in ((1, 3), (2, 5), (3, 6)):
        for ar in (0.0, 0.6):
            for latency in (0.0, 0.15):
                costs = constants(2 * p, 1, 1.1, 0.8, ar, layers=2, message=1.0, link=SimLink(latency))
                choice = choose(p, m, costs, effort=10_000)
                for name in TORCH:
                    order = unbraid(build(name, p=p, m=m))
                    on = costs if order.v == 2 else costs.merged()
                    theirs = simulate(order, on).step_time
                    assert choice.best.step_time <= 1.01 * theirs, (p, m, ar, latency, name)
                assert choice.best.step_time == pytest.approx(
                    simulate(
                        choice.schedule,
                        costs if choice.schedule.v == 2 else costs.merged(),
                        ordered_by=None
                        if choice.best.order == "paper"
                        else (costs if choice.schedule.v == 2 else costs.merged()),
                    ).step_time
                )


def test_a_choice_without_collectives_says_so_and_is_not_held_against_itself() -> None:
    from fxbraid.simulate import constants

    for ar in (0.0, 0.6):
        costs = constants(4, 1, 1, 1, ar, layers=2)
        auto = choose(2, 5, costs, effort=2_000)
        asked = settle(build("1f1b", p=2, m=5), costs.merged())
        for choice in (auto, asked):
            assert choice.hides == (ar > 0)
            against = [line for line in choice.lines if line.startswith("against ")]
            for line in against:
                same = line.split(":")[0].removeprefix("against torch's fastest order here, ")
                assert same.removeprefix("against ") != choice.best.name, line
            said = ("collectives take no time here" in choice.lines[-1]) == (ar == 0)
            assert said and ("waiting for a partner" not in choice.lines[-1] or ar > 0)
