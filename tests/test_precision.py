"""Types of numbers: float32 sums of bfloat16 gradients, float32 masters, autocast, gradients that are not finite."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbraid
from fxbraid.passes.errors import BraidError

from . import lockstep
from .tiny import batch, lower, qwen2

pytestmark = pytest.mark.usefixtures("shared_traces")

LOW = torch.bfloat16


def braid(model: nn.Module, example: dict[str, Any], **options: Any) -> fxbraid.BraidedModel:
    given: dict[str, Any] = {"n_microbatches": 2, "compile": False, **options}
    return fxbraid.braid(model, example, **given)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert set(got) == set(want)
    return max(distance(got[name], want[name]) for name in want)


def rounded_sum(model: nn.Module, data: dict[str, Tensor], m: int) -> dict[str, Tensor]:
    """Gradients of each micro-batch in the model's own type, added up in float64."""
    total: dict[str, Tensor] = {}
    count = (data["labels"][:, 1:] != -100).sum()
    for rows in zip(*(value.chunk(m) for value in data.values()), strict=True):
        one = dict(zip(data, rows, strict=True))
        model.zero_grad()
        share = (one["labels"][:, 1:] != -100).sum() / count
        (model(**one).loss * share).backward()
        for name, p in model.named_parameters():
            total[name] = total.get(name, 0) + p.grad.double()  # type: ignore[operator, union-attr]
    model.zero_grad()
    return total


# -- gradients add up in float32 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("compiled", "tied"), [(False, False), (False, True), ("unit", True)])
def test_gradients_of_a_bfloat16_model_add_up_in_float32(compiled: Any, tied: bool) -> None:
    model = qwen2(tie_word_embeddings=tied).to(LOW)
    data = batch(16, seed=1)
    want = rounded_sum(model, data, 16)
    errors = {}
    for kind in (torch.float32, None):
        braided = braid(model, data, n_microbatches=16, grad_dtype=kind, compile=compiled)
        braided.step(**data)
        grads = {n: p.main_grad if kind else p.grad for n, p in braided.named_parameters()}  # type: ignore[union-attr]
        assert {g.dtype for g in grads.values()} == {kind or LOW}  # type: ignore[union-attr]
        errors[kind] = {n: distance(grads[n], want[n]) for n in want}  # type: ignore[arg-type]
        for p in braided.parameters():
            assert p.grad is not None and p.grad.dtype is LOW
            assert kind is None or torch.equal(p.grad, p.main_grad.to(LOW))  # type: ignore[attr-defined, operator]
    if (
        compiled
    ):  # Inductor rounds inside a micro-batch less often than eager kernels do, which is more than all of it
        assert max(errors[torch.float32].values()) < 0.1
        return
    # What is left of the difference is the rounding inside a micro-batch, which both have.
    assert sum(errors[torch.float32].values()) < 0.6 * sum(errors[None].values())
    assert max(errors[torch.float32].values()) < 0.05
    assert errors[torch.float32]["model.norm.weight"] < 1e-6 < errors[None]["model.norm.weight"]


def test_main_grad_goes_on_where_grad_was_left_alone_and_follows_it_where_it_was_not() -> None:
    model, data = qwen2().to(LOW), batch(4, seed=2)
    braided = braid(model, data)

    def mains() -> dict[str, Tensor]:
        return {n: p.main_grad.clone() for n, p in braided.named_parameters()}  # type: ignore[operator, union-attr]

    braided.step(**data)
    once = mains()
    braided.step(**data)
    twice = mains()
    assert all(distance(twice[n], 2 * once[n]) < 1e-6 for n in once)  # far below what bfloat16 could tell
    for set_to_none in (True, False):
        braided.zero_grad(set_to_none=set_to_none)
        braided.step(**data)
        assert all(torch.equal(mains()[n], once[n]) for n in once)
    for p in braided.parameters():
        p.grad.mul_(0.5)  # type: ignore[union-attr]
    halves = {n: p.grad.clone() for n, p in braided.named_parameters()}  # type: ignore[union-attr]
    braided.step(**data)
    assert all(distance(mains()[n], halves[n] + once[n]) < 1e-6 for n in once)
    before = mains()
    braided.measure_peak(**data)
    assert all(torch.equal(mains()[n], before[n]) for n in before)


def test_clipping_scales_the_sums_and_what_the_optimizer_reads() -> None:
    model, data = qwen2().to(LOW), batch(4, seed=2)
    braided = braid(model, data)
    braided.step(**data)
    mains = [p.main_grad.clone() for p in braided.parameters()]  # type: ignore[attr-defined, operator]
    norm = braided.clip_grad_norm_(0.1)
    want = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in mains]))
    assert norm.dtype is torch.float32 and distance(norm, want) < 1e-6
    for p, main in zip(braided.parameters(), mains, strict=True):
        assert distance(p.main_grad, main * (0.1 / want)) < 1e-5  # type: ignore[arg-type]
        assert torch.equal(p.grad, p.main_grad.to(LOW))  # type: ignore[arg-type, operator]


# -- master weights ------------------------------------------------------------------------------------------------


