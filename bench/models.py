"""The bench's models: small ones made from a config, with weights that depend on the seed alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
}

TINY_MODELS: Mapping[str, str] = {"qwen2-tiny": "qwen2", "llama-tiny": "llama"}


def load_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The config called ``name`` ("qwen2-tiny", "llama-tiny") or the one in the file or folder ``name``."""
    if name in TINY_MODELS:
        return AutoConfig.for_model(TINY_MODELS[name], **{**_TINY, **overrides})
    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"no model is called {name!r} and no file has that path; give "
            f"{', '.join(TINY_MODELS)}, smollm2 or the path of a config.json"
        )
    return AutoConfig.from_pretrained(path, **overrides)


def build_model(config: PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal LM in training mode with random weights: equal on every rank for equal seeds."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    torch.random.set_rng_state(state)
    return model.train()


def make_batch(
    vocab_size: int, batch: int, seq: int, seed: int, *, ragged: bool = False
) -> dict[str, Tensor]:
    """Random token ids and labels; ``ragged`` pads each sequence to a length of its own, and masks that."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (batch, seq), generator=generator)
    if not ragged:
        return {"input_ids": ids, "labels": ids.clone()}
    lengths = torch.randint(2, seq + 1, (batch, 1), generator=generator)
    mask = torch.arange(seq).expand(batch, seq) < lengths
    return {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "attention_mask": mask.long()}
