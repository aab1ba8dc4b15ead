"""A vocabulary cut over the tensor-parallel ranks, against the unsplit model: all ranks in one process, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxbraid.bench.vocab import Sizes, measure, table
from fxbraid.passes.errors import BraidError, PlanError
from fxbraid.passes.joint import Phase
from fxbraid.passes.layout import ParamShard
from fxbraid.passes.loss_shards import SHARD_GRAD, SHARD_STATS, plain_grad, plain_stats
from fxbraid.passes.marks import COLLECTIVES, TP_MAX
from fxbraid.passes.pipeline import Lowered

from . import lockstep, zoo
from .parity import KeepDouble, make_batches
from .zoo import FAMILIES

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
Loss = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return x + self["down"](self["up"](x).tanh())


class Toy(nn.Module):
    """A language model with the head and the loss of a test."""

    def __init__(
        self,
        vocab: int = 97,
        *,
        loss: Loss | None = None,
        logits: Callable[[Tensor], Tensor] = lambda z: z,
        tied: bool = False,
        bias: bool = False,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(vocab, 16, padding_idx=padding)
        self.layers = nn.ModuleList(
            Layer({"up": nn.Linear(16, 24), "down": nn.Linear(24, 16)}) for _ in range(2)
        )
        self.head = nn.Linear(16, vocab, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.loss, self.logits = loss or F.cross_entropy, logits
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.logits(self.head(x) * 3)
        if labels is None:
            return {"logits": logits}
        return {"loss": self.loss(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def data(vocab: int = 97, *, seed: int = 0) -> dict[str, Tensor]:
    """[4, 6] tokens and ragged labels of a micro-batch size of 2; one row has a single label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (4, 6), generator=generator)
    labels = torch.randint(0, vocab, (4, 6), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[1, 1:] = -100
    labels[0, 0], ids[0, 0] = vocab - 1, vocab - 1
    return {"input_ids": ids, "labels": labels}


def compare(model: nn.Module, batch: dict[str, Tensor], *, tp: int, **options: Any) -> lockstep.Ranks:
    """Two steps' batches, loss and gradients to 1e-12; the vocabulary must be cut."""
    loss = model(**batch)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ranks = lockstep.step(
        model, batch, tp=tp, verify=True, **{"tp_plan": PLAN, "vocab_parallel": True, **options}
    )
    assert max(lockstep.errors(model, ranks, loss.detach(), grads)) <= 1e-12
    assert "embed.weight" in ranks.lowered.vocabulary
    return ranks


def no_whole_logits(lowered: Lowered, vocab: int) -> None:
    """Nothing in any graph is as wide as the vocabulary."""
    for chunk in lowered.chunks.values():
        for node in chunk.joint.graph.nodes:
            val = node.meta.get("val")
            assert not isinstance(val, Tensor) or vocab not in val.shape, node.format_node()


def cap(z: Tensor) -> Tensor:
    return torch.tanh(z / 2.0) * 2.0


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "tied with padding": {"tied": True, "padding": 3},
    "padding": {"padding": 96},
    "bias": {"bias": True},
    "softcap": {"logits": cap},
    "scale": {"logits": lambda z: z * 0.0625, "tied": True},
    "granite": {"logits": lambda z: (z / 8.0).float().double()},
    "smoothing": {"loss": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1)},
    "another ignored label": {"loss": lambda z, y: F.cross_entropy(z, y.clamp(min=5), ignore_index=5)},
    "sum": {"loss": lambda z, y: F.cross_entropy(z, y, reduction="sum")},
    "two losses": {"loss": lambda z, y: F.cross_entropy(z, y) + 0.5 * F.cross_entropy(z * 2, y)},
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_and_losses(head: str) -> None:
    # 97 over 4 ranks: 25 each, the last one with 3 rows of padding.
    model = Toy(**HEADS[head])
    ranks = compare(model, data(), tp=4, n_chunks=2 if model.head.weight is model.embed.weight else 1)
    no_whole_logits(ranks.lowered, 97)
    assert ranks.lowered.plan.params[ranks.lowered.canonical["head.weight"]].local_shape == (25, 16)


