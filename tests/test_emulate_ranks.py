"""The emulated cluster in real processes: times to the bit on the virtual clock, real data on every clock."""

from __future__ import annotations

from typing import Any

import pytest

from fxbraid.runtime.launch import RankError, launch

from . import emulated

#: name -> (milliseconds, value), with tp = 10 ms + 1 ms per kB and pp = 20 ms + 1 ms per kB
EXPECTED: dict[str, tuple[float, Any]] = {
    "collectives: all_reduce over the pp axis": (21.0, 2.0),
    "collectives: all_gather": (11.0, [0.0, 1.0]),
    "collectives: all_gather_into_tensor": (11.0, [0.0, 1.0]),
    "collectives: broadcast": (11.0, 0.0),
    "collectives: scatter": (11.0, 1.0),
    "collectives: barrier": (13.0, None),  # the last rank came after 3 ms
    "overlap: three queue": (30.0, [10.0, 20.0, 30.0]),
    "overlap: two groups do not": (10.0, None),
    "overlap: hidden in part": (10.0, None),
    "overlap: hidden": (15.0, None),
    "overlap: a late rank": (17.0, None),
    "overlap: never waited for": (20.0, None),
    "overlap: is_completed": (10.0, [False, True]),
    "functional: eager": (22.0, 10.0),
    "functional: compiled": (22.0, 10.0),
    "functional: all_gather eager": (11.0, 1000.0),
    "functional: all_gather compiled": (11.0, 1000.0),
    "messages: one way": (24.0, 5.0),
    "messages: a late receiver": (24.0, None),
    "messages: four queue": (24.0, None),  # 4 ms of bytes, one latency
    "messages: two groups, one wire": (22.0, None),
    "messages: both ways at once": (21.0, 0.0),
    "dtensors: row parallel": (10.256, True),
    "slow: slowdown 2": (15.0, None),
    "slow: another link": (1.0, None),
}


@pytest.fixture(scope="module")
def tours() -> list[list[dict[str, Any]]]:
    return [launch(emulated.tour, nproc=4, timeout_s=240) for _ in range(2)]


def test_every_kind_of_communication_takes_its_time_and_moves_its_data(
    tours: list[list[dict[str, Any]]],
) -> None:
    for rank, found in enumerate(tours[0]):
        here = {name: found[name] for name in EXPECTED}
        assert here == EXPECTED, rank
        assert found["collectives: reduce_scatter_tensor"] == (11.0, 2.0 * (1 + rank % 2))
        assert found["collectives: all_to_all_single"] == (10.004, [0.0 + rank % 2, 10.0 + rank % 2])
        assert found["collectives: objects"][1] is True


def test_virtual_times_repeat_to_the_bit(tours: list[list[dict[str, Any]]]) -> None:
    assert tours[0] == tours[1]


@pytest.mark.parametrize("clock", ["paced", "wall"])
def test_asked_and_got_on_a_clock_that_sleeps(clock: str) -> None:
    asked = 60.0
    for found in launch(emulated.real_clock, (clock, asked / 1e3), nproc=2, timeout_s=120):
        for name, times in {"reduce": 1, "two": 2, "message": 1, "hide": 1, "future": 1}.items():
            got = found[name][0]
            # Never early; late by what a busy machine with two processors may need (measured: under 1 ms).
            assert times * asked <= got < times * asked + 40, (name, got)
        assert found["future"][1] == 2.0
        assert found["processor"] < 0.18  # of more than 360 ms: waiting sleeps
        assert 0 <= found["error"] < 0.5
        assert f"{clock} clock" in found["label"]


def test_torchs_gpipe_runs_unchanged() -> None:
    m, forward, backward, message = 4, 2.0, 4.0, 1.0
    for plain, rendezvous, eager in launch(emulated.gpipe, (m,), nproc=2, timeout_s=120):
        assert plain[1:] == rendezvous[1:] == eager[1:]  # losses and gradients, to the bit
        compute = (m + 1) * (forward + backward)
        # torch posts each receive when it needs it: with rendezvous, every message is exposed.
        assert rendezvous[0] == compute + 2 * m * message
        assert eager[0] == compute + 2 * message


def test_a_peer_that_never_comes_ends_the_wait() -> None:
    with pytest.raises(RankError, match="rank 0 failed"):
        launch(emulated.missing_peer, nproc=2, timeout_s=60, on_line=lambda *_: None)
