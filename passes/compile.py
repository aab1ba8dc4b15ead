"""Pass ``compile``: FX graphs -> artefacts, each made once and shared by everything of equal structure.

Contract: (unit) -> a callable ``artefact(*state, *args) -> sequence of outs``; (piece of a block) -> the same. What
has the same key shares one artefact, so with ``"unit"`` what is compiled does not grow with depth. Inductor caches
artefacts on disk, by graph, shapes, strides, types, options and versions: another process or a later run compiles
nothing that is known.

==========  ======================================================================================================
``"unit"``  Inductor per unit. Collectives lie between units, never inside an artefact: the block's code keeps them.
``"block"`` Inductor per piece of a block (``compile_block``), launches and waits inside and pinned
            (``compile_pin``). Units alone are compiled only where something asks for one (a profile).
``False``   the units' FX graphs as they are.
==========  ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock
from torch import Tensor, fx

from .. import compat
from ..compat import cache_dir
from .compile_block import Piece
from .compile_pin import options
from .errors import UnsupportedError
from .joint import VIEWS, Phase
from .products import SumArtefact, products
from .units import Unit

Artefact = Callable[..., Sequence[Tensor]]
Compile = Literal["unit", "block"] | bool


class Artefacts:
    """The artefacts of one braid, by key of unit or piece."""

    def __init__(self, mode: Compile) -> None:
        if mode is not False and mode not in ("unit", "block"):
            raise UnsupportedError(
                f'compile={mode!r}: use "unit" (Inductor per unit), "block" (per block) or False (eager)'
            )
        self.mode = mode
        self._made: dict[str, Artefact] = {}
        self._rests: dict[str, Artefact] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, unit: Unit) -> Artefact:
        """The artefact of ``unit``, made on first use; with ``"block"``, on its first call."""
        return self._get(unit) if self.mode != "block" else lambda *inputs: self._get(unit)(*inputs)

    def get_piece(self, piece: Piece) -> Artefact:
        """The artefact of a piece of a block, made on first use."""
        key = f"piece {piece.key}"
        if key not in self._made:
            self._made[key] = compile_graph(piece.graph_module, piece.key, name=piece.name, options=options())
        return self._made[key]

    def _get(self, unit: Unit) -> Artefact:
        key = unit.key
        if unit.phase is Phase.W:  # equal graphs of which not the same outs are gradients are not the same
            key += "".join("01"[name is not None] for name in unit.grads)
        if key not in self._made:
            self._made[key] = (
                self._sum(unit) if unit.phase is Phase.W else self._make(unit, unit.graph_module, unit.key)
            )
        return self._made[key]

    def _sum(self, unit: Unit) -> Artefact:
        """Of a W unit: its weight gradients' matrix products stay outside, where they add into the gradients."""
        plan = products(unit)
        if not plan.products:
            return self._make(unit, unit.graph_module, unit.key)
        if plan.rest is None:
            return SumArtefact(plan, None)
        if plan.key not in self._rests:
            self._rests[plan.key] = self._make(unit, plan.rest, plan.key)
        return SumArtefact(plan, self._rests[plan.key])

    def _make(self, unit: Unit, module: fx.GraphModule, key: str) -> Artefact:
        if self.mode is False:
            return module.forward
        return compile_graph(module, key, name=f"unit {unit.label} of chunk {unit.chunk}")


def compile_graph(
    module: fx.GraphModule, key: str, *, name: str, options: Mapping[str, Any] | None = None
) -> Artefact:
    """Inductor on one graph; inputs are fake tensors from the graph's own metadata, nothing runs.

    ``options``: of Inductor, beyond its defaults. Raises :class:`UnsupportedError`, which names ``name``.
    """
    inputs: list[Any] = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    if all(node.target in VIEWS for node in module.graph.nodes if node.op == "call_function"):
        return module.forward  # nothing to compute
    # Ranks on one machine meet the same graph at the same moment: one compiles, the others find it in the cache.
    lock = Path(cache_dir()) / f"fxbraid-{key}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    patches = {"config_patches": dict(options)} if options else {}
    try:
        with FileLock(lock), torch.no_grad():
            # mypy takes the module torch._inductor.standalone_compile for the function of that name.
            artefact: Artefact = compat.standalone_compile(module, inputs, options=patches)  # type: ignore[operator]
            return artefact
    except Exception as error:
        raise UnsupportedError(
            f"Inductor failed on {name} (key {key}): {type(error).__name__}: {error}; compile=False runs it as it is"
        ) from error
