"""What lies between column- and row-parallel linears: refused with a sentence, or exact, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxbraid.passes.errors import PlanError

from .parity import make_batches
from .test_zoo import PLAN, Blocks, Layer, assert_exact

HEADS, SIZE = 4, 6
Block = Callable[[Any, Tensor, Any], Tensor]


class Attention(Blocks):
    """One layer with what attention in many spellings needs: 4 heads of 6 features."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.layers = nn.ModuleList([Layer(self.parts())]).double()
        for p in self.parameters():
            with torch.no_grad():
                p.add_(torch.randn_like(p) * 0.1)

    def parts(self) -> dict[str, nn.Module]:
        return {
            **super().parts(),
            "value": nn.Linear(16, 24),
            "key": nn.Linear(16, 12),
            "qkv": nn.Linear(16, 72),
            "both": nn.Linear(16, 48),
            "conv": nn.ParameterDict({"weight": torch.randn(24, 3), "bias": torch.randn(24)}),
            "experts": Experts(),
        }


class Experts(nn.Module):
    """Four experts in two tensors, one chosen per token by a router that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.inner = nn.Parameter(torch.randn(4, 24, 16) * 0.3)
        self.outer = nn.Parameter(torch.randn(4, 16, 24) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        gates = torch.zeros_like(self.router(x)).scatter(-1, chosen, weight)
        result = torch.zeros_like(x)
        for e in range(4):
            result = result + gates[..., e : e + 1] * F.linear(
                F.linear(x, self.inner[e]).tanh(), self.outer[e]
            )
        return result


WHOLE_PLAN = {
    **PLAN,
    **{f"layers.*.{name}": "colwise" for name in ("value", "key", "qkv", "both", "conv.weight", "conv.bias")},
    "layers.*.experts": "moe_tp_experts",
    "layers.*.experts.inner": "colwise",
    "layers.*.experts.outer": "rowwise",
}


def batch() -> dict[str, Tensor]:
    return make_batches(2, 2, mask=False, steps=1)[0]


def exact(block: Block, *, tp: int, plan: dict[str, str] | None = WHOLE_PLAN) -> Any:
    options = {} if plan is None else {"tp_plan": plan}
    return assert_exact(Attention(block), batch(), tp=tp, n_chunks=1, **options)


def heads(x: Tensor) -> Tensor:
    """[b, s, features] -> [b, heads, s, SIZE]"""
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def qkv(x: Tensor, la: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads(la["up"](x)), heads(la["gate"](x)), heads(la["value"](x))


def single_head(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = la["up"](x), la["gate"](x), la["value"](x)
    return la["down"](F.scaled_dot_product_attention(q, k, v))


def by_hand_over_features(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = la["up"](x), la["gate"](x), la["value"](x)
    return la["down"]((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def heads_that_are_no_slices(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = (la[n](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in ("up", "gate", "value"))
    return la["down"](joined(F.scaled_dot_product_attention(q, k, v)))


def heads_innermost(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = (la[n](x).unflatten(-1, (SIZE, -1)).permute(0, 3, 1, 2) for n in ("up", "gate", "value"))
    return la["down"](F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).flatten(2))


def heads_by_chunk(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = (la[n](x).chunk(HEADS, -1) for n in ("up", "gate", "value"))
    outs = [F.scaled_dot_product_attention(*head) for head in zip(q, k, v, strict=True)]
    return la["down"](torch.cat(outs, -1))


def linear_attention(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = la["up"](x), la["gate"](x).softmax(1), la["value"](x)
    return la["down"](q @ (k.transpose(-1, -2) @ v))


def over_heads(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = qkv(x, la)
    return la["down"](joined((q @ k.mT).softmax(1) @ v))


def scaled_by_all_features(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = qkv(x, la)
    return la["down"](joined((q @ k.mT / la["up"].weight.shape[0]).softmax(-1) @ v))


def features(change: Callable[[Tensor], Tensor]) -> Block:
    return lambda m, x, la: la["down"](change(la["up"](x)))


def grouped_by_first(h: Tensor) -> Tensor:
    return h.unflatten(-1, (HEADS, -1)).softmax(-1).flatten(-2)


WRONG: dict[str, tuple[Block, str]] = {
    "single head": (single_head, "scaled_dot_product_attention"),
    "single head by hand": (by_hand_over_features, r"(softmax|matmul)"),
    "heads that are no slices": (heads_that_are_no_slices, "unflatten"),
    "heads innermost": (heads_innermost, "unflatten"),
    "heads by chunk": (heads_by_chunk, "scaled_dot_product|no equal sections fit"),
    "linear attention": (linear_attention, "matmul"),
    "softmax over heads": (over_heads, "softmax"),
    "a scale by all features": (scaled_by_all_features, "div"),
    "softmax": (features(lambda h: h.softmax(-1)), "softmax"),
    "log_softmax": (features(lambda h: h.log_softmax(-1)), "log_softmax"),
    "amax": (features(lambda h: h - h.amax(-1, keepdim=True)), "amax"),
    "max": (features(lambda h: h - h.max(-1, keepdim=True)[0]), "max"),
    "mean": (features(lambda h: h - h.mean(-1, keepdim=True)), "mean"),
    "sum": (features(lambda h: h * h.sum(-1, keepdim=True)), "sum"),
    "norm": (features(lambda h: h / h.norm(dim=-1, keepdim=True)), "norm"),
    "std": (features(lambda h: h / h.std(-1, keepdim=True)), "std"),
    "normalize": (features(lambda h: F.normalize(h, dim=-1)), "norm"),
    "rms by hand": (features(lambda h: h * (h.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()), "mean"),
    "flip": (features(lambda h: h.flip(-1)), "flip"),
    "roll": (features(lambda h: h.roll(1, -1)), "roll"),
    "index_select": (features(lambda h: h.index_select(-1, torch.arange(h.shape[-1]).flip(0))), "index_select"),
    "index": (features(lambda h: h[..., torch.arange(h.shape[-1]).flip(0)]), "index"),
    "gather": (features(lambda h: h.gather(-1, h.argsort(-1))), "argsort"),
    "cumsum": (features(lambda h: h.cumsum(-1)), "cumsum"),
    "topk": (features(lambda h: h * (h >= h.topk(3, -1)[0][..., -1:])), "topk"),
    "sort": (features(lambda h: h.sort(-1)[0]), "sort"),
    "argmax": (features(lambda h: h * (h.argmax(-1, keepdim=True) + 1)), "argmax"),
    "max_pool": (features(lambda h: F.max_pool1d(h, 3, 1, 1)), "max_pool1d"),
    "layer_norm": (features(lambda h: F.layer_norm(h, (h.shape[-1],))), "layer_norm"),
    "rms_norm": (features(lambda h: F.rms_norm(h, (h.shape[-1],))), "rms_norm"),
    "conv over features": (
        features(lambda h: F.conv1d(h.flatten(0, 1)[:, None], torch.ones(1, 1, 3).double(), padding=1).view_as(h)),
        "conv1d",
    ),
    "groups by number": (features(grouped_by_first), "unflatten"),
    "a count of features": (features(lambda h: h * h.shape[-1]), "mul"),
    "numbers of features": (features(lambda h: h * torch.arange(h.shape[-1])), "arange"),
    "first of a whole": (
        lambda m, x, la: la["down"](m.scale.repeat(2)[: la["up"].weight.shape[0]] * la["up"](x)),
        "slice",
    ),
    "outer product": (
        lambda m, x, la: la["down"]((la["up"](x)[..., None] * la["gate"](x)[..., None, :]).sum(-1)),
        "mul",
    ),
    "a half beside a half": (features(lambda h: h.reshape(*h.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)), ""),
    "tokens among features": (features(lambda h: h.reshape(h.shape[0], -1, h.shape[1]).transpose(1, 2)), "reshape"),
    "a row's weight read": (lambda m, x, la: F.linear(la["up"](x), la["down"].weight).tanh(), "linear"),
    "a row's weight and bias read": (
        lambda m, x, la: F.linear(la["up"](x), la["down"].weight, la["down"].bias),
        "bias",
    ),
    "a row's weight in a product": (lambda m, x, la: la["up"](x) @ la["down"].weight.T + x, "matmul"),
    "a whole value added": (lambda m, x, la: F.linear(la["up"](x), la["down"].weight) + x, "linear"),
    "a column without a row": (lambda m, x, la: la["up"](x).sum(-1, keepdim=True) * x, "sum"),
    "a sum beside a row": (
        lambda m, x, la: la["down"](la["up"](x)) + (la["up"](x) ** 2).sum(-1, keepdim=True),
        "sum",
    ),
}  # fmt: skip


#: With four ranks, each with one head, in every run; the others with -m slow.
FOUR = ("single head", "heads by chunk", "softmax over heads", "mean", "first of a whole")


@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_features_or_heads_is_refused(name: str) -> None:
    assert_refused(name, 2)
    if name in FOUR:
        assert_refused(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_features_or_heads_is_refused_on_four_ranks(name: str) -> None:
    assert_refused(name, 4)


def assert_refused(name: str, tp: int) -> None:
    block, operator = WRONG[name]
    plan = {p: s for p, s in WHOLE_PLAN.items() if "experts" not in p and "conv" not in p}
    with pytest.raises(PlanError, match=operator):
        exact(block, tp=tp, plan=plan)


# -- what must not be refused ------------------------------------------------------------------------------------


def by_view(m: Any, x: Tensor, la: Any) -> Tensor:
    b, s, _ = x.shape
    q, k, v = (la[n](x).view(b, s, -1, SIZE).transpose(1, 2) for n in ("up", "gate", "value"))
    return la["down"](
        F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
    )


def by_matmul(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = qkv(x, la)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().expand(q.shape[0], q.shape[1], -1, -1)
    scores = (q @ k.mT / SIZE**0.5).masked_fill(~mask, -1e9)
    return la["down"](joined(scores.softmax(-1) @ v))


def by_einsum(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = (la[n](x).unflatten(-1, (-1, SIZE)) for n in ("up", "gate", "value"))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return la["down"](torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


def by_bmm(m: Any, x: Tensor, la: Any) -> Tensor:
    b, s, _ = x.shape
    q, k, v = (heads(la[n](x)).reshape(-1, s, SIZE) for n in ("up", "gate", "value"))
    return la["down"](joined(torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(b, -1, s, SIZE)))


def by_split_heads(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = (torch.stack(la[n](x).split(SIZE, -1), 1) for n in ("up", "gate", "value"))
    return la["down"](torch.cat(F.scaled_dot_product_attention(q, k, v).unbind(1), -1))


def fused(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = (heads(part) for part in la["qkv"](x).chunk(3, -1))
    return la["down"](joined(F.scaled_dot_product_attention(q, k, v)))


def grouped_queries(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k = heads(la["up"](x)), heads(la["key"](x))
    k = k[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
    return la["down"](joined(F.scaled_dot_product_attention(q, k, k)))


def repeated_keys(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k = heads(la["up"](x)), heads(la["key"](x)).repeat_interleave(2, 1)
    return la["down"](joined(F.scaled_dot_product_attention(q, k, k)))


def gqa(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k = heads(la["up"](x)), heads(la["key"](x))
    return la["down"](joined(F.scaled_dot_product_attention(q, k, k, enable_gqa=True)))


def one_key_head(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k = heads(la["up"](x)), x[..., :SIZE].unsqueeze(1)
    return la["down"](joined((q @ k.mT).softmax(-1) @ k))


def gated(m: Any, x: Tensor, la: Any) -> Tensor:
    return la["down"](F.silu(la["up"](x)) * la["gate"](x))


def glu(m: Any, x: Tensor, la: Any) -> Tensor:
    return la["down"](F.glu(torch.cat([la["up"](x), la["gate"](x)], -1)))


def gated_in_one(m: Any, x: Tensor, la: Any) -> Tensor:
    a, b = la["both"](x).chunk(2, -1)
    return la["down"](a.sin() * b)


def depthwise(m: Any, x: Tensor, la: Any) -> Tensor:
    weight, bias = la["conv"]["weight"], la["conv"]["bias"]
    h = F.conv1d(la["up"](x).transpose(1, 2), weight[:, None], bias, padding=2, groups=weight.shape[0])
    return la["down"](h[..., : x.shape[1]].transpose(1, 2))


def experts(m: Any, x: Tensor, la: Any) -> Tensor:
    return la["experts"](x)  # type: ignore[no-any-return]


def norm_of_each_head(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = qkv(x, la)
    q, k = F.rms_norm(q, (SIZE,)), F.normalize(k, dim=-1)
    return la["down"](joined(F.scaled_dot_product_attention(q, k, v)))


def rotated(m: Any, x: Tensor, la: Any) -> Tensor:
    q, k, v = qkv(x, la)
    angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.5, 0.1, 1.0, 0.5, 0.1]).double()

    def rotate(h: Tensor) -> Tensor:
        a, b = h.chunk(2, -1)
        return h * angle.cos() + torch.cat([-b, a], -1) * angle.sin()

    return la["down"](joined(F.scaled_dot_product_attention(rotate(q), rotate(k), v)))


def recurrent(m: Any, x: Tensor, la: Any) -> Tensor:
    """Linear attention head by head, with a state that starts from zeros."""
    q, k, v = qkv(x, la)
    state = q.new_zeros(q.shape[0], q.shape[1], SIZE, SIZE)
    outs = []
    for i in range(3):
        state = state * 0.9 + k[:, :, i, :, None] * v[:, :, i, None, :]
        outs.append((q[:, :, i, None, :] @ state).squeeze(-2))
    return F.pad(la["down"](torch.stack(outs, 1).flatten(2)), (0, 0, 0, x.shape[1] - 3))


def weight_of_a_column(m: Any, x: Tensor, la: Any) -> Tensor:
    return la["down"](F.linear(x, la["up"].weight, la["up"].bias).tanh() + x @ la["gate"].weight.T)


def sum_of_two_rows(m: Any, x: Tensor, la: Any) -> Tensor:
    return la["down"](la["up"](x).tanh()) + torch.sigmoid(x) * la["down"](la["gate"](x))


RIGHT: dict[str, Block] = {
    f.__name__: f
    for f in (
        by_view, by_matmul, by_einsum, by_bmm, fused, grouped_queries, repeated_keys, gqa, one_key_head, gated, glu,
        gated_in_one, depthwise, experts, norm_of_each_head, rotated, recurrent, weight_of_a_column, sum_of_two_rows,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_features_or_heads_apart_is_exact(name: str) -> None:
    exact(RIGHT[name], tp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in RIGHT if name not in ("grouped_queries", "repeated_keys", "gqa")]
)  # two key-value heads
def test_what_keeps_features_or_heads_apart_is_exact_on_four_ranks(name: str) -> None:
    exact(RIGHT[name], tp=4)


def test_an_unknown_operator_is_refused_in_a_users_plan_and_leaves_an_inferred_one_whole() -> None:
    def block(m: Any, x: Tensor, la: Any) -> Tensor:
        h = la["up"](x).unfold(1, 1, 1).squeeze(-1)
        return la["down"](h) + la["down"](la["gate"](x).tanh())

    with pytest.raises(
        PlanError, match=r"can't be shown .* calls unfold, which is an operator that cut features can't"
    ):
        exact(block, tp=2)
    with pytest.raises(PlanError, match="unfold"):
        exact(block, tp=2, plan=None)


def test_an_inferred_plan_leaves_whole_what_mixes_and_cuts_the_rest() -> None:
    class Two(Attention):
        def parts(self) -> dict[str, nn.Module]:
            return {**super().parts(), "up2": nn.Linear(16, 24), "down2": nn.Linear(24, 16)}

    def two(m: Any, x: Tensor, la: Any) -> Tensor:
        h = la["up"](x).unflatten(-1, (HEADS, -1)).transpose(-1, -2).flatten(-2).tanh()
        return la["down"](h) + la["down2"](la["up2"](x).tanh())

    plan = assert_exact(Two(two), batch(), tp=2, n_chunks=1).plan
    assert plan.params["layers.0.up.weight"].dim is None and plan.params["layers.0.down.weight"].dim is None
    assert plan.params["layers.0.up2.weight"].dim == 0
    assert any("layers.*.up stays whole" in note and "unflatten" in note for note in plan.notes), plan.notes


def test_the_way_out_is_exact() -> None:
    plan = {
        "layers.*.up": "colwise_gather_output",
        "layers.*.gate": "colwise_gather_output",
        "layers.*.value": "colwise_gather_output",
        "layers.*.down": "rowwise_split_input",
    }
    for tp in (2, 4):
        exact(single_head, tp=tp, plan=plan)


def test_a_sum_that_is_pending_goes_through_what_is_linear_alone() -> None:
    def once(m: Any, x: Tensor, la: Any) -> Tensor:
        part = F.linear(la["up"](x), la["down"].weight)
        return part * part

    def rounded(m: Any, x: Tensor, la: Any) -> Tensor:
        return torch.div(F.linear(la["up"](x), la["down"].weight), 2, rounding_mode="floor")

    for block in (once, rounded):
        with pytest.raises(PlanError, match="its sum over the ranks is still missing"):
            exact(block, tp=2)


def test_a_loop_over_a_ranks_heads_is_refused_unless_all_of_it_is_the_models() -> None:
    def block(m: Any, x: Tensor, la: Any) -> Tensor:
        total = x
        for _ in range(la["up"].weight.shape[0] // SIZE):
            total = total + la["down"](la["up"](x))
        return total

    with pytest.raises(PlanError, match="the code looks at sizes"):
        exact(block, tp=2)
