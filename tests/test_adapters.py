"""Adapters of peft: cut with the linear that they wrap, whatever kind that is, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxbraid.passes.errors import PlanError
from fxbraid.passes.joint import Phase

from .families import FAMILIES, make
from .test_zoo import collectives, llama, step

peft = pytest.importorskip("peft")
LLAMA = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def adapted(model: nn.Module, config: Any) -> nn.Module:
    """``model`` with adapters whose every parameter is away from its initial value."""
    wrapped: nn.Module = peft.get_peft_model(model, config).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return wrapped


def lora(targets: list[str], **options: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets, **options)


def test_adapters_follow_their_linear() -> None:
    ranks = step(adapted(llama(), lora(LLAMA)))
    plan = ranks.lowered.plan
    at = "base_model.model.model.layers.1.self_attn.{}.lora_{}.default.weight"
    assert plan.params[at.format("q_proj", "B")].local_shape == (16, 4)
    assert plan.params[at.format("o_proj", "A")].local_shape == (4, 16)
    assert {at.format("q_proj", "A"), at.format("o_proj", "B")} <= plan.partial
    # The base of the first layer is frozen and so is the embedding: nothing to sum for its inputs.
    assert collectives(ranks, Phase.F) == 4 and collectives(ranks, Phase.I) == 3


@pytest.mark.parametrize("targets", [["c_attn", "c_proj", "c_fc"], ["c_attn"]])
def test_adapters_of_turned_linears_in_an_inferred_plan(targets: list[str]) -> None:
    """GPT-2: q, k and v in one ``Conv1D``, of which the adapter is cut in the same three sections."""
    ranks = step(adapted(make(FAMILIES["gpt2"]), lora(targets, fan_in_fan_out=True)))
    at = "base_model.model.transformer.h.1.attn.{}.weight"
    params = ranks.lowered.plan.params
    assert params[at.format("c_attn.base_layer")].local_shape == (32, 48)
    assert params[at.format("c_attn.lora_B.default")].local_shape == (48, 4)
    assert len(params[at.format("c_attn.lora_B.default")].sections) == 3
    if "c_proj" in targets:
        assert params[at.format("c_proj.base_layer")].local_shape == (16, 32)
        assert params[at.format("c_proj.lora_A.default")].local_shape == (4, 16)
    assert collectives(ranks, Phase.F) == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: lora(["o_proj"], use_dora=True), r"peft\.tuners\.lora\).*variant of LoRA \(Dora"),
        (
            lambda: peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[]),
            r"peft\.tuners\.ia3\).*no pair of linears",
        ),
        (
            lambda: peft.VeraConfig(target_modules=["o_proj"], r=4),
            r"peft\.tuners\.vera\).*no pair of linears",
        ),
    ],
)
def test_other_adapters_are_refused_by_name_and_right_on_one_rank(
    config: Callable[[], Any], words: str
) -> None:
    model = adapted(llama(), config())
    step(model, tp=1)
    with pytest.raises(
        PlanError, match=rf"module .*layers\.0\.self_attn\.o_proj carries .*{words}.*use tp_size=1"
    ):
        step(model)


def test_attention_with_such_an_adapter_stays_whole_in_an_inferred_plan() -> None:
    ranks = step(adapted(make(FAMILIES["gpt2"]), lora(["c_attn"], fan_in_fan_out=True, use_dora=True)))
    assert any(
        "attention stays whole: module" in note and "Dora" in note for note in ranks.lowered.plan.notes
    )
    assert collectives(ranks, Phase.F) == 2
