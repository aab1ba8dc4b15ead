"""Tiny vision-language models and batches of images for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IMAGE, VIDEO, START, END = 90, 91, 92, 93
VOCAB, SEQ = 96, 32
TEXT: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
_PATCHES = {
    "in_channels": 3,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 4,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_channels": 3}


@dataclass(frozen=True)
class Vision:
    """A model: its class in transformers, its configs, and its images: grids of patches, or squares of pixels of which
    each gives ``features`` tokens."""

    kind: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    config: Mapping[str, Any]
    #: values of a patch (with a grid), or the side of an image
    values: int
    features: int = 0
    grid: bool = True
    #: name of the input that says which tokens are of images; "" for none
    types: str = "mm_token_type_ids"


VISION: dict[str, Vision] = {
    "qwen2_vl": Vision(
        "Qwen2VL",
        _MROPE,
        {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 32, **_PATCHES},
        _TOKENS,
        24,
    ),
    "qwen2_5_vl": Vision(
        "Qwen2_5_VL",
        _MROPE,
        {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 8,
            "fullatt_block_indexes": [1],
            **_PATCHES,
        },
        _TOKENS,
        24,
    ),
    "qwen3_vl": Vision(
        "Qwen3VL",
        _MROPE,
        {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
            **_PATCHES,
        },
        _TOKENS,
        24,
    ),
    "llava": Vision(
        "Llava",
        {"model_type": "llama"},
        {
            "model_type": "clip_vision_model",
            "num_hidden_layers": 3,
            "image_size": 8,
            "patch_size": 4,
            **_SIGLIP,
        },
        {"image_token_index": IMAGE, "vision_feature_layer": -2},
        8,
        features=4,
        grid=False,
        types="",
    ),
    "gemma3": Vision(
        "Gemma3",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False, **_SIGLIP},
        {
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
        16,
        features=4,
        grid=False,
        types="token_type_ids",
    ),
}


def make(name: str, **overrides: Any) -> nn.Module:
    """A tiny float64 model in training mode, no parameter at its trivial initial value. ``overrides``: of the vision
    config, or of the text config where their names begin with ``text_``."""
    import transformers

    one = VISION[name]
    text = {key.removeprefix("text_"): v for key, v in overrides.items() if key.startswith("text_")}
    vision = {key: v for key, v in overrides.items() if not key.startswith("text_")}
    text = {**TEXT, **one.text, **text}
    if "layer_types" in text:  # as many as there are layers
        kinds = text["layer_types"]
        text["layer_types"] = [kinds[k % len(kinds)] for k in range(text["num_hidden_layers"])]
    config = getattr(transformers, f"{one.kind}Config")(
        text_config=text, vision_config={**one.vision, **vision}, **one.config
    )
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, f"{one.kind}ForConditionalGeneration")(config).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model.train()


Grid = tuple[int, int, int]
_SQUARE: Grid = (1, 4, 4)


def batch(
    name: str,
    images: Sequence[int | Sequence[Grid]],
    *,
    videos: Sequence[Sequence[Grid]] | None = None,
    seed: int = 0,
    seq: int = SEQ,
    mask: bool = True,
) -> dict[str, Tensor]:
    """Random tokens and images. ``images``: per sample how many (of 4 x 4 patches), or their grids; ``videos``
    likewise. Labels are ragged, padding is on the left."""
    one = VISION[name]
    generator = torch.Generator().manual_seed(seed)
    per_sample = [[_SQUARE] * n if isinstance(n, int) else list(n) for n in images]
    clips = [list(n) for n in videos] if videos is not None else [[] for _ in images]
    rows = len(per_sample)
    ids = torch.randint(3, 80, (rows, seq), generator=generator)
    types = torch.zeros_like(ids)
    pad = torch.ones_like(ids)
    for row, (pictures, movies) in enumerate(zip(per_sample, clips, strict=True)):
        at = 1
        if mask and row % 2:
            at = 1 + row % 5
            pad[row, :at] = 0
        parts = [(grid, IMAGE, 1) for grid in pictures] + [(grid, VIDEO, 2) for grid in movies]
        for grid, token, kind in parts:
            frames = grid[0] if kind == 2 and name == "qwen3_vl" else 1
            each = (grid[0] * grid[1] * grid[2] // 4 if one.grid else one.features) // frames
            for _ in range(frames):  # Qwen3-VL writes a timestamp in front of every frame
                ids[row, at] = START
                ids[row, at + 1 : at + 1 + each] = token
                types[row, at + 1 : at + 1 + each] = kind
                at += each + 2
        if at > seq:
            raise ValueError(f"{at} tokens do not fit into {seq}")
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[0, : seq - 3] = -100
    labels[(pad == 0) | (types > 0)] = -100
    result = {"input_ids": ids, "labels": labels}
    if mask:
        result["attention_mask"] = pad
    if one.types:
        result[one.types] = types
    result |= _pixels(
        one, [g for sample in per_sample for g in sample], generator, "pixel_values", "image_grid_thw"
    )
    movies = [g for sample in clips for g in sample]
    return result | _pixels(one, movies, generator, "pixel_values_videos", "video_grid_thw")


def _pixels(
    one: Vision, grids: Sequence[Grid], generator: torch.Generator, pixels: str, name: str
) -> dict[str, Tensor]:
    if not grids:
        return {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if not one.grid:
        return {pixels: normal(len(grids), 3, one.values, one.values)}
    return {pixels: normal(sum(t * h * w for t, h, w in grids), one.values), name: torch.tensor(grids)}


#: Which parameters of a model are frozen, by name of the case.
FROZEN: Mapping[str, Callable[[str], bool]] = {
    "tower": lambda name: any(part in name for part in ("visual.", "vision_tower.")) and "merger" not in name,
    "language": lambda name: not any(part in name for part in ("merger", "projector")),
}


def freeze(model: nn.Module, what: str) -> nn.Module:
    """``tower``: the vision tower but for the projector; ``language``: everything but the projector."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[what](name))
    return model
