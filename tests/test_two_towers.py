"""The analytic model of a vision tower: its FLOPs against a trace, the workload of both towers, the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest
import typer
from typer.testing import CliRunner

from fxbraid.inputs import Inputs, first
from fxbraid.passes.pipeline import lower_model
from fxbraid.plan.cut import CutClock, fastest_cut
from fxbraid.plan.search import plan
from fxbraid.plan.space import Request
from fxbraid.schedule import Placement, ScheduleError, build
from fxbraid.simulate import ModelConfig, Shape, Workload, analytic, device, load_model, simulate
from fxbraid.simulate.cli import simulate_command
from fxbraid.simulate.two_towers import both, split_of, stretched

from .multimodal import VISION, batch, make

QWEN = load_model("Qwen/Qwen2-VL-7B-Instruct")
A800 = device("a800")
SHAPE = Shape(4096, 1, 4, images=4, patches=2048)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n != "qwen2_vl" else n for n in VISION]
)
def test_flops_are_those_of_the_trace(name: str) -> None:
    model = make(name)
    inputs = Inputs.of(model)
    micro = first(inputs.split(inputs.complete(batch(name, [1, 1], mask=False)), 1))
    parts = lower_model(model, micro, n_chunks=1, only=()).partition
    config = ModelConfig.from_dict(model.config.to_dict(), name)  # type: ignore[union-attr, operator]
    tower, images = config.tower, 2
    assert tower is not None
    patches = tower.sized(16 if VISION[name].grid else 0, name)
    traced = [cost.f for cost in parts.stretches]
    assert len(parts.names) == tower.layers + config.layers
    merger = images * tower.merger_flops(patches)
    for k in range(tower.layers):
        assert traced[2 * k + 1] == images * tower.block_flops(k, patches) + merger * (k in tower.deep)
    assert sum(traced[: 2 * tower.layers + 1 : 2]) == images * tower.embedding_flops(patches) + merger


def test_known_sizes() -> None:
    assert QWEN.tower is not None
    assert QWEN.tower.parameters == pytest.approx(675e6, rel=0.01)
    assert QWEN.parameters == pytest.approx(8.29e9, rel=0.01)
    assert load_model("Qwen/Qwen2-VL-72B-Instruct").parameters == pytest.approx(73.4e9, rel=0.01)
    assert QWEN.tower.features(2048) == 512


def test_seconds_are_those_of_the_flops_and_add_up_over_the_cut() -> None:
    """No faster than the roofline; the same work however it is cut; a tower twice as deep costs twice as much."""
    place = Placement("v", 2, 2)
    made = stretched(QWEN, A800, SHAPE)
    whole = sum(piece.seconds() for piece in made.pieces)
    for split in ([15, 15, 15, 15], [32, 10, 10, 8], [1, 1, 1, 57]):
        load = both(QWEN, A800, place, SHAPE, split)
        tails = sum(u.seconds for c in load.chunks for phase in "FI" for u in c.of(phase) if u.name == "tail")
        assert sum(chunk.seconds() for chunk in load.chunks) == pytest.approx(whole + tails)
        assert sum(load.static) == pytest.approx(sum(made.static))
        for chunk in load.chunks:
            saved = sum(u.saves for phase in "FIW" for u in chunk.of(phase))
            assert saved == pytest.approx(sum(u.frees for phase in "FIW" for u in chunk.of(phase)))
    assert made.flops / A800.peak < whole
    tower = [piece.seconds() for piece in made.pieces[: 2 * 32 : 2]], [made.pieces[1].seconds()]
    deeper = replace(QWEN, tower=replace(QWEN.tower, layers=64))  # type: ignore[type-var]
    more = sum(piece.seconds() for piece in stretched(deeper, A800, SHAPE).pieces) - whole
    assert more == pytest.approx(32 * tower[1][0])


def test_boundaries_are_those_of_what_crosses() -> None:
    load = both(QWEN, A800, Placement("v", 2, 2), SHAPE, [16, 20, 12, 12])
    patches, tokens = 4 * 2048 * 1280 * 2, 4096 * 3584 * 2
    assert [chunk.sends_f for chunk in load.chunks] == [patches, tokens, tokens, 0]
    assert [chunk.sends_i for chunk in load.chunks] == [0, patches, tokens, tokens]


def test_sequence_parallelism_cuts_the_text_alone() -> None:
    whole, cut = (stretched(QWEN, A800, replace(SHAPE, sequence=on)) for on in (False, True))
    assert cut.pieces[1] == whole.pieces[1]
    assert cut.pieces[-2].saved < 0.9 * whole.pieces[-2].saved
    assert cut.tails[2] == whole.tails[2] and cut.tails[-1].nbytes == whole.tails[-1].nbytes / 4


def test_heads_that_do_not_divide_are_computed_on_every_rank() -> None:
    odd = replace(QWEN, tower=replace(QWEN.tower, heads=10))  # type: ignore[type-var]
    ours, theirs = (stretched(model, A800, SHAPE).pieces[1] for model in (QWEN, odd))
    assert theirs.f[0].seconds > 2 * ours.f[0].seconds and theirs.f[0].collective == 0
    assert theirs.f[1] == ours.f[1]


@pytest.mark.parametrize("name", ["stp", "interleaved_1f1b"])
def test_the_cut_is_close_to_the_best_of_all(name: str) -> None:
    """A small model of both towers: all cuts are timed, the search a fifth of them."""
    small = replace(QWEN, layers=7, vocab=32000, tower=replace(QWEN.tower, layers=8))  # type: ignore[type-var]
    schedule = build(name, p=2, m=8)
    made = stretched(small, A800, SHAPE)
    clock = CutClock(schedule, Workload(made.pieces))
    every = [at for at in combinations(made.row.places, 3) if made.row.fits(at)]
    best = min(map(clock, every))
    assert clock(fastest_cut(clock, made.row, trials=len(every) // 5)) <= 1.02 * best
    quick = simulate(schedule, analytic(small, A800, schedule.placement, SHAPE)).step_time
    equal = simulate(schedule, analytic(small, A800, schedule.placement, SHAPE, made.row.equal(4))).step_time
    assert quick < equal and quick <= 1.06 * best
    assert split_of(made.row, made.row.of_layers([3, 4, 4, 4])) == [3, 4, 4, 4]


def test_what_does_not_fit_is_refused() -> None:
    place = Placement("v", 2, 2)
    with pytest.raises(ScheduleError, match="has no vision tower"):
        analytic(load_model("Qwen/Qwen2-7B"), A800, place, SHAPE)
    with pytest.raises(ScheduleError, match="give the patches of one, for example 1024"):
        analytic(QWEN, A800, place, Shape(4096, images=1))
    with pytest.raises(ScheduleError, match=r"9 images of 512 tokens do not fit into a sequence of 4096"):
        analytic(QWEN, A800, place, replace(SHAPE, images=9))
    with pytest.raises(ScheduleError, match="2046 patches do not make tokens of 4 patches each; take 2044"):
        analytic(QWEN, A800, place, replace(SHAPE, patches=2046))
    with pytest.raises(ScheduleError, match="32 blocks in its tower and 28 layers"):
        analytic(QWEN, A800, place, SHAPE, [7, 7, 7, 7])


def test_a_plan_knows_both_towers() -> None:
    asked = Request(
        QWEN,
        A800,
        8,
        4096,
        16,
        tp=(2,),
        pp=(2, 4),
        micro_batch=(1,),
        schedules=("stp", "1f1b"),
        images=4,
        patches=2048,
    )
    found, text = plan(asked), plan(replace(asked, images=0, patches=0))
    assert found.ranking[0].step_time > 1.05 * text.ranking[0].step_time
    assert {one.candidate.pp for one in found.ranking} == {2, 4}


def test_the_commands_take_images() -> None:
    app = typer.Typer()
    app.command()(simulate_command)
    about = ["stp", "--pp", "2", "-m", "8", "--model", QWEN.name, "--device", "a800", "--tp", "4"]
    images = ["--images", "4", "--patches", "2048"]
    said = CliRunner().invoke(app, [*about, *images, "--split", "30,10,10,10", "--json"])
    assert said.exit_code == 0, said.output
    assert "4 images of 2048 patches" in json.loads(said.output)["workload"]
    for wrong, words in (
        ([], "give the patches of one"),
        ([*images, "--seq", "1024"], "more than the 1024 of a sequence"),
        ([*images, "--memory"], "predict_memory"),
        (["--images", "0", "--patches", "4"], "there are none"),
    ):
        said = CliRunner().invoke(app, [*about, *wrong])
        assert said.exit_code != 0 and words in " ".join(said.stderr.split())