def test_fewer_entries_than_fill_the_ranks() -> None:
    """5 entries over 4 ranks of 2: the last rank has padding alone."""
    compare(Toy(5), data(5), tp=4)
    compare(Toy(5, loss=lambda z, y: F.cross_entropy(z, y, label_smoothing=0.2)), data(5), tp=4)


def test_losses_that_are_sums_or_means_of_a_micro_batch() -> None:
    none = Toy(loss=lambda z, y: F.cross_entropy(z, y, reduction="none").sum())
    compare(none, data(), tp=2, loss_reduction="sum")
    # A loss over a count that comes with the batch, as transformers' Trainer gives it.
    batch = data()
    batch["num_items_in_batch"] = torch.tensor(13)

    class Counted(Toy):
        def forward(
            self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **_: Any
        ) -> Any:
            out = super().forward(input_ids, labels)
            return {"loss": out["loss"] / num_items_in_batch, "logits": out["logits"]}

    compare(Counted(loss=lambda z, y: F.cross_entropy(z, y, reduction="sum")), batch, tp=2)


def test_all_labels_ignored_gives_what_the_plain_model_gives() -> None:
    model, batch = Toy(), data()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch)["loss"]
    loss.backward()
    ranks = lockstep.step(model, batch, tp=2, tp_plan=PLAN, vocab_parallel=True)
    assert loss.isnan() and ranks.loss.isnan()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for rank in range(2):
            wanted = ranks.lowered.plan.params[name].take(parameter.grad, rank)
            assert torch.equal(ranks.grads[rank][name].isnan(), wanted.isnan()), name


def test_values_outside_of_the_vocabulary_are_refused_before_anything_runs() -> None:
    batch = data()
    lowered = lockstep.step(Toy(), batch, tp=2, tp_plan=PLAN).lowered
    for name, value, what in (
        ("labels", 97, "label 97"),
        ("labels", -1, "label -1"),
        ("input_ids", 98, "token id 98"),
    ):
        wrong = {k: v.clone() for k, v in batch.items()}
        wrong[name][3, 2] = value
        with pytest.raises(
            BraidError, match=rf"{name} holds the {what} in micro-batch 1, .*97 entries \(0 to 96\)"
        ):
            lockstep.step(Toy(), wrong, tp=2, lowered=lowered)

    # Hugging Face's loss shifts labels: the first of a row is never read, and may be anything.
    def shifted(z: Tensor, y: Tensor) -> Tensor:
        y = F.pad(y.view(2, 6), (0, 1), value=-100)[:, 1:].contiguous()
        return F.cross_entropy(z, y.view(-1))

    wrong = {k: v.clone() for k, v in batch.items()}
    wrong["labels"][:, 0] = 1000
    lowered = lockstep.step(Toy(loss=shifted), wrong, tp=2, tp_plan=PLAN).lowered
    wrong["labels"][2, 1] = 1000
    with pytest.raises(BraidError, match="labels holds the label 1000 in micro-batch 1"):
        lockstep.step(Toy(loss=shifted), wrong, tp=2, lowered=lowered)


def test_collectives_are_three_forward_and_one_backward_and_small() -> None:
    ranks = compare(Toy(), data(), tp=2, n_chunks=2)
    first, last = ranks.lowered.chunks.values()
    found = {
        (c, p): [n for n, q in chunk.joint.phase.items() if n.target in COLLECTIVES and q is p]
        for c, chunk in (("first", first), ("last", last))
        for p in Phase
    }
    # One for the embedding and one for the layer; one for the layer, then the maximum and the sums of 12 tokens.
    assert [len(found["first", p]) for p in Phase] == [2, 1, 0]
    assert [len(found["last", p]) for p in Phase] == [3, 2, 0]
    assert [tuple(n.meta["val"].shape) for n in found["last", Phase.F][1:]] == [(12,), (2, 12)]
    assert found["last", Phase.F][1].target is TP_MAX


