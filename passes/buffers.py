"""Pass ``buffers``: the buffer of every receive of a program, reused as soon as nothing can read it any more.

Contract: (program graph, received values) -> a slot for every received value, and the layout of every slot. A value
occupies its slot from the node that posts it to the last node that may read its storage::

    post_F1 = self.post_F1(0)              # slot 0 is taken
    [y0_0_0] = self.arrive_F1(post_F1)
    [for_I, for_W] = self.F2(y0_0_0)       # for_W keeps y0_0_0, or a view of it
    self.W2(for_W, handed)                 # the last reader: slot 0 is free behind it
    post_F1_4 = self.post_F1(0)

What may share the storage is followed through the graphs of the chunks: a value and its views, in the boxes that F
hands to I and W and I to W, over the turn of a V into the next chunk. A value whose storage leaves the program (a
result, or part of a message that is sent on) gets no slot but a buffer of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ..schedule import Action
from ..schedule import Phase as Do
from .block import Block
from .marks import is_mark
from .units import ChunkUnits

#: Operators whose result may be their input though their schema does not say so.
_SILENT = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.native_dropout.default})
BOXES = ("for_I", "for_W", "handed")


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and type of one value that crosses a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(val: Tensor) -> Layout:
        """The layout of a (fake) tensor."""
        return Layout(tuple(val.shape), val.dtype, val.device)


@dataclass(frozen=True, slots=True)
class Call:
    """A block call in the program: its actions, and what each reads (name in the block, program node)."""

    block: Block
    actions: tuple[Action, ...]
    reads: tuple[tuple[tuple[str, fx.Node], ...], ...]


@dataclass(slots=True)
class Received:
    """One value of a message: where it is posted, where it arrives, how it is laid out."""

    post: fx.Node
    value: fx.Node
    layout: Layout


@dataclass(slots=True)
class Slots:
    """``of``: slots (None: a buffer of its own) of each post node, in the order of its values. ``layouts``: of each
    slot. ``free_behind``: the slots that become free behind a node."""

    of: dict[fx.Node, list[int | None]] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)
    free_behind: dict[fx.Node, list[int]] = field(default_factory=dict)


def assign(
    graph: fx.Graph,
    received: Sequence[Received],
    calls: Mapping[fx.Node, Call],
    chunks: Mapping[int, ChunkUnits],
) -> Slots:
    """See the module's docstring. ``received``: in the order of their posts."""
    result = Slots()
    readers = _Readers(graph, calls, chunks)
    ends = {item.value: readers.last(item.value) for item in received}
    posts: dict[fx.Node, list[Received]] = {}
    for item in received:
        posts.setdefault(item.post, []).append(item)
    free: dict[Layout, list[int]] = {}
    for node in graph.nodes:
        for item in posts.get(node, ()):
            end, slot = ends[item.value], None
            if end is not None:
                pool = free.setdefault(item.layout, [])
                if not pool:
                    pool.append(len(result.layouts))
                    result.layouts.append(item.layout)
                slot = pool.pop(pool.index(min(pool)))
                result.free_behind.setdefault(end, []).append(slot)
            result.of.setdefault(node, []).append(slot)
        for slot in result.free_behind.get(node, ()):
            free[result.layouts[slot]].append(slot)
    return result


class _Readers:
    """Who reads the storage of a value of the program, and until when."""

    def __init__(
        self, graph: fx.Graph, calls: Mapping[fx.Node, Call], chunks: Mapping[int, ChunkUnits]
    ) -> None:
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        self.nodes = list(graph.nodes)
        self.calls, self.chunks = calls, chunks

    def last(self, value: fx.Node) -> fx.Node | None:
        """The last node that may read the storage of ``value``; None where it leaves the program."""
        # Program nodes that share the storage; for boxes, which of their values do (nodes of the chunk's graph).
        shared: dict[fx.Node, set[fx.Node]] = {value: set()}
        end = value
        for node in self.nodes[self.order[value] + 1 :]:
            if not any(source in shared for source in node.all_input_nodes):
                continue
            if node.op == "output":
                return None
            end = node
            if "parked" in node.meta:  # on its way to the host and back with what shares the boxes
                shared[node] = set().union(*(shared.get(source, set()) for source in node.all_input_nodes))
            elif node in self.calls and self._through(node, shared):
                return None
        return end

    def _through(self, node: fx.Node, shared: dict[fx.Node, set[fx.Node]]) -> bool:
        """Add the results of the block call ``node`` that share the storage; True where one is sent away."""
        call = self.calls[node]
        items = {int(user.args[1]): user for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]
        index = 0
        for action, names, reads in zip(call.actions, call.block.outputs, call.reads, strict=True):
            chunk = self.chunks[action.chunk]
            seeds: set[fx.Node] = set()
            for name, source in reads:
                if source in shared:
                    seeds |= shared[source] if name in BOXES else {_inside(chunk, name)}
            alias = aliases(seeds)
            if _sent(chunk, action, names, alias):
                return True
            for name in names:
                inside = alias & set(_results(chunk, name))
                if inside and index in items:
                    shared[items[index]] = inside if name in BOXES else set()
                index += 1
        return False


def aliases(seeds: Iterable[fx.Node], shares: Callable[[fx.Node], bool] | None = None) -> set[fx.Node]:
    """``seeds`` and every node behind them that may share their storage."""
    shares = shares or may_alias
    found: set[fx.Node] = set()
    todo = list(seeds)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [user for user in node.users if shares(user)]
    return found


def may_alias(node: fx.Node) -> bool:
    """May the result of ``node`` share the storage of an input? By the operator's schema; anything unknown may."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or is_mark(node) or node.target in _SILENT:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(value.alias_info is not None for value in node.target._schema.returns)


def _inside(chunk: ChunkUnits, name: str) -> fx.Node:
    """The node of the chunk's graph that input ``x2`` or ``dy0`` of its block is."""
    if name.startswith("dy"):
        return chunk.joint.tangents[int(name[2:])]
    return chunk.joint.boundary[int(name[1:])]


def _results(chunk: ChunkUnits, name: str) -> Sequence[fx.Node]:
    """The nodes of the chunk's graph that output ``y0``, ``dx0`` or a box of its block holds."""
    if name in BOXES:
        return getattr(chunk, name)  # type: ignore[no-any-return]
    if name.startswith("dx"):
        return [chunk.input_grads[int(name[2:])]]
    return [chunk.outputs[int(name[1:])]]


def _sent(chunk: ChunkUnits, action: Action, names: Sequence[str], alias: set[fx.Node]) -> bool:
    """Does the block send a value of ``alias`` to another rank (what stays here is among its ``names``)?"""
    if action.phase is Do.F:
        return not any(name.startswith("y") for name in names) and not alias.isdisjoint(chunk.outputs)
    if action.phase is Do.W:
        return False
    return not any(name.startswith("dx") for name in names) and not alias.isdisjoint(chunk.input_grads)
