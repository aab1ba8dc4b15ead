"""Part of pass ``vocab``: the graph on a rank's part of the vocabulary, node by node.

A lookup of token ids becomes a masked one and its sum over ranks; what follows the head is made again on the rank's
columns; cross entropy becomes numbers per token (``passes.loss_shards``) and two small all-reduces of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..compat import FakeTensorMode
from .loss_shards import SHARD_STATS
from .marks import TP_MAX, TP_REDUCE

aten = torch.ops.aten
EMBEDDING = aten.embedding.default
LINEAR = aten.linear.default
CROSS_ENTROPY = aten.cross_entropy_loss.default
MEAN, SUM = 1, 2
_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_CASTS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default})
#: Operators that leave the last dimension as it is, if what they return ends with it.
_ARRANGE = _VIEWS | {
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}
#: The same, where their dimension is not the last one.
_BY_DIM = frozenset({aten.slice.Tensor, aten.select.int})


#: Pointwise operators whose value and slope at 0, the logit of a padded column, are finite.
_FINITE_AT_ZERO = [
    "add",
    "clamp",
    "clamp_max",
    "clamp_min",
    "exp",
    "gelu",
    "masked_fill",
    "maximum",
    "minimum",
    "mul",
    "neg",
    "relu",
    "rsub",
    "sigmoid",
    "silu",
    "softplus",
    "sub",
    "tanh",
    "where",
]


class Emitter:
    """Puts calls in front of ``before``, with fake values and with the place of ``like`` in the model."""

    def __init__(self, before: fx.Node, like: fx.Node) -> None:
        self._before, self._like = before, like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(target, args, kwargs)
        node.meta = {**self._like.meta, "val": evaluate(node, self._like.meta["val"].fake_mode)}
        return node


def evaluate(node: fx.Node, mode: FakeTensorMode) -> Any:
    """The fake value of a call, from those of its arguments."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # type: ignore[misc]
    with mode, torch.no_grad():
        return target(*args, **kwargs)


# -- the lookup --------------------------------------------------------------------------------------------------


def shard_lookup(node: fx.Node, rank: fx.Node) -> None:
    """``embedding(W, ids)``, its weight already this rank's rows, becomes ::

    local = ids - rank * rows
    tp_reduce(embedding(W, local within 0 and rows - 1), zero where local is outside)
    """
    weight, ids, padding = node.args[0], node.args[1], argument(node, 2, "padding_idx", -1)
    rows = weight.meta["val"].shape[0]  # type: ignore[union-attr]
    call = Emitter(node, node)
    local = call(aten.sub.Tensor, ids, call(aten.mul.Tensor, rank, rows))
    outside = call(aten.logical_or.default, call(aten.lt.Scalar, local, 0), call(aten.ge.Scalar, local, rows))
    x = call(EMBEDDING, weight, call(aten.clamp.default, local, 0, rows - 1))
    x = call(aten.masked_fill.Scalar, x, call(aten.unsqueeze.default, outside, -1), 0)
    if padding >= 0:  # this token's row is read, and its gradient stays zero
        held = call(aten.unsqueeze.default, call(aten.eq.Scalar, ids, padding), -1)
        x = call(aten.where.self, held, call(aten.detach.default, x), x)
    replace(node, call(TP_REDUCE, x))


# -- behind the head ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Region:
    """What is computed from the logits of one head, column by column.

    ``nodes``: in the order of the graph, the head first; ``losses``: cross entropies on them; ``others``: nodes that
    read them as a whole, by the member that they read.
    """

    vocab: int
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    losses: dict[fx.Node, None] = field(default_factory=dict)
    others: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)


def read_region(head: fx.Node, order: Mapping[fx.Node, int]) -> Region:
    """The region of ``head``, a linear with the vocabulary as its last dimension. ``order``: places in the graph."""
    region = Region(int(head.meta["val"].shape[-1]))
    inside = {head}
    region.nodes[head] = None
    todo = [(order[user], user) for user in head.users]
    heapq.heapify(todo)
    seen: set[fx.Node] = set()
    while todo:
        _, node = heapq.heappop(todo)
        if node in seen:
            continue
        seen.add(node)
        if _by_column(node, inside, region.vocab):
            inside.add(node)
            region.nodes[node] = None
            for user in node.users:
                heapq.heappush(todo, (order[user], user))
        elif _is_loss(node, inside):
            region.losses[node] = None
        else:
            region.others += [(source, node) for source in node.all_input_nodes if source in inside]
    return region


def unsafe_in_padding(region: Region) -> fx.Node | None:
    """The first operator of the region that may make something infinite of a padded column, whose logits are 0: then
    the gradient that nothing should come of is 0 times infinity."""
    for node in region.nodes:
        target: Any = node.target
        if target is LINEAR or target in _ARRANGE | _CASTS | _BY_DIM:
            continue
        name = getattr(target, "overloadpacket", target).__name__
        if name == "div" and node.args[1] not in region.nodes:
            continue
        if name not in _FINITE_AT_ZERO:
            return node
    return None


def _by_column(node: fx.Node, inside: set[fx.Node], vocab: int) -> bool:
    """Does ``node`` work on every column alone?"""
    val = node.meta.get("val")
    if node.op != "call_function" or not isinstance(val, Tensor) or val.ndim == 0 or val.shape[-1] != vocab:
        return False
    target: Any = node.target
    if target in _ARRANGE | _CASTS:
        return True
    if target in _BY_DIM:
        ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
        return int(argument(node, 1, "dim", 0)) % ndim != ndim - 1
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return False
    others = [n.meta["val"] for n in node.all_input_nodes if n not in inside]
    return all(isinstance(o, Tensor) and (o.ndim == 0 or o.shape[-1] == 1) for o in others)


