"""fxbraid on the emulated cluster: the same bits as on gloo, and the step time that the simulator predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link
from fxbraid.runtime.launch import launch, process_group

from .parity import Case, Outcome, make_batches, make_model, merge, run_case, share_traces

UNIT_S, AR_S = 2e-3, 1e-3  # of each attention and MLP unit, in each of F, I and W; of each all-reduce
PP_LINK = Link(0.5e-3, 4e6)
CLUSTER = Cluster(Link(AR_S), PP_LINK)
MESSAGE = 16 * 32 * 4  # bytes of one micro-batch: a row of 16 tokens, 32 wide, float32
LAYERS = 4


def seconds(unit: Any) -> float:
    """Attention and MLP alike, everything else free."""
    return UNIT_S if unit.name.startswith(("attn", "mlp")) else 0.0


def run_everywhere(cases: list[Case]) -> list[list[Outcome]]:
    """On gloo, then on each clock."""
    torch.set_num_threads(1)
    share_traces()
    with process_group(timeout_s=60):
        found = [[run_case(case) for case in cases]]
    for clock in emulate.CLOCKS:
        with emulate.process_group(replace(CLUSTER, clock=clock), timeout_s=60):  # type: ignore[arg-type]
            emulate.unit_times(lambda unit: seconds(unit) / 10)
            found.append([run_case(case) for case in cases])
    return found


def step_times(schedules: list[str], m: int) -> dict[str, Any]:
    """In each of 2 x 2 ranks: (seconds of two steps with arithmetic, of one without, the loss) by schedule."""
    torch.set_num_threads(1)
    share_traces()
    batch = make_batches(1, m, mask=False, steps=1)[0]
    found: dict[str, Any] = {}
    with emulate.process_group(CLUSTER, timeout_s=60):
        for name in schedules:
            schedule, _, blocking = name.partition(":")
            model = fxbraid.braid(
                make_model("qwen2", tied=False, layers=LAYERS, dtype=torch.float32),
                batch,
                tp_size=2,
                pp_size=2,
                n_microbatches=m,
                schedule=schedule,
                compile=False,
                braided=not blocking,
                split=[1] * 4 if schedule == "stp" else "auto",
                vocab_parallel=False,  # two equal collectives a layer and no other: what ``constants`` says
            )
            times, loss = [], 0.0
            for arithmetic in (True, True, False):
                emulate.unit_times(seconds, arithmetic=arithmetic)
                with emulate.stopwatch() as reading:
                    loss = float(model.step(**batch)) if arithmetic else (model.step(**batch), loss)[1]
                times.append(reading.seconds)
            assert "timing only" in emulate.label()
            found[name] = (times, loss)
    return found


@pytest.fixture(scope="module")
def times() -> list[list[dict[str, Any]]]:
    names = ["stp", "stp:blocking", "1f1b"]
    return [launch(step_times, (some, 8), nproc=4, timeout_s=240) for some in (names, names[:1])]


@pytest.mark.slow  # and fxbraid.bench.bitwise, over every clock and link
def test_losses_and_gradients_are_those_of_gloo_to_the_bit() -> None:
    cases = [Case(steps=2), Case(steps=2, braided=False, schedule="1f1b")]
    ranks = launch(run_everywhere, (cases,), nproc=4, timeout_s=240)
    for i in range(len(cases)):
        plain, *clocks = (
            merge([rank[place][i] for rank in ranks]) for place in range(1 + len(emulate.CLOCKS))
        )
        assert plain.loss <= 1e-6 and plain.grad <= 1e-5
        for clock, outcome in zip(emulate.CLOCKS, clocks, strict=True):
            assert outcome.digests == plain.digests, clock


def test_step_times_repeat_to_the_bit_with_and_without_arithmetic(times: list[list[dict[str, Any]]]) -> None:
    first, second = times
    assert [rank["stp"] for rank in first] == [rank["stp"] for rank in second]
    for found in first:
        for steps, loss in found.values():
            assert steps == [steps[0]] * 3
            assert loss == first[0]["stp"][1] or abs(loss / first[0]["stp"][1] - 1) < 1e-6


def test_step_times_are_those_of_the_simulator(times: list[list[dict[str, Any]]]) -> None:
    from fxbraid import schedule as schedules
    from fxbraid.simulate import Link as SimLink
    from fxbraid.simulate import constants, simulate

    for name, layers in {"stp": 1, "stp:blocking": 1, "1f1b": 2}.items():
        kind, _, blocking = name.partition(":")
        schedule = schedules.build(kind, p=2, m=8)
        if blocking:
            schedule = schedules.unbraid(schedule)
        chunk, ar = 2 * layers * UNIT_S, 2 * layers * AR_S
        link = SimLink(PP_LINK.alpha_s, PP_LINK.beta_bytes_per_s)
        workload = constants(schedule, chunk, chunk, chunk, ar, layers=layers, message=MESSAGE, link=link)
        predicted = simulate(schedule, workload, braided=not blocking).step_time
        loss = PP_LINK.alpha_s + 4 / PP_LINK.beta_bytes_per_s  # its broadcast, which the simulator leaves out
        assert times[0][0][name][0][0] == pytest.approx(predicted + loss, rel=1e-9), name


def test_braiding_hides_on_the_emulated_cluster(times: list[list[dict[str, Any]]]) -> None:
    found = times[0][0]
    assert found["stp"][0][0] < 0.9 * found["stp:blocking"][0][0]
