"""Tiny models of every decoder family of transformers that is known to trace, and how each is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import multimodal

#: Coefficient of the auxiliary loss of a mixture of experts.
AUX = 0.3
#: An override that leaves a key of ``SIZES`` to the config. (A function as override takes the number of layers.)
DEFAULT = object()
#: Sizes of every family; a config takes those that it has.
SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    # mixtures of experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # compressed keys and values
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # older spellings
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 48,
    "rotary_dim": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    # no dropout
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "residual_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_COMPRESSED = {"num_key_value_heads": 4, "head_dim": 4}
_ALL_KEYS = {"num_key_value_heads": 4}
_HALF_LINEAR = {"layer_types": lambda n: (["linear_attention", "full_attention"] * n)[:n]}
_ATTENTION_WHOLE = "the plan leaves attention whole"
_EXPERTS_ALONE = "the plan cuts the experts alone"
_PARALLEL = "attention and MLP in parallel: one sum serves both"


@dataclass(frozen=True)
class Family:
    """``collectives`` per decoder layer, forward and backward alike or a pair. ``aux``: with its auxiliary loss."""

    name: str
    collectives: float | tuple[float, float] = 2
    aux: bool = False
    overrides: tuple[tuple[str, Any], ...] = ()
    #: shown in the table
    remark: str = ""
    #: a vision-language model (``multimodal``), whose layers are those of both towers
    images: bool = False


def family(
    name: str, collectives: float | tuple[float, float] = 2, remark: str = "", **overrides: Any
) -> Family:
    """A family whose config takes ``overrides`` before ``SIZES``."""
    return Family(name, collectives, overrides=tuple(overrides.items()), remark=remark)


#: The families that everybody knows.
CORE = (
    Family("llama"),
    Family("qwen2"),
    Family("qwen3"),
    Family("mistral"),
    Family("gemma"),
    Family("gemma2", remark="sliding windows, soft-capped attention and logits"),
    Family("phi3"),
    Family("gpt_neox", collectives=1, remark=_PARALLEL),
    Family("olmo2", collectives=4),
    Family("mixtral", aux=True),
    Family("qwen3_moe", aux=True),
    Family("gpt2"),
)
#: More of them.
MORE = (
    family("afmoe", 1, _EXPERTS_ALONE, num_dense_layers=0),
    Family("apertus"),
    Family("apertus1p5_text"),
    Family("arcee"),
    Family("aria_text"),
    Family("beam"),
    Family("bloom", 1),
    Family("codegen", 1, remark=_PARALLEL),
    Family("cohere", 1, remark=_PARALLEL),
    Family("cohere2", 1, remark=_PARALLEL),
    Family("cohere2_moe", 1, remark=_PARALLEL),
    Family("ctrl"),
    Family("cwm"),
    family("deepseek_v2", **_COMPRESSED),
    family("deepseek_v3", 1, _ATTENTION_WHOLE, **_COMPRESSED),
    family("deepseek_v32", **_COMPRESSED),
    Family("deepseek_v4", 1, remark=_EXPERTS_ALONE),
    Family("diffllama", 1),
    Family("doge"),
    Family("dots1"),
    Family("ernie4_5"),
    Family("ernie4_5_moe"),
    Family("exaone"),
    Family("exaone4"),
    Family("exaone_moe"),
    family("falcon", 1, _PARALLEL, head_dim=DEFAULT, new_decoder_architecture=True, num_kv_heads=2),
    Family("flex_olmo", 4),
    Family("flint", 1, remark=_ATTENTION_WHOLE),
    Family("gemma3_text"),
    Family("glm"),
    Family("glm4"),
    Family("glm4_moe"),
    family("glm4_moe_lite", **_COMPRESSED),
    Family("gpt_bigcode", 1),
    family("gpt_neo", attention_types=lambda n: [[["global", "local"], n // 2]]),
    Family("gpt_neox_japanese"),
    Family("gpt_oss", 1, remark="attention alone: its experts have no plan"),
    Family("gptj", 1, remark=_PARALLEL),
    Family("granite"),
    Family("granite_swa"),
    Family("granitemoe", 1, remark=_EXPERTS_ALONE),
    Family("granitemoe_swa"),
    Family("granitemoeshared", 1, remark=_EXPERTS_ALONE),
    Family("helium"),
    Family("hunyuan_v1_dense"),
    Family("hunyuan_v1_moe", 1, remark=_EXPERTS_ALONE),
    Family("hy_v3"),
    Family("hyperclovax"),
    Family("internlm3"),
    Family("inkling_text", 1, remark=_EXPERTS_ALONE),
    Family("inkling2_text", 1, remark=_EXPERTS_ALONE),
    Family("iquestcoder"),
    Family("jais2"),
    Family("kolibri1"),
    Family("laguna"),
    Family("lara_mini"),
    Family("lfm2"),
    Family("llama4_text"),
    family("longcat_flash", **_COMPRESSED),
    Family("mamba"),
    Family("mellum"),
    Family("mimo_v2_flash"),
    family("minicpm3", **_ALL_KEYS),
    Family("minimax", 1.5),
    Family("minimax_m2", 4),
    Family("minimax_m3_vl_text"),
    Family("ministral"),
    Family("ministral3"),
    Family("moshi", 1),
    Family("mpt", 1),
    Family("nanochat"),
    Family("nemotron"),
    Family("olmo"),
    Family("olmo3", 4),
    Family("olmo_hybrid", 2.5),
    Family("olmoe", 4),
    Family("openai-gpt", 3),
    Family("opt"),
    Family("persimmon"),
    Family("phi", 1, remark=_PARALLEL),
    Family("phimoe"),
    Family("qwen2_moe"),
    family("qwen3_5_text", (4, 2.5), **_HALF_LINEAR),
    family("qwen3_5_moe_text", (4, 2.5), **_HALF_LINEAR),
    family("qwen3_next", (3, 2.5), **_HALF_LINEAR),
    Family("rwkv", 1),
    Family("sarvam_moe"),
    Family("seed_oss"),
    Family("smollm3"),
    Family("solar_open"),
    Family("stablelm"),
    Family("starcoder2"),
    Family("vaultgemma"),
    family("youtu", 1, _ATTENTION_WHOLE, **_COMPRESSED),
)
_TOWER = "with images; one sum of each half for the merger"
#: Vision-language models.
IMAGES = (
    Family("qwen2_vl", 2.25, remark=_TOWER, images=True),
    Family("qwen2_5_vl", 2.25, remark=_TOWER, images=True),
    Family("qwen3_vl", 2.5, remark="with images; the merger and one of an earlier layer", images=True),
    Family("llava", 1.8, remark="with images; one sum of each half for the projector", images=True),
    Family("gemma3", 2, remark="with images", images=True),
)
FAMILIES: dict[str, Family] = {family.name: family for family in (*CORE, *MORE, *IMAGES)}


def make(family: Family, **overrides: Any) -> nn.Module:
    """A tiny float64 model of the family, in training mode, its experts as the loop that can't be traced."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family.images:
        return multimodal.make(family.name, **overrides)
    config: Any = AutoConfig.for_model(family.name)
    config = getattr(config, "text_config", config)
    wanted = {**SIZES, **dict(family.overrides), **overrides}
    if family.aux:
        wanted |= {"output_router_logits": True, "router_aux_loss_coef": AUX}
    layers = wanted["num_hidden_layers"]
    given = {k: v for k, v in wanted.items() if v is not DEFAULT and hasattr(config, k)}
    given = {k: v(layers) if callable(v) else v for k, v in given.items()}
    config = type(config)(**given)
    torch.manual_seed(3)
    model: nn.Module = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    if getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"
    return model.train()


def whole_loss(model: nn.Module, batch: Mapping[str, Any], m: int) -> Tensor:
    """What a step of the unsplit model would lose. An auxiliary loss counts as its mean over micro-batches."""
    if not getattr(model.config, "output_router_logits", False):
        out = model(**batch)
        return out["loss"]  # type: ignore[no-any-return]
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    total = (batch["labels"][:, 1:] != -100).sum().to(loss.dtype)
    rows = len(batch["labels"]) // m
    for i in range(m):
        micro = {k: v[i * rows : (i + 1) * rows] for k, v in batch.items()}
        out = model(**micro)
        share = (micro["labels"][:, 1:] != -100).sum() / total
        loss = loss + (out.loss - AUX * out.aux_loss) * share + AUX * out.aux_loss / m
    return loss
