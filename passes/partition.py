"""Pass ``partition``: the model's graph in S chunks, one after the other.

Contract: (captured graph, S) -> S graphs with the same inputs by name; chunk c takes the boundary values of chunk
c - 1 as further placeholders ``boundary_0, ...`` and returns its own, the last chunk the model's outputs::

    x = embedding(W, ids); m = mask(am)     chunk 0: (ids, am) -> x1      chunk 1: (am, boundary_0) -> loss
    x1 = layer0(x, m)                   =>    m = mask(am)                  m = mask(am)      # made again
    loss = head(layer1(x1, m))                x1 = layer0(embed(ids), m)    loss = head(layer1(boundary_0, m))

Chunks are runs of stretches (pass ``stretches``: layers of all towers, and what lies between them), cut where their
costs balance. A value that depends on inputs alone (rotary tables, masks, position ids) is made again in each chunk
that reads it and never sent. An activation that a later chunk than the next one reads (pass ``carry``) goes through
the chunks between as one more boundary value. ``cut`` marks go where a unit must end without a collective: between
layers and what is none, and between layers of a model without TP marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx

from .capture import Captured
from .carry import Skip, carry_on, dense, view_again
from .cost import StretchCost, phase_flops
from .cutting import Cut, Cutter, balanced, given
from .errors import PartitionError
from .marks import CUT, is_mark
from .stretches import Place, Stretches, stretches
from .trainable import wants_grad

BOUNDARY = "boundary_{}"

Split = str | Sequence[int] | Cut | Cutter
"""What :func:`partition` is told of where to cut."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One virtual pipeline stage before it is differentiated."""

    index: int
    graph_module: fx.GraphModule
    #: placeholders that are the user's inputs (or loss counts), in order
    inputs: tuple[str, ...]
    #: number of boundary placeholders (after the inputs) and of boundary outputs
    boundary_in: int
    boundary_out: int
    #: parameters by Hugging Face name, in order of first use
    params: tuple[str, ...]
    #: output names of the last chunk, () elsewhere
    outputs: tuple[str, ...]
    layers: range
    #: per boundary placeholder: does a gradient go back through it?
    boundary_grads: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Partition:
    """``chunks`` in model order, ``layers`` = number of layers of all towers, ``costs`` FLOPs of F, I and W per chunk,
    ``read_in`` the layers that read each parameter (-1: before the layers, ``layers``: behind them), ``cut`` where the
    chunks begin, ``skips`` the values that go through chunks in which they aren't made, ``names`` the layers' paths,
    ``stretches`` the costs that the cut was made from."""

    chunks: tuple[Chunk, ...]
    layers: int
    costs: tuple[int, ...]
    read_in: Mapping[str, frozenset[int]]
    cut: Cut
    skips: tuple[Skip, ...]
    names: tuple[str, ...]
    stretches: tuple[StretchCost, ...]


