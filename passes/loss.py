"""Pass ``normalise_loss``: the loss of a micro-batch becomes its share of the whole batch's loss.

Contract: the mean over the valid tokens of one micro-batch turns into their sum over a count that is an input of
the graph, the number of valid tokens of the *whole* batch; the sum over micro-batches is then the loss that the
unsplit model returns, ragged labels included (a mean of means is not)::

    loss = cross_entropy(x, y, None, mean, -100)   =>   s = cross_entropy(x, y, None, sum, -100)
                                                        loss = s / loss_count_0

``count`` is the graph of that number for one micro-batch: inputs -> (count_0, ...), 0-d. Its results are summed
over micro-batches (and over data-parallel ranks) before the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .capture import Captured
from .errors import UnsupportedError

_CROSS_ENTROPY = torch.ops.aten.cross_entropy_loss.default
_MEAN, _SUM = 1, 2
#: Operators through which the loss may reach its cross entropies: linear in each of them.
_LINEAR = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
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


def normalise_loss(captured: Captured, *, loss_reduction: str = "auto") -> Normalised:
    """``loss_reduction``: "auto" finds mean cross entropies in the graph; "sum" leaves a loss that already is a
    sum or divides by a global count; "mean" divides the loss by the number of micro-batches, for a loss that is
    a plain mean over equally large micro-batches (done by the caller: one count of 1 per micro-batch).

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
    targets: list[tuple[fx.Node, fx.Node | None, int]] = [(loss, None, 0)]
    if loss_reduction == "auto":
        targets = [(n, n.args[1], _ignored(n)) for n in _means(loss)]  # type: ignore[misc]
        if not targets:
            return Normalised(captured, None, ())
    count = _count_graph(captured, [(labels, ignore) for _, labels, ignore in targets])
    names = []
    for i, (node, _, _) in enumerate(targets):
        names.append(COUNT.format(i))
        _divide(graph_module.graph, node, names[-1], sum_first=loss_reduction == "auto")
    graph_module.recompile()
    inputs = (*captured.inputs, *names)
    return Normalised(Captured(graph_module, inputs, captured.outputs), count, tuple(names))


def _argument(node: fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _ignored(node: fx.Node) -> int:
    return int(_argument(node, 4, "ignore_index", -100))  # type: ignore[call-overload, no-any-return]


def _means(loss: fx.Node) -> list[fx.Node]:
    """The mean cross entropies that ``loss`` is a linear combination of."""
    found: list[fx.Node] = []
    todo = [loss]
    while todo:
        node = todo.pop()
        if node.target is _CROSS_ENTROPY:
            if _argument(node, 2, "weight", None) is not None:
                raise UnsupportedError("cross entropy with class weights is not supported yet")
            reduction = _argument(node, 3, "reduction", _MEAN)
            if reduction == _MEAN and node not in found:
                found.append(node)
            elif reduction == 0:
                raise UnsupportedError(_unknown(node))
        elif node.target in _LINEAR:
            tensors = [n for n in node.all_input_nodes if n.meta["val"].is_floating_point()]
            if node.target is torch.ops.aten.div.Tensor:
                tensors = tensors[:1]
            elif node.target is torch.ops.aten.mul.Tensor and len(tensors) > 1:
                raise UnsupportedError(_unknown(node))  # a product of two values is linear in neither
            todo += tensors
        elif node.op not in ("placeholder", "get_attr"):
            raise UnsupportedError(_unknown(node))
    return found


def _unknown(node: fx.Node) -> str:
    return (
        f"the loss comes from {node.target}, not from a mean cross entropy, so its share of the whole batch is "
        'not known; pass loss_reduction="sum" if the micro-batches\' losses add up to the batch\'s, or "mean" if '
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
