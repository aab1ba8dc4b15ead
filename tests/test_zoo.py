"""Every family against its unsplit model, and what the passes do with odd layouts: all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxbraid.passes import styles
from fxbraid.passes.errors import BraidError, PlanError, UnsupportedError
from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_collective

from . import lockstep, odd, zoo
from .families import CORE, FAMILIES, IMAGES, MORE, Family, make
from .parity import KeepDouble, make_batches


def assert_row(row: zoo.Row) -> None:
    assert row.loss <= 1e-12 and row.grad <= 1e-12, row
    wanted = FAMILIES[row.name].collectives
    assert (row.forward, row.backward) == (wanted if isinstance(wanted, tuple) else (wanted, wanted)), row
    assert row.weight == 0, row


def assert_exact(model: nn.Module, batch: dict[str, Any], *, tp: int = 2, m: int = 2, **options: Any) -> Any:
    """One step in lockstep to 1e-12 of the unsplit model; returns what the passes made."""
    loss = model(**batch)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ranks = lockstep.step(model, batch, tp=tp, m=m, verify=True, **options)
    assert max(lockstep.errors(model, ranks, loss.detach(), grads)) <= 1e-12
    return ranks.lowered


#: One of each kind in every run; the rest of the zoo with -m slow.
QUICK = ("qwen3", "phi3", "gpt_neox", "olmo2", "qwen3_moe", "gpt2")


@pytest.mark.parametrize("name", QUICK)
def test_family(name: str) -> None:
    assert_row(zoo.run(FAMILIES[name]))


#: Families that are refused with tensor parallelism, and by which words.
REFUSED = {
    "doge": "traces whole but not on the local shapes of tp_size=2",
    "longcat_flash": r"modeling_longcat_flash.py:\d+ in forward: .*expert_hit",
    "mamba": "none follows from its graph",
    "phimoe": "draws random numbers",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [f for f in (*CORE, *MORE, *IMAGES) if f.name not in QUICK], ids=lambda f: f.name
)
def test_every_family(family: Family) -> None:
    if family.name in REFUSED:
        with pytest.raises(BraidError, match=REFUSED[family.name]):
            zoo.run(family)
    else:
        assert_row(zoo.run(family))


def test_every_style_of_transformers_is_known_or_refused_by_name() -> None:
    """Expert parallelism has styles of its own, which are not tensor parallelism."""
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    experts = {"grouped_gemm", "ep_dispatch_experts", "ep_router", "gather"}
    unknown = set(ALL_PARALLEL_STYLES.keys()) - styles.KNOWN
    assert unknown <= experts, unknown - experts


@pytest.mark.slow
@pytest.mark.parametrize("family", CORE, ids=lambda f: f.name)
def test_four_ranks_share_two_key_value_heads(family: Family) -> None:
    row = zoo.run(family, tp=4, n_chunks=1)
    assert row.loss <= 1e-12 and row.grad <= 1e-12, row


def step(model: nn.Module, *, tp: int = 2, n_chunks: int = 2, **options: Any) -> lockstep.Ranks:
    """One step in lockstep, compared with the unsplit model to 1e-12."""
    batch = make_batches(2, 2, mask=True, steps=1)[0]
    with KeepDouble():
        loss, grads = zoo.reference(model, batch, 2)
        ranks = lockstep.step(model, batch, tp=tp, n_chunks=n_chunks, verify=True, **options)
    errors = lockstep.errors(model, ranks, loss, grads)
    assert max(errors) <= 1e-12, errors
    return ranks


def collectives(ranks: lockstep.Ranks, phase: Phase) -> int:
    """Without those of the vocabulary."""
    forward, backward = zoo.of_vocabulary(ranks.lowered)
    return -{Phase.F: forward, Phase.I: backward, Phase.W: 0}[phase] + sum(
        is_collective(n) and q is phase
        for c in ranks.lowered.chunks.values()
        for n, q in c.joint.phase.items()
    )


def llama(**overrides: Any) -> nn.Module:
    return make(Family("llama"), **overrides)


def test_key_value_heads_that_ranks_share() -> None:
    ranks = step(llama(attention_bias=True), tp=4)
    plan = ranks.lowered.plan
    assert plan.params["model.layers.0.self_attn.k_proj.weight"].local_shape == (8, 32)
    assert any("each is held by 2" in note for note in plan.notes)
    step(make(Family("phi3"), num_key_value_heads=1), tp=4, n_chunks=1)


def test_frozen_layers_have_no_backward() -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    chunks = step(model).lowered.chunks
    assert not chunks[0].units[Phase.I] and not chunks[0].units[Phase.W]
    assert not chunks[0].joint.tangents and chunks[1].units[Phase.W]


def test_frozen_weights_make_no_work() -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" not in name and "norm" not in name)
    chunks = step(model).lowered.chunks
    grads = {g for c in chunks.values() for u in c.units[Phase.W] for g in u.grads}
    assert not any(g and ("q_proj" in g or "norm" in g) for g in grads)


class Layer(nn.ModuleDict):
    """A numbered layer; what it computes is the test's."""

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


