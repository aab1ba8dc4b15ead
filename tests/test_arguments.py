"""Arguments of ``braid`` and its friends that make no sense, or differ between ranks: refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid import observe
from fxbraid.agree import describe, disagreement, facts
from fxbraid.order import check_order
from fxbraid.passes.errors import BraidError
from fxbraid.plan.choose import choose
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import units as emulated_units
from fxbraid.runtime.links import LinkTime
from fxbraid.runtime.mesh import Mesh
from fxbraid.runtime.profile import Profile
from fxbraid.schedule import ScheduleError, build
from fxbraid.simulate import constants

from .tiny import batch, qwen2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "stp", "max_live": 4}, "leave max_live out"),
        ({"schedule": "auto", "max_live": 2.5}, r"max_live=2\.5: give a whole number"),
        ({"schedule": "auto", "max_live": "a"}, "max_live='a': give a whole number"),
        ({"schedule": "auto", "max_live": 0}, "max_live=0"),
        ({"max_programs": 0}, "max_programs=0: give a whole number, 1 or more"),
        ({"n_microbatches": 2.0}, r"n_microbatches=2\.0: give a whole number"),
        ({"braided": False, "collectives": "overlap"}, "leave one of them out"),
        ({"order": 3}, "3 holds no times"),
        ({"order": [1, 2]}, r"\[1, 2\] holds no times"),
        ({"order": {"a": math.nan}}, "the time of unit 'a' is nan; give finite seconds"),
        ({"order": {"a": -1.0}}, r"'a' is -1\.0"),
        ({"order": {"a": math.inf}}, "'a' is inf"),
        ({"order": {"a": "fast"}}, "'a' is 'fast'"),
        ({"order": Profile({}, all_reduce=LinkTime(-1.0, 1e9))}, "of all-reduces is no link"),
        ({"order": Profile({}, messages={(0, 1): LinkTime(0.0, math.nan)})}, "of messages 0-1 is no link"),
        ({"order": Profile({}, contention=math.nan)}, "contention is nan"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes': give True or False"),
        ({"reproducible": "no"}, "reproducible='no': give True or False"),
        ({"braided": 1}, "braided=1: give True or False"),
        ({"master_weights": "on"}, "master_weights='on': give True or False"),
        ({"grad_dtype": "float32"}, "grad_dtype='float32': give torch"),
        ({"regather": None}, "regather=None: give True or False"),
        ({"vocab_parallel": 3}, "vocab_parallel=3: use True, False or 'auto'"),
        ({"vocab_parallel": 1}, "vocab_parallel=1: use True"),
        ({"loss_reduction": "max"}, "loss_reduction='max': use 'auto', 'sum' or 'mean'"),
        ({"loss_reduction": None}, "loss_reduction=None"),
        ({"compile": "yes"}, "compile='yes': use \"unit\""),
        ({"compile": True}, 'compile=True: use "unit"'),
        ({"compile": ["unit"]}, "compile="),
        ({"collectives": ["overlap"]}, r"collectives=\['overlap'\] is not one of"),
        ({"tp_plan": 5}, 'tp_plan=5: use "auto", or a dict of module patterns'),
        ({"tp_plan": "mine"}, "tp_plan='mine': use \"auto\""),
        ({"tp_plan": {"layers.*.up": 3}}, r"tp_plan=\{'layers.*.up': 3\}: use"),
        ({"split": "3"}, "split='3': use \"auto\", or a list with the layers of each chunk"),
        ({"split": 3}, "split=3: use"),
        ({"split": []}, r"split=\[\]: use"),
        ({"split": [2, "2"]}, "layers in split='2': give a whole number"),
        ({"split": [4, 0]}, "layers in split=0: give a whole number"),
        ({"max_programs": "many"}, "max_programs='many': give a whole number"),
        ({"max_programs": None}, "max_programs=None"),
        ({"seed": "x"}, "seed='x': give a whole number of 64 bits"),
        ({"seed": 2**70}, "seed=1180591620717411303424"),
        ({"tp_size": "2"}, "tp_size='2': give a whole number"),
        ({"pp_size": True}, "pp_size=True: give a whole number"),
        ({"device_mesh": (1, 1)}, r"device_mesh=\(1, 1\): give a DeviceMesh"),
        ({"schedule": 7}, "schedule=7: give the name of one"),
    ],
)
def test_arguments_are_checked_before_anything_is_traced(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxbraid.tracing.lower_model", lambda *_, **__: pytest.fail("it was traced"))
    with pytest.raises(BraidError, match=words):
        fxbraid.braid(qwen2(), batch(4), **{"n_microbatches": 2, "compile": False, **options})


def test_what_is_no_model_and_no_batch_is_said() -> None:
    with pytest.raises(BraidError, match=r"model is of type str; give a torch\.nn\.Module"):
        fxbraid.braid("qwen2", batch(4), n_microbatches=2)  # type: ignore[arg-type]
    for wrong in ([batch(4)], torch.zeros(4, 16), {1: torch.zeros(4)}):
        with pytest.raises(BraidError, match="give a dict of the model's keyword arguments"):
            fxbraid.braid(qwen2(), wrong, n_microbatches=2)  # type: ignore[arg-type]
    with pytest.raises(BraidError, match="seed='x': give a whole number"):
        fxbraid.from_pretrained("nowhere", batch(4), n_microbatches=2, seed="x")


@pytest.mark.parametrize("most", [0, 2.5, True])
def test_a_choice_takes_whole_activations(most: Any) -> None:
    with pytest.raises(ScheduleError, match="give a whole number of chunk activations"):
        choose(2, 4, constants(build("stp", p=2, m=4), 1, 1, 1, 0.25), max_live=most)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return fxbraid.braid(qwen2(), batch(4), n_microbatches=2, schedule="1f1b", compile=False).train()


@pytest.mark.parametrize("repeats", [0, -1, 1.5, True])
def test_a_profile_is_measured_a_whole_number_of_times(model: Any, repeats: Any) -> None:
    with pytest.raises(BraidError, match=r"repeats=.*: give a whole number of measurements, 1 or more"):
        fxbraid.profile(model, repeats=repeats, cache=False)


def test_only_what_braid_made_has_a_profile() -> None:
    with pytest.raises(BraidError, match=r"what braid\(\) has made, and this is a Qwen2ForCausalLM"):
        fxbraid.profile(qwen2())  # type: ignore[arg-type]


@pytest.mark.parametrize("time", [math.nan, -1.0, math.inf])
def test_a_simulation_takes_times(model: Any, time: float) -> None:
    with pytest.raises(BraidError, match="give finite seconds, 0 or more"):
        model.simulate({"a": time})


# -- the same on all ranks

ASKED: dict[str, Any] = {
    "model": torch.nn.Linear(2, 2),
    "example_batch": {"x": torch.zeros(4, 2)},
    "n_microbatches": 2,
    "schedule": "stp",
    "order": Profile({"a": 1e-3}, LinkTime(1e-5, 1e9), {(0, 1): LinkTime(1e-5, 1e9)}),
    "split": [1, 1],
    "tp_plan": {"a": "colwise"},
}


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("schedule", "1f1b", r"'stp' on ranks 0, 2; '1f1b' on rank 1"),
        ("schedule", build("stp", p=2, m=4), "the schedule stp on rank 1"),
        ("n_microbatches", 4, "2 on ranks 0, 2; 4 on rank 1"),
        ("order", "paper", "'paper' on rank 1"),
        ("order", Profile({"a": 2e-3}, LinkTime(1e-5, 1e9), {(0, 1): LinkTime(1e-5, 1e9)}), "1 units"),
        ("order", Profile({"a": 1e-3}, LinkTime(1e-5, 1e9), {(0, 1): LinkTime(2e-5, 1e9)}), "1 units"),
        ("order", Profile({"a": 1e-3}, LinkTime(1e-5, 1e9), {}, rendezvous=False), "1 units"),
        ("split", [2, 0], r"\[2, 0\] on rank 1"),
        ("tp_plan", {"a": "rowwise"}, "rowwise"),
        ("example_batch", {"x": torch.zeros(8, 2)}, r"\(8, 2\)"),
        ("model", torch.nn.Linear(2, 3), "Linear"),
        ("model", torch.nn.Linear(2, 2).eval(), "in eval mode"),
    ],
)
def test_whatever_differs_between_ranks_is_named_with_its_values(name: str, other: Any, words: str) -> None:
    mine, theirs = facts(ASKED), facts({**ASKED, name: other})
    assert disagreement([mine, mine, facts(dict(ASKED))]) is None
    said = disagreement([mine, theirs, mine])
    assert said is not None and said.startswith(f"{name} differs between ranks")
    with pytest.raises(BraidError, match=words):
        raise BraidError(said)


def test_every_argument_of_braid_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    seen: dict[str, Any] = {}
    monkeypatch.setattr("fxbraid.api.agree", seen.update)

    def stop(*_: Any, agree: Callable[[], None], **__: Any) -> None:
        agree()
        raise InterruptedError

    monkeypatch.setattr("fxbraid.api.make_mesh", stop)
    with pytest.raises(InterruptedError):
        fxbraid.braid(qwen2(), batch(4), n_microbatches=2, schedule="STP", compile=False)
    assert seen.pop("torch.autocast") == {"cpu": None, "cuda": None}
    assert set(seen) == set(inspect.signature(fxbraid.braid).parameters)
    assert (seen["schedule"], seen["order"], seen["collectives"]) == ("stp", "paper", "overlap")
    # And says what it is, not only of which type.
    assert all(describe(value) != type(value).__name__ for value in seen.values())


def test_order_is_a_profile_from_here_on() -> None:
    assert check_order({"a": 1}, auto=False) == Profile({"a": 1}, label="given times")
    assert check_order(None, auto=True) == "costs"


# -- timelines and modelled times


def test_a_timeline_that_cannot_be_written_is_said_on_every_rank(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.record(**batch(4))
    with pytest.raises(BraidError, match=r"the timeline can't be written to .*: No such file"):
        model.write_timeline(tmp_path / "nope" / "x.json")
    timeline = model.write_timeline()
    monkeypatch.setattr("fxbraid.runtime.ranks.gather", lambda mine: ["it can't be written", mine])
    second = Mesh(torch.device("cpu"), pp_size=2, pp_rank=1)
    for path in (tmp_path / "x.json", None):
        with pytest.raises(BraidError, match="it can't be written"):
            observe.save(timeline, path, second)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("time", [math.nan, -1.0, math.inf])
def test_modelled_times_are_asked_for_before_a_step_sends_anything(
    model: Any, time: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last unit of a step has no time: the step says so before its first unit runs."""
    session = SimpleNamespace(units=emulated_units.UnitTimes(lambda unit: time if unit.phase == "W" else 0.0))
    monkeypatch.setattr(emulated_units, "active", lambda: session)
    monkeypatch.setattr(model._last, "_run", lambda *_: pytest.fail("the program ran"))
    with pytest.raises(ValueError, match=r"unit_times gives unit .* s; give finite seconds, 0 or more"):
        model.step(**batch(4))
    assert emulate.check_times is emulated_units.check_times
