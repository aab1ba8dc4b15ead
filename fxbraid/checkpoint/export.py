"""Plain Hugging Face folders: from a braided model, one parameter at a time, or from a checkpoint, in one process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..passes.errors import BraidError
from ..runtime import ranks
from .files import DTYPES, Spec, in_order, replace_text, sync_folder, write_safetensors
from .folder import Saved, problems
from .held import Box, Held, held, structure
from .hub import CONFIG, INDEX, Export, Part, cast_to, config_files, plan_export

if TYPE_CHECKING:
    from ..model import BraidedModel

_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

#: A file of weights -> the full tensor of each of its keys.
Whole = Callable[[str], Tensor]


def save_pretrained(
    model: BraidedModel, folder: str | Path, *, max_shard_size: int | str, dtype: torch.dtype | None
) -> None:
    """See :meth:`fxbraid.BraidedModel.save_pretrained`."""
    folder = Path(folder)
    error: str | None = None
    try:
        if ranks.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as failed:
        error = f"{folder} can't be written ({failed})"
    ranks.raise_together(error)
    mine = held(model)
    boxes = ranks.gather(
        [
            (one.name, one.tensor.dtype, one.full, [(b.offset, b.shape) for b in one.boxes if b.writes])
            for one in mine.values()
        ]
    )
    specs = {name: Spec(kind, full) for told in boxes for name, kind, full, _ in told}
    export = plan_export(structure(model), specs, dtype, max_shard_size)
    where: dict[str, list[tuple[int, Box]]] = {}
    for rank, told in enumerate(boxes):
        for name, _, _, parts in told:
            where.setdefault(name, []).extend((rank, Box(o, shape, None, 0, True)) for o, shape in parts)
    group = None
    if ranks.several():
        timeout = model._mesh.timeout or timedelta(minutes=10)
        group = dist.new_group(backend="gloo", timeout=timeout)
    gathering = _Gathering(mine, specs, where, export, dtype, group)
    written = []
    for k, (name, part) in enumerate(export.parts.items()):
        # Files go round: while one rank still writes its file, the others fetch the next.
        owner = k % ranks.world()
        try:
            if gathering.run(part, folder / f".{name}.part", owner):
                written.append(name)
        except (OSError, ValueError) as failed:
            error = f"{folder / name} can't be written ({failed})"
    ranks.raise_together(error)
    try:
        for name in written:
            os.replace(folder / f".{name}.part", folder / name)
    except OSError as failed:
        error = f"{folder} can't be written ({failed})"
    ranks.raise_together(error)
    try:
        if ranks.rank() == 0:
            _finish(folder, export, config_files(structure(model), export.dtype))
    except OSError as failed:
        error = f"{folder} can't be written ({failed})"
    ranks.raise_together(error)
    if group is not None:
        dist.destroy_process_group(group)


def convert(
    saved: Saved, folder: Path, *, max_shard_size: int | str = "5GB", dtype: torch.dtype | None = None
) -> None:
    """Write the model of a checkpoint as a plain Hugging Face folder. In one process, one parameter at a time.

    Raises BraidError where the checkpoint is damaged, or of a model that transformers has no class for.
    """
    if found := problems(saved):
        raise BraidError(f"{saved.path} is not what was saved: {'; '.join(found[:5])}")
    model = _skeleton(saved)
    specs = {
        name: Spec(DTYPES[said["dtype"]], tuple(said["shape"]))
        for name, said in saved.tensors.items()
        if "/" not in name
    }
    export = plan_export(model, specs, dtype, max_shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in export.parts.items():
        made = _Made(part, export, lambda one: _read(saved, one, dtype))
        write_safetensors(folder / f".{name}.part", part.specs, made, {"format": "pt"})
    for name in export.parts:
        os.replace(folder / f".{name}.part", folder / name)
    _finish(folder, export, config_files(model, export.dtype))


class _Made:
    """Keys of one file, made from full tensors of the model when the first key of their group is asked for."""

    def __init__(self, part: Part, export: Export, fetch: Whole) -> None:
        self._part, self._export, self._fetch = part, export, fetch
        self._made: dict[str, Tensor] = {}
        self._seen: set[str] = set()

    def __call__(self, key: str) -> Tensor:
        group = self._part.groups[key]
        if key not in self._made:
            whole = {name: self._fetch(self._export.source[name]) for name in group.names}
            self._made.update((k, t) for k, t in group.convert(whole).items() if k in self._part.specs)
        return self._made.pop(key)


@dataclass(slots=True)
class _Gathering:
    """Full tensors on one rank, from the boxes of all: one parameter at a time, in an order that all ranks know."""

    mine: Mapping[str, Held]
    specs: Mapping[str, Spec]
    where: Mapping[str, list[tuple[int, Box]]]
    export: Export
    dtype: torch.dtype | None
    group: dist.ProcessGroup | None

    def run(self, part: Part, path: Path, owner: int) -> bool:
        """Write a file on its ``owner``, and send it what it needs from everywhere else; True on the owner. Whatever
        the disk says, everything that is sent is received: an error is raised at the end."""
        names = self._names(part)
        if ranks.rank() != owner:
            for name in names:
                self._send(name, owner)
            return False
        pending = list(names)

        def fetch(name: str) -> Tensor:
            assert pending[0] == name, "the order of parameters is not the one that all ranks know"
            pending.pop(0)
            return self._receive(name)

        try:
            write_safetensors(path, part.specs, _Made(part, self.export, fetch), {"format": "pt"})
        finally:
            for name in list(pending):
                fetch(name)
        return True

    def _names(self, part: Part) -> list[str]:
        """The parameters of a file, in the order in which they are asked for."""
        found: dict[str, None] = {}
        for key in in_order(part.specs):
            found.update((self.export.source[name], None) for name in part.groups[key].names)
        return list(found)

    def _send(self, name: str, owner: int) -> None:
        for rank, box in self.where[name]:
            if rank == ranks.rank():
                dist.send(_bytes(self._own(name, box)), owner, group=self.group)

    def _receive(self, name: str) -> Tensor:
        spec = self.specs[name]
        kind = cast_to(spec.dtype, self.dtype)
        full = torch.empty(spec.shape, dtype=kind)
        for rank, box in self.where[name]:
            if rank == ranks.rank():
                value = self._own(name, box)
            else:
                value = torch.empty(box.shape, dtype=kind)
                dist.recv(_bytes(value), rank, group=self.group)
            _inside(full, box.offset, box.shape).copy_(value)
        return full

    def _own(self, name: str, box: Box) -> Tensor:
        """A box of this rank, on the host, in the type of the export."""
        one = self.mine[name]
        mine = next(b for b in one.boxes if b.offset == box.offset)
        value = mine.of(one.tensor).detach()
        return value.to("cpu", cast_to(value.dtype, self.dtype)).contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _inside(full: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start, length)
    return full


def _read(saved: Saved, name: str, dtype: torch.dtype | None) -> Tensor:
    from safetensors import safe_open

    said = saved.tensors[name]
    kind = DTYPES[said["dtype"]]
    full = torch.empty(said["shape"], dtype=cast_to(kind, dtype))
    for chunk in said["chunks"]:
        with safe_open(str(saved.path / chunk["file"]), framework="pt") as file:
            _inside(full, tuple(chunk["offset"]), tuple(chunk["shape"])).copy_(file.get_tensor(name))
    return full


def _skeleton(saved: Saved) -> nn.Module:
    """The model of a checkpoint on the meta device."""
    import transformers

    if not (saved.path / CONFIG).is_file():
        raise BraidError(
            f"{saved.path} is of a model that is not of transformers, and a Hugging Face folder needs its config.json"
        )
    config: Any = transformers.AutoConfig.from_pretrained(saved.path)
    names = config.architectures or []
    kind: Any = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    if kind is None:
        raise BraidError(
            f"transformers has no class of architectures={names}; load the checkpoint into the braided model and call "
            "its save_pretrained"
        )
    with torch.device("meta"):
        model: nn.Module = kind._from_config(config)
    path = saved.path / "generation_config.json"
    if path.is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(saved.path)  # type: ignore[assignment]
    return model


def _finish(folder: Path, export: Export, files: Mapping[str, str]) -> None:
    """Index, config, and away with weights of an earlier export under other names."""
    for path in folder.iterdir():
        if (_SHARD.fullmatch(path.name) and path.name not in export.parts) or (
            path.name == INDEX and export.index is None
        ):
            path.unlink()
    texts = {**files, **({INDEX: export.index} if export.index is not None else {})}
    for name, text in texts.items():
        replace_text(folder / name, text)
    sync_folder(folder)
