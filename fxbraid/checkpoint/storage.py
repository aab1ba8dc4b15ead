"""The two ends of torch.distributed.checkpoint: what to write and read, and files of safetensors.

torch brings the protocol (every rank plans, the first one checks that the boxes fill each tensor, everybody writes, an
error anywhere is everybody's error), the resharding, and the reader of its Hugging Face storage. The writer is our own:
torch's holds one box per tensor and file (the sections of a fused weight overwrite each other), builds a file in memory
under the interpreter's lock, and hashes nothing. Its header is the same, so torch's reader reads our files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .files import DTYPES, NAMES, Spec, Written, write_safetensors
from .folder import Saved
from .held import Held
from .optimizer import PREFIX

#: In the header of a file: where each tensor's box begins, as torch's storage writes it.
SHARDING = "DCP_SHARDING_INFO"

#: From every rank's part of the values that are no tensors, and (name of file -> what was written, box by box), to the
#: rest of a checkpoint: on the first rank, when all files of tensors are there.
Finish = Callable[[list[Any], Mapping[str, Written], dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Staged:
    """A box of a tensor that this rank writes, copied to the host."""

    name: str
    full: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


def stage(tensors: Iterable[Held]) -> list[Staged]:
    """Copies on the host of what this rank writes: training may go on changing the originals."""
    staged = []
    with torch.no_grad():
        for held in tensors:
            for box in held.boxes:
                if box.writes:
                    part = box.of(held.tensor)
                    copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                    copy.copy_(part, non_blocking=True)
                    staged.append(Staged(held.name, held.full, box.offset, copy))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return staged


def save(
    staged: list[Staged],
    values: Any,
    path: Path,
    stamp: Mapping[str, str],
    finish: Finish,
    *,
    group: dist.ProcessGroup | None,
    most_bytes: int,
) -> None:
    """Write ``staged`` into ``path`` and call ``finish`` on the first rank. Collective over ``group`` (None: alone).

    ``values``: this rank's, for ``finish``. ``stamp``: into the header of every file. Raises what went wrong on any
    rank, on all of them (``CheckpointException``).
    """
    rank = dist.get_rank(group) if group is not None else 0
    planner = _SavePlanner(staged, values)
    writer = _Writer(path, rank, stamp, finish, most_bytes)
    if group is not None:
        state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=group)
        return
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    results = writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner)
    writer.finish(metadata, [results.wait()])


def load(tensors: Iterable[Held], saved: Saved, *, group: dist.ProcessGroup | None) -> None:
    """Fill ``tensors`` in place from a checkpoint, of any layout. Collective over ``group`` (None: alone)."""
    planner, reader = _LoadPlanner(tensors), _Reader(saved)
    if group is not None:
        state_dict_loader.load({}, storage_reader=reader, planner=planner, process_group=group)
        return
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, which checks that all boxes together fill each tensor once, with the boxes given to it."""

    def __init__(self, staged: list[Staged], values: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {MetadataIndex(one.name, one.offset): one for one in staged}
        self._values = values

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, one in self._boxes.items():
            data = TensorWriteData(
                ChunkStorageMetadata(torch.Size(one.offset), one.tensor.size()),
                TensorProperties(dtype=one.tensor.dtype),
                torch.Size(one.full),
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self._values)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        if len(all_plans) == 1:  # of a single plan torch does not ask whether it is all
            self._check_filled(metadata)
        values = [plan.planner_data for plan in plans]
        return [replace(plan, planner_data=None) for plan in plans], replace(metadata, planner_data=values)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._boxes.pop(write_item.index).tensor  # the copy has done its duty when it is on disk

    def _check_filled(self, metadata: Metadata) -> None:
        for name, said in metadata.state_dict_metadata.items():
            assert isinstance(said, TensorStorageMetadata)
            filled = sum(math.prod(chunk.sizes) for chunk in said.chunks)
            if filled != math.prod(said.size):
                raise ValueError(f"{name} has {math.prod(said.size)} elements, and {filled} would be written")


class _Writer(StorageWriter):
    """One or several files of safetensors per rank, each with a box of a tensor at most once."""

    def __init__(
        self, path: Path, rank: int, stamp: Mapping[str, str], finish: Finish, most_bytes: int
    ) -> None:
        self._path, self._rank, self._stamp = path, rank, stamp
        self._finish, self._most = finish, most_bytes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for name, items in self._files(plan.items).items():
            specs = {i.index.fqn: Spec(_dtype(i), tuple(_chunk(i).sizes)) for i in items}
            by_key = {i.index.fqn: i for i in items}
            places = {key: {"saved_offsets": list(_chunk(item).offsets)} for key, item in by_key.items()}
            metadata = {SHARDING: json.dumps(places), "format": "pt", **self._stamp}

            def fetch(key: str, by_key: dict[str, WriteItem] = by_key) -> Tensor:
                return planner.resolve_data(by_key[key])  # type: ignore[return-value]

            written = write_safetensors(self._path / name, specs, fetch, metadata)
            for item in items:
                box = {"file": name, "offset": list(_chunk(item).offsets), "shape": list(_chunk(item).sizes)}
                results.append(WriteResult(item.index, specs[item.index.fqn].nbytes, (name, written, box)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, Written] = {}
        tensors: dict[str, Any] = {}
        for result in (one for ranks in results for one in ranks):
            name, written, box = result.storage_data
            if not (self._path / name).is_file():
                raise FileNotFoundError(
                    f"{self._path / name} was written by another rank and is not here; give a folder that all "
                    "ranks share"
                )
            files[name] = written
            said: Any = metadata.state_dict_metadata[result.index.fqn]
            entry = tensors.setdefault(
                result.index.fqn,
                {"dtype": NAMES[said.properties.dtype], "shape": list(said.size), "chunks": []},
            )
            entry["chunks"].append(box)
        values, metadata.planner_data = metadata.planner_data, None  # which torch would send to every rank
        self._finish(values, files, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None

    def _files(self, items: list[WriteItem]) -> dict[str, list[WriteItem]]:
        """Items by the file that they go to: of the model or of the optimizer, at most ``most_bytes`` unless one item
        alone is larger, and no tensor twice."""
        files: dict[str, list[WriteItem]] = {}
        for kind in ("model", "optimizer"):
            open_files: list[tuple[set[str], int, list[WriteItem]]] = []
            for item in items:
                if item.index.fqn.startswith(PREFIX) != (kind == "optimizer"):
                    continue
                size = Spec(_dtype(item), tuple(_chunk(item).sizes)).nbytes
                for k, (names, filled, inside) in enumerate(open_files):
                    if item.index.fqn not in names and filled + size <= self._most:
                        names.add(item.index.fqn)
                        inside.append(item)
                        open_files[k] = names, filled + size, inside
                        break
                else:
                    open_files.append(({item.index.fqn}, size, [item]))
            for k, (_, _, inside) in enumerate(open_files):
                files[f"{kind}-{self._rank:05d}-{k:03d}.safetensors"] = inside
        return files


class _LoadPlanner(LoadPlanner):
    """Reads for the boxes that this rank holds."""

    def __init__(self, tensors: Iterable[Held]) -> None:
        self._held = {held.name: held for held in tensors}
        self._views = {
            MetadataIndex(held.name, box.offset): box.of(held.tensor)
            for held in self._held.values()
            for box in held.boxes
        }

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for held in self._held.values():
            chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in held.boxes]
            stored: Any = self._metadata.state_dict_metadata[held.name]
            items += create_read_items_for_chunk_list(held.name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("a checkpoint of fxbraid holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._views[read_item.dest_index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in place already."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where torch's reader finds a box, and what it is: the fields of its own record."""

    relative_path: str
    shape: torch.Size
    dtype: torch.dtype


class _Reader(HuggingFaceStorageReader):
    """torch's reader of safetensors, told by the manifest what lies where: other files in the folder are not opened."""

    def __init__(self, saved: Saved) -> None:
        super().__init__(str(saved.path))
        self._saved = saved

    def read_metadata(self) -> Metadata:
        tensors: dict[str, Any] = {}
        places = {}
        for key, said in self._saved.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(c["offset"]), torch.Size(c["shape"])) for c in said["chunks"]
            ]
            properties = TensorProperties(dtype=DTYPES[said["dtype"]])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(said["shape"]), chunks)
            for chunk in said["chunks"]:
                file = str(self._saved.path / chunk["file"])
                place = _Place(file, torch.Size(chunk["shape"]), properties.dtype)
                places[MetadataIndex(key, chunk["offset"])] = place
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype
