"""Towers, skips and boundaries of several tensors: what the cut makes, that it is exact, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from fxbraid.passes.cost import StretchCost
from fxbraid.passes.cutting import Cut, balanced, given, places, row_of
from fxbraid.passes.errors import PartitionError
from fxbraid.passes.stretches import Stretches
from fxbraid.plan.cut import CutClock, ForPlacement, fastest_cut
from fxbraid.schedule import Placement, build
from fxbraid.simulate import Workload, constants, simulate

from . import towers
from .test_zoo import assert_exact

CHUNKS = {"towers": 8, "towers-deep": 8, "encoder-decoder": 6, "unet": 6}


def lowered(name: str, n_chunks: int, *, tp: int = 1, **options: Any) -> Any:
    model = towers.MODELS[name]()
    plan = towers.plan(model) if tp > 1 else "auto"
    return assert_exact(model, towers.batch(name, 4), tp=tp, n_chunks=n_chunks, tp_plan=plan, **options)


@pytest.mark.parametrize("name", ["towers-deep", "unet"])
def test_one_layer_a_chunk_is_exact(name: str) -> None:
    parts = lowered(name, CHUNKS[name]).partition
    assert parts.layers == CHUNKS[name] and all(len(chunk.layers) == 1 for chunk in parts.chunks)
    # Up block 0 reads down block 2 next to it; what blocks 0 and 1 make goes through the middle.
    furthest = {skip.made: skip.read[-1] for skip in parts.skips}
    wanted = {"unet": {0: 5, 1: 4}, "towers-deep": {0: 4, 1: 5, 2: 6}}[name]
    assert furthest == wanted
    assert all(chunk.boundary_grads == (True,) * chunk.boundary_in for chunk in parts.chunks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["towers", "encoder-decoder"])
def test_the_others_one_layer_a_chunk(name: str) -> None:
    lowered(name, CHUNKS[name])


@pytest.mark.parametrize("name", ["encoder-decoder"])
def test_two_tensor_parallel_ranks_and_four_chunks_are_exact(name: str) -> None:
    parts = lowered(name, 4, tp=2, split_layers=[3, 1, 1, 1]).partition
    assert [skip.name for skip in parts.skips] == ["masked_fill of the model", "layer_norm of last"]
    assert [chunk.boundary_in for chunk in parts.chunks] == [0, 3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["towers", "towers-deep", "unet"])
def test_the_others_with_two_tensor_parallel_ranks(name: str) -> None:
    lowered(name, 4, tp=2)


# -- the cut, without tracing anything


def row(blocks: int, layers: int) -> Stretches:
    names = [f"vision.{i}" for i in range(blocks)] + [f"layers.{i}" for i in range(layers)]
    return Stretches({}, tuple(names), (2 * blocks,) if blocks else ())


def costs(blocks: int, layers: int, factor: float) -> list[StretchCost]:
    """A decoder layer costs 1 in each phase; the vision tower ``factor`` times the decoder; merger and head too."""
    found = [StretchCost()] * (2 * (blocks + layers) + 1)
    for k in range(blocks):
        found[2 * k + 1] = StretchCost(*[factor * (layers + 1) / blocks] * 3)
    for k in range(blocks, blocks + layers):
        found[2 * k + 1] = StretchCost(1.0, 1.0, 1.0)
    found[2 * blocks] = StretchCost(0.3, 0.3, 0.3)
    found[-1] = StretchCost(1.0, 1.0, 1.0)
    return found


def clock(name: str, per_stretch: Sequence[StretchCost], ratio: float = 0.37) -> CutClock:
    pieces = [
        constants(1, cost.f, cost.i, cost.w, ratio * cost.f if k % 2 else 0.0).chunks[0]
        for k, cost in enumerate(per_stretch)
    ]
    return CutClock(build(name, p=2, m=8), Workload(tuple(pieces)))


def every(own: Stretches, n_chunks: int) -> list[tuple[int, ...]]:
    return [at for at in combinations(places(own), n_chunks - 1) if row_of(own).fits(at)]


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("trials", [400, 60])
def test_the_cut_by_cost_is_the_best_of_all_or_close_to_it(factor: float, trials: int) -> None:
    """With 60 trials of 112 cuts the search climbs; with 400 it looks at all."""
    own, per_stretch = row(4, 6), costs(4, 6, factor)
    time = clock("stp", per_stretch)
    best = min(map(time, every(own, 4)))
    found = time(fastest_cut(time, row_of(own), trials=trials, near=0.0))
    assert found <= (1 + 1e-9 if trials == 400 else 1.03) * best
    assert found <= time(given([2, 3, 2, 3], own, 4).at) * (1 + 1e-9)
    assert found <= time(balanced(per_stretch, own, 4).at) * (1 + 1e-9)


def test_a_search_that_can_not_look_at_all_is_close_to_the_best() -> None:
    """A piece per layer, 1,140 cuts of which it times 100."""
    per_stretch = costs(8, 13, 1.5)
    layers = [per_stretch[2 * k] + per_stretch[2 * k + 1] for k in range(21)]
    layers[-1] += per_stretch[-1]
    time = clock("stp", layers)
    best = min(map(time, combinations(range(1, 21), 3)))
    at = fastest_cut(time, row_of(row(8, 13)), trials=100)
    assert time([one // 2 for one in at]) <= 1.02 * best


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_without_measured_costs_the_cut_is_close_to_the_best(factor: float) -> None:
    own, per_stretch = row(4, 6), costs(4, 6, factor)
    time = clock("stp", per_stretch, 0.25)
    at = ForPlacement(Placement("v", 2, 2), 0.25)(per_stretch, row_of(own), 4)
    assert time(at) <= 1.02 * min(map(time, every(own, 4)))
    assert time(at) <= time(given([2, 3, 2, 3], own, 4).at)


def test_equal_layers_stay_equal() -> None:
    own = row(0, 8)
    even = [StretchCost(*[float(k % 2)] * 3) for k in range(own.count)]
    for place in (
        Placement("v", 2, 2),
        Placement("loop", 4, 1),
        Placement("loop", 2, 2),
        Placement("v", 4, 2),
    ):
        at = ForPlacement(place, 0.25)(even, row_of(own), place.n_chunks)
        assert at == given([8 // place.n_chunks] * place.n_chunks, own, place.n_chunks).at
    assert repr(ForPlacement(place)) == repr(ForPlacement(Placement("v", 4, 2)))  # so that traces are shared


def test_what_two_cuts_share_is_timed_once_and_right() -> None:
    per_stretch = costs(4, 6, 1.0)
    time = clock("stp", per_stretch)
    for cut in (Cut((4, 9, 14)), Cut((8, 12, 16)), Cut((4, 9, 14))):
        chunks = time.pieces.cut(cut.at)
        assert time(cut.at) == simulate(time.schedule, replace(chunks, static=())).step_time


def test_a_cut_that_leaves_a_chunk_without_a_layer_is_refused() -> None:
    own = row(2, 2)
    assert places(own) == [2, 4, 5, 6]
    Cut((4, 6)).check(own, 3)
    for wrong in ((4, 5), (3, 6), (4,), (6, 4)):
        with pytest.raises(PartitionError, match="does not make 3 chunks of one layer or more"):
            Cut(wrong).check(own, 3)
