"""What ``eval`` returns against the unsplit model: auxiliary losses, hidden states, some of the logits only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbraid
from fxbraid.outputs import nested
from fxbraid.passes.errors import BraidError, PlanError, UnsupportedError
from fxbraid.runtime.launch import launch, process_group

from . import lockstep
from .families import AUX, FAMILIES, make, whole_loss
from .parity import KeepDouble, make_batches
from .test_zoo import PLAN, Blocks, assert_exact
from .tiny import batch, qwen2

Given = dict[str, Any]


def given(m: int = 2, **more: Any) -> Given:
    """[2 m, 16] ragged and padded."""
    return {**make_batches(2, m, mask=True, steps=1)[0], **more}


def without_labels(**more: Any) -> Given:
    return {name: value for name, value in given(**more).items() if name != "labels"}


def wanted_of(model: nn.Module, asked: Given, m: int) -> Given:
    """What the unsplit model returns; loss and auxiliary loss as they count over ``m`` micro-batches."""
    with torch.no_grad():
        out = dict(model.eval()(**asked, use_cache=False))
        if "aux_loss" in out and m > 1:
            rows = len(asked["input_ids"]) // m
            micro = [{k: v[i * rows : (i + 1) * rows] for k, v in asked.items()} for i in range(m)]
            out["aux_loss"] = torch.stack([model(**one).aux_loss for one in micro]).mean()
            if "loss" in out:
                out["loss"] = whole_loss(model, asked, m)
    return out


def worst(got: Any, wanted: Any) -> float:
    """The largest difference of two outputs, names and nesting alike."""
    if isinstance(wanted, Tensor):
        assert got.shape == wanted.shape
        return float((got - wanted).abs().max())
    pairs = (
        [(got[k], wanted[k]) for k in wanted] if isinstance(wanted, dict) else zip(got, wanted, strict=True)
    )
    return max(worst(a, b) for a, b in pairs)


def in_lockstep(model: nn.Module, asked: Given, *, tp: int = 2, m: int = 2, **options: Any) -> Given:
    """The outputs of the first TP rank, the same on all, from 2 chunks of as many layers."""
    out = lockstep.forward(model.eval(), asked, tp=tp, m=m, verify=True, **options)
    assert all(torch.equal(values[0], value) for values in out.values() for value in values)
    return nested({name: values[0] for name, values in out.items()})


@pytest.mark.parametrize(("labels", "m"), [(True, 2), (False, 1)])
def test_a_mixture_of_experts_with_its_auxiliary_loss(labels: bool, m: int) -> None:
    model = make(FAMILIES["mixtral"], num_hidden_layers=2)
    asked = given() if labels else without_labels()
    with KeepDouble():
        wanted = wanted_of(model, asked, m)
        got = in_lockstep(model, asked, m=m)
        summed = in_lockstep(model, asked, tp=1, m=m, loss_reduction="sum") if labels else got
    assert (
        set(got) == set(wanted) == {"aux_loss", "logits", "router_logits"} | ({"loss"} if labels else set())
    )
    assert worst(got, wanted) <= 1e-12
    assert len(got["router_logits"]) == 2
    # A way of adding up that is the user's leaves the auxiliary loss what it is.
    assert worst(summed["aux_loss"], wanted["aux_loss"]) <= 1e-12


@pytest.mark.parametrize(("keep", "vocab"), [(0, 97), (1, 96), (2, 97)])
def test_some_of_the_logits(keep: int, vocab: int) -> None:
    model = make(FAMILIES["llama"], vocab_size=vocab)
    asked = without_labels(logits_to_keep=keep)
    with KeepDouble():
        wanted = wanted_of(model, asked, 2)
        assert wanted["logits"].shape == (4, keep or 16, vocab)
        assert worst(in_lockstep(model, asked), wanted) <= 1e-12


def test_a_slice_in_front_of_columns() -> None:
    """The mark of columns lies dense where its source has gaps, and is gone when the graph runs."""

    def block(model: Any, x: Tensor, layer: Any) -> Tensor:
        return F.pad(layer["down"](layer["up"](x[:, 3:]).tanh() * layer["gate"](x[:, 3:])), (0, 0, 0, 3))

    assert_exact(Blocks(block), make_batches(2, 2, mask=False, steps=1)[0], tp_plan=PLAN)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hidden_states_of_all_chunks(sequence_parallel: bool) -> None:
    model = make(FAMILIES["llama"], num_hidden_layers=4)
    asked = given(output_hidden_states=True)
    with KeepDouble():
        wanted = wanted_of(model, asked, 2)
        got = in_lockstep(model, asked, n_chunks=4, sequence_parallel=sequence_parallel)
    assert set(got) == {"loss", "logits", "hidden_states"} and len(got["hidden_states"]) == 5
    assert worst(got, wanted) <= 1e-12


def test_attentions_are_whole_or_refused() -> None:
    model = make(FAMILIES["llama"])
    model.set_attn_implementation("eager")  # type: ignore[operator]
    asked = without_labels(output_attentions=True)
    with KeepDouble():
        assert worst(in_lockstep(model, asked, tp=1), wanted_of(model, asked, 2)) <= 1e-12
        with pytest.raises(
            PlanError, match=r"output 'attentions\.0' follows from .*k_proj.*output_attentions=False"
        ):
            in_lockstep(model, asked)


class Says(nn.Module):
    """Returns what a test makes of the last hidden state."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.more = more

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"logits": x, "more": self.more(self, x)}


