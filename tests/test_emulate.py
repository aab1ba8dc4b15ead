"""The emulated cluster in one process: costs of links, queues of launches, units beside collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link, Op, collective_seconds, factor, torch_names
from fxbraid.runtime.emulate.queues import OutOfOrder, Queue
from fxbraid.runtime.emulate.session import end_of_unit
from fxbraid.runtime.emulate.stamps import Lane, Stamp


def test_this_torch_has_every_private_name() -> None:
    assert torch_names.missing() == []


def test_factors_are_those_of_rings_and_chains() -> None:
    assert [factor(Op.ALL_REDUCE, n) for n in (1, 2, 4)] == [0.0, 1.0, 1.5]
    assert [factor(Op.ALL_GATHER, n) for n in (2, 4)] == [0.5, 0.75]
    assert factor(Op.REDUCE_SCATTER, 4) + factor(Op.ALL_GATHER, 4) == factor(Op.ALL_REDUCE, 4)
    assert factor(Op.BROADCAST, 8) == 1.0 and factor(Op.BARRIER, 8) == 0.0
    link = Link(1e-3, 1e6)
    assert collective_seconds(link, Op.ALL_REDUCE, 1000, 4) == pytest.approx(2.5e-3)
    assert collective_seconds(link, Op.ALL_REDUCE, 1000, 1) == 0.0
    assert collective_seconds(Link(1e-3), Op.ALL_REDUCE, 10**12, 4) == 1e-3


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Link(-1.0), "alpha_s=-1.0 is no latency; give seconds, 0 or more"),
        (lambda: Link(math.nan), "alpha_s=nan is no latency"),
        (lambda: Link(0.0, 0.0), "beta_bytes_per_s=0.0 is no bandwidth"),
        (
            lambda: Cluster(Link(0.0), Link(0.0), clock="sun"),
            "clock='sun' is no clock; use one of 'virtual', 'paced'",
        ),
        (lambda: Cluster(Link(0.0), Link(0.0), slowdown=0.5), "slowdown=0.5 would speed units up"),
        (lambda: Cluster(Link(0.0), Link(0.0), "wall", 1.5), "the wall clock has none"),
        (lambda: Cluster(Link(0.0), Link(0.0), tp_size=0), "tp_size=0 is no number of ranks"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_which_link_a_group_takes() -> None:
    tp, pp = Link(1.0), Link(2.0)
    by_kind = Cluster(tp, pp)
    assert by_kind.link([0, 1], message=False) is tp
    assert by_kind.link([0, 1], message=True) is pp
    assert by_kind.link([0, 2], message=False, description="mesh_pp") is pp
    by_place = Cluster(tp, pp, tp_size=2)
    assert by_place.link([2, 3], message=True) is tp
    assert by_place.link([1, 2], message=False, description="mesh_tp") is pp


def test_what_is_no_emulated_group_needs_no_axis() -> None:
    emulate.name_axis(None, "pp")
    emulate.name_axis(object(), "pp")


def test_outputs_name_the_clock() -> None:
    for clock in emulate.CLOCKS:
        assert f"emulated, {clock} clock" in str(Cluster(Link(0.0), Link(0.0), clock=clock))  # type: ignore[arg-type]


def test_outside_an_emulated_cluster() -> None:
    assert emulate.active() is None
    with pytest.raises(RuntimeError, match="there is no emulated cluster here; open one with"):
        emulate.now()

    def artefact(*_: Any) -> list[Any]:
        return []

    assert emulate.timed(None, artefact) is artefact  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "alone", "windows", "end"),
    [
        (0, 10, [], 10),
        (0, 10, [(0, 100)], 20),
        (0, 10, [(4, 8)], 12),  # 4 alone, 4 beside (does 2), 4 alone
        (5, 10, [(0, 7)], 16),
        (0, 10, [(2, 6), (4, 8)], 13),  # the union counts once
        (0, 10, [(10, 20)], 10),
        (0, 10, [(9, 20)], 11),
        (30, 10, [(0, 20)], 40),
    ],
)
def test_a_unit_slows_down_by_two_beside_a_collective(
    start: int, alone: int, windows: list[tuple[int, int]], end: int
) -> None:
    assert end_of_unit(start, alone, windows, 2.0) == end


def make_queues(writers: int = 2, slots: int = 8, **options: Any) -> list[Queue]:
    view = memoryview(bytearray(8 * Lane.size(writers, slots))).cast("q")
    lane = Lane(view, 0, writers, slots)
    return [Queue(lane, writer, "the test", timeout_s=0.2, **options) for writer in range(writers)]


def at(time: int, occupies: int = 10, latency: int = 0, kind: int = 1) -> Stamp:
    return Stamp(time, occupies, latency, kind)


def test_a_launch_ends_behind_the_last_rank_and_behind_the_launch_before() -> None:
    a, b = make_queues()
    first, second = a.launch(at(0)), a.launch(at(1))
    assert a.poll(second) is None  # the other rank is missing
    theirs = b.launch(at(5))
    assert a.wait(first) == b.wait(theirs) == 15
    assert a.poll(second) is None
    b.launch(at(6))
    assert a.wait(second) == 25
    a.launch(at(100)), b.launch(at(90))
    third = a.launch(at(101))
    b.launch(at(91))
    assert a.wait(third) == 120  # waiting for a later one settles those before


def test_latencies_overlap_on_a_lane_that_is_taken_only_while_bytes_move() -> None:
    send, receive = make_queues()
    tickets = [send.launch(at(0, 10, 100)) for _ in range(3)]
    for _ in range(3):
        receive.launch(at(0, 10, 100))
    assert [send.wait(ticket) for ticket in tickets] == [110, 120, 130]


def test_without_rendezvous_a_message_starts_when_it_is_sent() -> None:
    send, receive = make_queues(rendezvous=False)
    assert send.wait(send.launch(at(0, 10, 5))) == 15
    assert receive.wait(receive.launch(at(1000, 10, 5))) == 15


def test_slots_are_used_again_and_again() -> None:
    a, b = make_queues(slots=4)
    for i in range(0, 40, 2):
        pair = [a.launch(at(100 * i)), a.launch(at(100 * i))]
        other = [b.launch(at(100 * i)), b.launch(at(100 * i))]
        assert [a.wait(t) for t in pair] == [b.wait(t) for t in other] == [100 * i + 10, 100 * i + 20]


def test_a_full_lane_waits_and_says_for_whom() -> None:
    a, _ = make_queues(slots=4)
    for _ in range(4):
        a.launch(at(0))
    with pytest.raises(
        TimeoutError, match=r"waited 0\.2 s for launch 0 of the test: some rank of the group never"
    ):
        a.launch(at(0))


def test_different_things_under_one_number_are_refused() -> None:
    a, b = make_queues()
    ticket = a.launch(at(0, kind=int(Op.ALL_REDUCE)))
    b.launch(at(0, kind=int(Op.BROADCAST)))
    with pytest.raises(OutOfOrder, match=r"launch 0 of the test is not the same on all its ranks .*1, 5"):
        a.wait(ticket)


def test_what_is_in_flight_depends_on_this_ranks_own_order_alone() -> None:
    a, b = make_queues()
    first, second = a.launch(at(0)), a.launch(at(2))
    assert a.in_flight(3) == [(0, 10), (10, 20)]
    b.launch(at(50)), b.launch(at(60))
    a.poll(second)
    assert a.in_flight(3) == [(0, 10), (10, 20)]  # that the other's stamps have come changes nothing
    assert a.wait(first) == 60
    assert a.in_flight(61) == [(60, 70)]
    assert a.wait(second) == 70
    assert a.in_flight(61) == []
