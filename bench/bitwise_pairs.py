"""Which engines must agree to the bit, and whether they did.

Gradients are sums over micro-batches, so two runs of fxbraid agree bitwise where every chunk's W's run in one order
(DESIGN, section 8): any two with micro-batch order, whatever their chunks; else the same schedule, braided or not.
Compiled, only engines whose units are the same (equal chunks) are held to it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping

from torch import Tensor

from fxbraid.bench.parity import Part
from fxbraid.runtime.ranks import gather
from fxbraid.schedule import Phase, Schedule, parts


def accumulation(schedule: Schedule, compiled: bool) -> str:
    """A name for the order in which ``schedule`` adds gradients up: equal names, equal bits."""
    orders: dict[int, list[int]] = {}
    for row in schedule.actions:
        for action in (one for step in row for one in parts(step)):
            if action.phase in (Phase.W, Phase.B):
                orders.setdefault(action.chunk, []).append(action.microbatch)
    chunks = str(schedule.placement) if compiled else ""
    if all(order == sorted(order) for order in orders.values()):
        return f"micro-batch order {chunks}"
    return f"{schedule.placement} {sorted(orders.items())}"


def digest_of(loss: Tensor, parts: Iterable[Part]) -> str:
    """One digest of the loss and of all gradients on all ranks, the same wherever they lie. Collective.

    Raises ``ValueError`` where two ranks hold the same part of a gradient with different bits.
    """
    mine = {"loss": _sha(loss)}
    for part in parts:
        if part.grad is not None:
            mine[f"{part.name}[{part.index}/{part.count}]"] = _sha(part.grad)
    everyone: list[dict[str, str]] = gather(mine)
    whole: dict[str, str] = {}
    for rank, one in enumerate(everyone):
        for name, value in one.items():
            if whole.setdefault(name, value) != value:
                raise ValueError(f"rank {rank} holds other bits of {name} than a rank before it")
    return hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()


def equal_pairs(digests: Mapping[str, tuple[str, str]]) -> dict[str, bool]:
    """``digests``: engine -> (order of accumulation, digest). Each pair of neighbours that adds up in one order, as
    "a = b", and whether its digests are equal."""
    by_order: dict[str, list[str]] = {}
    for name, (order, _) in digests.items():
        by_order.setdefault(order, []).append(name)
    return {
        f"{a} = {b}": digests[a][1] == digests[b][1]
        for names in by_order.values()
        for a, b in itertools.pairwise(names)
    }


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
