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
#: Bytes that are read before files are opened anew.
MAPPED = 2**24


@dataclass(frozen=True, slots=True)
class Loaded:
    """What reading a checkpoint came to: the same on every rank but for ``bytes_read``.

    ``missing``: parameters and saved buffers of the model that the checkpoint lacks. ``unexpected``: keys of the
    checkpoint that the model has no use for. ``bytes_read``: of this rank, slices only.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


class File:
    """A file of safetensors, open: tensors are views of it, so copy them.

    Raises BraidError for one that is cut short or no safetensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.open()

    def open(self) -> None:
        """Anew, if it is open: what was read of it is mapped, and counts as this process's memory until then."""
        from safetensors import SafetensorError, safe_open

        try:
            self._file: Any = safe_open(str(self._path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise BraidError(
                f"{self._path} can't be read as safetensors ({error}); is it complete?"
            ) from None

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, or the part of it that ``index`` says."""
        value: Tensor = self._file.get_tensor(key) if index is None else self._file.get_slice(key)[index]
        return value


@dataclass(slots=True)
class Checkpoint:
    """An open folder (or one file) of safetensors, for one model's names. What ``take`` and ``buffer`` give may be a
    view of a file: copy it.

    Raises BraidError for a missing folder or file, a file that is cut short or no safetensors, and a key in no file.
    """

    path: Path
    #: key -> the open file that holds it
    files: Mapping[str, File]
    #: the model's names -> what they are made of
    recipes: Mapping[str, Recipe]
    unexpected: tuple[str, ...]
    bytes_read: int = field(default=0)
    #: files that were read since ``bytes_read`` was that much
    _mapped: set[File] = field(default_factory=set)
    _since: int = field(default=0)

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
            found = self.files[recipe.keys[0]].shape(recipe.keys[0])
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
            whole = recipe.convert({key: self._read(key) for key in recipe.keys})
            if tuple(whole.shape) != shard.shape:
                raise BraidError(
                    f"{name} comes out of the checkpoint {self.path} as {tuple(whole.shape)}, and the model has "
                    f"{shard.shape}; give the config that belongs to it"
                )
            return shard.take(whole, tp_rank)
        key = recipe.keys[0]
        if shard.dim is None:
            return self._read(key)
        before = (slice(None),) * shard.dim

        def rows(start: int, length: int) -> Tensor:
            return self._read(key, (*before, slice(start, start + length)))

        return shard.collect(rows, tp_rank)

    def buffer(self, name: str) -> Tensor:
        """A saved buffer, whole."""
        return self._read(self.recipes[name].keys[0])

    def _read(self, key: str, index: tuple[slice, ...] | None = None) -> Tensor:
        if self.bytes_read - self._since >= MAPPED:
            for file in self._mapped:
                file.open()
            self._mapped.clear()
            self._since = self.bytes_read
        file = self.files[key]
        self._mapped.add(file)
        value = file.read(key, index)
        self.bytes_read += value.numel() * value.element_size()
        return value


def _open(path: Path) -> dict[str, File]:
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


def _keys(path: Path) -> dict[str, File]:
    file = File(path)
    return dict.fromkeys(file.keys(), file)
