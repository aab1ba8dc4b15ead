"""What all ranks say, on all ranks: small Python objects, in the thread that trains."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..passes.errors import BraidError


def several() -> bool:
    """Are there other ranks?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if several() else 0


def world() -> int:
    return dist.get_world_size() if several() else 1


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order. Collective over the default process group."""
    if not several():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def raise_together(error: BraidError | str | None) -> None:
    """Raise on every rank what any rank can't go on for. Collective."""
    said = [str(one) for one in gather(None if error is None else str(error)) if one is not None]
    if said:
        distinct = list(dict.fromkeys(said))
        raise BraidError("; ".join(distinct[:5]) + (f"; and {len(distinct) - 5} more" * (len(distinct) > 5)))