def test_what_is_not_known_of_the_whole_batch_is_refused() -> None:
    x = torch.randn(6, 6)

    def run(more: Any, m: int = 2) -> Any:
        return fxbraid.braid(Says(more).eval(), {"x": x}, n_microbatches=m, compile=False)(x=x)

    for more, words in (
        (lambda _, x: x.mean(), "output 'more' is one number for a micro-batch of 3 rows"),
        (lambda _, x: x.T[:5], r"output 'more' is of shape \(5, 3\) for a micro-batch of 3 rows"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            run(more)
    assert torch.allclose(run(lambda _, x: x.mean(), 1)["more"], Says(lambda _, x: x.mean())(x)["more"])
    # What follows from weights alone is the same for every micro-batch.
    model = Says(lambda model, _: model.layers[0].weight.sum())
    assert torch.allclose(run(model.more)["more"], model(x)["more"])


def test_outputs_in_outputs() -> None:
    flat = {"loss": 1, "a.0": 2, "a.2": 3, "b.0.0": 4, "b.0.1": 5, "c.d": 6, "e": 7}
    assert nested(flat) == {"loss": 1, "a": (2, None, 3), "b": ((4, 5),), "c.d": 6, "e": 7}
    assert nested(dict.fromkeys(flat)) == dict.fromkeys(("loss", "a", "b", "c.d", "e"))


# -- real processes


def evaluate() -> dict[str, Any]:
    """In a rank: outputs that cross chunks, some logits, and values outside of the vocabulary at tp 1."""
    torch.set_num_threads(1)
    model = make(FAMILIES["mixtral"], num_hidden_layers=4)
    asked = given()
    found: dict[str, Any] = {"worst": 0.0, "logits": [], "said": []}
    with process_group(timeout_s=60), KeepDouble():
        wanted = wanted_of(copy.deepcopy(model), asked, 2)
        braided = fxbraid.braid(
            model.train(), asked, tp_size=2, pp_size=2, n_microbatches=2, schedule="stp", compile=False
        ).eval()
        for more, right in (
            ({}, wanted),
            ({"labels": None, "logits_to_keep": 2}, None),
        ):
            this = {k: v for k, v in {**asked, **more}.items() if v is not None}
            right = right or wanted_of(copy.deepcopy(model), this | {"output_router_logits": False}, 1)
            this |= {} if "labels" in this else {"output_router_logits": False}
            out = dict(braided(**this))
            held = {k: v for k, v in out.items() if v is not None}
            found["logits"].append("logits" in held)
            found["worst"] = max([found["worst"], *(worst(v, right[k]) for k, v in held.items())])
        plain = fxbraid.braid(
            qwen2(), batch(4), tp_size=1, pp_size=4, n_microbatches=2, schedule="1f1b", compile=False
        ).train()
        for name in ("labels", "input_ids"):
            wrong = {k: v.clone() for k, v in batch(4).items()}
            wrong[name][3, 5] = 96
            try:
                plain.step(**wrong)
            except BraidError as error:
                found["said"].append(str(error))
        found["after"] = plain.step(**batch(4)).item()
    return found


@pytest.mark.slow  # test_vocab_ranks has eval and its refusals on 2 x 2 ranks, lockstep the rest
def test_two_by_two_ranks() -> None:
    ranks = launch(evaluate, nproc=4, timeout_s=300)
    assert max(found["worst"] for found in ranks) <= 1e-12
    assert [found["logits"] for found in ranks] == [
        [True, True],
        [True, True],
        [False, False],
        [False, False],
    ]
    for found in ranks:
        assert found["said"] == ranks[0]["said"] and len(found["said"]) == 2
        assert "labels holds the label 96 in micro-batch 1" in found["said"][0]
        assert "input_ids holds the token id 96 in micro-batch 1" in found["said"][1]
        assert found["after"] == ranks[0]["after"]


def test_auxiliary_losses_are_added_with_their_coefficient() -> None:
    """The reference of these tests is itself the unsplit model's where there is one micro-batch."""
    model, asked = make(FAMILIES["mixtral"]).eval(), given()
    with KeepDouble(), torch.no_grad():
        assert torch.allclose(whole_loss(model, asked, 1), model(**asked).loss, rtol=1e-12)
        assert AUX * model(**asked).aux_loss > 0.01
