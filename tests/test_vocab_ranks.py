"""A cut vocabulary in real processes: schedules to the bit, whole logits in eval, whole parameters, refusals."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

import fxbraid
from fxbraid.runtime.launch import launch, process_group

from .parity import keep_double
from .tiny import batch, qwen2

VOCAB = 97  # 49 rows on each of two ranks, the last one padding


def train(schedule: str) -> dict[str, Any]:
    """In a rank: two steps, an eval, and what must be refused."""
    plain = qwen2(vocab_size=VOCAB, tie_word_embeddings=True).double()
    given = {k: v.clone() for k, v in plain.state_dict().items()}
    steps = [batch(6, seed=seed) for seed in (1, 2)]
    with keep_double(torch.float64):
        model = fxbraid.braid(
            copy.deepcopy(plain).train(),
            steps[0],
            tp_size=2,
            pp_size=2,
            n_microbatches=3,
            schedule=schedule,
            compile=False,
            reproducible=True,
            vocab_parallel=True,
        )
    shards = model.plan.tp.params
    mine = {n: p for n, p in model.named_parameters() if n == "model.embed_tokens.weight"}
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    worst = 0.0
    losses = []
    for each in steps:
        with keep_double(torch.float64):
            wanted = plain(**each).loss
        wanted.backward()
        got = model.step(**each)
        losses.append(got.item())
        worst = max(worst, abs(got.item() - wanted.item()) / wanted.item())
        for name, parameter in model.named_parameters():
            full = dict(plain.named_parameters())[name].grad
            assert full is not None and parameter.grad is not None
            whole = shards[name].take(full, model._mesh.tp_rank)
            worst = max(worst, ((parameter.grad - whole).abs().max() / full.abs().max()).item())
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        worst = max(worst, abs(model.clip_grad_norm_(1.0).item() - norm.item()) / norm.item())
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    # Parameters of both TP ranks put together are the unsplit model's, without the padding.
    both: list[Any] = [None, None]
    dist.all_gather_object(both, model.state_dict(), group=model._mesh.tp_group)
    for name, after in plain.state_dict().items():
        if name in both[0] and name in shards:
            whole = shards[name].join([both[0][name], both[1][name]])
            assert whole.shape == after.shape == given[name].shape, name
            worst = max(worst, (whole - after).abs().max().item())
    # Logits of eval are whole; a batch without labels is another trace of the same shards.
    model.eval()
    plain.eval()
    asked = {k: v for k, v in steps[0].items() if k != "labels"}
    with keep_double(torch.float64), torch.no_grad():
        out, wanted_logits = model(**asked), plain(**asked).logits
    if out.logits is not None:
        assert out.logits.shape == wanted_logits.shape
        worst = max(worst, (out.logits - wanted_logits).abs().max().item())
    model.train()
    said = []
    for key in ("labels", "input_ids"):
        wrong = {k: v.clone() for k, v in steps[0].items()}
        wrong[key][-1, 5] = VOCAB
        try:
            model.step(**wrong)
        except fxbraid.BraidError as error:
            said.append(str(error))
    # All ranks are in step: the next one works.
    model.zero_grad()
    losses.append(model.step(**steps[0]).item())
    return {
        "worst": worst,
        "losses": losses,
        "said": said,
        "rows": [tuple(p.shape) for p in mine.values()],
        "logits": out.logits is not None,
        "report": str(model.report()),
    }


def train_all() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with process_group(timeout_s=60):
        return [train(schedule) for schedule in ("1f1b", "stp")]


def test_a_tied_and_padded_vocabulary_over_two_by_two_ranks() -> None:
    ranks = launch(train_all, nproc=4, timeout_s=300)
    for once, stp in ranks:
        assert once["losses"] == stp["losses"]
        for found in (once, stp):
            assert found["worst"] <= 1e-12
            assert found["losses"] == ranks[0][0]["losses"]
            assert found["rows"] in ([], [(49, 32)])
            assert len(found["said"]) == 2
            assert "labels holds the label 97 in micro-batch 2" in found["said"][0]
            assert "input_ids holds the token id 97 in micro-batch 2" in found["said"][1]
            assert "97 rows of the vocabulary, 49 on each TP rank; the last 1 are padding" in found["report"]
    # Only 1f1b's last chunk lies on the last pipeline rank; stp's V ends on the first.
    assert [once["logits"] for once, _ in ranks] == [False, False, True, True]
    assert [stp["logits"] for _, stp in ranks] == [True, True, False, False]
