"""Pass ``compile``: one artefact for every distinct unit.

Contract: (unit) -> a callable ``artefact(*state, *args) -> sequence of outs``. Units with the same key share one
artefact, so what is compiled does not grow with depth. ``False`` runs the unit's FX graph as it is; ``"unit"``
compiles it with Inductor. Collectives lie between units and are never inside an artefact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock
from torch import Tensor, fx

from .. import compat
from ..compat import cache_dir
from .errors import UnsupportedError
from .units import Unit

Artefact = Callable[..., Sequence[Tensor]]
Compile = Literal["unit"] | bool


class Artefacts:
    """The artefacts of one braid, by unit key."""

    def __init__(self, mode: Compile) -> None:
        if mode not in ("unit", False):
            raise UnsupportedError(f'compile={mode!r}: use "unit" (Inductor per unit) or False (eager)')
        self.mode = mode
        self._made: dict[str, Artefact] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, unit: Unit) -> Artefact:
        """The artefact of ``unit``, made on first use."""
        if unit.key not in self._made:
            module = unit.graph_module
            self._made[unit.key] = module.forward if self.mode is False else compile_unit(module, unit.key)
        return self._made[unit.key]


def compile_unit(module: fx.GraphModule, key: str) -> Artefact:
    """Inductor on one unit; inputs are fake tensors from the graph's own metadata, nothing runs."""
    inputs: list[Any] = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return module.forward
    # Ranks on one machine meet the same unit at the same moment: one compiles, the others find it in the cache.
    lock = Path(cache_dir()) / f"fxbraid-{key}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock), torch.no_grad():
        # mypy takes the module torch._inductor.standalone_compile for the function of that name.
        artefact: Artefact = compat.standalone_compile(module, inputs)  # type: ignore[operator]
        return artefact
