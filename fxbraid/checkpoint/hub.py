"""What a plain Hugging Face folder is made of: files beside the weights, and which weights go into which file."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat_transformers import SaveGroup, save_groups, saved_names
from ..passes.errors import BraidError
from ..passes.shard import canonical_names
from .files import Spec

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def config_files(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, str]:
    """config.json, and generation_config.json where the model has one: name -> text. ``dtype``: of the weights."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    kind = dtype or getattr(model, "dtype", None)
    if kind is not None:
        config.dtype = str(kind).removeprefix("torch.")
    found = {CONFIG: config.to_json_string(use_diff=True)}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        found["generation_config.json"] = generation.to_json_string(use_diff=True)
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """A file of weights: ``specs`` by key, and the group of parameters that each key is made from."""

    specs: Mapping[str, Spec]
    groups: Mapping[str, SaveGroup]


@dataclass(frozen=True, slots=True)
class Export:
    """A folder as ``save_pretrained`` would write it: files of weights, the index if there are several, the type of the
    weights, and ``source``: the name of each tensor in a model's state -> the one that we know it by (of a tied one the
    first)."""

    parts: Mapping[str, Part]
    index: str | None
    dtype: torch.dtype | None
    source: Mapping[str, str]


def plan_export(
    model: nn.Module, specs: Mapping[str, Spec], dtype: torch.dtype | None, max_shard_size: int | str
) -> Export:
    """``model``: structure, on the meta device. ``specs``: full shapes and types by first name."""
    from huggingface_hub import split_torch_state_dict_into_shards

    first = canonical_names(model)
    names = saved_names(model)
    if lost := [name for name in names if first.get(name, name) not in specs]:
        raise BraidError(
            f"{lost[0]} is in the model's state and nowhere to be read; {len(lost)} tensors are missing"
        )
    made: dict[str, Tensor] = {}
    group_of: dict[str, SaveGroup] = {}
    for group in save_groups(model, names):
        empty = {}
        for name in group.names:
            spec = specs[first.get(name, name)]
            empty[name] = torch.empty(spec.shape, dtype=cast_to(spec.dtype, dtype), device="meta")
        for key, value in group.convert(empty).items():
            made[key], group_of[key] = value, group
    split = split_torch_state_dict_into_shards(made, max_shard_size=max_shard_size)
    parts = {
        file: Part(
            {key: Spec(made[key].dtype, tuple(made[key].shape)) for key in keys},
            {key: group_of[key] for key in keys},
        )
        for file, keys in split.filename_to_tensors.items()
    }
    index = None
    if split.is_sharded:
        metadata = {"total_parameters": sum(p.numel() for p in model.parameters()), **split.metadata}
        index = json.dumps(
            {"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True
        )
    kind = next((value.dtype for value in made.values() if value.is_floating_point()), None)
    return Export(parts, index, kind, {name: first.get(name, name) for name in names})


def cast_to(found: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The type that a tensor is exported in: numbers of a set (indices, masks) stay what they are."""
    return wanted if wanted is not None and found.is_floating_point else found
