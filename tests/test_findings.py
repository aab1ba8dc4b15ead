"""What a tester found: each once trained wrongly in silence, or ended in a raw error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbraid
from fxbraid.passes.errors import BraidError, PartitionError, PlanError, UnsupportedError
from fxbraid.runtime.unit import GradSlot

from .test_model import assert_grads, braid, plain_grads
from .tiny import batch, lower, qwen2


class Toy(nn.Module):
    """Four numbered layers and a loss of one's own."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.loss = loss or F.cross_entropy

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": self.loss(self.body(x), y)}


def data(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "x": torch.randn(rows, 6, generator=generator),
        "y": torch.randint(0, 6, (rows,), generator=generator),
    }


def assert_parity(model: nn.Module, given: dict[str, Any], **options: Any) -> None:
    braided = braid(model, given, **options)
    out = model(**given)
    loss = out["loss"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out.loss
    assert torch.allclose(braided.step(**given), loss, rtol=1e-6)
    model.zero_grad()
    loss.backward()
    assert_grads(braided, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, reduction="sum") / (y != -100).sum(),
        lambda x, y: F.cross_entropy(x, y, reduction="sum") / x.shape[0],
        lambda x, y: F.cross_entropy(x, y, reduction="sum") / 8,
        lambda x, y: F.cross_entropy(x, y) + 1.0,
        lambda x, y: F.cross_entropy(x, y) * x.mean(),
        lambda x, y: F.cross_entropy(x, y) ** 2,
        lambda x, y: F.cross_entropy(x, torch.softmax(x.detach(), -1)),
        lambda x, y: F.cross_entropy(x, y) + x.pow(2).mean(),
    ],
)
def test_a_loss_whose_share_of_the_batch_is_not_known_is_refused(loss: Any) -> None:
    with pytest.raises(UnsupportedError, match="loss"):
        braid(Toy(loss), data())


def test_losses_that_are_known_stay_exact() -> None:
    for loss in (
        lambda x, y: F.cross_entropy(x, y) / 2 + 0.5 * F.cross_entropy(x * 2, y, label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x, y),
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    ):
        given = data()
        given["y"][:3] = -100
        assert_parity(Toy(loss), given)


@pytest.mark.slow
def test_a_count_given_as_a_number_is_no_new_program() -> None:
    model = qwen2()
    braided = braid(model)
    for count in (7, 9):
        given = {**batch(4), "num_items_in_batch": count}
        braided.zero_grad()
        loss = braided.step(**given)
        assert torch.allclose(loss, model(**batch(4), num_items_in_batch=torch.tensor(count)).loss, rtol=1e-6)
    assert len(braided._engines) == 2


def test_what_follows_from_weights_alone_is_made_where_it_is_read() -> None:
    class Low(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            x = self.body(x) * (1 + self.scale)
            return {"loss": F.cross_entropy(x @ self.a.T @ self.b.T, y)}

    for schedule in ("1f1b", "stp"):
        assert_parity(Low(), data(), schedule=schedule)


@pytest.mark.parametrize("name", ["gemma", "cohere"])
def test_families_that_compute_with_the_norms_weight(name: str) -> None:
    import transformers as t

    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    torch.manual_seed(5)
    kind = {"gemma": (t.GemmaConfig, t.GemmaForCausalLM), "cohere": (t.CohereConfig, t.CohereForCausalLM)}[
        name
    ]
    assert_parity(kind[1](kind[0](**sizes)), batch(4))
    chunks = lower(kind[1](kind[0](**sizes)), n_chunks=4, tp_size=1).partition.chunks
    assert [c.boundary_out for c in chunks] == [1, 1, 1, 0]


def test_layers_that_share_modules_or_names() -> None:
    class Shared(Toy):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(6, 6)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), shared) for _ in range(4))

    class Stacks(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def body(self, x: Tensor) -> Tensor:
            for layer in self.encoder:
                x = layer(x).relu()
            return super().body(x)

    twice = Toy()
    twice.layers[2] = twice.layers[0]
    for model in (Shared(), Stacks(), twice):
        assert_parity(model, data())


def test_constants_and_buffers_of_any_kind() -> None:
    class Held(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.randn(6)
            self.register_buffer("one", torch.randn(6))
            self.register_buffer("two", self.one)
            self.register_buffer("unread", torch.randn(3))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            x = self.body(x * self.plain + self.one) + self.two
            return {"loss": F.cross_entropy(x, y)}

    class Literal(Toy):
        def body(self, x: Tensor) -> Tensor:
            return super().body(x) * torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 1.0])

    class Alias(Held):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.one  # a plain attribute that is some buffer's tensor

        def body(self, x: Tensor) -> Tensor:
            return super().body(x) * self.alias

    model = Held()
    assert_parity(model, data())
    braided = braid(model, data())
    assert set(braided.state_dict()) == set(model.state_dict())
    braided.load_state_dict(model.state_dict())
    assert_parity(Literal(), data())
    with pytest.raises(BraidError, match="register it as a buffer"):
        braid(Alias(), data())