def test_bf16_logits_are_read_as_they_are() -> None:
    """The cast to float32 in front of the loss is made in registers: no float32 logits are kept, and gradients are
    bf16 as in the plain model."""
    model = Toy(loss=lambda z, y: F.cross_entropy(z.float(), y)).to(torch.bfloat16)
    batch = data()
    loss = model(**batch)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    ranks = lockstep.step(model, batch, tp=2, m=1, tp_plan=PLAN, vocab_parallel=True)
    error, worst = lockstep.errors(model, ranks, loss.detach(), grads)
    assert error < 2e-2 and worst < 5e-2
    stats = [n for c in ranks.lowered.chunks.values() for n in c.joint.graph.nodes if n.target is SHARD_STATS]
    assert [n.args[0].meta["val"].dtype for n in stats] == [torch.bfloat16]  # type: ignore[union-attr]
    # On the same bf16 logits the loss is the one of float32, and the gradient is its rounding.
    z, y = (torch.randn(40, 96) * 4).bfloat16(), torch.randint(0, 96, (40,))
    whole = z.clone().requires_grad_()
    wanted = F.cross_entropy(whole.float(), y)
    wanted.backward()
    parts = [z[:, r * 48 : (r + 1) * 48].clone().requires_grad_() for r in range(2)]
    stats_of = [SHARD_STATS(part, y, torch.tensor([r]), 96, False) for r, part in enumerate(parts)]
    top = torch.maximum(stats_of[0][0], stats_of[1][0]).detach()
    total = sum(s[1] * (s[0].detach() - top).exp() for s in stats_of)
    got = (total.log() + top - stats_of[0][2] - stats_of[1][2]).mean()  # type: ignore[union-attr]
    got.backward()
    assert torch.allclose(got, wanted, rtol=1e-6)
    assert whole.grad is not None
    grad = torch.cat([part.grad for part in parts], 1)  # type: ignore[misc]
    assert grad.dtype is torch.bfloat16 and torch.allclose(
        grad.float(), whole.grad.float(), rtol=2**-7, atol=1e-8
    )


def test_eval_returns_whole_logits_and_training_never() -> None:
    for model in (Toy(tied=True), Toy(logits=cap)):
        batch = data()
        with torch.no_grad():
            wanted = model(**batch)
        trained = lockstep.step(model, batch, tp=4, tp_plan=PLAN).lowered
        names = tuple(trained.vocabulary)
        got = lockstep.forward(model, batch, tp=4, tp_plan=PLAN, vocab_parallel=names)
        for rank in range(4):
            assert torch.allclose(got["logits"][rank], wanted["logits"], rtol=0, atol=1e-12)
            assert torch.allclose(got["loss"][rank], wanted["loss"], rtol=1e-12)
        del batch["labels"]
        got = lockstep.forward(model, batch, tp=4, tp_plan=PLAN, vocab_parallel=names)
        assert torch.allclose(got["logits"][3], wanted["logits"], rtol=0, atol=1e-12)


