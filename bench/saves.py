"""``python -m fxbraid.bench.saves``: bytes that a layer keeps for its backward, by what is chosen (docs/memory.md).

Counted from the graphs of one rank of two, for one micro-batch in bfloat16, each storage once. A layer is the
difference between a model of four layers and one of two, so that embedding, head, loss and masks are not in it. Nothing
is run and no weight is made: models and batch are on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from tabulate import tabulate
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fxbraid.passes.aliases import storage
from fxbraid.passes.checkpoint import Named
from fxbraid.passes.cost import nbytes
from fxbraid.passes.pipeline import Cut, Lowered, lower_model, recut

TOKENS, HIDDEN = 512, 256
TP = 2
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 704, "num_key_value_heads": 4},
    "qwen2": {"intermediate_size": 704, "num_key_value_heads": 2},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "mixtral": {"intermediate_size": 448, "num_key_value_heads": 2, "num_local_experts": 4},
}
_SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "attention_dropout": 0.0,
    "max_position_embeddings": TOKENS,
}


def make(kind: str, layers: int) -> nn.Module:
    """A model of ``layers`` layers without weights."""
    sizes = {**_SIZES, "num_hidden_layers": layers, **MODELS[kind]}
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **sizes), dtype=torch.bfloat16
        )
    return model.train()


def kept(lowered: Lowered) -> tuple[int, int]:
    """Bytes from F to the backward, and bytes from I to W."""
    chunk = lowered.chunks[0]
    given = set(chunk.joint.inputs.values())

    def size(*lists: list[torch.fx.Node]) -> int:
        found = {storage(node) for nodes in lists for node in nodes} - given
        return sum(nbytes(node.meta["val"]) for node in found)

    return size(chunk.for_I, chunk.for_W), size(chunk.for_W, chunk.handed)


def layer(traced: Mapping[int, Lowered], cut: Cut) -> tuple[float, float]:
    """What :func:`kept` says of one layer, in units of tokens x hidden x 2 bytes."""
    four, two = (kept(recut(traced[layers], cut)) for layers in (4, 2))
    unit = 2 * (TOKENS * HIDDEN * 2)
    return (four[0] - two[0]) / unit, (four[1] - two[1]) / unit


def rows(kinds: tuple[str, ...] = tuple(MODELS)) -> list[list[str]]:
    """A line per model and way to keep: what all readers read, then each policy."""
    micro = {
        name: torch.empty(1, TOKENS, dtype=torch.long, device="meta") for name in ("input_ids", "labels")
    }
    ways = {"all that the backward reads": Cut(TP, least_saved=False)}
    ways |= {policy: Cut(TP, checkpoint=policy) for policy in get_args(Named)}
    found = []
    for kind in kinds:
        traced = {
            layers: lower_model(make(kind, layers), micro, n_chunks=1, tp_size=TP, least_saved=False)
            for layers in (4, 2)
        }
        for name, cut in ways.items():
            forward, weights = layer(traced, cut)
            found.append([kind, name, f"{forward:.2f}", f"{weights:.2f}"])
    return found


def table(found: list[list[str]]) -> str:
    """Markdown."""
    headers = ["model", "checkpoint", "from F", "from I to W"]
    return tabulate(
        found, headers, tablefmt="pipe", disable_numparse=True, colalign=("left", "left", "right", "right")
    )


if __name__ == "__main__":
    print(table(rows()))
