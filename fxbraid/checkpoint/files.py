"""Files that are there whole or not at all, and safetensors written as a stream.

The library's ``save_file`` builds a whole file in memory and holds the interpreter's lock for all of it, so that a
training loop would stand still while a background thread writes. The format is eight bytes, a JSON header and the
bytes of the tensors; written here one tensor at a time, hashed on the way, with the lock released in both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: the names that the format has for types
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was meant: ``size`` in bytes, ``sha256`` of what was written (not of what was read back)."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor before it is there."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


def in_order(specs: Mapping[str, Spec]) -> list[str]:
    """The order in which :func:`write_safetensors` asks for tensors: wide types first, so that each lies at a multiple
    of its size; else as given."""
    return sorted(specs, key=lambda key: -specs[key].dtype.itemsize)


def write_safetensors(
    path: Path, specs: Mapping[str, Spec], fetch: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> Written:
    """Write ``path`` with the tensors of ``specs``, each of which ``fetch(key)`` gives when its turn comes, and sync it
    to disk. ``metadata``: strings for the header.

    Raises OSError where the disk refuses, ValueError for a type that the format lacks or a tensor that isn't as said.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for key in in_order(specs):
        spec = specs[key]
        if spec.dtype not in NAMES:
            raise ValueError(f"{key} is {spec.dtype}, which safetensors has no name for")
        header[key] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        size = 0
        for part in (struct.pack("<Q", len(text)), text):
            digest.update(part)
            size += file.write(part)
        for key in in_order(specs):
            tensor = fetch(key)
            if (tensor.dtype, tuple(tensor.shape)) != (specs[key].dtype, specs[key].shape):
                raise ValueError(f"{key} is {tensor.dtype} {tuple(tensor.shape)}, and not {specs[key]}")
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(data)
            size += file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def write_text(path: Path, text: str) -> Written:
    """Write a text file and sync it to disk."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(data), hashlib.sha256(data).hexdigest())


def replace_text(path: Path, text: str) -> None:
    """Replace a text file in one step: a reader, or whoever comes after a crash, finds the old text or the new."""
    part = path.with_name(f".{path.name}.part")
    write_text(part, text)
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder last."""
    with contextlib.suppress(OSError):  # some file systems can't, and then keep names by themselves
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