@pytest.mark.slow
def test_outputs_of_every_shape() -> None:
    class Pair(Toy):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            x = self.body(x)
            return F.cross_entropy(x, y), x

    assert_parity(Pair(), data())
    model = qwen2(output_hidden_states=True)
    assert_parity(model, batch(4))
    braided = braid(qwen2(), batch(4))
    without = {k: v for k, v in batch(4).items() if k != "labels"}
    with pytest.raises(UnsupportedError, match="returns no loss"):
        braided.step(**without)
    out = braid(model.eval(), batch(4))(**batch(4))
    wanted = model(**batch(4))
    assert len(out.hidden_states) == len(wanted.hidden_states) == 5
    for mine, theirs in zip(out.hidden_states, wanted.hidden_states, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_layers_by_name_and_models_without_any() -> None:
    class Named(Toy):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})  # type: ignore[assignment]

        def body(self, x: Tensor) -> Tensor:
            for name in self.layers:
                x = self.layers[name](x).tanh()  # type: ignore[call-overload]
            return x

    class One(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Linear(6, 6)  # type: ignore[assignment]

        def body(self, x: Tensor) -> Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    for names in (("first", "second", "third"), ("b1", "a2"), ("0", "1", "2")):
        assert_parity(Named(*names), data())
    with pytest.raises(PartitionError, match=r"no layers were found .*nn\.ModuleDict .* computes in layers"):
        braid(One(), data())


def test_a_penalty_on_weights_that_are_cut_is_refused() -> None:
    from .test_zoo import PLAN, Blocks, assert_exact

    class Penalised(Blocks):
        def __init__(self, penalty: Callable[[Any], Tensor]) -> None:
            super().__init__(lambda m, x, la: la["down"](la["up"](x).tanh()))
            self.penalty = penalty

        def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"loss": super().forward(input_ids, labels)["loss"] + 0.1 * self.penalty(self)}

    given = batch(4, mask=False)
    penalties: list[tuple[str, Callable[[Any], Tensor]]] = [
        (
            r"layers\.0\.up\.weight",
            lambda m: m.layers[0]["up"].weight.norm(),
        ),
        (
            r"layers\.1\.down\.weight",
            lambda m: (m.layers[1]["down"].weight @ m.layers[1]["down"].weight.T).trace(),
        ),
        (r"layers\.0\.up\.bias", lambda m: sum(p.square().mean() for p in m.parameters() if p.ndim == 1)),
    ]
    for words, penalty in penalties:
        model = Penalised(penalty)
        assert_exact(model, given, tp=1, tp_plan=PLAN)
        with pytest.raises(
            PlanError, match=rf"(cut by {words}.*colwise_gather_output|{words}.*cuts into 2 parts.*Leave)"
        ):
            assert_exact(model, given, tp=2, tp_plan=PLAN)
    # Of what is whole on every rank, and of the vocabulary, which then stays whole, it is right.
    assert_exact(
        Penalised(lambda m: m.scale.norm() + m.embed.weight.square().sum()), given, tp=2, tp_plan=PLAN
    )


