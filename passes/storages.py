"""What the graph of a unit holds while it runs, and what its results keep, storage by storage.

Contract: (graph module, how many of its inputs are state) -> :class:`Held`, found by running the graph on fake tensors:
a view shares its source's storage, and a storage counts once, from the node that makes it to the last node that reads
it or a view of it::

    a = x.mm(p); b = a.t(); c = a.relu(); return b      a: held until the unit returns, by b; c: made and dropped

``fused``: as Inductor compiles it. What pointwise operators and reductions make for each other alone never lies in
memory; what a kernel of its own reads (a matrix product, attention, a gather), or the unit returns, does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .. import compat
from .buffers import may_alias

aten = torch.ops.aten
#: Reductions and the like, which Inductor fuses with the pointwise operators before them.
_FUSED = frozenset(
    {
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.mean.dim,
        aten.mean.default,
        aten.amax.default,
        aten.amin.default,
        aten.var.correction,
        aten.var_mean.correction,
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.cat.default,
        aten.full.default,
        aten.arange.start_step,
        aten.slice_backward.default,
        aten.select_backward.default,
    }
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of a unit. high: the most bytes of its own that it holds in it; level: what is left of them at its end.
    drops: the arguments that the unit then has read for the last time."""

    high: int
    level: int
    drops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Out:
    """A result. arg: the argument whose storage it is; made: the storage of the unit's own that it is (an index of
    ``Held.made``); neither where it is a view of state. nbytes: of its elements; dense: are they contiguous?"""

    arg: int | None
    made: int | None
    nbytes: int
    dense: bool


@dataclass(frozen=True, slots=True)
class Held:
    """``moments`` in order, ``made``: bytes of each storage that outlives the call, ``outs``: the results."""

    moments: tuple[Moment, ...]
    made: tuple[int, ...]
    outs: tuple[Out, ...]


def held(module: fx.GraphModule, *, state: int = 0, fused: bool = False) -> Held:
    """See the module's docstring. ``state``: the first inputs, parameters and buffers, which are always there."""
    return _Reading(module, state, fused).result()


class _Reading:
    def __init__(self, module: fx.GraphModule, state: int, fused: bool) -> None:
        graph = module.graph
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.results: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        self.values = _run(module)
        places = [node for node in self.nodes if node.op == "placeholder"]
        given = {
            key: k - state for k, node in reversed(list(enumerate(places))) for key in self._keys(node)
        }  # of arguments that share a storage the first
        self.args: dict[int, int] = {key: k for key, k in given.items() if k >= 0}
        self.state = {key for key, k in given.items() if k < 0}
        self.virtual = self._never_there() if fused else set()

    def _keys(self, node: fx.Node) -> Iterator[int]:
        for tensor in _tensors(self.values[node]):
            yield compat.storage_key(tensor)

    def _sizes(self, node: fx.Node) -> dict[int, int]:
        return {compat.storage_key(t): t.untyped_storage().nbytes() for t in _tensors(self.values[node])}

    def _never_there(self) -> set[int]:
        """Storages that fusion does away with."""
        real: set[int] = set()
        for node in self.nodes:
            if node.op == "call_function" and not _fusible(node):
                real.update(self._keys(node))
                for source in node.all_input_nodes:
                    real.update(self._keys(source))
        for node in self.results:
            real.update(self._keys(node))
        return {key for node in self.nodes for key in self._keys(node)} - real

    def _ends(self) -> dict[int, int]:
        """Storage -> the place of the node that reads it last; those of results have none."""
        place = {node: k for k, node in enumerate(self.nodes)}
        kept = {key for node in self.results for key in self._keys(node)}
        ends: dict[int, int] = {}
        for node in self.nodes:
            last = max((place[user] for user in node.users if user in place), default=place[node])
            for key in self._keys(node):
                ends[key] = max(ends.get(key, -1), last)
        return {key: end for key, end in ends.items() if key not in kept}

    def result(self) -> Held:
        ends = self._ends()
        behind: dict[int, list[int]] = {}
        for key, end in ends.items():
            behind.setdefault(end, []).append(key)
        moments: list[Moment] = []
        sizes: dict[int, int] = {}
        high = level = 0
        for k, node in enumerate(self.nodes):
            for key, size in self._sizes(node).items():
                if key not in sizes and key not in self.args and key not in self.state:
                    sizes[key] = 0 if key in self.virtual else size
                    level += sizes[key]
            high = max(high, level)
            dropped = []
            for key in behind.get(k, ()):
                level -= sizes.get(key, 0)
                if key in self.args:
                    dropped.append(self.args[key])
            if dropped:
                moments.append(Moment(high, level, tuple(sorted(dropped))))
                high = level
        moments.append(Moment(high, level, ()))
        made: dict[int, int] = {}
        outs = []
        for node in self.results:
            value = self.values[node]
            key = compat.storage_key(value)
            arg, index = self.args.get(key), None
            if arg is None and key not in self.state:
                index = made.setdefault(key, len(made))
            outs.append(Out(arg, index, value.numel() * value.element_size(), value.is_contiguous()))
        return Held(tuple(moments), tuple(sizes[key] for key in made), tuple(outs))


def _fusible(node: fx.Node) -> bool:
    target: Any = node.target
    if may_alias(node) or target in _FUSED:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _run(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """The value of every node, on fake tensors of its own."""
    mode = compat.FakeTensorMode()
    values: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return values[node]

    with mode, torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = _fake(node.meta["val"])
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values


def _fake(val: Any) -> Any:
    if not isinstance(val, Tensor):
        return val
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
