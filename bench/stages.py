"""Cut a Hugging Face causal LM by hand into pipeline stages with DTensor tensor parallelism.

What torch.distributed.pipelining needs and ``pipelining.pipeline()`` cannot give (rotary tables and masks
become skip connections, tied weights get wrong gradients). A stage is the model's own base class with fewer
layers, so that masks and rotary tables are computed in it by Hugging Face's code and never sent.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

#: Plan styles that this baseline keeps whole on every TP rank.
REPLICATED = ("embedding_rowwise", "colwise_gather_output", "colwise_rep", "replicated")

#: How a decoder layer calls the parents of its column-parallel linears. Making the DTensor once, in front of
#: the parent, gives one all-reduce in the backward instead of one per linear.
PARENT_INPUTS: Mapping[str, ParallelStyle] = {
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
    "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
}


class StageModule(nn.Module):
    """Layers ``layers`` of ``model``, with the embedding if first and norm and LM head if last.

    The parameters are the model's own, not copies. ``forward`` takes token ids (first stage) or hidden
    states, and the micro-batch's attention mask; it returns hidden states or (last stage) logits.
    """

    def __init__(self, model: nn.Module, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        base = base_of(model)
        config: Any = copy.deepcopy(base.config)
        config.num_hidden_layers = len(layers)
        config.use_cache = False
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i] for i in layers]
        with torch.device("meta"):
            body: Any = type(base)(config)
        body.layers = nn.ModuleList(base.layers[i] for i in layers)
        body.rotary_emb = base.rotary_emb
        body.embed_tokens = base.embed_tokens if first else nn.Identity()
        body.norm = base.norm if last else nn.Identity()
        self.body = body.train(model.training)
        self.head: Any = model.get_output_embeddings() if last else None  # type: ignore[operator]
        self.first = first
        self.layers = layers
        self._prefix = f"{model.base_model_prefix}."

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        source = {"input_ids": x} if self.first else {"inputs_embeds": x}
        hidden = self.body(**source, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return hidden if self.head is None else self.head(hidden)

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names that they have in the uncut model."""
        for name, parameter in self.body.named_parameters():
            yield self._prefix + re.sub(r"^layers\.(\d+)", self._global_layer, name), parameter
        if self.head is not None:
            for name, parameter in self.head.named_parameters():
                yield f"lm_head.{name}", parameter

    def _global_layer(self, match: re.Match[str]) -> str:
        return f"layers.{self.layers[int(match[1])]}"


def base_of(model: nn.Module) -> Any:
    """The decoder without its head; raises where the model is not built like Llama and Qwen2."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    wanted = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [name for name in wanted if not hasattr(base, name)]
    if missing or not hasattr(model, "lm_head"):
        raise ValueError(
            "the torch baseline cuts models of the Llama and Qwen2 family by hand, and "
            f"{type(model).__name__} has no {', '.join(missing) or 'lm_head'}; use such a model, or only "
            "fxbraid's schedules"
        )
    return base


def split_layers(n_layers: int, n_stages: int) -> list[range]:
    """Consecutive layers, as even as can be; the first stages take the rest."""
    if n_layers < n_stages:
        raise ValueError(
            f"{n_layers} layers cannot fill {n_stages} stages; use at most {n_layers} or a deeper model"
        )
    size, rest = divmod(n_layers, n_stages)
    starts = (i * size + min(i, rest) for i in range(n_stages + 1))
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def layer_styles(model: nn.Module) -> dict[str, str]:
    """The model's own TP plan for one decoder layer: {"self_attn.q_proj": "colwise", ...}."""
    prefix = f"{model.base_model_prefix}.layers.*."
    styles = {}
    for pattern, style in model.tp_plan.items():  # type: ignore[union-attr, operator]
        if pattern.startswith(prefix) and style in ("colwise", "rowwise"):
            styles[pattern.removeprefix(prefix)] = style
        elif style not in REPLICATED:
            raise ValueError(
                f"the torch baseline knows the plan styles colwise and rowwise, and the plan of "
                f"{type(model).__name__} gives {pattern} the style {style}; use --tp 1 or another model"
            )
    return styles


def parallelize(stage: StageModule, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Shard the stage's layers over ``mesh`` in place; embedding, norms and head stay whole."""
    if mesh.size() == 1:
        return
    plan: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if style == "colwise" else RowwiseParallel() for name, style in styles.items()
    }
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}
    plan.update({name: style for name, style in PARENT_INPUTS.items() if name in parents})
    for layer in stage.body.layers:
        parallelize_module(layer, mesh, plan)
