"""What is on disk, and whether it is what was written. No torch.

::

    folder/
      latest                           the name of the checkpoint to load; replaced last, in one step
      step-00000200/
        manifest.json                  every file's size and SHA-256, every tensor's boxes and where they lie
        state.json                     what is no tensor: optimizer options, scheduler, random numbers, data position
        config.json ...                of the Hugging Face model, for converting
        model-00000-000.safetensors    the boxes that one rank wrote, under Hugging Face names
        optimizer-00000-000.safetensors
      .saving-...                      a checkpoint that is being written, or was when its process died
      .removing-...                    one that is being removed
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..passes.errors import BraidError

LATEST, MANIFEST, STATE = "latest", "manifest.json", "state.json"
SAVING, REMOVING = ".saving-", ".removing-"
FORMAT = "fxbraid checkpoint 1"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_BLOCK = 2**22
#: a header of safetensors is no longer (the library's own limit)
_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Saved:
    """One complete checkpoint: its folder and its manifest, which is as it was written."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        return self.manifest["files"]  # type: ignore[no-any-return]

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Any]]:
        """By name: ``dtype``, ``shape``, and ``chunks`` of ``file``, ``offset``, ``shape``."""
        return self.manifest["tensors"]  # type: ignore[no-any-return]

    def chunks_of(self, file: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(name, box) of every tensor in a file."""
        for key, tensor in self.tensors.items():
            for chunk in tensor["chunks"]:
                if chunk["file"] == file:
                    yield key, chunk

    def state(self) -> dict[str, Any]:
        """state.json."""
        try:
            found = json.loads((self.path / STATE).read_text())
        except (OSError, ValueError) as error:
            raise BraidError(f"{self.path / STATE} can't be read ({error})") from None
        if not isinstance(found, dict):
            raise BraidError(f"{self.path / STATE} is no state of a checkpoint")
        return found


# -- which checkpoints there are


def name_of(step: int, taken: Sequence[str]) -> str:
    """The folder of a checkpoint of ``step``; a step that is saved again, after going back, gets another one, so that
    nothing complete is ever touched."""
    plain = f"step-{step:08d}"
    names = (plain, *(f"{plain}-{k}" for k in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def complete(folder: Path) -> list[str]:
    """The names of complete checkpoints, oldest step first: only a rename makes one."""
    if not folder.is_dir():
        return []
    found = [p.name for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=order)


def order(name: str) -> tuple[int, int]:
    """A checkpoint's step, and how often that was saved before."""
    match = _NAME.fullmatch(name)
    if match is None:
        return (-1, 0)
    return int(match[1]), int(match[2] or 1)


def find(folder: Path, step: int | None = None) -> Path | None:
    """The checkpoint of ``step``; of None the one that ``latest`` names, or where that is missing or names nothing
    that is there, the newest complete one. None where there is no checkpoint at all."""
    if (folder / MANIFEST).is_file():  # a checkpoint itself
        return folder
    names = complete(folder)
    if step is not None:
        same = [name for name in names if order(name)[0] == step]
        if not same:
            steps = ", ".join(str(order(name)[0]) for name in names) or "none"
            raise BraidError(f"{folder} has no checkpoint of step {step}; it has {steps}")
        return folder / same[-1]
    if not names:
        return None
    try:
        said = (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        said = ""
    return folder / (said if said in names else names[-1])


# -- the manifest


def sealed(manifest: Mapping[str, Any]) -> str:
    """The text of manifest.json, which holds a hash of itself."""
    return json.dumps({**manifest, "digest": _digest(manifest)}, indent=1)


def open_saved(path: Path) -> Saved:
    """Read a manifest. Raises BraidError where it is missing, changed, or of another format."""
    place = path / MANIFEST
    try:
        manifest = json.loads(place.read_bytes())
    except (OSError, ValueError) as error:
        raise BraidError(
            f"{place} can't be read ({error}); is {path.name} a checkpoint of fxbraid?"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BraidError(f"{place} is not a manifest of this version of fxbraid ({FORMAT!r})")
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    if manifest.get("digest") != _digest(rest):
        raise BraidError(f"{place} was changed after it was written: its hash is another one")
    if odd := [name for name in manifest["files"] if not _PLAIN.fullmatch(name)]:
        raise BraidError(f"{place} names a file outside of its folder: {odd[0]!r}")
    return Saved(path, manifest)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# -- is it what was written?


def problems(saved: Saved, share: tuple[int, int] = (0, 1), *, hashes: bool = True) -> list[str]:
    """What is wrong with the files of a checkpoint, each by name; [] is fine. ``share``: (rank, ranks) reads and
    hashes every ``ranks``-th file, by size, so that all of them together read each file once. ``hashes``: False leaves
    them out and compares sizes and headers."""
    rank, ranks = share
    found = []
    by_size = sorted(saved.files, key=lambda name: (-saved.files[name]["size"], name))
    for name in by_size[rank::ranks]:
        try:
            said = _problem(saved, name, hashes=hashes)
        except OSError as error:
            said = f"{name} can't be read ({error.strerror or error})"
        if said:
            found.append(said)
    if rank == 0:
        found += [
            f"{p.name} belongs to no checkpoint that was written here: the manifest lacks it"
            for p in sorted(saved.path.glob("*.safetensors"))
            if p.name not in saved.files
        ]
    return found


def _problem(saved: Saved, name: str, *, hashes: bool) -> str | None:
    path, wanted = saved.path / name, saved.files[name]
    if not path.is_file():
        return f"{name} is missing"
    other = _other_save(saved, path)
    if other is not None:
        return f"{name} is of another save ({other}), and this is step {saved.step}"
    size = path.stat().st_size
    if size != wanted["size"]:
        how = "is cut short" if size < wanted["size"] else "has grown"
        return f"{name} {how}: {size} bytes, and {wanted['size']} were written"
    if hashes and (found := _sha256(path)) != wanted["sha256"]:
        return f"{name} was changed: SHA-256 {found[:12]}..., and {wanted['sha256'][:12]}... was written"
    return _header_problem(saved, name)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _other_save(saved: Saved, path: Path) -> str | None:
    """The step of the save that a file says it is of, if that is another one."""
    try:
        if path.suffix == ".safetensors":
            said = header(path)["__metadata__"]
        elif path.name == STATE:
            said = json.loads(path.read_bytes())
        else:
            return None
        if said["save_id"] != saved.manifest["save_id"]:
            return f"of step {int(said['step'])}"
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the hash has the word
    return None


def _header_problem(saved: Saved, name: str) -> str | None:
    """A file with the right hash, of a manifest that somebody made: does it hold what the manifest says?"""
    if not name.endswith(".safetensors"):
        return None
    try:
        found = header(saved.path / name)
        for key, chunk in saved.chunks_of(name):
            said = found[key]
            if said["shape"] != chunk["shape"] or said["dtype"] != saved.tensors[key]["dtype"]:
                return (
                    f"{name} holds {key} as {said['dtype']} {said['shape']}, and the manifest says otherwise"
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return (
            f"{name} is no file of safetensors with what the manifest says ({type(error).__name__}: {error})"
        )
    return None


def header(path: Path) -> dict[str, Any]:
    """The header of a file of safetensors. Raises ValueError where it has none."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_HEADER, path.stat().st_size - 8):
            raise ValueError("no header")
        found = json.loads(file.read(length))
    if not isinstance(found, dict):
        raise ValueError("no header")
    return found
