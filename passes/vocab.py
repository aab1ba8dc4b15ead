"""Pass ``vocab``: the vocabulary, a model's largest matrix, is cut over the tensor-parallel ranks.

Contract: (captured graph at full vocabulary, plan) -> the same graph on a rank's rows of the embedding and columns of
the head, with marks, and a plan that says so (``[V/t, hid]`` each, padded with zeros where V does not divide)::

    x = embedding(E, ids)                 x = tp_reduce(lookup(E, ids - rank V/t), 0 where outside)
    ...                                   ...
    z = linear(h, W)               =>     z = linear(h, W)          # [N, V/t]
    z = tanh(z / c) * c                   z = tanh(z / c) * c       # soft caps and scales, column by column
    loss = cross_entropy(z, y)            stats = shard_stats(z, y); tp_max; tp_reduce; ...     # [3, N]

The logits are never gathered where the loss is all that a graph returns. ``eval`` returns them, and there they are put
together behind the last operator that works column by column.

A parameter is cut where every use of it is known: as the weight of a lookup, or of a head from whose logits nothing but
operators on single columns and cross entropies follow. So a tied weight is cut in both places or in none. What stays
whole is said in the plan's notes, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from ..compat import FakeTensorMode
from .capture import Captured
from .errors import PlanError
from .layout import ParamShard, TpPlan
from .settle import TP_RANK
from .vocab_graph import (
    EMBEDDING,
    LINEAR,
    Region,
    argument,
    gather_columns,
    localise,
    read_region,
    set_value,
    shard_lookup,
    shard_loss,
    unsafe_in_padding,
)

#: Styles in ``plan.styles`` of what this pass cuts.
ROWS_STYLE, COLUMNS_STYLE = "embedding_rowwise", "vocabulary_colwise"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of the vocabulary.

    ``parallel``: True (it must be cut), False (it stays whole) or "auto". ``names``: the parameters that an earlier
    trace of the same model cut, which is then all that may happen. ``inputs``: weights of the model's input embedding;
    ``whole``: weights that the user's plan leaves whole. All names are first names.
    """

    parallel: bool | str = "auto"
    names: frozenset[str] | None = None
    inputs: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The result. ``names``: first names of the parameters that are cut."""

    captured: Captured
    plan: TpPlan
    names: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Found:
    """The vocabulary's parameters: ``sizes`` by first name, ``lookups`` and ``heads`` with their region;
    ``refused``: why a parameter stays whole."""

    sizes: dict[str, int] = field(default_factory=dict)
    lookups: dict[fx.Node, str] = field(default_factory=dict)
    heads: dict[fx.Node, Region] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def shard_vocabulary(
    captured: Captured,
    plan: TpPlan,
    canonical: Mapping[str, str],
    wanted: Wanted,
    *,
    training: bool,
    fake_mode: FakeTensorMode,
) -> Vocabulary:
    """See the module's docstring. Changes ``captured`` in place; ``fake_mode`` is that of its parameters.

    Raises :class:`PlanError` where ``wanted`` can't be done, with the parameter and the reason.
    """
    if wanted.parallel not in (True, False, "auto"):
        raise PlanError(f'vocab_parallel={wanted.parallel!r}: use True, False or "auto"')
    if plan.tp_size == 1 or wanted.parallel is False or wanted.names == frozenset():
        return Vocabulary(captured, plan)
    graph = captured.graph_module.graph
    found = _find(graph, canonical, wanted)
    _refuse(graph, found, canonical, plan, wanted, training=training)
    _report(found, wanted)
    names = frozenset(found.sizes) - frozenset(found.refused)
    notes = (*plan.notes, *(f"{n} stays whole on every TP rank: {why}" for n, why in found.refused.items()))
    if not names:
        return Vocabulary(captured, replace(plan, notes=notes))
    planned = _planned(plan, found, names | (wanted.names or frozenset()), canonical, notes)
    _rewrite(captured, found, names, plan, canonical, fake_mode)
    return Vocabulary(captured, planned, names)


def input_weights(model: nn.Module, canonical: Mapping[str, str]) -> frozenset[str]:
    """First names of the weights of the model's input embedding, where it says which one that is."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        module = get() if get is not None else None
    except NotImplementedError:
        module = None
    held = {id(p) for p in module.parameters()} if isinstance(module, nn.Module) else set()
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(canonical[name] for name, parameter in named if id(parameter) in held)


