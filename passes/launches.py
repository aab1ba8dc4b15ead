"""Which collectives a unit launches and reads, and what each is in a block: part of pass ``braid``.

=========== ============================== ==========================================
mark        becomes                        is left out as (``collectives="free"``)
=========== ============================== ==========================================
tp_reduce   all_reduce                     this rank's value
tp_max      all_reduce, maximum            this rank's value
tp_gather   all_gather_into_tensor         this rank's value, repeated
tp_scatter  reduce_scatter_tensor          as much of this rank's value
=========== ============================== ==========================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .joint import Phase
from .marks import MARKS, TP_GATHER, TP_MAX, TP_SCATTER, is_collective
from .units import ChunkUnits, Unit

aten = torch.ops.aten
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
#: Everything that launches a collective.
LAUNCHES = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER})
WAIT = torch.ops._c10d_functional.wait_tensor.default


def call_of(mark: fx.Node, value: fx.Node, tp_size: int, group: str) -> tuple[Any, tuple[Any, ...]]:
    """Operator and arguments of the collective that ``mark`` becomes, on ``value`` of a block's graph."""
    if mark.target is TP_GATHER:
        return ALL_GATHER, (value, tp_size, group)
    if mark.target is TP_SCATTER:
        return REDUCE_SCATTER, (value, "sum", tp_size, group)
    return ALL_REDUCE, (value, "max" if mark.target is TP_MAX else "sum", group)


def left_out(mark: fx.Node, value: fx.Node) -> fx.Node:
    """What takes the place of ``mark``'s collective where it is left out: ``value``, in the shape of the result."""
    val, taken = mark.meta["val"], mark.args[0].meta["val"]  # type: ignore[union-attr]
    if mark.target is TP_GATHER:
        times = [int(val.shape[0]) // int(taken.shape[0])] + [1] * (val.ndim - 1)
        local = value.graph.call_function(aten.repeat.default, (value, times))
    elif mark.target is TP_SCATTER:
        local = value.graph.call_function(aten.slice.Tensor, (value, 0, 0, int(val.shape[0])))
    else:
        return value
    local.meta |= {"local": True, "val": val, "taken": taken}
    return local


def fetched(chunk: ChunkUnits, unit: Unit) -> list[fx.Node]:
    """The all-gathers of W that ``unit`` reads (pass ``regather``)."""
    if unit.phase is not Phase.W:
        return []
    return [n for n in unit.args if chunk.is_collective(n) and chunk.joint.phase[n] is Phase.W]


def ends_with_mark(chunk: ChunkUnits, unit: Unit) -> bool:
    """Does the unit end with a TP mark? Also where tp_size is 1, so that the order does not depend on it."""
    users = (user for out in unit.outs for user in _readers(chunk, out))
    return any(is_collective(user) and chunk.joint.phase[user] is unit.phase for user in users)


def launched(chunk: ChunkUnits, unit: Unit, out: fx.Node) -> list[fx.Node]:
    """The collectives that are launched behind ``unit``, of those that take its result ``out``."""
    users = filter(chunk.is_collective, _readers(chunk, out))
    return [user for user in users if chunk.joint.phase[user] is unit.phase]


def _readers(chunk: ChunkUnits, node: fx.Node) -> list[fx.Node]:
    """Users of ``node``, and what lies behind marks that do nothing."""
    found: list[fx.Node] = []
    for user in node.users:
        found.append(user)
        if user.target in MARKS and not chunk.is_collective(user):
            found += _readers(chunk, user)
    return found
