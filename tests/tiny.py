"""Tiny models and lowered graphs for tests in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fxbraid.passes.pipeline import Lowered, lower_model

VOCAB, SEQ = 96, 16


def qwen2(**overrides: Any) -> nn.Module:
    """A 4-layer Qwen2 with every parameter away from its trivial initial value."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(rows: int = 4, seq: int = SEQ, *, seed: int = 0, mask: bool = True) -> dict[str, Tensor]:
    """Random tokens, ragged labels, left padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, seq), generator=generator)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[0, : seq - 2] = -100
    result = {"input_ids": ids, "labels": labels}
    if mask:
        pad = torch.ones_like(ids)
        pad[::2, :3] = 0
        labels[pad == 0] = -100
        result["attention_mask"] = pad
    return result


def lower(model: nn.Module | None = None, *, n_chunks: int = 2, tp_size: int = 2, **options: Any) -> Lowered:
    """The passes up to units, for all chunks. The default model's with no further options are made once a process:
    who changes something in them puts it back."""
    if model is None and not options:
        return _default(n_chunks, tp_size)
    micro = batch(2)
    return lower_model(
        model if model is not None else qwen2(), micro, n_chunks=n_chunks, tp_size=tp_size, **options
    )


@cache
def _default(n_chunks: int, tp_size: int) -> Lowered:
    return lower(qwen2(), n_chunks=n_chunks, tp_size=tp_size)


def context(lowered: Lowered, *, sends: tuple[str, ...] = (), collectives: Any = "overlap") -> Any:
    """A block context over all chunks whose modules only stand in: for tests that read graphs."""
    from fxbraid.passes.block import BlockContext

    labels = [u.label for c in lowered.chunks.values() for us in c.units.values() for u in us]
    modules: dict[str, nn.Module] = {name: nn.Identity() for name in [*labels, *sends]}
    return BlockContext(chunks=lowered.chunks, modules=modules, tp_group="tp", collectives=collectives)
