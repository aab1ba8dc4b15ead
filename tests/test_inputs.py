"""What a batch holds: values outside of the vocabulary, and sequences packed into rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbraid
from fxbraid.passes.errors import BraidError

from .test_model import assert_grads, braid, plain_grads
from .tiny import VOCAB, batch, lower, qwen2


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 24, "vocab_size": VOCAB}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("labels", VOCAB, "labels holds the label 96 in micro-batch 1, but the vocabulary has 96 entries"),
        ("labels", -1, r"the label -1 in micro-batch 1, .*\(0 to 95\), and -100 is ignored"),
        ("input_ids", VOCAB, "input_ids holds the token id 96 in micro-batch 1"),
        ("input_ids", -100, "the token id -100"),
        (
            "position_ids",
            24,
            r"position_ids holds the index 24 in micro-batch 1, but transformer\.wpe\.weight has 24",
        ),
    ],
)
def test_values_outside_of_a_whole_vocabulary_are_refused_before_anything_runs(
    name: str, value: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**batch(4, mask=False), "position_ids": torch.arange(16).repeat(4, 1)}
    braided = braid(gpt2(), given)
    loss = braided.step(**given)
    wrong = {k: v.clone() for k, v in given.items()}
    wrong[name][3, 5] = value
    with monkeypatch.context() as patched:
        patched.setattr(braided._last, "_run", lambda *_: pytest.fail("the program ran"))
        with pytest.raises(BraidError, match=words):
            braided.step(**wrong)
    with pytest.raises(BraidError, match=words):
        braided.eval()(**wrong)
    braided.train().zero_grad()
    assert torch.equal(braided.step(**given), loss)


def test_a_first_label_that_the_loss_never_reads_may_be_anything() -> None:
    model, given = qwen2(), batch(4)
    given["labels"][:, 0] = 1000
    assert torch.allclose(braid(model, given).step(**given), model(**given).loss, rtol=1e-6)


def test_tables_that_stay_whole_are_checked_at_any_size() -> None:
    for options in ({"tp_size": 1}, {"tp_size": 2}, {"tp_size": 2, "vocab_parallel": False}):
        rules = lower(qwen2(), **options).checks.rules
        assert [(r.source, r.vocab, r.ignored) for r in rules] == [
            ("input_ids", 96, None),
            ("labels", 96, -100),
        ]


def packed() -> dict[str, Tensor]:
    """Rows of three sequences each, which their positions tell apart; no mask."""
    given = batch(4, mask=False)
    lengths = ((5, 4, 7), (8, 1, 7), (2, 2, 12), (9, 6, 1))
    given["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    for row, (first, second, _) in zip(given["labels"], lengths, strict=True):
        row[[0, first, first + second]] = -100
    return given


def test_packed_sequences_see_themselves_alone() -> None:
    """transformers looks for packing where there is no cache, and fxbraid traces without one."""
    model, given = qwen2(use_cache=True), packed()
    plain = model(**given, use_cache=False).loss
    assert not torch.allclose(model(**given).loss, plain, rtol=1e-3)
    for schedule in ("1f1b", "stp"):
        braided = braid(model, given, schedule=schedule)
        for _ in range(2):
            braided.zero_grad()
            assert torch.allclose(braided.step(**given), plain, rtol=1e-6)
            assert_grads(braided, plain_grads(model, {**given, "use_cache": False}))
    # Each sequence by itself has the logits that it has in its row.
    logits = fxbraid.braid(model.eval(), given, n_microbatches=2, compile=False)(**given).logits
    alone = model(input_ids=given["input_ids"][:1, 5:9]).logits
    assert torch.allclose(logits[:1, 5:9], alone, rtol=1e-4, atol=1e-4)