class TestWhole:
    """What stays whole, and says so."""

    def step(self, model: nn.Module, **options: Any) -> Lowered:
        batch = data()
        loss = model(**batch)["loss"]
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        ranks = lockstep.step(model, batch, tp=2, **{"tp_plan": PLAN, **options})
        assert max(lockstep.errors(model, ranks, loss.detach(), grads)) <= 1e-12
        return ranks.lowered

    def test_logits_that_padding_would_make_infinite(self) -> None:
        """0 times an infinite slope is no gradient of a padded column; where nothing is padded, nothing is refused."""
        for logits in (lambda z: z.abs().sqrt(), lambda z: (z * z).pow(0.4)):
            lowered = self.step(Toy(vocab=97, logits=logits))
            assert any("97 rows are no multiple of tp_size=2" in note for note in lowered.plan.notes)
            assert "head.weight" in self.step(Toy(vocab=98, logits=logits)).vocabulary
        assert "head.weight" in self.step(Toy(vocab=97, logits=lambda z: 5 * torch.tanh(z / 5))).vocabulary

    def test_logits_that_something_else_reads(self) -> None:
        def penalised(z: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(z, y, reduction="sum") + z.logsumexp(-1).square().sum()

        lowered = self.step(Toy(loss=penalised), loss_reduction="sum")
        assert lowered.vocabulary == {"embed.weight"}
        assert any("head.weight stays whole" in n and "logsumexp" in n for n in lowered.plan.notes)
        lowered = self.step(Toy(loss=penalised, tied=True), loss_reduction="sum")
        assert not lowered.vocabulary
        with pytest.raises(
            PlanError, match=r"embed.weight can't be cut over the vocabulary: the logits .*logsumexp"
        ):
            self.step(Toy(loss=penalised, tied=True), loss_reduction="sum", vocab_parallel=True)

    def test_class_weights_and_a_plan_that_says_so(self) -> None:
        plan = {**PLAN, "head": "replicate"}
        lowered = self.step(Toy(), tp_plan=plan)
        assert lowered.vocabulary == {"embed.weight"}
        assert "head.weight stays whole on every TP rank: tp_plan says so" in lowered.plan.notes
        assert not self.step(Toy(), vocab_parallel=False).vocabulary
        with pytest.raises(PlanError, match=r'vocab_parallel=.yes.: use True, False or "auto"'):
            self.step(Toy(), vocab_parallel="yes")

    def test_a_later_trace_that_needs_whole_logits(self) -> None:
        def penalised(z: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(z, y, reduction="sum") + z.logsumexp(-1).square().sum()

        with pytest.raises(PlanError, match=r"head.weight can't be cut.*pass vocab_parallel=False to braid"):
            self.step(
                Toy(loss=penalised), loss_reduction="sum", vocab_parallel=("head.weight", "embed.weight")
            )


def test_shards_put_together_are_the_parameter_without_padding() -> None:
    full = torch.randn(97, 3)
    for tp in (2, 3, 4, 8):
        shard = ParamShard("w", (97, 3), 0, tp)
        parts = [shard.take(full, rank) for rank in range(tp)]
        assert all(tuple(part.shape) == shard.local_shape for part in parts)
        assert torch.equal(shard.join(parts), full)
        assert torch.cat(parts)[97:].abs().sum() == 0


@pytest.mark.parametrize("name", ["gemma2", "cohere"])
def test_families_that_cap_or_scale_their_logits(name: str) -> None:
    row = zoo.run(FAMILIES[name], vocab_size=97)
    assert row.loss <= 1e-12 and row.grad <= 1e-12, row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "llama", "gpt_neox", "gptj", "phi", "gpt2"])
@pytest.mark.parametrize("tp", [2, 4])
def test_families_with_padding(name: str, tp: int) -> None:
    model = zoo.make(FAMILIES[name], vocab_size=97)
    batch = make_batches(2, 2, mask=True, steps=1)[0]
    with KeepDouble():
        loss, grads = zoo.reference(model, batch, 2)
        ranks = lockstep.step(model, batch, tp=tp, vocab_parallel=True)
    assert max(lockstep.errors(model, ranks, loss, grads)) <= 1e-12
    no_whole_logits(ranks.lowered, 97)


# -- Triton ------------------------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from fxbraid.passes import loss_shards as shards