def partition(
    captured: Captured,
    n_chunks: int,
    *,
    split: Split = "auto",
    keyed: Mapping[str, Place] | None = None,
    outputs: bool = False,
) -> Partition:
    """Cut into ``n_chunks``. ``split``: "auto" balances the FLOPs of F, I and W, embedding and head included; or the
    number of layers of each chunk, in the order in which they run; or where to cut, or a function that says so, given
    the costs. ``keyed``: the layers that have a name in place of a number (:func:`stretches.keyed_layers`).
    ``outputs``: the last chunk returns outputs of chunks before it as well (for ``eval``: in training they would be
    left without a gradient).

    Raises :class:`PartitionError` for fewer layers than chunks, or a split that does not add up.
    """
    graph = captured.graph_module.graph
    live = _live(graph)
    row = stretches(graph, live, n_chunks, keyed or {})
    n_layers = len(row.layers)
    if n_layers < n_chunks:
        raise PartitionError(
            f"the model has {n_layers} layers, fewer than the {n_chunks} chunks that the schedule cuts it into; "
            f"use a smaller pp_size, a schedule with fewer chunks per rank, or a model of {n_chunks} layers or more"
        )
    costs = _costs(graph, row)
    cut = _cut(split, costs, row, n_chunks)
    bounds = [0, *cut.at, row.count]
    chunk_of = [c for c in range(n_chunks) for _ in range(bounds[c], bounds[c + 1])]
    view_again(graph, row.of, chunk_of)
    _insert_cuts(graph, live, row)
    owner = {node: chunk_of[at] for node, at in row.of.items()}
    dense(graph, owner)
    skips = carry_on(graph, owner, n_chunks - 1, outputs=outputs)
    entering = [_crossing(graph, owner, c - 1) if c else [] for c in range(n_chunks)]
    grads = _with_gradient(captured, entering)
    layers = [range(bounds[c] // 2, bounds[c + 1] // 2) for c in range(n_chunks)]
    chunks = tuple(
        _extract(captured, c, n_chunks, owner, layers[c], entering[c], grads) for c in range(n_chunks)
    )
    return Partition(
        chunks=chunks,
        layers=n_layers,
        costs=tuple(
            round(sum(cost.total for cost in costs[bounds[c] : bounds[c + 1]])) for c in range(n_chunks)
        ),
        read_in=_read_in(graph, row),
        cut=cut,
        skips=skips,
        names=row.layers,
        stretches=costs,
    )


def alike(parts: Partition) -> list[int]:
    """For every chunk the first one that computes the same: equal operators on equal shapes and types."""
    first: dict[str, int] = {}
    return [first.setdefault(_structure(chunk), chunk.index) for chunk in parts.chunks]


def distinct(parts: Partition) -> list[int]:
    """The chunks that compute what no chunk before them does."""
    return sorted(set(alike(parts)))


def _structure(chunk: Chunk) -> str:
    number: dict[fx.Node, str] = {}
    lines = [repr(chunk.boundary_grads)]
    for node in chunk.graph_module.graph.nodes:
        number[node] = f"%{len(number)}"
        args = fx.map_arg((node.args, node.kwargs), lambda n: _Number(number[n]))
        val = node.meta.get("val")
        kind = (
            (tuple(val.shape), val.stride(), val.dtype, val.requires_grad) if isinstance(val, Tensor) else ""
        )
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args!r} {kind}")
    return "\n".join(lines)


class _Number(str):
    """A numbered node inside ``repr`` of arguments."""

    __slots__ = ()


def _cut(split: Split, costs: Sequence[StretchCost], row: Stretches, n_chunks: int) -> Cut:
    if isinstance(split, str):
        if split != "auto":
            raise PartitionError(f'split={split!r}: use "auto" or a list with the layers of each chunk')
        return balanced(costs, row, n_chunks)
    if isinstance(split, Sequence):
        return given(cast(Sequence[int], split), row, n_chunks)
    cut = split if isinstance(split, Cut) else split(costs, row, n_chunks)
    cut.check(row, n_chunks)
    return cut


def _costs(graph: fx.Graph, row: Stretches) -> tuple[StretchCost, ...]:
    """FLOPs of every stretch in F, I and W."""
    moved: set[fx.Node] = set()
    found = [StretchCost()] * row.count
    for node in graph.nodes:
        if node.meta.get("is_parameter"):
            if node.meta["val"].requires_grad:
                moved.add(node)
        elif any(n in moved for n in node.all_input_nodes):
            moved.add(node)
        if node in row.of:
            found[row.of[node]] += phase_flops(node, moved, row.of)
    return tuple(found)


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on a parameter and on an input: activations. The rest follows from inputs alone or (a
    transposed weight, Gemma's 1 + weight) from parameters alone, and is made again where it is read."""
    weights: set[fx.Node] = set()
    given: set[fx.Node] = set()
    for node in graph.nodes:
        if node.meta.get("is_parameter") or any(n in weights for n in node.all_input_nodes):
            weights.add(node)
        if node.op == "placeholder" or any(n in given for n in node.all_input_nodes):
            given.add(node)
    return weights & given


def _read_in(graph: fx.Graph, row: Stretches) -> dict[str, frozenset[int]]:
    """The layers in which each parameter, or what follows from it alone, is read."""
    n_layers = len(row.layers)
    # A gap's own parameters: -1 in front of all layers, else the layer before, and the number of layers behind all.
    own = {2 * k: k - 1 for k in range(n_layers)} | {2 * n_layers: n_layers}
    layers = {node: frozenset({own.get(at, at // 2)}) for node, at in row.of.items()}
    found: dict[str, frozenset[int]] = {}
    for node in reversed(graph.nodes):
        if node not in row.of:
            layers[node] = frozenset().union(*(layers[user] for user in node.users))
        if node.meta.get("is_parameter"):
            name = str(node.target)
            found[name] = found.get(name, frozenset()) | layers[node]
    return found


def _insert_cuts(graph: fx.Graph, live: set[fx.Node], row: Stretches) -> None:
    """A unit ends after the embedding and before the head, and at every seam of two towers; without TP marks, after
    every layer as well."""
    marked = any(is_mark(node) for node in graph.nodes)
    for node, here in list(row.of.items()):
        later = [u for u in node.users if u in row.of and row.of[u] > here]
        if (
            not later
            or not isinstance(node.meta["val"], Tensor)
            or not node.meta["val"].is_floating_point()
            or (marked and here % 2 and all(row.of[u] % 2 for u in later))
        ):
            continue
        with graph.inserting_after(node):
            mark = graph.call_function(CUT, (node,))
        mark.meta = dict(node.meta)
        for user in later:
            user.replace_input_with(node, mark)
        row.of[mark] = here
        live.add(mark)


def _with_gradient(captured: Captured, entering: Sequence[Sequence[fx.Node]]) -> set[fx.Node]:
    """The boundary values that have a gradient."""
    graph = captured.graph_module.graph
    frozen = any(n.meta.get("is_parameter") and not n.meta["val"].requires_grad for n in graph.nodes)
    if not frozen and all(len(nodes) <= 1 for nodes in entering):
        return {n for nodes in entering for n in nodes}  # the one activation that all of a model hangs on
    return wants_grad(captured)


def _extract(
    captured: Captured,
    index: int,
    n_chunks: int,
    owner: dict[fx.Node, int],
    layers: range,
    entering: Sequence[fx.Node],
    grads: set[fx.Node],
) -> Chunk:
    source = captured.graph_module.graph
    output = source.output_node()
    last = index == n_chunks - 1
    mine = [node for node in source.nodes if owner.get(node) == index]
    leaving = list(output.args[0]) if last else _crossing(source, owner, index)  # type: ignore[arg-type]
    for name, node in zip(captured.outputs, leaving, strict=True) if last else ():
        if owner.get(node, index) != index:
            raise PartitionError(
                f"the model's {name} is made in chunk {owner[node]}, before the last one, and the layers behind it "
                f"would be left without a gradient; leave them out of the model, or use one chunk"
            )
    wanted: set[fx.Node] = set()
    todo = [*mine, *(n for n in leaving if n not in owner)]
    while todo:
        node = todo.pop()
        if node not in wanted and node not in entering:
            wanted.add(node)
            todo += [n for n in node.all_input_nodes if n not in owner or owner[n] == index]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = []
    for node in source.nodes:
        if node.op == "placeholder" and node in wanted:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
            inputs.append(node.name)
    for i, node in enumerate(entering):
        env[node] = graph.placeholder(BOUNDARY.format(i))
        env[node].meta["val"] = node.meta["val"]
    params = []
    for node in source.nodes:
        if node in wanted and node.op in ("get_attr", "call_function"):
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.meta.get("is_parameter"):
                params.append(str(node.target))
    graph.output(tuple(env[n] for n in leaving))
    return Chunk(
        index=index,
        graph_module=fx.GraphModule(captured.graph_module, graph),
        inputs=tuple(inputs),
        boundary_in=len(entering),
        boundary_out=0 if last else len(leaving),
        params=tuple(params),
        outputs=captured.outputs if last else (),
        layers=layers,
        boundary_grads=tuple(n in grads and n.meta["val"].is_floating_point() for n in entering),
    )


def _crossing(graph: fx.Graph, owner: dict[fx.Node, int], index: int) -> list[fx.Node]:
    """Values that go from chunk ``index`` to ``index + 1``, in the order in which they are made."""
    found = []
    for node in graph.nodes:
        if owner.get(node) == index and any(owner.get(user, index) > index for user in node.users):
            if not isinstance(node.meta["val"], Tensor):
                raise PartitionError(f"{node.name} crosses a chunk boundary and is not a tensor")
            found.append(node)
    return found
