"""BraidedModel in one process: what a user sees, against the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbraid
from fxbraid.passes.errors import BraidError, CaptureError, PlanError, UnsupportedError
from fxbraid.runtime.unit import BoundUnit

from .tiny import batch, qwen2

pytestmark = pytest.mark.usefixtures("shared_traces")


def braid(model: nn.Module, example: dict[str, Any] | None = None, **options: Any) -> fxbraid.BraidedModel:
    given: dict[str, Any] = {"n_microbatches": 2, "compile": False, **options}
    return fxbraid.braid(model, example if example is not None else batch(4), **given)


def plain_grads(model: nn.Module, *batches: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for one in batches:
        model(**one).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def assert_grads(braided: nn.Module, wanted: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    got = {name: p.grad for name, p in braided.named_parameters()}
    assert set(got) == set(wanted)
    for name, grad in got.items():
        assert grad is not None, name
        error = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error <= tolerance, (name, float(error))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "stp"])
def test_a_step_is_the_plain_models_loss_and_gradients(schedule: str, tied: bool) -> None:
    model = qwen2(tie_word_embeddings=tied, use_cache=True)
    braided = braid(model, schedule=schedule)
    data = batch(4, seed=5)
    loss = braided.step(**data)
    assert loss.shape == () and not loss.requires_grad
    assert torch.allclose(loss, model(**data).loss, rtol=1e-6)
    assert_grads(braided, plain_grads(model, data))


def test_names_shapes_and_state_are_those_of_the_model() -> None:
    model = qwen2(tie_word_embeddings=True)
    braided = braid(model)
    assert {n: p.shape for n, p in braided.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert set(braided.state_dict()) == set(model.state_dict())
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in braided.state_dict().items())
    other = braid(qwen2(tie_word_embeddings=True, initializer_range=0.1))
    other.load_state_dict(braided.state_dict())
    data = batch(4)
    assert torch.equal(other.step(**data), braided.step(**data))


def test_the_users_model_is_not_modified() -> None:
    model = qwen2(use_cache=True)
    before = copy.deepcopy(model.state_dict())
    config = model.config.to_dict()
    braided = braid(model)
    optimizer = torch.optim.SGD(braided.parameters(), lr=1.0)
    braided.step(**batch(4))
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.config.to_dict() == config
    assert not torch.equal(braided.state_dict()["lm_head.weight"], before["lm_head.weight"])


def test_two_steps_without_zero_grad_are_the_sum() -> None:
    for tied in (True, False):
        model = qwen2(tie_word_embeddings=tied)
        braided = braid(model)
        one, two = batch(4, seed=1), batch(4, seed=2)
        braided.step(**one)
        braided.step(**two)
        assert_grads(braided, plain_grads(model, one, two))


def test_zero_grad_to_none_and_to_zero() -> None:
    model = qwen2()
    braided = braid(model)
    data = batch(4)
    for set_to_none in (True, False):
        braided.step(**data)
        braided.zero_grad(set_to_none=set_to_none)
        braided.step(**data)
        assert_grads(braided, plain_grads(model, data))
        braided.zero_grad()


def test_train_eval_train() -> None:
    model = qwen2()
    braided = braid(model.train())
    data = batch(4)
    plain = model.eval()(**data)
    braided.eval()
    out = braided(**data)
    assert torch.allclose(out.loss, plain.loss, rtol=1e-6)
    assert torch.allclose(out.logits, plain.logits, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in braided.parameters())
    braided.train()
    braided.step(**data)
    assert_grads(braided, plain_grads(model, data))
    braided.eval()
    again = braided(**data)
    assert torch.equal(again.loss, out.loss)


@pytest.mark.slow
def test_eval_before_train_and_without_labels() -> None:
    model = qwen2().eval()
    braided = braid(model)
    assert not braided.training
    data = batch(4)
    labels = data.pop("labels")
    out = braided(**data)
    assert "loss" not in out
    assert torch.allclose(out.logits, model(**data).logits, rtol=1e-4, atol=1e-5)
    braided.train()
    braided.step(**data, labels=labels)
    assert_grads(braided, plain_grads(model, {**data, "labels": labels}))


def test_a_second_braid_on_another_instance() -> None:
    one, two = qwen2(), qwen2(initializer_range=0.1)
    first, second = braid(one), braid(two)
    data = batch(4)
    first.step(**data)
    second.step(**data)
    assert_grads(first, plain_grads(one, data))
    assert_grads(second, plain_grads(two, data))


def test_clipping_and_training_follow_the_plain_model() -> None:
    model = qwen2()
    braided = braid(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (model, braided)]
    for seed in range(3):
        data = batch(4, seed=seed)
        loss = model(**data).loss
        loss.backward()
        assert torch.allclose(braided.step(**data), loss, rtol=1e-5)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5), braided.clip_grad_norm_(0.5)]
        assert torch.allclose(norms[0], norms[1], rtol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, float("inf")])
def test_every_norm(kind: float) -> None:
    model = qwen2()
    braided = braid(model)
    data = batch(4)
    braided.step(**data)
    model(**data).loss.backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=kind)
    assert torch.allclose(braided.clip_grad_norm_(0.1, kind), wanted, rtol=1e-5)
    assert_grads(braided, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def test_a_norm_that_is_not_finite() -> None:
    braided = braid(qwen2())
    braided.step(**batch(4))
    parameter = next(braided.parameters())
    assert parameter.grad is not None
    parameter.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="norm is inf"):
        braided.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_another_shape_or_keyword_is_traced_and_cached() -> None:
    model = qwen2()
    braided = braid(model, max_programs=3)
    for data in (batch(4, seq=8), batch(4, mask=False), batch(4, seq=8, seed=9)):
        braided.zero_grad()
        loss = braided.step(**data)
        assert torch.allclose(loss, model(**data).loss, rtol=1e-6)
        assert_grads(braided, plain_grads(model, data))
    with pytest.raises(BraidError, match=r"program number 4, and max_programs is 3"):
        braided.step(**batch(4, seq=12))
    with pytest.raises(CaptureError, match="colour"):
        braid(_strict(model), {**batch(4), "colour": torch.zeros(4)})


def _strict(model: nn.Module) -> nn.Module:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)

    return Strict()


def test_constants_and_positions_for_all_rows() -> None:
    model = qwen2()
    positions = torch.arange(16)[None] + 3
    data = {**batch(4), "position_ids": positions, "return_dict": True}
    braided = braid(model, data)
    assert torch.allclose(braided.step(**data), model(**data).loss, rtol=1e-6)
    assert_grads(braided, plain_grads(model, data))


def test_meta_tensors_as_example() -> None:
    model = qwen2()
    braided = braid(model, {k: v.to("meta") for k, v in batch(4).items()})
    data = batch(4)
    assert torch.allclose(braided.step(**data), model(**data).loss, rtol=1e-6)
    assert len(braided._engines) == 1


def test_a_frozen_parameter_gets_no_gradient() -> None:
    model = qwen2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    braided = braid(model)
    data = batch(4)
    braided.step(**data)
    wanted = plain_grads(model, data)
    got = {n: p.grad for n, p in braided.named_parameters() if p.grad is not None}
    assert set(got) == set(wanted)
    for name, grad in got.items():
        assert torch.allclose(grad, wanted[name], rtol=1e-4, atol=1e-7), name


def test_refusals_come_before_anything_runs() -> None:
    model = qwen2()
    with pytest.raises(
        BraidError, match=r"n_microbatches=4 does not divide the batch of 6; use 1, 2, 3 or 6"
    ):
        braid(model, batch(6), n_microbatches=4)
    with pytest.raises(BraidError, match=r"tp_size=2 x pp_size=2 needs 4 processes, but there are 1"):
        braid(model, tp_size=2, pp_size=2)
    with pytest.raises(BraidError, match=r"dp_size=2"):
        braid(model, dp_size=2)
    with pytest.raises(fxbraid.PartitionError, match="1 layers, fewer than the 2 chunks"):
        braid(qwen2(num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match=r"dropout p=0\.1"):
        braid(qwen2(attention_dropout=0.1).train())
    with pytest.raises(UnsupportedError, match="compile='all'"):
        braid(model, compile="all")
    with pytest.raises(ValueError, match="nosuch"):
        braid(model, schedule="nosuch")
    with pytest.raises(BraidError, match="dim 0 of input 'position_ids' is 3"):
        braid(model, {**batch(4), "position_ids": torch.zeros(3, 16, dtype=torch.long)})
    assert issubclass(PlanError, BraidError)


def test_step_and_forward_say_which_mode_they_are_for() -> None:
    braided = braid(qwen2().train())
    with pytest.raises(BraidError, match="call step"):
        braided(**batch(4))
    with pytest.raises(BraidError, match="eval mode"):
        braided.eval().step(**batch(4))


def test_the_program_and_its_blocks_can_be_read() -> None:
    braided = braid(qwen2(), schedule="stp", n_microbatches=4)
    code = braided.program.code
    assert code.count("self.F0") >= 1 and "labels" in code
    for kind in ("F", "B", "I", "W", "F&B", "F&I", "F&W", "F&F"):
        assert "self.attn" in braided.blocks[kind].code
    assert braided.blocks[braided.blocks["F&B"].name] is braided.blocks["F&B"]
    for wrong in ("X", "F9", "F&F&F", "B&F"):
        with pytest.raises(KeyError):
            braided.blocks[wrong]
    assert braided.schedule.name.startswith("stp") and braided.plan.partition.layers == 4
    report = braided.report()
    assert report.units > report.artefacts
    assert "2 chunks" in str(report) and "layers per chunk: 2, 2" in str(report)
    assert "published order" not in str(report)


def test_nothing_of_a_step_stays_alive_and_the_peak_does_not_grow_with_m() -> None:
    import gc

    def alive() -> list[Tensor]:
        return [
            t
            for t in gc.get_objects()
            if type(t) is torch.Tensor
            and t.shape[:2] == (2, 16)
            and t.is_floating_point()
            and t.device.type == "cpu"
        ]

    model = qwen2()
    peaks = {}
    old = alive()  # of other tests
    for m in (4, 8):
        braided = braid(model, batch(2 * m), n_microbatches=m, schedule="1f1b")
        data = batch(2 * m)
        braided.step(**data)
        before = {n: p.grad.clone() for n, p in braided.named_parameters() if p.grad is not None}
        peaks[m] = braided.measure_peak(**data)
        assert all(
            torch.equal(p.grad, before[n]) for n, p in braided.named_parameters() if p.grad is not None
        )
        gc.collect()
        known = {p.untyped_storage().data_ptr() for p in [*braided.parameters(), *braided.buffers()]}
        known |= {t.untyped_storage().data_ptr() for t in old}
        known |= {p.grad.untyped_storage().data_ptr() for p in braided.parameters() if p.grad is not None}
        assert not [t for t in alive() if t.untyped_storage().data_ptr() not in known]
    # Every further micro-batch keeps its loss, 4 bytes, and nothing else.
    assert peaks[8] - peaks[4] == 4 * 4 and peaks[4] > 10_000


def test_one_loss_for_a_batch_of_one_micro_batch() -> None:
    model = qwen2()
    data = batch(3)
    braided = braid(model, data, n_microbatches=1)
    assert torch.allclose(braided.step(**data), model(**data).loss, rtol=1e-6)
    assert_grads(braided, plain_grads(model, data))
    assert "m = 1 is below 3p - 1 = 2, where the published order does not exist" in str(braided.report())


def test_labels_that_are_all_ignored_give_what_the_plain_model_gives() -> None:
    model = qwen2()
    data = batch(4)
    data["labels"] = torch.full_like(data["labels"], -100)
    braided = braid(model)
    assert bool(torch.isnan(model(**data).loss)) and bool(torch.isnan(braided.step(**data)))
    data = batch(4)
    data["labels"][:2] = -100  # a whole micro-batch without a label
    braided.zero_grad()
    assert torch.allclose(braided.step(**data), model(**data).loss, rtol=1e-6)
    assert_grads(braided, plain_grads(model, data))


def test_a_step_after_one_that_failed_starts_anew() -> None:
    model = qwen2(tie_word_embeddings=True)
    braided = braid(model)
    data = batch(4)
    braided.step(**data)
    braided.zero_grad()
    block = braided.blocks["B"].graph_module
    # The program holds its units' functions already; what they call can still be another.
    last = [m for m in block.children() if isinstance(m, BoundUnit)][-1]
    kept = last._call

    def fail(*_: Any) -> None:
        raise ValueError("broken")

    last._call = fail
    with pytest.raises(ValueError, match="broken"):
        braided.step(**data)
    last._call = kept
    braided.zero_grad()
    braided.step(**data)
    assert_grads(braided, plain_grads(model, data))


def test_what_would_no_longer_fit_the_program_is_refused() -> None:
    braided = braid(qwen2())
    assert braided.to("cpu") is braided.float()
    for convert in (braided.half, braided.double, lambda: braided.to(torch.bfloat16)):
        with pytest.raises(BraidError, match="before braid"):
            convert()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BraidError, match="traced without it"):
        braided.step(**batch(4))
    with pytest.raises(BraidError, match="save state_dict"):
        copy.deepcopy(braided)
    with torch.no_grad():
        braided.step(**batch(4))
    assert all(p.grad is not None for p in braided.parameters())


def test_bfloat16() -> None:
    model = qwen2().to(torch.bfloat16)
    braided = braid(model)
    data = batch(4)
    assert torch.allclose(braided.step(**data), model(**data).loss, rtol=1e-2)
    assert_grads(braided, plain_grads(model, data), tolerance=5e-2)


class Odd(nn.Module):
    """Parameters whose gradients are one and the same tensor, and one whose gradient is just passed on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.one = nn.Parameter(torch.randn(6))
        self.two = nn.Parameter(torch.randn(6))
        self.wide = nn.Parameter(torch.randn(2, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 1:
                x = x + self.one + self.two + self.wide
        return {"loss": nn.functional.cross_entropy(x, y)}


@pytest.mark.parametrize("schedule", ["gpipe", "stp"])
def test_parameters_that_share_a_gradient_and_one_that_gets_it_whole(schedule: str) -> None:
    model = Odd()
    data = {"x": torch.randn(6, 6), "y": torch.randint(0, 6, (6,))}
    braided = braid(model, data, n_microbatches=3, schedule=schedule)
    # ``wide`` has the shape of a micro-batch: the plain model must see the same one.
    pieces = [{k: v[i : i + 2] for k, v in data.items()} for i in (0, 2, 4)]
    (sum(model(**piece)["loss"] for piece in pieces) / 3).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for _ in range(2):
        braided.step(**data)
        assert_grads(braided, wanted)
        braided.zero_grad()


def test_dropout_is_found_when_training_begins_not_only_at_the_start() -> None:
    model = qwen2(attention_dropout=0.1).eval()
    braided = braid(model)
    data = batch(4)
    assert torch.allclose(braided(**data).loss, model(**data).loss, rtol=1e-6)
    with pytest.raises(UnsupportedError, match=r"dropout p=0\.1"):
        braided.train().step(**data)


def test_gradient_checkpointing_of_the_model_changes_nothing() -> None:
    model = qwen2()
    model.gradient_checkpointing_enable()
    data = batch(4)
    braided = braid(model.train())
    braided.step(**data)
    assert model.model.gradient_checkpointing or model.is_gradient_checkpointing
    assert_grads(braided, plain_grads(model, data))
