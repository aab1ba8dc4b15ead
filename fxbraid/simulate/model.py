"""What the analytic model needs to know of a model, from a Hugging Face ``config.json`` or by
name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fxbraid.schedule import ScheduleError
from fxbraid.simulate.tower import TowerConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of equal layers: grouped-query attention and a (gated) MLP, with norms in front; and the vision tower
    before it, if there is one."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    tower: TowerConfig | None = None

    @property
    def attention_parameters(self) -> int:
        """Of one layer: q, k, v, o and the norm."""
        width = self.heads * self.head
        return self.hidden * (2 * width + 2 * self.kv_heads * self.head) + self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Of one layer: up, down, the gate if there is one, and the norm."""
        return (3 if self.gated else 2) * self.hidden * self.ffn + self.hidden

    @property
    def parameters(self) -> int:
        """All of them; a tied head counts once."""
        layer = self.attention_parameters + self.mlp_parameters
        tower = self.tower.parameters if self.tower is not None else 0
        return tower + self.layers * layer + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    def step_flops(self, tokens: int, seq: int) -> float:
        """FLOPs of forward and backward that the model needs: 6 per parameter of a matrix product and token,
        and the half of the attention scores that a causal mask keeps. (Recomputation and the masked half
        don't count.)
        """
        matmuls = self.layers * (self.attention_parameters + self.mlp_parameters) + self.vocab * self.hidden
        scores = 6 * self.layers * self.heads * self.head * seq
        return float(tokens) * (6 * matmuls + scores)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], name: str = "model") -> ModelConfig:
        """From the dict of a Hugging Face configuration. Raises ScheduleError for what is no plain
        decoder.
        """
        whole, config = config, config.get("text_config", config)
        experts = config.get("num_local_experts") or config.get("num_experts")
        if experts:
            raise ScheduleError(
                f"{name} is a mixture of {experts} experts, which the analytic model does not describe; "
                "measure a profile of it instead"
            )
        try:
            hidden = int(config.get("hidden_size") or config["n_embd"])
            layers = int(config.get("num_hidden_layers") or config["n_layer"])
            heads = int(config.get("num_attention_heads") or config["n_head"])
            vocab = int(config["vocab_size"])
        except KeyError as missing:
            raise ScheduleError(
                f"the configuration of {name} has no {missing}; hidden_size, num_hidden_layers, "
                "num_attention_heads, intermediate_size and vocab_size are needed"
            ) from None
        kind = str(config.get("model_type", ""))
        return cls(
            name=name,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or hidden // heads),
            ffn=int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden),
            vocab=vocab,
            gated=kind not in ("gpt2", "gpt_neox", "opt", "bloom", "phi", "falcon"),
            tied=bool(config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))),
            tower=TowerConfig.from_dict(whole, hidden, name),
        )


def _model(
    name: str,
    hidden: int,
    layers: int,
    heads: int,
    kv: int,
    ffn: int,
    vocab: int,
    head: int = 0,
    tower: TowerConfig | None = None,
) -> ModelConfig:
    return ModelConfig(name, hidden, layers, heads, kv, head or hidden // heads, ffn, vocab, tower=tower)


def _qwen2_vl(out: int) -> TowerConfig:
    """The tower of all sizes of Qwen2-VL."""
    return TowerConfig(1280, 32, 16, 5120, 1176, ((5120, 5120), (5120, out)), 4)


MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        model.name.lower(): model
        for model in (
            # The 12.1B model of arXiv 2510.27257: this reading of its table gives the parameter count.
            _model("qwen2-12.1b", 3584, 46, 32, 8, 18944, 152064, 128),
            _model("Qwen/Qwen2-7B", 3584, 28, 28, 4, 18944, 152064),
            _model("Qwen/Qwen2-VL-7B-Instruct", 3584, 28, 28, 4, 18944, 152064, tower=_qwen2_vl(3584)),
            _model("Qwen/Qwen2-VL-72B-Instruct", 8192, 80, 64, 8, 29568, 152064, tower=_qwen2_vl(8192)),
            _model("Qwen/Qwen2.5-14B", 5120, 48, 40, 8, 13824, 152064),
            _model("Qwen/Qwen2.5-32B", 5120, 64, 40, 8, 27648, 152064),
            _model("Qwen/Qwen2.5-72B", 8192, 80, 64, 8, 29568, 152064),
            _model("Qwen/Qwen3-8B", 4096, 36, 32, 8, 12288, 151936, 128),
            _model("meta-llama/Llama-2-7b-hf", 4096, 32, 32, 32, 11008, 32000),
            _model("meta-llama/Llama-2-70b-hf", 8192, 80, 64, 8, 28672, 32000),
            _model("meta-llama/Llama-3.1-8B", 4096, 32, 32, 8, 14336, 128256),
            _model("meta-llama/Llama-3.1-70B", 8192, 80, 64, 8, 28672, 128256),
            _model("meta-llama/Llama-3.1-405B", 16384, 126, 128, 8, 53248, 128256),
            _model("mistralai/Mistral-7B-v0.3", 4096, 32, 32, 8, 14336, 32768),
        )
    }
)
"""Models by their Hugging Face name (facts of their ``config.json``)."""


def load_model(source: str | os.PathLike[str]) -> ModelConfig:
    """A known name, a ``config.json``, or a folder with one in it."""
    text = os.fspath(source)
    found = MODELS.get(text.lower()) or next(
        (m for key, m in MODELS.items() if key.rpartition("/")[2] == text.lower()), None
    )
    if found is not None:
        return found
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ScheduleError(
            f"{text!r} is neither a file nor a known model; give the path of a config.json, or one of "
            f"{', '.join(model.name for model in MODELS.values())}"
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ScheduleError(f"{path} holds no JSON object; give the model's config.json")
    return ModelConfig.from_dict(config, path.parent.name or path.stem)
