"""Pass ``partition``: the model's graph in S chunks, one after the other.

Contract: (captured graph, S) -> S graphs with the same inputs by name; chunk c takes the boundary values of chunk
c - 1 as further placeholders ``boundary_0, ...`` and returns its own, the last chunk the model's outputs::

    x = embedding(W, ids); m = mask(am)     chunk 0: (ids, am) -> x1      chunk 1: (am, boundary_0) -> loss
    x1 = layer0(x, m)                   =>    m = mask(am)                  m = mask(am)      # made again
    loss = head(layer1(x1, m))                x1 = layer0(embed(ids), m)    loss = head(layer1(boundary_0, m))

A value that depends on inputs alone (rotary tables, masks, position ids) is made again in each chunk that reads
it and never sent. In ``eval`` what skips a chunk goes through it, so that the last one returns hidden states and
router logits of all. ``cut`` marks go where a unit must end without a collective: after the embedding, and between
layers of a model without TP marks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from .capture import Captured
from .cost import flops
from .errors import PartitionError
from .marks import CUT, is_mark
from .trainable import wants_grad

BOUNDARY = "boundary_{}"


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
    """``chunks`` in model order, ``layers`` = number of decoder layers, ``costs`` FLOPs of the forward per chunk,
    ``read_in`` the layers that read each parameter (-1: before the layers, ``layers``: behind them)."""

    chunks: tuple[Chunk, ...]
    layers: int
    costs: tuple[int, ...]
    read_in: Mapping[str, frozenset[int]] = field(default_factory=dict)


def partition(
    captured: Captured,
    n_chunks: int,
    *,
    split: str | Sequence[int] = "auto",
    keyed: Mapping[str, tuple[str, int]] | None = None,
    carry: bool = False,
) -> Partition:
    """Cut into ``n_chunks``. ``split``: "auto" balances FLOPs, embedding and head included; or the number of
    layers of each chunk. ``keyed``: the layers that have a name in place of a number (:func:`keyed_layers`); they count
    where too few have a number. ``carry``: what skips a chunk, outputs included, goes through it (for ``eval``: in
    training it would be kept by every chunk on the way).

    Raises :class:`PartitionError` for fewer layers than chunks, a split that does not add up, or, without ``carry``, a
    value that would have to skip a chunk.
    """
    graph = captured.graph_module.graph
    live = _live(graph)
    container = _container(graph, live, n_chunks, keyed or {})
    segment, n_layers = _segments(graph, live, container)
    if n_layers < n_chunks:
        raise PartitionError(
            f"the model has {n_layers} layers, fewer than the {n_chunks} chunks that the schedule cuts it into; "
            f"use a smaller pp_size, a schedule with fewer chunks per rank, or a model of {n_chunks} layers or more"
        )
    costs = _segment_costs(segment, n_layers)
    sizes = _balance(costs, n_chunks) if split == "auto" else _given(split, n_layers, n_chunks)
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    chunk_of_layer = [c for c, size in enumerate(sizes) for _ in range(size)]

    def chunk_of(node: fx.Node) -> int:
        return chunk_of_layer[min(max(segment[node], 0), n_layers - 1)]

    _insert_cuts(graph, live, segment)
    owner = {node: chunk_of(node) for node in graph.nodes if node in live and node.op == "call_function"}
    if carry:
        _carry(graph, owner, n_chunks - 1)
    entering = [_crossing(graph, owner, c - 1) if c else [] for c in range(n_chunks)]
    grads = _with_gradient(captured, entering)
    chunks = tuple(
        _extract(captured, c, n_chunks, owner, range(bounds[c], bounds[c + 1]), entering[c], grads)
        for c in range(n_chunks)
    )
    totals = [0] * n_chunks
    for node, c in owner.items():
        totals[c] += flops(node)
    return Partition(chunks, n_layers, tuple(totals), _read_in(graph, segment))


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


def keyed_layers(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Path -> (container, position) of the children of every ``nn.ModuleDict`` whose children are of one type."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleDict) and len({type(child) for child in module.values()}) == 1:
            for i, key in enumerate(module):
                found[f"{path}.{key}" if path else key] = path, i
    return found


_Places = Callable[[fx.Node], list[tuple[str, int]]]


def _numbered(node: fx.Node) -> list[tuple[str, int]]:
    """(container, index) for every numbered module around the node, outermost first."""
    matches = (re.fullmatch(r"(.*?)\.?(\d+)", path) for path in _paths(node))
    return [(match.group(1), int(match.group(2))) for match in matches if match]


def _paths(node: fx.Node) -> list[str]:
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


@dataclass(frozen=True, slots=True)
class _Container:
    """What holds the layers. ``order``: index -> number of the layer; ``places``: of a node in containers."""

    name: str
    order: Mapping[int, int]
    places: _Places


def _container(
    graph: fx.Graph, live: set[fx.Node], n_chunks: int, keyed: Mapping[str, tuple[str, int]]
) -> _Container:
    """The one that most is computed in: of numbered layers, or of named ones where those are more than too few."""
    found = _heaviest(graph, live, _numbered)
    if found is None or len(found.order) < n_chunks:
        named = _heaviest(graph, live, lambda node: [keyed[path] for path in _paths(node) if path in keyed])
        found = named if named is not None and (found is None or len(named.order) >= n_chunks) else found
    if found is None:
        tops = sorted({path for node in live for path in _paths(node) if path and "." not in path})
        raise PartitionError(
            "no layers were found in the traced model, and fxbraid cuts between layers: modules with a number "
            "(model.layers.0, ...; an nn.ModuleList or nn.Sequential), or those of an nn.ModuleDict that are all of "
            f"one type; this model computes in {', '.join(tops) or 'no module'}"
        )
    return found


def _heaviest(graph: fx.Graph, live: set[fx.Node], places: _Places) -> _Container | None:
    weight: Counter[str] = Counter()
    indices: dict[str, set[int]] = {}
    for node in graph.nodes:
        if node in live and node.op == "call_function":
            for container, index in places(node)[:1]:
                weight[container] += max(flops(node), 1)
                indices.setdefault(container, set()).add(index)
    if not weight:
        return None
    name = max(weight, key=lambda name: weight[name])
    return _Container(name, {index: i for i, index in enumerate(sorted(indices[name]))}, places)


def _segments(graph: fx.Graph, live: set[fx.Node], container: _Container) -> tuple[dict[fx.Node, int], int]:
    """Layer index of every live node: -1 before the first layer, n after the last."""
    n_layers = len(container.order)
    segment: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node not in live or node.op != "call_function":
            continue
        own = [container.order[i] for c, i in container.places(node) if c == container.name]
        before = max((segment[n] for n in node.all_input_nodes if n in segment), default=-1)
        # Outside the layers: with its inputs, and behind the last layer once that has been left.
        segment[node] = max(own[0], before) if own else (before if before < n_layers - 1 else n_layers)
    for node in reversed(graph.nodes):
        # What starts before the layers and is read behind them alone (a penalty on weights) is made there.
        if segment.get(node) == -1 and {segment.get(user, n_layers) for user in node.users} == {n_layers}:
            segment[node] = n_layers
    return segment, n_layers


def _read_in(graph: fx.Graph, segment: dict[fx.Node, int]) -> dict[str, frozenset[int]]:
    """The layers in which each parameter, or what follows from it alone, is read."""
    layers = {node: frozenset({index}) for node, index in segment.items()}
    found: dict[str, frozenset[int]] = {}
    for node in reversed(graph.nodes):
        if node not in segment:
            layers[node] = frozenset().union(*(layers[user] for user in node.users))
        if node.meta.get("is_parameter"):
            name = str(node.target)
            found[name] = found.get(name, frozenset()) | layers[node]
    return found


def _segment_costs(segment: dict[fx.Node, int], n_layers: int) -> list[int]:
    costs = [0] * (n_layers + 2)
    for node, index in segment.items():
        costs[index + 1] += flops(node)
    return costs


def _balance(costs: list[int], n_chunks: int) -> list[int]:
    """Layers per chunk so that the dearest chunk is as cheap as possible, then the sum of squares (dynamic
    programming over the cuts, at least one layer in each chunk)."""
    n = len(costs) - 2
    layer = costs[1:-1]
    prefix = [0]
    for cost in layer:
        prefix.append(prefix[-1] + cost)

    def cost_of(start: int, end: int) -> int:
        extra = (costs[0] if start == 0 else 0) + (costs[-1] if end == n else 0)
        return prefix[end] - prefix[start] + extra

    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, 0.0, [])}
    for c in range(1, n_chunks + 1):
        for end in range(c, n - (n_chunks - c) + 1):
            options = []
            for start in range(c - 1, end):
                if (c - 1, start) in best:
                    top, squares, sizes = best[c - 1, start]
                    own = float(cost_of(start, end))
                    options.append((max(top, own), squares + own * own, [*sizes, end - start]))
            best[c, end] = min(options)
    return best[n_chunks, n][2]


def _given(split: str | Sequence[int], n_layers: int, n_chunks: int) -> list[int]:
    if isinstance(split, str):
        raise PartitionError(f'split={split!r}: use "auto" or a list with the layers of each chunk')
    if len(split) != n_chunks or sum(split) != n_layers or min(split) < 1:
        raise PartitionError(
            f"split={list(split)} must have {n_chunks} entries of 1 or more that add up to {n_layers} layers"
        )
    return list(split)


def _insert_cuts(graph: fx.Graph, live: set[fx.Node], segment: dict[fx.Node, int]) -> None:
    """A unit ends after the embedding and before the head; without TP marks, after every layer as well."""
    marked = any(is_mark(node) for node in graph.nodes)
    head = max(segment.values())
    for node in list(segment):
        here = segment[node]
        later = [u for u in node.users if u in segment and segment[u] > here]
        if (
            not later
            or not node.meta["val"].is_floating_point()
            or (marked and here >= 0 and all(segment[u] < head for u in later))
        ):
            continue
        with graph.inserting_after(node):
            mark = graph.call_function(CUT, (node,))
        mark.meta = dict(node.meta)
        for user in later:
            user.replace_input_with(node, mark)
        segment[mark] = here
        live.add(mark)


def _carry(graph: fx.Graph, owner: dict[fx.Node, int], last: int) -> None:
    """Hand what is read in a later chunk than the next one on from chunk to chunk, and outputs to the ``last`` one."""
    for node in [n for n in graph.nodes if n in owner and isinstance(n.meta["val"], Tensor)]:
        readers = {user: owner.get(user, last + 1) for user in node.users}
        here = node
        for index in range(owner[node] + 1, max(readers.values(), default=0)):
            with graph.inserting_after(here):
                there = graph.call_function(torch.ops.aten.clone.default, (here,))
            there.meta["val"] = node.meta["val"]
            owner[there] = index
            for user, at in readers.items():
                if at > index:
                    user.replace_input_with(here, there)
            here = there


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
    """Values that go from chunk ``index`` to ``index + 1``; anything that goes further is refused."""
    found = []
    for node in graph.nodes:
        if owner.get(node) != index:
            continue
        last = max((owner.get(user, index) for user in node.users), default=index)
        if last > index + 1:
            raise PartitionError(
                f"{node.name} of chunk {index} is read in chunk {last}: a skip connection over a chunk is not "
                "supported yet; choose split so that both ends lie in neighbouring chunks"
            )
        if last == index + 1:
            if not isinstance(node.meta["val"], Tensor):
                raise PartitionError(f"{node.name} crosses a chunk boundary and is not a tensor")
            found.append(node)
    return found
