"""Pass ``sequence``: what tensor parallelism left whole works on this rank's s/t tokens (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2).

Contract: (settled graph, plan) -> the same function, in which a value that all ranks hold whole and that treats tokens
one by one is computed on this rank's tokens alone, and the names of the parameters whose gradients thereby are parts::

    x = embedding(W, ids)                  x = embedding(W, part(ids))             # [b, s/t, h]
    h = norm(x)                            h = norm(x)
    q = linear(tp_copy(h), Wq)       =>    q = linear(tp_gather(h), Wq)            # [b, s, h/t]
    y = x + tp_reduce(linear(o, Wo))       y = x + tp_scatter(linear(o, Wo))
    logits = linear(norm(y), head)         logits = linear(tp_join(norm(y)), head)

A reduce-scatter and an all-gather move as many bytes as the all-reduce that they replace. What mixes tokens gets all of
them: attention behind a ``tp_gather``, anything that every rank computes as a whole behind a ``tp_join``, whose
backward only takes this rank's part. What lies in a region behind one gather (rotary tables, masks, the norms of
parallel branches, a router) stays on whole sequences. Values without gradients (ids, positions, masks) are whole on
every rank, and each rank takes its part of them for nothing. The gradient of a norm's weight, or of a row-parallel
linear's bias, is then the sum over the ranks' tokens: summed once per step, as ``plan.partial`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from .capture import Captured
from .errors import PlanError
from .layout import TpPlan
from .marks import (
    CUT,
    TP_COPY,
    TP_GATHER,
    TP_JOIN,
    TP_REDUCE,
    TP_SCATTER,
    TP_SHARE,
    TP_SLICE,
)
from .parts import from_parts, rank_part, to_parts
from .settle import TP_RANK, Kind, infer, names_of
from .tokens import aligned, follow, is_pointwise, localise

aten = torch.ops.aten
#: Inputs that say how many tokens there are: [batch, tokens] and [batch, tokens, features].
_INPUTS = ("input_ids", "inputs_embeds")
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)
#: Views whose shape is that of a tensor, which they do not otherwise read.
_VIEWS_AS = frozenset({aten.view_as.default, aten.reshape_as.default})


def shard_sequence(captured: Captured, plan: TpPlan, canonical: Mapping[str, str]) -> tuple[Captured, TpPlan]:
    """See the module's docstring. Changes ``captured`` in place; ``canonical`` gives the first name of every
    parameter, under which ``plan`` has it.

    Raises :class:`PlanError` for a number of tokens that the TP ranks don't divide, and for a model in which no
    row-parallel sum over [batch, tokens, features] would be scattered.
    """
    batch, length = _tokens(captured, plan.tp_size)
    graph = captured.graph_module.graph
    _bring_together(graph, (batch, length))
    cut = frozenset(name for name, first in canonical.items() if plan.params[first].dim is not None)
    job = _Job(captured, infer(graph, cut), plan.tp_size, batch, length, parts=set(plan.partial))
    job.find()
    if not any(node.target is TP_REDUCE for node in job.dims):
        raise PlanError(
            "sequence_parallel=True finds nothing to cut: the tensor-parallel plan leaves no sum over ranks of shape "
            f"[{batch}, {length}, features] in this model; leave it out, or give a tp_plan with row-parallel linears"
        )
    job.rewrite()
    job.settle_parameters()
    graph.eliminate_dead_code()
    graph.lint()
    captured.graph_module.recompile()
    note = f"sequence parallel: {length} tokens, {length // plan.tp_size} on each rank between the parallel regions"
    return captured, replace(plan, partial=frozenset(job.parts), notes=(*plan.notes, note))


def _tokens(captured: Captured, tp_size: int) -> tuple[int, int]:
    """(batch, tokens) of a micro-batch."""
    found = {n.name: n.meta["val"].shape for n in captured.graph_module.graph.find_nodes(op="placeholder")}
    shape = next((found[name] for name in _INPUTS if len(found.get(name, ())) >= 2), None)
    if shape is None:
        raise PlanError(
            "sequence_parallel=True cuts the tokens of input_ids [batch, tokens] or inputs_embeds [batch, tokens, "
            f"features], and the model got neither (its inputs are {', '.join(found)}); leave it out"
        )
    batch, length = int(shape[0]), int(shape[1])
    if length % tp_size:
        longer = length + tp_size - length % tp_size
        raise PlanError(
            f"sequence_parallel=True: {length} tokens are not divisible by tp_size={tp_size}; pad the batch to "
            f"{longer} tokens (labels -100, attention_mask 0), or use sequence_parallel=False"
        )
    return batch, length


def _bring_together(graph: fx.Graph, shape: tuple[int, int]) -> None:
    """Marks move over views that merge or part batch and tokens, to where both are dimensions of their own::

    view(tp_reduce(y [b*s, h]), [b, s, h])     =>     tp_reduce(view(y, [b, s, h]))
    tp_copy(view(h [b, s, h], [b*s, h]))       =>     view(tp_copy(h), [b*s, h])
    """
    for node in list(graph.nodes):
        if node.target in _VIEWS_AS:
            node.target, node.args = aten.reshape.default, (node.args[0], _shape(node))
        if node.target not in _VIEWS:
            continue
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if source.target is TP_REDUCE and len(source.users) == 1 and node.meta["val"].shape[:2] == shape:
            inner: fx.Node = source.args[0]  # type: ignore[assignment]
            node.replace_input_with(source, inner)
            with graph.inserting_after(node):
                mark = graph.call_function(TP_REDUCE, (node,))
            mark.meta = dict(node.meta)
            node.replace_all_uses_with(mark, delete_user_cb=lambda user, mark=mark: user is not mark)
            graph.erase_node(source)
        users = list(node.users)
        if source.meta["val"].shape[:2] == shape and [u.target for u in users] == [TP_COPY]:
            with graph.inserting_before(node):
                mark = graph.call_function(TP_COPY, (source,))
            mark.meta = {**users[0].meta, "val": source.meta["val"]}
            node.replace_input_with(source, mark)
            users[0].replace_all_uses_with(node)
            graph.erase_node(users[0])


@dataclass(slots=True)
class _Job:
    """``dims``: nodes that are computed on this rank's tokens, and the dimension in which those lie. ``parts``: names
    of the parameters whose gradients are parts. ``reads``: where a weight is read whole, and where its parts are
    summed at the reading."""

    captured: Captured
    kinds: Mapping[fx.Node, Kind]
    tp_size: int
    batch: int
    length: int
    parts: set[str]
    dims: dict[fx.Node, int] = field(default_factory=dict)
    made: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)
    reads: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    rank: fx.Node | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.captured.graph_module.graph

    # -- what is computed on a part of the tokens

    def find(self) -> None:
        tables = self.graph.find_nodes(op="call_function", target=aten.embedding.default)
        width = next((_width(n) for n in tables if _shape(n)[-2:-1] == [self.length]), None)
        sums = [n for n in self.graph.nodes if n.target is TP_REDUCE and self._is_stream(n)]
        if any(_width(n) == width for n in sums):
            sums = [n for n in sums if _width(n) == width]
        self.dims = dict.fromkeys(sums, 1)
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target in (TP_COPY, TP_REDUCE, TP_SHARE):
                continue
            if self.kinds[node] not in (Kind.WHOLE, Kind.FREE):
                continue
            if self._embeds(node):
                self.dims[node] = node.meta["val"].ndim - 2
            elif any(n in self.dims for n in node.all_input_nodes):
                dim = follow(node, self.dims)
                if dim is not None:
                    self.dims[node] = dim

    def _is_stream(self, node: fx.Node) -> bool:
        val = node.meta["val"]
        return val.ndim == 3 and val.shape[:2] == (self.batch, self.length) and val.shape[2] > 1

    def _embeds(self, node: fx.Node) -> bool:
        """A row of a table for each token."""
        if node.target is not aten.embedding.default:
            return False
        ids: fx.Node = node.args[1]  # type: ignore[assignment]
        shape = ids.meta["val"].shape
        return len(shape) > 0 and shape[-1] == self.length and self.kinds[ids] is Kind.FREE

    # -- the new graph

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            if node.target is TP_COPY and node.args[0] in self.dims:
                self._replace(node, self._gather(node))
            elif node in self.dims and node.target is TP_REDUCE:
                scattered = self._scatter(node)
                self.dims[scattered] = self.dims.pop(node)
                self._replace(node, scattered)
            elif node in self.dims:
                self._note_reads(node, part=True)
                self._localise(node)
            else:
                self._note_reads(node, part=False)
                for source in node.all_input_nodes:
                    if source in self.dims:
                        node.replace_input_with(source, self._join(source, node))

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _localise(self, node: fx.Node) -> None:
        dim = self.dims[node]
        if node.target is aten.embedding.default and node.args[1] not in self.dims:
            ids: fx.Node = node.args[1]  # type: ignore[assignment]
            node.replace_input_with(ids, self._part(ids, ids.meta["val"].ndim - 1))
        elif is_pointwise(node):
            for source in node.all_input_nodes:
                if source not in self.dims and isinstance(source.meta.get("val"), Tensor):
                    at = aligned(node, source, dim)
                    if at is not None:
                        node.replace_input_with(source, self._part(source, at))
        for source in node.all_input_nodes:
            # It goes with every token, so that its gradient is a sum over all ranks' tokens.
            if source not in self.dims and self.kinds.get(source) is Kind.WHOLE:
                node.replace_input_with(source, self._copy(source))
        localise(node, dim, self.length // self.tp_size)
        self._value(node)

    def _copy(self, source: fx.Node) -> fx.Node:
        key = ("copy", source)
        if key not in self.made:
            self.made[key] = self._writer(source, behind=source)(TP_COPY, source)
        return self.made[key]

    def _part(self, source: fx.Node, dim: int) -> fx.Node:
        """This rank's tokens of a whole value; right behind it, so that no whole value is sent."""
        key = ("part", source, dim)
        if key not in self.made:
            op = self._writer(source, behind=source)
            if self.kinds.get(source) is Kind.WHOLE:
                self.made[key] = op(TP_SLICE, source, self._rank(), self.tp_size, dim)
            else:
                self.made[key] = rank_part(op, source, _shape(source), self._rank(), self.tp_size, dim)
        return self.made[key]

    def _gather(self, copy: fx.Node) -> fx.Node:
        """All tokens of what a region of column-parallel linears reads."""
        source: fx.Node = copy.args[0]  # type: ignore[assignment]
        op = self._writer(copy, before=copy)
        mark = op(TP_GATHER, source, self.tp_size)
        return from_parts(op, mark, _shape(source), self.tp_size, self.dims[source])  # type: ignore[no-any-return]

    def _scatter(self, reduce: fx.Node) -> fx.Node:
        """This rank's tokens of a sum over ranks."""
        dim, shape = self.dims[reduce], _shape(reduce)
        for linear in _rows(reduce.args[0]):
            # A unit ends in front of a row-parallel product, so that the collectives on both sides of a region hide
            # behind one half each of another strand's.
            half = self._writer(linear, before=linear)(CUT, linear.args[0])
            linear.args = (half, *linear.args[1:])
        op = self._writer(reduce, before=reduce)
        mark = op(TP_SCATTER, to_parts(op, reduce.args[0], shape, self.tp_size, dim), self.tp_size)
        part = [n // self.tp_size if d == dim else n for d, n in enumerate(shape)]
        return op(aten.view.default, mark, part)  # type: ignore[no-any-return]

    def _join(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """All tokens for a reader that every rank computes as a whole; one for the readers of one module."""
        stack = [path for path, *_ in (reader.meta.get("nn_module_stack") or {}).values()]
        key = ("join", source, *stack[:4])
        if key not in self.made:
            like = reader if reader.op == "call_function" else source
            op = self._writer(like, behind=source)
            mark = op(TP_JOIN, source, self._rank(), self.tp_size)
            self.made[key] = from_parts(op, mark, _shape(source), self.tp_size, self.dims[source])
        return self.made[key]

    def _rank(self) -> fx.Node:
        """The number of this rank among the TP ranks."""
        if self.rank is None:
            first = next(iter(self.graph.nodes))
            known = self.graph.find_nodes(op="get_attr", target=TP_RANK)
            if known:
                self.rank = known[0]
                first.prepend(self.rank)
            else:
                module = self.captured.graph_module
                held: Any = next(module.parameters())
                traced: Any = next(n.meta["val"] for n in self.graph.find_nodes(op="placeholder"))
                # What a module holds and what its nodes are traced with are fake tensors of two modes.
                ranks = []
                for val in (held, traced):
                    with val.fake_mode:
                        ranks.append(torch.empty(1, dtype=torch.long, device=val.device))
                module.register_buffer(TP_RANK, ranks[0], persistent=False)
                with self.graph.inserting_before(first):
                    self.rank = self.graph.get_attr(TP_RANK)
                self.rank.meta["val"] = ranks[1]
        return self.rank

    # -- nodes and their values

    def _writer(
        self, like: fx.Node, *, before: fx.Node | None = None, behind: fx.Node | None = None
    ) -> Callable[..., fx.Node]:
        """Appends nodes in one place, with the module stack of ``like``."""
        place = before
        if behind is not None:
            place = behind.next
            while place.op in ("placeholder", "get_attr"):  # the rank is among them
                place = place.next

        def write(target: Any, *args: Any) -> fx.Node:
            with self.graph.inserting_before(place):
                node = self.graph.call_function(target, args)
            node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
            self._value(node)
            return node

        return write

    def _value(self, node: fx.Node) -> None:
        """Compute the fake value of ``node`` from those of its inputs."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        val: Any = next(n.meta["val"] for n in self.graph.find_nodes(op="placeholder"))
        with val.fake_mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta.pop("tensor_meta", None)

    # -- parameters

    def _note_reads(self, node: fx.Node, *, part: bool) -> None:
        """Remember where weights are read by something that is no weight."""
        if node.op != "call_function" or self.kinds.get(node) is Kind.WEIGHT:
            return
        copied = node.target is TP_COPY  # a weight whose parts are summed at every reading
        inner = self.kinds.get(node) in (Kind.PART, Kind.LOCAL) and not copied
        for source in node.all_input_nodes:
            if self.kinds.get(source) is not Kind.WEIGHT or inner:
                continue
            if part:
                self.parts.update(names_of(source))
            else:
                self.reads.append((source, node))

    def settle_parameters(self) -> None:
        """A parameter that some tokens' gradients are summed for over ranks is a part wherever else it is read, too:
        behind a ``tp_share`` where its gradient is whole, and without the ``tp_copy`` of its readings in regions."""
        before = -1
        while before != len(self.parts):
            before = len(self.parts)
            for source, _ in self.reads:
                names = names_of(source)
                if not self.parts.isdisjoint(names):
                    self.parts.update(names)
        shares: dict[fx.Node, fx.Node] = {}
        for source, node in self.reads:
            if self.parts.isdisjoint(names_of(source)):
                continue
            if node.target is TP_COPY:
                self._replace(node, source)
                continue
            if source not in shares:
                shares[source] = self._writer(source, behind=source)(TP_SHARE, source, self.tp_size)
            node.replace_input_with(source, shares[source])


def _rows(node: Any) -> list[fx.Node]:
    """The products that are terms of a sum over ranks."""
    if node.target is aten.linear.default:
        return [node]
    if node.target is aten.add.Tensor or node.target in _VIEWS:
        return [found for source in node.all_input_nodes for found in _rows(source)]
    return []


def _shape(node: fx.Node) -> list[int]:
    return [int(n) for n in node.meta["val"].shape]


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])
