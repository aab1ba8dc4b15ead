"""Profiles: measured once, cached for what they depend on, and never believed where they are not ours."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid.passes.errors import BraidError
from fxbraid.runtime import costs, profile_cache
from fxbraid.runtime import profile as profiles
from fxbraid.runtime.launch import launch, process_group
from fxbraid.runtime.links import FASTEST, fit, links_of
from fxbraid.runtime.mesh import Mesh
from fxbraid.runtime.profile_cache import ProfileCache, _link
from fxbraid.schedule import build

from .parity import share_traces
from .tiny import batch, qwen2

pytestmark = pytest.mark.usefixtures("shared_traces")

VALUES = {"seconds": {"a": 1e-3}, "links": {"all_reduce": [1e-5, 1e9], "contention": [-0.01]}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(profile_cache.VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return fxbraid.braid(qwen2(), batch(4), n_microbatches=2, schedule="1f1b", compile=False).train()


def test_what_is_written_is_read_for_the_same_facts_only(cache: Path) -> None:
    store = ProfileCache.of({"torch": "2", "world": {"tp": 2}})
    assert store.read() is None
    store.write(VALUES)
    assert store.read() == VALUES
    assert ProfileCache.of({"torch": "3", "world": {"tp": 2}}).read() is None
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ("[]", "not of format"),
        ('{"format": 0}', "not of format"),
        ({"facts": {"torch": "9"}}, "made for something else"),
        ({"seconds": {"a": -1.0}}, "no times"),
        ({"seconds": {"a": float("nan")}}, "no times"),
        ({"seconds": {"a": "fast"}}, "no times"),
        ({"links": {"all_reduce": [1e-5, 0.0]}}, "no links"),
        ({"links": {"who knows": [1.0, 1.0]}}, "no links"),
        ("[" * 100_000, "no JSON"),
        ({"seconds": {"a": 1e300}}, "no times"),
        ({"links": {"all_reduce": [1e300, 1e9]}}, "no links"),
        ({"links": {"all_reduce": [1e-5, 6.45e13]}}, "no links"),
        ({"links": {"contention": [1e300]}}, "no links"),
        ({"links": {}}, "lacks the links all_reduce, message 0-1"),
        ({"links": {"all_reduce": [1e-5, 1e9]}}, "lacks the links message 0-1"),
    ],
)
def test_a_file_that_cannot_be_believed_is_ignored_with_a_warning(cache: Path, text: Any, why: str) -> None:
    store = ProfileCache.of({"torch": "2"})
    store.write(VALUES)
    whole = json.loads(store.path.read_text())
    store.path.write_text(text if isinstance(text, str) else json.dumps({**whole, **text}))
    with pytest.warns(UserWarning, match=why):
        assert store.read(["all_reduce", "message 0-1"]) is None
    store.path.write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match="can't be read"):
        assert store.read() is None


def test_links_are_those_of_the_world() -> None:
    mesh = Mesh(torch.device("cpu"), pp_size=2, tp_size=2)
    ends = {"message 0-1", "message 1-0", "host"}
    assert links_of(mesh, build("stp", p=2, m=4)) == ends | {"all_reduce", "contention"}
    assert links_of(Mesh(torch.device("cpu"), pp_size=2), build("stp", p=2, m=4)) == ends
    assert links_of(Mesh(torch.device("cpu")), build("1f1b", p=1, m=4)) == {"host"}


@pytest.mark.parametrize(
    ("small", "large", "wanted"),
    [
        (1e-5, 1.1e-4, [1e-5 - 1024 / ((2**20 - 1024) / 1e-4), (2**20 - 1024) / 1e-4]),
        (1e-4, 1e-4, [0.0, 2**20 / 1e-4]),
        (2e-4, 1e-4, [0.0, 2**20 / 1e-4]),
        (1e-4, 1e-4 + 1e-8, [0.0, 2**20 / (1e-4 + 1e-8)]),  # 1e14 bytes/s
        (0.0, 0.0, [0.0, FASTEST]),
    ],
)
def test_a_link_is_fitted_or_takes_the_large_messages_rate(
    small: float, large: float, wanted: list[float]
) -> None:
    assert fit(small, large, 2**20) == pytest.approx(wanted)
    assert _link("all_reduce", fit(small, large, 2**20))


def test_a_write_that_fails_warns_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile_cache.json, "dump", full)
    with pytest.warns(UserWarning, match="could not be cached .*No space left"):
        ProfileCache.of({"torch": "2"}).write(VALUES)
    assert not list(cache.iterdir())


def test_units_are_measured_once_and_then_read(
    model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fxbraid.profile(model, repeats=1)
    assert set(first) == {
        u.key for c in model._last.lowered.chunks.values() for us in c.units.values() for u in us
    }
    assert all(seconds > 0 for seconds in first.values()) and first.made_from["compile"] == "False"

    def measured(units: Any, *_: Any, **__: Any) -> dict[str, float]:
        assert not list(units)
        return {}

    monkeypatch.setattr(profiles, "unit_seconds", measured)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fxbraid.profile(model).seconds == first.seconds


def test_profiling_leaves_parameters_and_gradients_alone(model: Any, cache: Path) -> None:
    model.step(**batch(4))
    before = {name: (p.clone(), p.grad.clone()) for name, p in model.named_parameters()}
    fxbraid.profile(model, repeats=1, cache=False)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0]) and torch.equal(p.grad, before[name][1]), name
    assert not list(cache.iterdir())


def test_a_profile_simulates_and_orders(model: Any, cache: Path) -> None:
    profile = fxbraid.profile(model, repeats=1)
    result = model.simulate(profile)
    assert result.step_time > 0 and result.workload.label == profile.label
    other = fxbraid.braid(
        qwen2(), batch(4), n_microbatches=2, schedule="1f1b", compile=False, order=profile
    ).train()
    assert other.report().choice is not None and other._decision.profile is profile
    assert torch.equal(other.step(**batch(4)), model.step(**batch(4)))


def test_orders_that_do_not_exist_and_times_that_do_not_fit() -> None:
    with pytest.raises(BraidError, match='use "paper", "costs"'):
        fxbraid.braid(qwen2(), batch(4), n_microbatches=2, order="fastest", compile=False)
    with pytest.raises(BraidError, match="say nothing of unit"):
        fxbraid.braid(qwen2(), batch(4), n_microbatches=2, order={"x": 1.0}, compile=False)


def in_ranks() -> tuple[dict[str, Any], dict[str, Any], str]:
    torch.set_num_threads(1)
    share_traces()
    with process_group(timeout_s=60):
        model = fxbraid.braid(
            qwen2(), batch(4), tp_size=2, pp_size=2, n_microbatches=2, schedule="stp", compile=False
        )
        first, second = (fxbraid.profile(model, repeats=1) for _ in range(2))
        auto = fxbraid.braid(
            qwen2(), batch(4), tp_size=2, pp_size=2, n_microbatches=2, schedule="auto", compile=False
        )
        auto.train().step(**batch(4))
        return as_plain(first), as_plain(second), auto.schedule.to_csv() + str(auto.report().choice)


def as_plain(profile: fxbraid.Profile) -> dict[str, Any]:
    return {
        "seconds": dict(profile.seconds),
        "all_reduce": (profile.all_reduce.alpha_s, profile.all_reduce.beta_bytes_per_s),
        "messages": {ends: link.seconds(10**6) for ends, link in profile.messages.items()},
        "contention": profile.contention,
    }


def test_ranks_measure_links_and_agree() -> None:
    ranks = launch(in_ranks, (), nproc=4, timeout_s=240)
    first, second, told = ranks[0]
    assert all(rank == (first, second, told) for rank in ranks)
    assert first == second  # the second time everything came from the cache
    # On a busy machine a latency may not show (links.fit); that a message takes time always does.
    assert math.isfinite(first["all_reduce"][1]) and set(first["messages"]) == {(0, 1), (1, 0)}
    assert all(0 < seconds < math.inf for seconds in first["messages"].values())


def test_a_bound_unit_is_called_as_the_program_calls_it(model: Any) -> None:
    lowered = model._last.lowered
    units = [u for c in lowered.chunks.values() for us in c.units.values() for u in us]
    for unit in units:
        call, inputs = costs.bound_unit(unit, model._artefacts)
        values = call(list(inputs))
        assert len(values) == sum(name is None for name in unit.grads)
