"""Profiles on disk: one JSON file for each machine, torch, compile mode and world.

The file says what its numbers depend on, and is believed only where every fact agrees and every number is one. Units
are named by the hash of their graph (operators, shapes, types), so files grow with what was measured, and a change
of the model or of its shapes is a miss and never a wrong hit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .links import FASTEST

FORMAT = 2
VARIABLE = "FXBRAID_CACHE_DIR"

LONGEST_S = 3600.0
"""Seconds above which the time of a unit, or of a message without bytes, is not believed."""

MOST_CONTENTION = 1000.0
"""Times an all-reduce's own time that it can cost the units beside it."""


def folder() -> Path:
    """Where profiles lie: ``$FXBRAID_CACHE_DIR``, else ``fxbraid`` in the user's cache folder."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxbraid"


def machine(device: torch.device) -> dict[str, Any]:
    """What the times of this machine depend on; its name only as a hash."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:12],
        "device": device.type,
        "name": name,
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
    }


@dataclass(frozen=True, slots=True)
class ProfileCache:
    """One file. ``facts``: what its numbers depend on."""

    path: Path
    facts: Mapping[str, Any]

    @staticmethod
    def of(facts: Mapping[str, Any]) -> ProfileCache:
        """The file for these facts."""
        text = json.dumps([FORMAT, facts], sort_keys=True)
        return ProfileCache(
            folder() / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json", facts
        )

    def read(self, links_of: Collection[str] = ()) -> dict[str, Any] | None:
        """``{"seconds": ..., "links": ...}``; None, with a warning where there is a file that can't be believed.
        links_of: the names of links that it must hold."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return self._refuse(f"can't be read ({error})")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return self._refuse("is no JSON")
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            return self._refuse(f"is not of format {FORMAT}")
        if found.get("facts") != json.loads(json.dumps(self.facts)):
            return self._refuse("was made for something else")
        seconds, links = found.get("seconds"), found.get("links")
        if not isinstance(seconds, dict) or not all(map(_time, seconds.values())):
            return self._refuse("holds unit times that are no times")
        if not isinstance(links, dict) or not all(_link(name, values) for name, values in links.items()):
            return self._refuse("holds links that are no links")
        if missing := sorted(set(links_of) - set(links)):
            return self._refuse(f"lacks the links {', '.join(missing)}")
        return {"seconds": seconds, "links": links}

    def write(self, values: Mapping[str, Any]) -> None:
        """Replace the file in one go; where the folder can't be written, warn and go on."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.stem, delete=False
            ) as file:
                try:
                    json.dump(
                        {"format": FORMAT, "facts": self.facts, **values}, file, indent=1, sort_keys=True
                    )
                    file.flush()
                    os.replace(file.name, self.path)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            warnings.warn(f"the profile could not be cached ({error}); it is measured again", stacklevel=2)

    def _refuse(self, why: str) -> dict[str, Any] | None:
        warnings.warn(f"the cached profile {self.path.name} {why}; it is measured anew", stacklevel=3)
        return None


def _time(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 <= value <= LONGEST_S
    )


def _link(name: Any, values: Any) -> bool:
    """``contention`` is one number, of either sign; a link is alpha, 0 or more, and beta, above 0 and below
    what no link gives."""
    if not isinstance(values, list):
        return False
    if name == "contention":
        return (
            len(values) == 1
            and isinstance(values[0], int | float)
            and math.isfinite(values[0])
            and abs(values[0]) <= MOST_CONTENTION
        )
    known = name in ("all_reduce", "replicas", "host") or (
        isinstance(name, str) and name.startswith("message ")
    )
    if not known or len(values) != 2 or not _time(values[0]):
        return False
    rate = values[1]
    return isinstance(rate, int | float) and math.isfinite(rate) and 0 < rate <= FASTEST