class Blocks(nn.Module):
    """A language model of blocks that a test writes: ``block(model, x, layer)``."""

    def __init__(self, block: Callable[[Any, Tensor, nn.Module], Tensor], *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(96, 16)
        self.layers = nn.ModuleList(Layer(self.parts()) for _ in range(2))
        self.shared = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(16, 96, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.block = block
        self.double()

    def parts(self) -> dict[str, nn.Module]:
        return {
            "up": nn.Linear(16, 24),
            "down": nn.Linear(24, 16),
            "gate": nn.Linear(16, 24),
            "norm": nn.LayerNorm(24),
        }

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(lambda x=x, layer=layer: self.block(self, x, layer))
        logits = self.head(self.shared(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


PLAN = {"layers.*.up": "colwise", "layers.*.gate": "colwise", "layers.*.down": "rowwise"}


def _twice(model: Any, x: Tensor, layer: Any) -> Tensor:
    """One Linear used twice, another between."""
    once = layer["down"](layer["up"](x).tanh())
    return layer["down"](layer["up"](layer["down"](layer["gate"](once))))


def _weight_only(model: Any, x: Tensor, layer: Any) -> Tensor:
    """A parameter that is read whole outside and inside of a parallel region."""
    weight = model.scale.repeat(2)[:12].tanh()
    return layer["down"]((layer["up"](x).unflatten(-1, (-1, 12)) * weight).flatten(-2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "block",
    [
        _twice,
        lambda m, x, la: la["down"](la["up"](m.shared(x)).tanh() * la["gate"](x)),
        lambda m, x, la: la["down"](la["up"](x).relu()) * m.scale + m.shared(x),
        lambda m, x, la: la["down"](la["up"](x)) + torch.sigmoid(x) * la["down"](la["gate"](m.shared(x))),
        lambda m, x, la: la["down"](la["up"](x).sin() * m.shared(x).mean(-1, keepdim=True)),
        lambda m, x, la: la["down"](la["up"](x) + m.scale.sum()) * m.scale.mean(),
        _weight_only,
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_odd_paths_have_right_gradients(block: Any, tied: bool) -> None:
    """Values that a plan does not know of, on their way into and out of parallel regions."""
    model = Blocks(block, tied=tied)
    for n_chunks in (1, 2):
        assert_exact(model, make_batches(2, 2, mask=False, steps=1)[0], n_chunks=n_chunks, tp_plan=PLAN)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_broke_elsewhere_is_right_all_at_once(tp: int) -> None:
    batch = {**make_batches(2, 3, mask=True, steps=1)[0], "mixing": "left"}
    lowered = assert_exact(odd.Odd(2), batch, tp=tp, m=3, tp_plan=odd.PLAN)
    if tp > 1:
        assert lowered.plan.params["layers.1.qkv.weight"].local_shape == (96 // tp, 32)
        assert "layers.*.qkv.weight is cut in 3 sections, as the model reads it" in lowered.plan.notes


def test_sums_of_parallel_branches_are_one() -> None:
    def block(model: Any, x: Tensor, layer: Any) -> Tensor:
        h = F.layer_norm(x, (16,))
        return layer["down"](layer["up"](x)) + torch.sigmoid(x) * layer["down"](layer["gate"](h))

    batch = make_batches(2, 2, mask=False, steps=1)[0]
    model = Blocks(block)
    for layer in model.layers:
        layer["down"].bias = None  # type: ignore[index]
    ranks = lockstep.step(model, batch, tp=2, tp_plan=PLAN)
    assert collectives(ranks, Phase.F) == collectives(ranks, Phase.I) == 2


class TestPlans:
    def plan(self, **plan: str) -> Any:
        batch = make_batches(2, 2, mask=False, steps=1)[0]
        model = Blocks(lambda m, x, la: la["down"](la["up"](x)))
        named = {f"layers.*.{name}": style for name, style in plan.items()}
        return lockstep.step(model, batch, tp=2, n_chunks=1, tp_plan=named)

    def test_a_column_without_a_row(self) -> None:
        with pytest.raises(Exception, match=r"does not trace|never summed"):
            self.plan(up="colwise")
        batch = make_batches(2, 2, mask=False, steps=1)[0]
        model = Blocks(lambda m, x, la: x)
        with pytest.raises(PlanError, match=r"cross_entropy_loss.* 48 of 96, cut by head.weight"):
            lockstep.step(model, batch, tp=2, n_chunks=1, tp_plan={"head": "colwise"})

    def test_columns_behind_columns(self) -> None:
        def pad(x: Tensor, size: int) -> Tensor:
            return F.pad(x, (0, size - x.shape[-1]))

        batch = make_batches(2, 2, mask=False, steps=1)[0]
        model = Blocks(lambda m, x, la: pad(la["down"](pad(la["up"](x), 24)), 16))
        with pytest.raises(PlanError, match=r"calls pad, which works across .* cut by layers\.0\.up\.weight"):
            lockstep.step(
                model, batch, tp=2, n_chunks=1, tp_plan={"layers.*.up": "colwise", "layers.*.down": "colwise"}
            )

    def test_gather_and_split_are_exact(self) -> None:
        batch = make_batches(2, 2, mask=False, steps=1)[0]
        model = Blocks(lambda m, x, la: la["down"](la["norm"](la["up"](x))))
        loss = model(**batch)["loss"]
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        plan = {"layers.*.up": "colwise_gather_output", "layers.*.down": "rowwise_split_input"}
        for tp in (2, 4):
            ranks = lockstep.step(model, batch, tp=tp, tp_plan=plan, verify=True)
            assert max(lockstep.errors(model, ranks, loss.detach(), grads)) <= 1e-12

    def test_a_style_for_experts_alone(self) -> None:
        with pytest.raises(PlanError, match=r"layers\.0\.up the style 'grouped_gemm'"):
            self.plan(up="grouped_gemm")

    def test_no_plan_and_none_to_infer(self) -> None:
        batch = make_batches(2, 2, mask=False, steps=1)[0]
        model = Blocks(lambda m, x, la: la["down"](la["norm"](la["up"](x))))
        with pytest.raises(PlanError, match=r"none follows from its graph \(.*layer_norm lies before it"):
            lockstep.step(model, batch, tp=2)

    def test_an_inferred_plan_is_said(self) -> None:
        batch = make_batches(2, 2, mask=False, steps=1)[0]
        model = Blocks(lambda m, x, la: la["down"](la["up"](x).tanh() * la["gate"](x)))
        notes = lockstep.step(model, batch, tp=2).lowered.plan.notes
        assert "layers.*.gate: inferred from the graph, colwise" in notes


def test_a_router_that_draws_lots_is_refused() -> None:
    batch = make_batches(2, 2, mask=False, steps=1)[0]
    model = Blocks(lambda m, x, la: x + torch.rand_like(x))
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        lockstep.step(model, batch, tp=1)


def test_an_assignment_into_a_slice_has_a_gradient() -> None:
    def block(model: Any, x: Tensor, layer: Any) -> Tensor:
        y = torch.zeros_like(x)
        y[..., :8] = layer["down"](layer["up"](x))[..., 8:]
        y[..., 8:] = 1.0
        return y

    batch = make_batches(2, 2, mask=False, steps=1)[0]
    model = Blocks(block)
    loss = model(**batch)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    ranks = lockstep.step(model, batch, tp=2, tp_plan=PLAN, verify=True)
    assert max(lockstep.errors(model, ranks, loss.detach(), grads)) <= 1e-12


def test_experts_make_their_weight_gradients_in_w_and_are_chosen_alike_on_all_ranks() -> None:
    ranks = step(make(replace(FAMILIES["mixtral"], aux=False)))
    plan = ranks.lowered.plan
    for chunk in ranks.lowered.chunks.values():
        targets = {p: [str(n.target) for n, q in chunk.joint.phase.items() if q is p] for p in Phase}
        assert targets[Phase.W].count("fxbraid.grouped_mm_weight.default") == 2
        assert targets[Phase.I].count("transformers.grouped_mm_fallback.default") == 2
        (chosen,) = [n for n in chunk.joint.graph.nodes if n.target is torch.ops.aten.topk.default]
        todo, seen = [chosen], set()
        while todo:
            node = todo.pop()
            if node not in seen and not is_collective(node):
                seen.add(node)
                todo += node.all_input_nodes
        read = {chunk.joint.state[n] for n in seen if n in chunk.joint.state} & plan.params.keys()
        assert any("gate" in name for name in read)
        assert all(plan.params[name].dim is None for name in read), "routing depends on a sharded parameter"
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in plan.partial} == {"gate"}
