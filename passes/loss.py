"""Pass ``normalise_loss``: the loss of a micro-batch becomes its share of the whole batch's loss.

Contract: the mean over the valid tokens of one micro-batch turns into their sum over a count that is an input of
the graph, the number of valid tokens of the *whole* batch; the sum over micro-batches is then the loss that the
unsplit model returns, ragged labels included (a mean of means is not)::

    loss = cross_entropy(x, y, None, mean, -100)   =>   s = cross_entropy(x, y, None, sum, -100)
                                                        loss = s / loss_count_0

A term that the model returns as its ``aux_loss`` (load balancing of a mixture of experts) is a product of two means
over tokens, so no micro-batch has a share of the whole batch's: it counts as the mean of the micro-batches' values,
which is what accumulating gradients over micro-batches means everywhere. The step's loss is then exactly ::

    cross entropy of the whole batch + coefficient * mean over micro-batches of aux_loss

A term that no input reaches (a penalty on weights) is the same for every micro-batch, and its mean is itself.

``count`` is the graph of that number for one micro-batch: inputs -> (count_0, ...), 0-d. Its results are summed
over micro-batches (and over data-parallel ranks) before the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .capture import Captured
from .errors import UnsupportedError

_CROSS_ENTROPY = torch.ops.aten.cross_entropy_loss.default
_MEAN, _SUM = 1, 2
#: Key of a model's output that is a loss of its own kind, added to the loss with a coefficient.
AUXILIARY = "aux_loss"
#: Operators that pass a 0-d loss on as it is.
_SAME = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
    torch.ops.aten.squeeze.default,
}
COUNT = "loss_count_{}"


@dataclass(frozen=True, slots=True)
class Normalised:
    """``captured`` with counts as further inputs, and the graph that makes them (None where there is no loss)."""

    captured: Captured
    count: fx.GraphModule | None
    counts: tuple[str, ...]


def loss_alone(captured: Captured) -> Captured:
    """The same graph with the loss as its only output: what training runs. Raises :class:`UnsupportedError` for a
    model that returns none."""
    if "loss" not in captured.outputs:
        raise UnsupportedError(
            f"the model returns no loss (its outputs are {', '.join(captured.outputs) or 'none'}); pass labels, or "
            'let its forward return a dict with "loss" or a tuple that begins with it'
        )
    graph = captured.graph_module.graph
    output = graph.output_node()
    _mark_auxiliary(captured)
    output.args = ((output.args[0][captured.outputs.index("loss")],),)  # type: ignore[index]
    # Attention may draw random numbers, and where nobody reads it (in the last layers of a tower whose features are
    # taken before them) that is no reason to keep it.
    graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    captured.graph_module.recompile()
    return replace(captured, outputs=("loss",))


def _mark_auxiliary(captured: Captured) -> fx.Node | None:
    """The auxiliary loss among the outputs, which its meta then says."""
    if AUXILIARY not in captured.outputs:
        return None
    values = captured.graph_module.graph.output_node().args[0]
    node: fx.Node = values[captured.outputs.index(AUXILIARY)]  # type: ignore[index, assignment]
    node.meta[AUXILIARY] = True
    return node


def normalise_loss(captured: Captured, *, loss_reduction: str = "auto") -> Normalised:
    """``loss_reduction``: "auto" finds mean cross entropies in the graph; "sum" leaves a loss that already is a
    sum or divides by a global count; "mean" divides the loss by the number of micro-batches, for a loss that is
    a plain mean over equally large micro-batches (done by the caller: one count of 1 per micro-batch).

    An auxiliary loss that is an output beside the loss (in ``eval``) stays that of the micro-batch.

    Raises :class:`UnsupportedError` where "auto" cannot tell what the loss is a mean of.
    """
    if "loss" not in captured.outputs:
        return Normalised(captured, None, ())
    if loss_reduction not in ("auto", "sum", "mean"):
        raise UnsupportedError(f'loss_reduction={loss_reduction!r}: use "auto", "sum" or "mean"')
    if loss_reduction == "sum":
        return Normalised(captured, None, ())
    graph_module = captured.graph_module
    output = graph_module.graph.output_node()
    index = captured.outputs.index("loss")
    loss: fx.Node = output.args[0][index]  # type: ignore[index, assignment]
    auxiliary = _mark_auxiliary(captured)
    targets: list[tuple[fx.Node, fx.Node | None, int]] = [(loss, None, 0)]
    if loss_reduction == "auto":
        targets = [
            (n, n.args[1], _ignored(n)) if n.target is _CROSS_ENTROPY else (n, None, 0)  # type: ignore[misc]
            for n in _means(loss)
        ]
        if not targets:
            return Normalised(captured, None, ())
    count = _count_graph(captured, [(labels, ignore) for _, labels, ignore in targets])
    names = []
    for i, (node, labels, _) in enumerate(targets):
        names.append(COUNT.format(i))
        _divide(graph_module.graph, node, names[-1], sum_first=labels is not None)
    if auxiliary is not None:
        values = list(output.args[0])  # type: ignore[arg-type]
        values[captured.outputs.index(AUXILIARY)] = auxiliary
        output.args = (tuple(values),)
    graph_module.recompile()
    inputs = (*captured.inputs, *names)
    return Normalised(replace(captured, inputs=inputs), count, tuple(names))


def _argument(node: fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _ignored(node: fx.Node) -> int:
    return int(_argument(node, 4, "ignore_index", -100))  # type: ignore[call-overload, no-any-return]


def _means(loss: fx.Node) -> list[fx.Node]:
    """The mean cross entropies, auxiliary losses and terms of weights alone that ``loss`` is a linear combination of.

    Empty where it is made of sums, bare or over a 0-d input (``num_items_in_batch``): those add up as they are.
    Anything that would count once per micro-batch, or that depends on a micro-batch's own size, is refused.
    """
    found: list[fx.Node] = []
    given = _from_inputs(loss.graph)
    todo: list[tuple[fx.Node, bool]] = [(loss, False)]
    while todo:
        node, by_number = todo.pop()
        if node.meta.get(AUXILIARY) or node not in given:
            if node not in found:
                found.append(node)
        elif node.target is _CROSS_ENTROPY:
            if _reduction(node) == _MEAN:
                if node not in found:
                    found.append(node)
            elif _reduction(node) != _SUM or by_number:
                raise UnsupportedError(_unknown(node))  # the number may be this micro-batch's size
        elif node.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor):
            value, factor = node.args[0], node.args[1]
            if node.target is torch.ops.aten.mul.Tensor and _is_scale(value):
                value, factor = factor, value
            if not isinstance(value, fx.Node) or not _is_scale(factor):
                raise UnsupportedError(_unknown(node))
            todo.append((value, by_number or not isinstance(factor, fx.Node)))
        elif node.target is torch.ops.aten.add.Tensor:
            if not all(isinstance(arg, fx.Node) for arg in node.args) or node.kwargs:
                raise UnsupportedError(_unknown(node))  # a constant would count once per micro-batch
            todo += [(arg, by_number) for arg in node.args]  # type: ignore[misc]
        elif node.target in _SAME:
            todo.append((node.args[0], by_number))  # type: ignore[arg-type]
        else:
            raise UnsupportedError(_unknown(node))
    return found


def _from_inputs(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _reduction(node: fx.Node) -> object:
    if _argument(node, 2, "weight", None) is not None:
        raise UnsupportedError("a loss with class weights in its cross entropy is not supported yet")
    if node.args[1].meta["val"].is_floating_point():  # type: ignore[union-attr]
        raise UnsupportedError("a loss with class probabilities as labels is not supported yet")
    return _argument(node, 3, "reduction", _MEAN)


def _is_scale(factor: Any) -> bool:
    """A number, a parameter, or a 0-d input: the same for every micro-batch."""
    if not isinstance(factor, fx.Node):
        return isinstance(factor, int | float)
    while factor.target in _SAME:
        factor = factor.args[0]
    if factor.op == "placeholder":
        return bool(factor.meta["val"].ndim == 0)
    return bool(factor.op == "get_attr")


def _unknown(node: fx.Node) -> str:
    return (
        f"the loss comes from {node.target}, not from mean cross entropies alone, so its share of the whole batch "
        'is not known; pass loss_reduction="sum" if the micro-batches\' losses add up to the batch\'s, or "mean" if '
        "it is a plain mean over samples"
    )


def _divide(graph: fx.Graph, node: fx.Node, name: str, *, sum_first: bool) -> None:
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        count = graph.placeholder(name)
    # Placeholders stay in the order of Captured.inputs: after those that are there already.
    last = [n for n in graph.nodes if n.op == "placeholder" and n is not count][-1]
    last.append(count)
    val = node.meta["val"]
    with val.fake_mode:
        count.meta["val"] = torch.empty((), dtype=val.dtype, device=val.device)
    if sum_first:
        logits, labels, ignore = node.args[0], node.args[1], _ignored(node)
        smoothing = _argument(node, 5, "label_smoothing", 0.0)
        node.args = (logits, labels, None, _SUM, ignore, smoothing)  # type: ignore[assignment]
        node.kwargs = {}
    with graph.inserting_after(node):
        share = graph.call_function(torch.ops.aten.div.Tensor, (node, count))
    share.meta = dict(node.meta)
    node.replace_all_uses_with(share, delete_user_cb=lambda user: user is not share)


def _count_graph(captured: Captured, targets: list[tuple[fx.Node | None, int]]) -> fx.GraphModule:
    """inputs -> number of labels that count, one 0-d int64 per target."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed: set[fx.Node] = set()
    todo = [node for node, _ in targets if node is not None]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        if node.op == "get_attr":
            raise UnsupportedError(
                "the labels of the loss depend on parameters; pass loss_reduction explicitly"
            )
        needed.add(node)
        todo += node.all_input_nodes
    for node in captured.graph_module.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(node.name)
        elif node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
    results = []
    for labels, ignore in targets:
        if labels is None:
            results.append(graph.call_function(torch.ops.aten.scalar_tensor.default, (1,)))
        else:
            valid = graph.call_function(torch.ops.aten.ne.Scalar, (env[labels], ignore))
            results.append(graph.call_function(torch.ops.aten.sum.default, (valid,)))
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)