# -- which parameters --------------------------------------------------------------------------------------------


def _find(graph: fx.Graph, canonical: Mapping[str, str], wanted: Wanted) -> _Found:
    """Heads: linears with as many columns as an embedding has rows, from which a cross entropy or an output of the
    model follows. Embeddings: the model's input, or with as many rows as a head has columns."""
    found = _Found()
    lookups = {
        node: canonical[str(weight.target)]
        for node in graph.find_nodes(op="call_function", target=EMBEDDING)
        if (weight := node.args[0]).meta.get("is_parameter")
    }
    rows = {int(node.args[0].meta["val"].shape[0]) for node in lookups}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        weights = [canonical[str(n.target)] for n in node.all_input_nodes[1:] if n.meta.get("is_parameter")]
        if not weights or len(weights) != len(node.all_input_nodes) - 1:
            continue
        if wanted.names is not None and weights[0] not in wanted.names:
            continue
        if wanted.names is None and node.meta["val"].shape[-1] not in rows:
            continue
        region = read_region(node, order)
        if wanted.names is None and not region.losses and all(r.op != "output" for _, r in region.others):
            continue
        found.heads[node] = region
        found.sizes.update(dict.fromkeys(weights, region.vocab))
    columns = set(found.sizes.values())
    for node, name in lookups.items():
        size = int(node.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
        known = wanted.names if wanted.names is not None else wanted.inputs or None
        if name in found.sizes or (name in known if known is not None else size in columns):
            found.sizes[name] = size
            found.lookups[node] = name
    for node in graph.find_nodes(op="get_attr"):  # read in another way than the trace that cut it did
        if canonical.get(str(node.target)) in (wanted.names or ()):
            found.sizes.setdefault(canonical[str(node.target)], int(node.meta["val"].shape[0]))
    return found


def _refuse(
    graph: fx.Graph,
    found: _Found,
    canonical: Mapping[str, str],
    plan: TpPlan,
    wanted: Wanted,
    *,
    training: bool,
) -> None:
    """Fill ``found.refused``."""
    refused = found.refused
    for name in found.sizes:
        if name in wanted.whole:
            refused[name] = "tp_plan says so"
        elif plan.params[name].dim is not None:
            refused[name] = f"tp_plan cuts its dim {plan.params[name].dim} already"
    for node in graph.find_nodes(op="get_attr"):
        name = canonical.get(str(node.target), "")
        for user in node.users if name in found.sizes else ():
            why = _unknown_use(node, user, found)
            if why is not None:
                refused.setdefault(name, why)
    groups = []
    for head, region in found.heads.items():
        groups.append([canonical[str(n.target)] for n in head.all_input_nodes[1:]])
        if training and region.others:
            _, reader = region.others[0]
            what = "are returned" if reader.op == "output" else f"go into {reader.target}"
            refused.setdefault(groups[-1][0], f"the logits that it makes {what}, which needs all of them")
        unsafe = unsafe_in_padding(region) if region.vocab % plan.tp_size else None
        if unsafe is not None:
            refused.setdefault(
                groups[-1][0],
                f"{region.vocab} rows are no multiple of tp_size={plan.tp_size}, and {unsafe.target} of the logits "
                "may be infinite, or have an infinite slope, at the zeros of the padding",
            )
    for group in groups * 2:  # a weight and its bias are cut together; twice, for one that two heads share
        reason = next((refused[name] for name in group if name in refused), None)
        if reason is not None:
            for name in group:
                refused.setdefault(name, reason)


def _unknown_use(node: fx.Node, user: fx.Node, found: _Found) -> str | None:
    if user in found.lookups:
        if user.args[0] is not node or node in user.all_input_nodes[1:]:
            return f"it is an input of {user.target}"
        if argument(user, 3, "scale_grad_by_freq", False) or argument(user, 4, "sparse", False):
            return "its embedding scales gradients by frequency, or makes them sparse"
        return None
    if user in found.heads and user.all_input_nodes[0] is not node:
        return None
    return f"it is an input of {user.target}"


def _report(found: _Found, wanted: Wanted) -> None:
    """Raise where what stays whole was asked to be cut."""
    asked = wanted.names if wanted.names is not None else found.sizes if wanted.parallel is True else ()
    for name in asked:
        why = found.refused.get(name)
        if why is None:  # cut, or not read at all by this graph
            continue
        raise PlanError(
            f"{name} can't be cut over the vocabulary: {why}; "
            + (
                "the example batch did not show it, so pass vocab_parallel=False to braid()"
                if wanted.names is not None
                else 'pass vocab_parallel="auto" or False'
            )
        )
    if wanted.parallel is True and wanted.names is None and not found.sizes:
        raise PlanError(
            "vocab_parallel=True, but the traced model has no linear from which a cross entropy or its logits follow, "
            'and no input embedding; pass vocab_parallel="auto" or False'
        )


# -- the rewrite -------------------------------------------------------------------------------------------------


def _planned(
    plan: TpPlan,
    found: _Found,
    names: Collection[str],
    canonical: Mapping[str, str],
    notes: tuple[str, ...],
) -> TpPlan:
    params, styles = dict(plan.params), dict(plan.styles)
    for name in names:
        params[name] = _shard(plan, name)
    weights = [(node.args[0], ROWS_STYLE) for node in found.lookups]
    weights += [(node.all_input_nodes[1], COLUMNS_STYLE) for node in found.heads]
    for weight, style in weights:
        alias = str(weight.target)  # type: ignore[union-attr]
        if canonical[alias] in names:
            styles[alias.rpartition(".")[0]] = style
    for name in sorted(names):
        shard = params[name]
        rows = shard.local_shape[0]
        padding = rows * plan.tp_size - shard.shape[0]
        padded = f"; the last {padding} are padding" if padding else ""
        notes += (f"{name}: {shard.shape[0]} rows of the vocabulary, {rows} on each TP rank{padded}",)
    return replace(plan, params=params, styles=styles, notes=notes)


def _shard(plan: TpPlan, name: str) -> ParamShard:
    return replace(plan.params[name], dim=0, sections=())


def _rewrite(
    captured: Captured,
    found: _Found,
    names: Collection[str],
    plan: TpPlan,
    canonical: Mapping[str, str],
    fake_mode: FakeTensorMode,
) -> None:
    module = captured.graph_module
    rank = _rank(module, fake_mode)
    for alias in {str(n.target) for n in module.graph.find_nodes(op="get_attr")}:
        name = canonical.get(alias)
        if name in names:
            _cut(module, alias, _shard(plan, name), fake_mode)  # type: ignore[arg-type]
    for node, name in found.lookups.items():
        if name in names:
            shard_lookup(node, rank)
    for head, region in found.heads.items():
        if canonical[str(head.all_input_nodes[1].target)] not in names:
            continue
        localise(region)
        for loss in region.losses:
            shard_loss(loss, rank, region.vocab)
        for value, reader in region.others:
            whole = gather_columns(value, reader, rank, plan.tp_size, region.vocab)
            reader.replace_input_with(value, whole)
    module.graph.eliminate_dead_code()
    module.recompile()


def _rank(module: fx.GraphModule, fake_mode: FakeTensorMode) -> fx.Node:
    """The node of this rank's TP rank, at the head of the graph."""
    for node in module.graph.find_nodes(op="get_attr"):
        if node.target == TP_RANK:
            return node  # type: ignore[no-any-return]
    like = next(n.meta["val"] for n in module.graph.find_nodes(op="placeholder"))

    def made(mode: FakeTensorMode) -> torch.Tensor:
        with mode:
            return torch.empty(1, dtype=torch.long, device=like.device)

    module.register_buffer(TP_RANK, made(fake_mode), persistent=False)
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        node = module.graph.get_attr(TP_RANK)
    node.meta["val"] = made(like.fake_mode)
    return node


def _cut(module: fx.GraphModule, alias: str, shard: ParamShard, fake_mode: FakeTensorMode) -> None:
    """This rank's rows of a parameter, for one of its names."""
    full = next(n for n in module.graph.find_nodes(op="get_attr") if n.target == alias).meta["val"]

    def local(mode: FakeTensorMode) -> nn.Parameter:
        with mode:
            rows = torch.empty(shard.local_shape, dtype=full.dtype, device=full.device)
            return nn.Parameter(rows, requires_grad=full.requires_grad)

    set_value(module, alias, local(fake_mode), local(full.fake_mode))
