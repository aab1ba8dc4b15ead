"""A batch of keyword arguments and its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .passes.errors import BraidError

#: The inputs that say how large the batch is, most telling first.
_LEADING = ("input_ids", "inputs_embeds", "decoder_input_ids", "pixel_values", "labels")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a trace depends on: shapes and dtypes of tensors, values of everything else."""

    entries: tuple[tuple[str, Any], ...]
    n_microbatches: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={entry}" for name, entry in self.entries)


def signature(batch: Mapping[str, Any], n_microbatches: int) -> Signature:
    """The signature of a whole batch; keyword order does not matter."""
    entries = []
    for name in sorted(batch):
        value = batch[name]
        if isinstance(value, Tensor):
            entries.append((name, (tuple(value.shape), str(value.dtype))))
        else:
            try:
                hash(value)
            except TypeError:
                raise BraidError(
                    f"input {name!r} is a {type(value).__name__}; give tensors or plain constants"
                ) from None
            entries.append((name, value))
    return Signature(tuple(entries), n_microbatches)


def batch_size(batch: Mapping[str, Any]) -> int:
    """Dim 0 of the leading input."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim > 0}
    if not tensors:
        raise BraidError("the batch holds no tensor with a batch dimension")
    lead = next((name for name in _LEADING if name in tensors), next(iter(tensors)))
    return int(tensors[lead].shape[0])


def check_rows(size: int, n_microbatches: int) -> None:
    """Raise :class:`BraidError` where a batch of ``size`` samples has no ``n_microbatches`` equal parts."""
    if n_microbatches < 1:
        raise BraidError(f"n_microbatches={n_microbatches} must be 1 or more")
    if size % n_microbatches:
        ways = [str(d) for d in range(1, size + 1) if size % d == 0]
        text = ways[0] if len(ways) == 1 else ", ".join(ways[:-1]) + " or " + ways[-1]
        raise BraidError(f"n_microbatches={n_microbatches} does not divide the batch of {size}; use {text}")


def split(
    batch: Mapping[str, Any], n_microbatches: int, *, dims: Mapping[str, int] | None = None
) -> dict[str, list[Any]]:
    """Per input, its value for each micro-batch.

    Tensors are cut along dim 0 (or what ``dims`` says) into equal parts; tensors without a batch dimension (0-d, or
    dim 0 of size 1 beside a larger batch) and constants go to every micro-batch whole. Raises :class:`BraidError` with
    the numbers.
    """
    size = batch_size(batch)
    check_rows(size, n_microbatches)
    parts: dict[str, list[Any]] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            parts[name] = [value] * n_microbatches
        elif dims and name in dims and value.shape[dims[name]] == size:
            parts[name] = list(value.split(size // n_microbatches, dim=dims[name]))
        elif value.shape[0] == size:
            parts[name] = list(value.split(size // n_microbatches))
        elif value.shape[0] == 1:
            parts[name] = [value] * n_microbatches
        else:
            raise BraidError(
                f"dim 0 of input {name!r} is {value.shape[0]}, but the batch is {size}; every input is cut along "
                "dim 0, or has size 1 there and goes to every micro-batch whole"
            )
    return parts


def normal(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as fxbraid takes it: a count that changes with every batch is a 0-d tensor, not a constant of the
    trace. Raises :class:`BraidError` for an input that wants a gradient."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise BraidError(
                f"input {name!r} wants a gradient, and fxbraid gives none to inputs; detach() it"
            )
    return {
        name: torch.tensor(value)
        if name == "num_items_in_batch" and isinstance(value, int | float)
        else value
        for name, value in batch.items()
    }


def move(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The same batch with its tensors on ``device``, without waiting for the copies.

    To a GPU they go from pinned memory, or the copy would hold up the host. The pinned block may be dropped at once:
    torch's host allocator gives it to nobody before the copy is done.
    """

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if device.type == "cuda" and value.device.type == "cpu" and not value.is_pinned():
            value = value.pin_memory()
        return value.to(device, non_blocking=True)

    return {name: moved(value) for name, value in batch.items()}