torch.manual_seed(0)
shards._kernels().BLOCK = 16  # several passes of the loop over the 25 columns
assert shards._compiled(torch.zeros(1)) is not None
for dtype, rough in ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
    for vocab, tp in ((96, 2), (97, 4), (5, 4)):
        for total in (False, True):
            columns = -(-vocab // tp)
            labels = torch.randint(0, vocab, (7,))
            labels[2] = -100
            logits = (torch.randn(7, columns * tp) * 5).to(dtype)
            logits[3, 0] = -torch.inf
            grads = torch.randn(4 if total else 3, 7, dtype=shards.accumulated(dtype))
            for r in range(tp):
                mine, rank = logits[:, r * columns : (r + 1) * columns], torch.tensor([r])
                got = shards.SHARD_STATS(mine, labels, rank, vocab, total)
                wanted = shards.plain_stats(mine, labels, rank, vocab, total)
                finite = wanted.isfinite()
                assert torch.equal(finite, got.isfinite()), (dtype, vocab, r)
                assert torch.allclose(got[finite], wanted[finite], rtol=rough, atol=rough), (dtype, vocab, r)
                got = shards.SHARD_GRAD(mine, labels, rank, vocab, wanted, grads)
                plain = shards.plain_grad(mine, labels, rank, vocab, wanted, grads)
                assert got.dtype is dtype and got.shape == mine.shape
                wide = 2**-7 if dtype is torch.bfloat16 else rough
                assert torch.allclose(got.double(), plain.double(), rtol=wide, atol=rough), (dtype, vocab, r)
                assert not got[:, max(0, vocab - r * columns) :].any()
op = torch.ops.fxbraid.shard_stats_triton
assert op.default._schema.name == "fxbraid::shard_stats_triton"
print("as the plain operators")
"""


def test_the_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0 and "as the plain operators" in run.stdout, run.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    """More than one pass of the loop over a padded shard, against the plain operators on the host."""
    vocab, tp, tokens = 20001, 2, 33
    columns = -(-vocab // tp)
    logits = (torch.randn(tokens, columns) * 5).to(dtype)
    labels, rank = torch.randint(0, vocab, (tokens,)), torch.tensor([1])
    labels[3] = -100
    wanted = plain_stats(logits, labels, rank, vocab, True)
    grads = torch.randn_like(wanted)
    there = [t.cuda() for t in (logits, labels, rank)]
    rough = 1e-12 if dtype is torch.float64 else 1e-4
    assert torch.allclose(SHARD_STATS(*there, vocab, True).cpu(), wanted, rtol=rough, atol=rough)
    got = SHARD_GRAD(*there, vocab, wanted.cuda(), grads.cuda()).cpu()
    wide = 2**-7 if dtype is torch.bfloat16 else rough
    plain = plain_grad(logits, labels, rank, vocab, wanted, grads)
    assert torch.allclose(got.double(), plain.double(), rtol=wide, atol=rough)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_compile_to_ptx_for_hopper(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("in the interpreter kernels are Python")
    from fxbraid.passes import loss_kernels as kernels

    for kernel in (kernels.stats_kernel, kernels.grad_kernel):
        text = kernels.ptx(kernel, dtype, capability=90)
        assert ".target sm_90" in text and f".visible .entry {kernel.__name__}" in text
        assert "ex2.approx" in text


def test_the_benchmark_finds_less_memory_where_the_vocabulary_is_cut() -> None:
    sizes = Sizes(vocab=512, hidden=32, tokens=32, tp=4, dtype="float32", device="cpu")
    whole, cut = (measure(sizes, parallel) for parallel in (False, True))
    assert whole.parameters == 4 * cut.parameters == 512 * 32 * 4
    logits = 32 * 512 * 4
    # Whole: the log-softmax is saved and the logits' gradient handed on. Cut: a fourth of the logits, and theirs.
    few = 8 * 32 * 4  # numbers per token
    assert whole.saved - cut.saved >= 3 * logits // 4 - few
    assert whole.handed - cut.handed >= 3 * logits // 4 - few
    assert cut.peak < whole.peak - logits
    assert (whole.loss, cut.loss) == (0, 32 * 4 + 2 * 32 * 4)
    assert "cut" in table([whole, cut], 32)
