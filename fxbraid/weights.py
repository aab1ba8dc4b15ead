"""Weights from a folder of safetensors, read slice by slice: each rank reads what it holds, and nothing else.

A checkpoint of ``save_pretrained`` is a file, or several with an index. Its keys need not be the model's own names:
transformers keeps renamings and conversions by model type (the experts of a mixture lie apart on disk and in one tensor
in the model). A renamed key is read by slices as any other; a converted parameter is made from whole tensors, one
parameter at a time, before its shard is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .compat_transformers import Recipe, checkpoint_recipes
from .passes.errors import BraidError
from .passes.layout import ParamShard

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What reading a checkpoint came to: the same on every rank but for ``bytes_read``.

    ``missing``: parameters and saved buffers of the model that the checkpoint lacks. ``unexpected``: keys of the
    checkpoint that the model has no use for. ``bytes_read``: of this rank, slices only.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@dataclass(slots=True)
class Checkpoint:
    """An open folder (or one file) of safetensors, for one model's names.

    Raises BraidError for a missing folder or file, a file that is cut short or no safetensors, and a key in no file.
    """

    path: Path
    #: key -> the open file that holds it
    files: Mapping[str, Any]
    #: the model's names -> what they are made of
    recipes: Mapping[str, Recipe]
    unexpected: tuple[str, ...]
    bytes_read: int = field(default=0)

    @classmethod
    def open(cls, path: str | Path, model: nn.Module) -> Checkpoint:
        files = _open(Path(path))
        recipes, unexpected = checkpoint_recipes(model, files)
        return cls(Path(path), files, recipes, unexpected)

    def __contains__(self, name: str) -> bool:
        return name in self.recipes

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare shapes before anything is read: headers only, the same error on every rank."""
        wrong = []
        for name, shape in shapes.items():
            recipe = self.recipes.get(name)
            if recipe is None or recipe.convert is not None:
                continue
            found = tuple(self.files[recipe.keys[0]].get_slice(recipe.keys[0]).get_shape())
            if found != tuple(shape):
                wrong.append(f"{name} is {found} there and {tuple(shape)} in the model")
        if wrong:
            more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise BraidError(
                f"the checkpoint {self.path} does not fit the model: {'; '.join(wrong[:5])}{more}; "
                "give the config that belongs to it"
            )

    def take(self, name: str, shard: ParamShard, tp_rank: int) -> Tensor:
        """This rank's part of a parameter, read from disk, in the checkpoint's dtype."""
        recipe = self.recipes[name]
        if recipe.convert is not None:
            whole = recipe.convert({key: self._whole(key) for key in recipe.keys})
            if tuple(whole.shape) != shard.shape:
                raise BraidError(
                    f"{name} comes out of the checkpoint {self.path} as {tuple(whole.shape)}, and the model has "
                    f"{shard.shape}; give the config that belongs to it"
                )
            return shard.take(whole, tp_rank)
        key = recipe.keys[0]
        if shard.dim is None:
            return self._whole(key)
        lazy = self.files[key].get_slice(key)
        before = (slice(None),) * shard.dim

        def rows(start: int, length: int) -> Tensor:
            part: Tensor = lazy[(*before, slice(start, start + length))]
            self.bytes_read += part.numel() * part.element_size()
            return part

        return shard.collect(rows, tp_rank)

    def buffer(self, name: str) -> Tensor:
        """A saved buffer, whole."""
        return self._whole(self.recipes[name].keys[0])

    def _whole(self, key: str) -> Tensor:
        value: Tensor = self.files[key].get_tensor(key)
        self.bytes_read += value.numel() * value.element_size()
        return value


def _open(path: Path) -> dict[str, Any]:
    """Every key of the checkpoint, and its open file."""
    if path.is_file():
        return _keys(path)
    if not path.is_dir():
        raise BraidError(
            f"there is no checkpoint at {path}; give a folder of save_pretrained, or a safetensors file"
        )
    index = path / INDEX
    if not index.exists():
        if (path / SINGLE).exists():
            return _keys(path / SINGLE)
        others = sorted(p.name for p in path.glob("*.bin"))
        also = f" (it has {others[0]}: load that with transformers and save it anew)" if others else ""
        raise BraidError(f"{path} has neither {SINGLE} nor {INDEX}{also}")
    try:
        by_key = json.loads(index.read_text())["weight_map"]
        names = sorted(set(by_key.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BraidError(f"{index} is no index of safetensors ({error})") from None
    if lost := [name for name in names if not (path / name).is_file()]:
        raise BraidError(
            f"{path} lacks {len(lost)} of {len(names)} files of its index: {', '.join(lost[:5])}"
        )
    opened = {name: _keys(path / name) for name in names}
    if absent := [key for key, name in by_key.items() if key not in opened[name]]:
        raise BraidError(f"{path / by_key[absent[0]]} lacks {absent[0]}, which the index says it holds")
    return {key: opened[name][key] for key, name in by_key.items()}


def _keys(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BraidError(f"{path} can't be read as safetensors ({error}); is it complete?") from None
    return dict.fromkeys(file.keys(), file)