def test_a_trace_inside_no_grad_still_has_gradients() -> None:
    model = qwen2()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            braided = braid(model)
        braided.step(**batch(4))
        assert_grads(braided, plain_grads(model, batch(4)))


def test_totals_of_a_step_that_failed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen2(tie_word_embeddings=True)
    braided = braid(model, batch(8), n_microbatches=4, schedule="gpipe")
    add, calls = GradSlot.add, [0]

    def interrupted(self: GradSlot, grad: Tensor) -> None:
        calls[0] += 1
        if calls[0] == 40:
            raise KeyboardInterrupt
        add(self, grad)

    monkeypatch.setattr(GradSlot, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        braided.step(**batch(8))
    monkeypatch.setattr(GradSlot, "add", add)
    braided.zero_grad()
    braided.step(**batch(8))
    assert_grads(braided, plain_grads(model, batch(8)))


def test_what_the_program_would_not_notice_is_refused() -> None:
    model = qwen2()
    braided = braid(model)
    next(iter(braided.parameters())).requires_grad_(False)
    with pytest.raises(BraidError, match="requires_grad of"):
        braided.step(**batch(4))
    braided = braid(model)
    braided.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(BraidError, match="was replaced after braid"):
        braided.step(**batch(4))
    embedded = {**batch(4), "inputs_embeds": torch.randn(4, 16, 32, requires_grad=True)}
    embedded.pop("input_ids")
    with pytest.raises(BraidError, match="'inputs_embeds' wants a gradient"):
        braid(model, embedded)
    embedded["inputs_embeds"] = embedded["inputs_embeds"].detach()
    braided = braid(model, embedded)
    with pytest.raises(BraidError, match=r"embed_tokens\.weight, which it did not read"):
        braided.step(**batch(4))


def test_plans_that_would_train_wrongly_or_do_nothing() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    layer = "model.layers.*."
    plan = {f"{layer}self_attn.{n}_proj": "colwise" for n in "qkv"} | {f"{layer}self_attn.o_proj": "rowwise"}
    # The plan does not say it: norms between columns and rows see their own heads, and are summed at the end.
    partial = lower(Qwen3ForCausalLM(config), n_chunks=1, tp_plan=plan).plan.partial
    assert partial == {f"model.layers.{i}.self_attn.{n}_norm.weight" for i in (0, 1) for n in "qk"}
    with pytest.raises(PlanError, match="matches no module"):
        lower(tp_plan={"layers.*.q_proj": "colwise"})


def test_adapters_in_place_of_planned_linears_work_at_tp_1() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    model = qwen2()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    braided = fxbraid.braid(model, batch(4), n_microbatches=2, compile=False)
    braided.step(**batch(4))
    wanted = plain_grads(model, batch(4))
    got = {n: p.grad for n, p in braided.named_parameters() if p.grad is not None}
    assert set(got) == set(wanted)
    for name, grad in got.items():
        assert torch.allclose(grad, wanted[name], rtol=1e-4, atol=1e-6), name


def test_an_inferred_plan_leaves_whole_what_does_not_run_and_cuts_the_rest() -> None:
    """A scale per feature lies between two linears, and two others are plain."""
    from .test_zoo import Blocks, assert_exact

    class Scaled(Blocks):
        def parts(self) -> dict[str, nn.Module]:
            return {**super().parts(), "first": nn.Linear(16, 24), "second": nn.Linear(24, 16)}

    torch.manual_seed(3)
    factor = nn.Parameter(torch.rand(24, dtype=torch.float64))

    def block(m: Any, x: Tensor, la: Any) -> Tensor:
        x = x + la["down"](torch.relu(la["up"](x)) * m.factor * la["gate"](x))
        return x + la["second"](la["first"](x).tanh())  # type: ignore[no-any-return]

    model = Scaled(block)
    model.factor = factor
    plan = assert_exact(model, batch(4, mask=False)).plan
    assert {n for n, shard in plan.params.items() if shard.dim is not None and "layers.0" in n} == {
        f"layers.0.{name}" for name in ("first.weight", "first.bias", "second.weight")
    }
    assert any("down" in note and "stays whole" in note for note in plan.notes), plan.notes