def test_masters_train_as_a_bfloat16_model_with_float32_weights_kept_beside_it() -> None:
    model, lr = qwen2(tie_word_embeddings=True).to(LOW), 1e-4
    model.model.embed_tokens.weight.requires_grad_(True)
    model.model.norm.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    data = batch(4, seed=3)
    braided = braid(model, data, master_weights=True)
    kinds = {n: p.dtype for n, p in braided.named_parameters()}
    assert kinds.pop("model.norm.weight") is LOW and set(kinds.values()) == {torch.float32}
    optimizer = torch.optim.AdamW(braided.parameters(), lr=lr)

    plain = copy.deepcopy(model)
    masters = {n: nn.Parameter(p.detach().float()) for n, p in plain.named_parameters() if p.requires_grad}
    reference = torch.optim.AdamW(masters.values(), lr=lr)
    for seed in range(4):
        data = batch(4, seed=seed)
        loss = braided.step(**data)
        plain.zero_grad()
        want = plain(**data).loss
        want.backward()
        for name, p in plain.named_parameters():
            if p.requires_grad:
                masters[name].grad = p.grad.float()  # type: ignore[union-attr]
        assert loss.dtype is torch.float32 and distance(loss, want.detach()) < 2e-3
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                plain.get_parameter(name).copy_(master)
    got = dict(braided.named_parameters())
    moved = {n: got[n].detach() - model.get_parameter(n).float() for n in masters}
    # Steps of 1e-4 are lost on most weights of bfloat16; here they are kept, whole.
    assert all(float(m.abs().median()) > 1e-4 for m in moved.values())
    away = torch.cat([(got[n] - masters[n]).detach().abs().flatten() for n in masters])
    assert float(away.mean()) < 0.05 * lr
    assert float(away.max()) < 8 * lr  # Adam makes a step of lr of a gradient of rounding errors, too


def test_a_master_that_is_written_without_a_trace_is_read_by_the_next_step() -> None:
    model, data = qwen2().to(LOW), batch(4, seed=3)
    braided = braid(model, data, master_weights=True)
    first = braided.step(**data)
    for p in braided.parameters():
        p.data.mul_(1.5)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert not torch.equal(braided.step(**data), first)
    assert torch.equal(braided.step(**data), braid(model, data).step(**data))
    braided.eval()
    assert torch.equal(braided(**data).loss, braid(model.eval(), data)(**data).loss)


# -- autocast ------------------------------------------------------------------------------------------------------


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=LOW)


def test_autocast_is_part_of_the_program() -> None:
    model, data = qwen2(), batch(4, seed=5)
    with autocast():
        braided = braid(model, data)
        want = model(**data).loss
        inside = braided.step(**data)
    want.backward()
    outside = braided.step(**batch(4, seed=5))
    assert torch.equal(inside, outside)
    assert distance(inside, want.detach()) < 1e-6
    plain = braid(model, data)
    assert distance(plain.step(**data), want.detach()) > 1e-6  # it is the casts that are compared
    braided.zero_grad()
    braided.step(**data)
    grads = {n: p.grad for n, p in braided.named_parameters()}
    assert {g.dtype for g in grads.values()} == {torch.float32}  # type: ignore[union-attr]
    assert worst(grads, {n: p.grad for n, p in model.named_parameters()}) < 0.01  # type: ignore[arg-type, misc]
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(BraidError, match="traced with"),
    ):
        braided.step(**data)


@pytest.mark.parametrize("sequence", [False, True])
def test_autocast_with_tensor_and_pipeline_parallelism(sequence: bool) -> None:
    model, data = qwen2(tie_word_embeddings=True), batch(4, seed=6)
    ranks = lockstep.step(model, data, tp=2, autocast=LOW, sequence_parallel=sequence)
    with autocast():
        want = model(**data).loss
    want.backward()
    assert distance(ranks.loss, want.detach()) < 1e-3
    grads = ranks.grads[0]
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert distance(grads[name], model.get_parameter(name).grad) < 0.06  # type: ignore[arg-type]


def test_what_crosses_a_boundary_or_is_summed_has_the_type_that_autocast_gives_it() -> None:
    lowered = lower(qwen2(), autocast=LOW)
    kinds = {
        unit.label: {
            n.meta["val"].dtype
            for n in unit.graph_module.graph.nodes
            if n.target is torch.ops.aten.mm.default
        }
        for chunk in lowered.chunks.values()
        for units in chunk.units.values()
        for unit in units
    }
    found = set().union(*kinds.values())
    assert found == {LOW}, kinds


# -- what is refused -----------------------------------------------------------------------------------------------


def test_float16_is_refused_with_the_way_out() -> None:
    data = batch(4)
    with pytest.raises(BraidError, match=r"is float16, .* convert the model to torch\.bfloat16"):
        braid(qwen2().half(), data)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(BraidError, match="loss scaled"):
        braid(qwen2(), data)
    with pytest.raises(BraidError, match=r"grad_dtype=torch\.int64"):
        braid(qwen2(), data, grad_dtype=torch.int64)


def test_gradients_that_are_not_finite_are_dropped_reported_or_raised() -> None:
    model, data = qwen2(), batch(4)
    braided = braid(model, data)
    optimizer = torch.optim.AdamW(braided.parameters(), lr=0.1)
    braided.step(**data)
    next(braided.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    before = {n: p.detach().clone() for n, p in braided.named_parameters()}
    with pytest.raises(RuntimeError, match="no gradient was scaled"):
        braided.clip_grad_norm_(1.0, error_if_nonfinite=True)
    norm = braided.clip_grad_norm_(1.0, skip_if_nonfinite=True)
    optimizer.step()
    assert not torch.isfinite(norm) and braided.skipped_steps == 1
    assert all(torch.equal(p, before[n]) for n, p in braided.named_parameters())
    assert not optimizer.state
    braided.step(**data)
    assert torch.isfinite(braided.clip_grad_norm_(1.0, skip_if_nonfinite=True)) and braided.skipped_steps == 1
    with pytest.raises(BraidError, match="exclude each other"):
        braided.clip_grad_norm_(1.0, error_if_nonfinite=True, skip_if_nonfinite=True)
