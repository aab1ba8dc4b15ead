"""What a model takes: its batches, completed by what it computes in Python from their values, and in micro-batches.

Two things happen to a batch on the host, once, before it is cut:

* **completed**: a model with multimodal rotary positions (M-RoPE) makes ``position_ids`` from token types and image
  grids in loops over values. Its own method does it here, as its forward would have.
* **cut**: samples along dim 0, images by the sample that they belong to (:mod:`fxbraid.images`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import batch as batches
from .batch import Signature
from .images import Kind, cut, find, kinds_of
from .passes.errors import BraidError

#: The methods of transformers' models that make positions of all three axes from a batch, the whole decision first.
_POSITIONS = ("compute_3d_position_ids", "get_rope_index")
#: What such a method needs beside the tokens.
_TYPES = "mm_token_type_ids"


@dataclass(frozen=True, slots=True)
class Inputs:
    """``kinds``: of images; ``positions``: the model's method for ``position_ids``, None where it has none."""

    kinds: tuple[Kind, ...] = ()
    positions: Callable[..., Any] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Inputs:
        """What ``model`` takes; plain batches for one that says nothing of images."""
        kinds = kinds_of(model)
        owners = [m for m in model.modules() if any(hasattr(m, name) for name in _POSITIONS)] if kinds else []
        method = None
        if owners:
            name = next(name for name in _POSITIONS if hasattr(owners[-1], name))
            method = getattr(owners[-1], name)
        return cls(kinds, method)

    def complete(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch as fxbraid takes it, with what the model computes from its values. Raises :class:`BraidError`."""
        batch = batches.normal(batch)
        grids = [kind.grid for kind in self.kinds if isinstance(batch.get(kind.grid), Tensor)]
        ids = batch.get("input_ids")
        if (
            self.positions is None
            or batch.get("position_ids") is not None
            or not grids
            or not isinstance(ids, Tensor)
        ):
            return batch
        if not isinstance(batch.get(_TYPES), Tensor):
            raise BraidError(
                f"the batch has {grids[0]} and no {_TYPES}, from which the model makes its position_ids; the processor "
                f"gives it beside input_ids (or pass position_ids [3, batch, tokens])"
            )
        if ids.device.type == "meta":
            return {**batch, "position_ids": torch.empty((3, *ids.shape), dtype=ids.dtype, device="meta")}
        return {**batch, "position_ids": self._positions(batch)}

    def _positions(self, batch: Mapping[str, Any]) -> Tensor:
        method: Any = self.positions
        accepted = inspect.signature(method).parameters
        wanted = {name: batch[name] for name in accepted if name in batch}
        missing = {
            name: None
            for name, p in accepted.items()
            if p.default is p.empty and name not in wanted and p.kind is p.POSITIONAL_OR_KEYWORD
        }
        try:
            with torch.no_grad():
                found = method(**wanted, **missing)
        except Exception as error:
            cause = str(error) or type(error).__name__
            raise BraidError(
                f"{type(method.__self__).__name__}.{method.__name__} refuses the batch: {cause}; check that image "
                "grids, token types and tokens belong together"
            ) from error
        method.__self__.rope_deltas = None  # it keeps those of the batch for generate()
        positions = found[0] if isinstance(found, tuple) else found
        return positions  # type: ignore[no-any-return]

    def split(self, batch: Mapping[str, Any], m: int) -> dict[str, list[Any]]:
        """Per input, its value for each of ``m`` micro-batches, of equal shapes. See :func:`fxbraid.batch.split`."""
        return self.cut(batch, m)[0]

    def cut(self, batch: Mapping[str, Any], m: int) -> tuple[dict[str, list[Any]], bool]:
        """:meth:`split`, and whether micro-batches were filled up with images of zeros."""
        images = find(self.kinds, batch)
        if not images:
            return batches.split(batch, m, dims=self._dims(batch)), False
        batches.check_rows(len(batch["input_ids"]), m)
        done: dict[str, list[Any]] = {}
        filled = False
        for one in images:
            parts, more = cut(one, batch, m)
            done |= parts
            filled = filled or more
        rest = {name: value for name, value in batch.items() if name not in done}
        done |= batches.split(rest, m, dims=self._dims(batch))
        return {name: done[name] for name in batch}, filled

    def example(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What is kept of a batch to trace it again: shapes, and the integers where they may be a layout of images."""
        return {
            name: value
            if not isinstance(value, Tensor)
            else value.to("meta")
            if not self.kinds or value.is_floating_point()
            else value.detach().clone()
            for name, value in batch.items()
        }

    def layout(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The values of grids in ``batch``, by name: what ranks must agree on beside shapes."""
        grids = (kind.grid for kind in self.kinds)
        found = {name: batch[name] for name in grids if isinstance(batch.get(name), Tensor)}
        return {name: values_of(grid) for name, grid in found.items() if grid.device.type != "meta"}

    def _dims(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Inputs whose samples do not lie along dim 0: positions of three axes, [3, batch, tokens]."""
        positions = batch.get("position_ids")
        many = self.positions is not None and isinstance(positions, Tensor) and positions.ndim == 3
        return {"position_ids": 1} if many else {}

    def signature(self, batch: Mapping[str, Any], m: int, static: Collection[str]) -> Signature:
        """What a trace of ``batch`` depends on; with images, or inputs whose values are ``static``, those of a
        micro-batch."""
        if not find(self.kinds, batch) and not any(name in batch for name in static):
            return batches.signature(batch, m)
        micro = first(self.split(batch, m))
        values = {name: values_of(micro[name]) for name in static if isinstance(micro.get(name), Tensor)}
        return batches.signature({**micro, **values}, m)


def first(parts: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The first micro-batch."""
    return {name: values[0] for name, values in parts.items()}


def values_of(tensor: Tensor) -> tuple[Any, ...]:
    """The numbers of a small tensor, hashable."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return (tuple(tensor.shape), frozen(tensor.tolist()))
