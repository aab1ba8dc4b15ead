"""What fxbraid takes from inside transformers: which keys of a checkpoint make which parameter, and the way back.

Checked on transformers 5.17 and 5.24 (``tests/test_weights.py`` compares with ``from_pretrained``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """``keys`` of a checkpoint that make one parameter: a single one under another name perhaps, or, where
    ``convert`` is given, several that it turns into the parameter (whole tensors by key -> whole tensor)."""

    keys: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], Tensor] | None = None


def checkpoint_recipes(model: nn.Module, keys: Iterable[str]) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    """The model's names -> what they are made of, and the keys that belong to no name.

    ``model``: on any device; a model that is not of transformers has the names it says.
    """
    names: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    ordered = sorted(keys, key=dot_natural_key)
    if not isinstance(model, PreTrainedModel):
        recipes = {key: Recipe((key,)) for key in ordered if key in names}
        return recipes, tuple(key for key in ordered if key not in names)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    found: dict[str, list[tuple[str, str | None]]] = {}
    unexpected = []
    prefix = model.base_model_prefix
    for key in ordered:
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=names)
        if name in names:
            found.setdefault(name, []).append((key, pattern))
        else:
            unexpected.append(key)
    recipes = {}
    for name, parts in found.items():
        converted = {pattern for _, pattern in parts} - {None}
        if not converted:
            recipes[name] = Recipe((parts[-1][0],))
            continue
        entry = by_pattern[next(pattern for _, pattern in parts if pattern is not None)]
        for target in _targets(name, entry, names):
            recipes[target] = Recipe(
                tuple(key for key, _ in parts), _Conversion(name, target, entry, parts, model)
            )
    return recipes, tuple(unexpected)


@dataclass(frozen=True, slots=True)
class SaveGroup:
    """``names`` of a model that together make keys of a checkpoint; ``convert``: whole tensors by name -> by key."""

    names: tuple[str, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def save_groups(model: nn.Module, names: Sequence[str]) -> list[SaveGroup]:
    """How ``save_pretrained`` would write ``names``, in as small groups as its conversions allow: one parameter,
    mostly (experts go apart), or several that a conversion joins."""
    if not isinstance(model, PreTrainedModel):
        return [SaveGroup((name,), dict) for name in names]
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverse: list[Any] = [e.reverse_transform() for e in conversions[::-1] if isinstance(e, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        target, pattern = apply_converters(name, reverse)
        groups.setdefault(name if pattern is None else f"converted {target}", []).append(name)

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(model, tensors)

    # Some renamings look at other keys first: then everything is one group.
    whole = {name: torch.empty_like(model.state_dict()[name], device="meta") for name in names}
    made = {target: list(convert({name: whole[name] for name in group})) for target, group in groups.items()}
    order = {key: i for i, key in enumerate(convert(whole))}
    if sorted(order) != sorted(key for keys in made.values() for key in keys):
        return [SaveGroup(tuple(names), convert)]
    targets = sorted(groups, key=lambda target: min(order[key] for key in made[target]))
    return [SaveGroup(tuple(groups[target]), convert) for target in targets]


def saved_names(model: nn.Module) -> list[str]:
    """The names that ``save_pretrained`` writes, in order: of a tied parameter the one that loading looks for."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name in sorted((n for n in state if n not in ignored), key=lambda n: n in tied):
        first.setdefault(id(state[name]), name)
    kept = set(first.values())
    return [name for name in state if name in kept]


def _targets(name: str, entry: WeightConverter, names: Mapping[str, Tensor]) -> list[str]:
    """One converter may make several parameters (a fused weight cut apart): it is filed under the first of them."""
    found = [name]
    for other in entry.target_patterns[1:]:
        target = name.replace(entry.target_patterns[0], other)
        if target in names and target != name:
            found.append(target)
    return found


class _Conversion:
    def __init__(
        self,
        name: str,
        target: str,
        entry: WeightConverter,
        parts: list[tuple[str, str | None]],
        model: PreTrainedModel,
    ) -> None:
        self._name, self._target, self._entry, self._parts, self._model = name, target, entry, parts, model

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        entry: Any = deepcopy(self._entry)
        for key, pattern in self._parts:
            entry.add_tensor(self._name, key, pattern if pattern is not None else key, tensors[key])
        made = entry.convert(self._name, model=self._model, config=self._model.config)
        value = made[self._target]
        return value[0] if isinstance(value, list) else value
