"""Vision-language models against the unsplit one: layouts of images, the tower's plan, frozen parts, programs per grid.

In lockstep, all ranks in one process; in real processes with -m slow, under two schedules and for three steps. Each
trace is seconds of work, so that only the families and the programs by grid are in every run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbraid
from fxbraid.inputs import Inputs
from fxbraid.passes.errors import BraidError, CaptureError, UnsupportedError
from fxbraid.passes.joint import Phase

from . import lockstep, multimodal
from .multimodal import VISION, batch, freeze, make
from .parity import Case, KeepDouble
from .test_parity import run

#: Families that every run looks at: grids and static inputs, and features that go to later layers.
QUICK = ("qwen2_vl", "qwen3_vl")


def step(
    model: nn.Module, inputs: dict[str, Tensor], *, tp: int = 2, n_chunks: int = 2, **options: Any
) -> Any:
    """One step in lockstep to 1e-12 of the unsplit model; returns what the passes made."""
    with KeepDouble():
        loss = model(**inputs).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        ranks = lockstep.step(model, inputs, tp=tp, n_chunks=n_chunks, verify=True, **options)
    errors = lockstep.errors(model, ranks, loss.detach(), grads)
    assert max(errors) <= 1e-12, errors
    return ranks.lowered


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VISION]
)
def test_one_two_and_no_images_on_two_by_two_ranks(name: str) -> None:
    lowered = step(make(name), batch(name, [1, 2, 0, 3]))
    grid = {"image_grid_thw"} if VISION[name].grid else set()
    assert lowered.static == grid
    notes = "\n".join(lowered.plan.notes)
    assert ("image_grid_thw is a static input (found by tracing)" in notes) == bool(grid)
    tower = [
        s
        for n, s in lowered.plan.params.items()
        if ("visual" in n or "vision_tower" in n) and s.dim is not None
    ]
    assert len(tower) >= 12, notes  # qkv, proj, fc1 and fc2 of two layers with their biases
    assert "inferred from the graph, colwise" in notes


@pytest.mark.slow
def test_sequence_parallelism_cuts_the_tokens_of_the_text_alone() -> None:
    notes = step(make("llava"), batch("llava", [1, 2, 0, 3]), sequence_parallel=True).plan.notes
    assert "sequence parallel: 32 tokens, 16 on each rank between the parallel regions" in notes


@pytest.mark.slow
def test_memory_is_predicted_for_images() -> None:
    sizes = {"tp_size": 2, "pp_size": 2, "n_microbatches": 2}
    small, large = (
        fxbraid.predict_memory(make("llava"), batch("llava", images), **sizes)  # type: ignore[arg-type]
        for images in ([1, 1], [3, 3])
    )
    assert large.peak > small.peak


@pytest.mark.slow
def test_micro_batches_with_fewer_images_are_filled_up_where_that_is_exact() -> None:
    step(make("qwen2_vl"), batch("qwen2_vl", [1, 2, 0, 1]), tp=1, n_chunks=1)
    with pytest.raises(
        UnsupportedError, match=r"different numbers of images.*on features of images and on tokens"
    ):
        step(make("qwen3_vl"), batch("qwen3_vl", [1, 2, 0, 1]), tp=1, n_chunks=1)


@pytest.mark.slow
def test_heads_that_do_not_divide_stay_whole_and_the_report_says_what_that_costs() -> None:
    model = make("qwen2_vl", num_heads=1)
    notes = "\n".join(step(model, batch("qwen2_vl", [1, 0, 1, 0]), n_chunks=1).plan.notes)
    assert "num_attention_heads=1" in notes and "stays whole" in notes
    assert "are computed on every one of 2 TP ranks" in notes
    assert "visual.blocks.*.mlp.fc1: inferred from the graph, colwise" in notes


@pytest.mark.slow
@pytest.mark.parametrize("what", multimodal.FROZEN)
def test_frozen_parts_make_no_work(what: str) -> None:
    lowered = step(freeze(make("qwen2_vl"), what), batch("qwen2_vl", [1, 0, 1, 0]))
    trained = {g for c in lowered.chunks.values() for u in c.units[Phase.W] for g in u.grads if g}
    assert trained and not any(map(multimodal.FROZEN[what], trained))


class TestPrograms:
    """In one process: a program for each layout."""

    def model(self, example: dict[str, Tensor], **options: Any) -> tuple[nn.Module, fxbraid.BraidedModel]:
        model = make("qwen2_vl")
        with KeepDouble():
            return model, fxbraid.braid(model, example, n_microbatches=2, compile=False, **options)

    def test_another_grid_is_traced_again_up_to_a_limit(self) -> None:
        plain, model = self.model(batch("qwen2_vl", [1, 1]), max_programs=3)
        wide = batch("qwen2_vl", [[(1, 2, 8)], [(1, 2, 8)]], seed=1)
        for inputs in (batch("qwen2_vl", [1, 1], seed=2), wide, batch("qwen2_vl", [1, 1], seed=3)):
            with KeepDouble():
                loss = plain(**inputs).loss
                loss.backward()
                got = model.step(**inputs)
            assert abs(got - loss) <= 1e-12 * abs(loss)
        grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        for name, parameter in model.named_parameters():
            if name in grads:
                assert (parameter.grad - grads[name]).abs().max() <= 1e-12 * grads[name].abs().max() + 1e-15
        with KeepDouble():
            out = model.eval()(**wide)
            model.train()
            logits = plain.eval()(**wide).logits
        assert out.logits.shape == logits.shape and (out.logits - logits).abs().max() <= 1e-12
        with pytest.raises(
            BraidError, match=r"program number 4.*image_grid_thw are part of a program, so bucket"
        ):
            model.step(**batch("qwen2_vl", [[(1, 8, 2)], [(1, 8, 2)]]))
        with pytest.raises(
            BraidError, match="mm_token_type_ids, from which the model makes its position_ids"
        ):
            model.step(**{k: v for k, v in wide.items() if k != "mm_token_type_ids"})

    @pytest.mark.slow
    def test_static_inputs_can_be_named(self) -> None:
        example = batch("qwen2_vl", [1, 1])
        with pytest.raises(CaptureError, match="add it to static_inputs"):
            self.model(example, static_inputs=())
        _, model = self.model(example, static_inputs=("image_grid_thw",))
        assert "image_grid_thw is a static input (as asked for)" in str(model.report())
        with pytest.raises(BraidError, match="names of inputs whose values"):
            self.model(example, static_inputs="image_grid_thw")


def test_positions_are_the_models_own() -> None:
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        model = make(name)
        inputs = batch(name, [1, 2], videos=[[(2, 2, 4)], []])
        seen: list[Tensor] = []
        model.model.language_model.register_forward_pre_hook(
            lambda _m, _a, kwargs, seen=seen: seen.append(kwargs["position_ids"]), with_kwargs=True
        )
        model(**inputs)
        made = Inputs.of(model).complete(inputs)["position_ids"]
        assert torch.equal(made, seen[0]) and made.shape[0] == 3
        assert torch.equal(
            torch.cat(Inputs.of(model).split({**inputs, "position_ids": made}, 1)["position_ids"], 1), made
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_videos_beside_images(name: str) -> None:
    clips = [[(2, 2, 4)], [], [], [(2, 2, 4)]]
    step(make(name), batch(name, [1, 1, 2, 0], videos=clips, seq=48))
    step(make(name), batch(name, [0, 0, 0, 0], videos=clips))


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"images:{n}" for n in VISION])
@pytest.mark.parametrize("frozen", ["", "-tower", "-language"])
def test_three_steps_under_two_schedules_in_real_processes(name: str, frozen: str) -> None:
    base = Case(model=name + frozen, dtype=torch.float64, m=3, rows=3, steps=3, layers=4)
    run([replace(base, schedule=schedule) for schedule in ("1f1b", "stp")])