def _is_loss(node: fx.Node, inside: set[fx.Node]) -> bool:
    """A cross entropy of logits [N, vocabulary] with one label each."""
    if node.target is not CROSS_ENTROPY or node.args[0] not in inside or node.args[1] in inside:
        return False
    logits, labels = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    return bool(
        logits.ndim == 2
        and labels.ndim == 1
        and not labels.is_floating_point()
        and argument(node, 2, "weight", None) is None
    )


def localise(region: Region) -> None:
    """Give every node of the region the values of the rank's columns; the head's weight already has them."""
    for node in region.nodes:
        if node.target in _VIEWS:
            sizes = list(node.args[1])  # type: ignore[arg-type]
            sizes[-1] = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
            node.args = (node.args[0], sizes)
        node.meta["val"] = evaluate(node, node.meta["val"].fake_mode)


def shard_loss(node: fx.Node, rank: fx.Node, vocab: int) -> None:
    """Replace a cross entropy on the rank's columns; see ``passes.loss_shards``."""
    labels: fx.Node = node.args[1]  # type: ignore[assignment]
    reduction = argument(node, 3, "reduction", MEAN)
    ignored = int(argument(node, 4, "ignore_index", -100))
    smoothing = float(argument(node, 5, "label_smoothing", 0.0))
    call = Emitter(node, node)
    logits = _narrow(node, call)
    stats = call(SHARD_STATS, logits, labels, rank, vocab, smoothing > 0)
    own = call(aten.detach.default, call(aten.select.int, stats, 0, 0))
    top = call(TP_MAX, own)
    scale = call(aten.exp.default, call(aten.sub.Tensor, own, top))
    shares = [call(aten.mul.Tensor, call(aten.select.int, stats, 0, 1), scale)]
    shares += [call(aten.select.int, stats, 0, k) for k in range(2, stats.meta["val"].shape[0])]
    sums = call(TP_REDUCE, call(aten.stack.default, shares))
    logs = call(aten.log.default, call(aten.select.int, sums, 0, 0))
    # The maximum off the label's logit first: the two are close where the model is right.
    target = call(aten.sub.Tensor, call(aten.select.int, sums, 0, 1), top)
    losses = call(aten.sub.Tensor, logs, target)
    if smoothing > 0:
        mean = call(aten.div.Tensor, call(aten.select.int, sums, 0, 2), vocab)
        even = call(aten.sub.Tensor, logs, call(aten.sub.Tensor, mean, top))
        losses = call(
            aten.add.Tensor,
            call(aten.mul.Tensor, losses, 1 - smoothing),
            call(aten.mul.Tensor, even, smoothing),
        )
    empty = call(aten.eq.Scalar, labels, ignored)
    result = call(aten.masked_fill.Scalar, losses, empty, 0)
    if reduction in (MEAN, SUM):
        result = call(aten.sum.default, result)
    if reduction == MEAN:
        result = call(aten.div.Tensor, result, call(aten.sum.default, call(aten.logical_not.default, empty)))
    dtype = node.meta["val"].dtype
    if result.meta["val"].dtype != dtype:
        result = call(aten._to_copy.default, result, dtype=dtype)
    replace(node, result)


def _narrow(node: fx.Node, call: Emitter) -> fx.Node:
    """The logits of a cross entropy as they are before a cast to float32 that it alone reads: the sums are float32
    anyway, and no wider copy of the logits is kept for the backward."""
    logits: fx.Node = node.args[0]  # type: ignore[assignment]
    views: list[fx.Node] = []
    source = logits
    while source.target in _ARRANGE and len(source.users) == 1:
        views.append(source)
        source = source.args[0]  # type: ignore[assignment]
    if source.target not in _CASTS or len(source.users) != 1:
        return logits
    given: fx.Node = source.args[0]  # type: ignore[assignment]
    if source.meta["val"].dtype is not torch.float32 or given.meta["val"].dtype not in (
        torch.bfloat16,
        torch.float16,
    ):
        return logits
    for view in reversed(views):
        given = call(view.target, given, *view.args[1:], **view.kwargs)
    return given


def gather_columns(value: fx.Node, reader: fx.Node, rank: fx.Node, tp_size: int, vocab: int) -> fx.Node:
    """All ranks' columns of ``value``, in front of ``reader``: each rank's among zeros, summed. For ``eval`` alone."""
    call = Emitter(reader, value)
    val = value.meta["val"]
    ranks = call(aten.arange.default, tp_size, device=val.device)
    others = call(aten.ne.Tensor, ranks, rank)
    apart = call(
        aten.masked_fill.Scalar,
        call(aten.unsqueeze.default, value, -2),
        call(aten.unsqueeze.default, others, -1),
        0,
    )
    side = call(aten.reshape.default, apart, [*val.shape[:-1], tp_size * val.shape[-1]])
    return call(aten.slice.Tensor, call(TP_REDUCE, side), val.ndim - 1, 0, vocab)


# -- nodes -------------------------------------------------------------------------------------------------------


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """An argument of a call by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def replace(node: fx.Node, made: fx.Node) -> None:
    """Everything reads ``made`` in the place of ``node``, which goes."""
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def set_value(module: fx.GraphModule, name: str, value: Tensor, meta: Tensor) -> None:
    """Parameter or buffer ``name`` of ``module`` becomes ``value``, and in its graph ``meta``: the same in the fake
    mode of the trace."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)
    for node in module.graph.find_nodes(op="get_attr"):
        if node.target == name:
            node.meta["val"] = meta
