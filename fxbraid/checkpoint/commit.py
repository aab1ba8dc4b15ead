"""The last part of a save, on the first rank: when all tensors are on disk, everything becomes a checkpoint at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__
from ..model import BraidedModel
from . import folder as folders
from . import optimizer as optimizers
from .files import Written, replace_text, sync_folder, write_text
from .held import structure
from .hub import config_files


@dataclass(frozen=True, slots=True)
class Facts:
    """What a checkpoint says of the run that wrote it."""

    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    #: name -> text, of the Hugging Face model
    files: Mapping[str, str]


def facts(model: BraidedModel) -> Facts:
    """Of a braided model. Local."""
    import torch
    import transformers

    mesh, schedule = model._mesh, model.schedule
    layout = {
        "tp": mesh.tp_size,
        "pp": mesh.pp_size,
        "schedule": schedule.name,
        "n_microbatches": schedule.m,
        "layers": [len(chunk.layers) for chunk in model.plan.partition.chunks],
    }
    versions = {"fxbraid": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return Facts(layout, versions, config_files(structure(model)))


@dataclass(frozen=True, slots=True)
class Commit:
    """A save of ``step`` under way: ``path`` is where the files gather until they are a checkpoint."""

    folder: Path
    step: int
    save_id: str
    keep: int | None
    facts: Facts

    @property
    def path(self) -> Path:
        return self.folder / f"{folders.SAVING}{self.step:08d}-{self.save_id[:8]}"

    @property
    def stamp(self) -> dict[str, str]:
        """What every file says of the save that it belongs to."""
        return {"save_id": self.save_id, "step": str(self.step)}

    def finish(self, values: list[Any], files: Mapping[str, Written], tensors: dict[str, Any]) -> None:
        """``values``: what each rank has that is no tensor; see :data:`..storage.Finish`. Everything is synced to disk
        before the rename, and the rename before ``latest``."""
        state = {**self.stamp, "step": self.step, **_merged(values)}
        written = dict(files)
        for name, text in {**self.facts.files, folders.STATE: json.dumps(state)}.items():
            written[name] = write_text(self.path / name, text)
        manifest = {
            "format": folders.FORMAT,
            **self.stamp,
            "step": self.step,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "layout": {**self.facts.layout, "ranks": len(values)},
            "versions": dict(self.facts.versions),
            "files": {name: {"size": one.size, "sha256": one.sha256} for name, one in written.items()},
            "tensors": tensors,
        }
        write_text(self.path / folders.MANIFEST, folders.sealed(manifest))
        sync_folder(self.path)
        name = folders.name_of(self.step, [p.name for p in self.folder.iterdir()])
        os.rename(self.path, self.folder / name)
        sync_folder(self.folder)
        replace_text(self.folder / folders.LATEST, name + "\n")
        self._prune(name)

    def _prune(self, latest: str) -> None:
        """Remove what is older than the last ``keep``, and what was left behind by saves that did not end. A folder is
        renamed first: half of a checkpoint never looks like one."""
        for path in self.folder.iterdir():
            if path.name.startswith((folders.SAVING, folders.REMOVING)):
                shutil.rmtree(path, ignore_errors=True)
        if self.keep is None:
            return
        # By when they were written: after going back to an earlier step, later steps are the old ones.
        others = [name for name in folders.complete(self.folder) if name != latest]
        others.sort(key=lambda name: (self.folder / name / folders.MANIFEST).stat().st_mtime_ns)
        for name in others[: max(0, len(others) + 1 - self.keep)]:
            gone = self.folder / f"{folders.REMOVING}{name}"
            os.rename(self.folder / name, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _merged(values: list[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"rng": [one["rng"] for one in values], "extra": values[0]["extra"]}
    if "optimizer" in values[0]:
        merged["optimizer"] = optimizers.merge([one["optimizer"] for one in values])
    if "scheduler" in values[0]:
        merged["scheduler"] = values[0]["scheduler"]
    if "data" in values[0]:
        positions: dict[int, Any] = {}  # by data-parallel rank: of each, the first rank's
        for one in values:
            positions.setdefault(*one["data"])
        merged["data"] = [positions[copy] for copy in sorted(positions)]
    return merged
