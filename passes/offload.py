"""Pass ``offload``: which of the values that F hands to I and W may leave the device in between.

Contract: (chunk) -> its storages that may leave, in the order in which F makes them. A storage that several saved views
share goes once. Nothing goes that something else needs: parameters and buffers, inputs of the batch, a boundary value
that was received (it lies in a receive buffer) or that is sent on, and whatever may share memory with those::

    F1:  h = attn(x0);  a = silu(g);  y = h + mlp(a)        x0 received, y sent: they stay
         for_I = [x0, h, a.t()];  for_W = [h.view(...), a]  h and a may leave, each once

It only says what may leave: which of it does, and when, is a plan (``schedule.offload``), and moving anything else
would be as right.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import Tensor, fx

from .buffers import may_alias
from .joint import Phase
from .launches import launched
from .units import ChunkUnits, Unit

BOXES = ("for_I", "for_W")


@dataclass(frozen=True, slots=True)
class Stored:
    """One storage that may leave. places: (box, index) of the values that lie in it, box 0 is ``for_I`` and 1
    ``for_W``. nbytes: of the storage, by the graph. unit: the one that makes it, or what a collective makes it of."""

    places: tuple[tuple[int, int], ...]
    nbytes: int
    unit: Unit | None


def stored(chunk: ChunkUnits) -> tuple[Stored, ...]:
    """See the module's docstring."""
    joint = chunk.joint
    group = _groups(chunk)
    kept = {group[node] for node in (*joint.state, *joint.inputs.values(), *joint.boundary, *joint.free)}
    kept |= {group[node] for node in chunk.outputs}
    found: dict[fx.Node, list[tuple[int, int]]] = {}
    for box, nodes in enumerate((chunk.for_I, chunk.for_W)):
        for index, node in enumerate(nodes):
            if group[node] not in kept and joint.phase.get(node) is Phase.F:
                found.setdefault(group[node], []).append((box, index))
    sizes: dict[fx.Node, int] = {}
    for node, root in group.items():
        if root in found and joint.phase.get(node) is Phase.F:
            sizes[root] = max(sizes.get(root, 0), span(node.meta.get("val")))
    makers: dict[fx.Node, Unit] = {}
    for unit in reversed(chunk.units[Phase.F]):
        for out in unit.outs:
            makers[group[out]] = unit
            makers.update({group[user]: unit for user in launched(chunk, unit, out)})
    order = {node: k for k, node in enumerate(joint.graph.nodes)}
    return tuple(
        Stored(tuple(places), sizes[root], makers.get(root))
        for root, places in sorted(found.items(), key=lambda one: order[one[0]])
    )


def span(val: object) -> int:
    """Bytes from the first element of a (fake) tensor to its last: of a view that repeats elements, those that there
    are."""
    if not isinstance(val, Tensor) or val.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(val.shape, val.stride(), strict=True))
    return (1 + int(last)) * val.element_size()


def _groups(chunk: ChunkUnits) -> dict[fx.Node, fx.Node]:
    """Every node's storage, named by its first node. What may share one counts as one."""
    root: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            root[node] = node = root[root[node]]
        return node

    order = {node: k for k, node in enumerate(chunk.joint.graph.nodes)}
    for node in order:
        root[node] = node
        if _shares(node) and not chunk.is_collective(node):
            for source in node.all_input_nodes:
                one, other = sorted((find(source), find(node)), key=order.__getitem__)
                root[other] = one
    return {node: find(node) for node in root}


def _shares(node: fx.Node) -> bool:
    """May ``node`` lie in the memory of what it reads? One of several results does where the others do: a part of a
    split lies in the whole, attention's logsumexp does not lie in its output."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return may_alias(node)
