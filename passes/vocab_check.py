"""What a batch must satisfy before a model sees it: every token and every label lies inside of the vocabulary.

On a sharded vocabulary a lookup that no rank has a row for would be zero, and a label that no rank has a column for
would count as a logit of zero, both in silence; on a whole one torch raises an ``IndexError`` in mid-step, on one rank,
while the others wait. So the values are looked at where every rank has them, on the host, before the first collective
of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .capture import Captured
from .errors import BraidError
from .reach import ancestors

aten = torch.ops.aten
#: Operators whose values are those of their first input (``pad``: and the one that is padded with).
_SAME = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.contiguous.default,
        aten.clone.default,
        aten.alias.default,
        aten.flatten.using_ints,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten._to_copy.default,
    }
)


@dataclass(frozen=True, slots=True)
class Check:
    """``node``: rows of ``table``, or labels (``table`` is empty), of ``vocab`` entries; ``ignored``: a label that
    counts for nothing, None for rows."""

    node: fx.Node
    vocab: int
    ignored: int | None
    table: str = ""


@dataclass(frozen=True, slots=True)
class _Rule:
    """``source``: the input whose values the checked ones are, None where they are computed; the rest as in
    :class:`Check`."""

    source: str | None
    vocab: int
    ignored: int | None
    table: str

    def bad(self, values: Tensor) -> Tensor:
        """The values that are no entries of the vocabulary."""
        wrong = (values < 0) | (values >= self.vocab)
        if self.ignored is not None:
            wrong &= values != self.ignored
        return values[wrong]


@dataclass(frozen=True, slots=True)
class Checks:
    """``check(batch, split)`` raises for a value outside of the vocabulary.

    ``graph``: those inputs of a micro-batch that ``inputs`` names -> what each rule looks at, on the host.
    """

    rules: tuple[_Rule, ...] = ()
    inputs: tuple[str, ...] = ()
    graph: fx.GraphModule | None = None

    def check(self, batch: Mapping[str, object], split: Callable[[], Mapping[str, Sequence[object]]]) -> None:
        """``batch``: the whole one; ``split``: gives it in micro-batches. Raises :class:`BraidError`.

        The inputs are looked at first, once and whole: only where they are not clearly right (a first label that the
        loss never reads may be anything) is what the model makes of them computed, micro-batch by micro-batch.
        """
        if self.graph is None or not any(self._doubtful(rule, batch) for rule in self.rules):
            return
        micro = split()
        for i in range(len(micro[self.inputs[0]])):
            values = self.graph(*(_host(micro[name][i]) for name in self.inputs))
            for rule, value in zip(self.rules, values, strict=True):
                bad = rule.bad(value)
                if bad.numel():
                    raise BraidError(_text(rule, int(bad[0]), i))

    def _doubtful(self, rule: _Rule, batch: Mapping[str, object]) -> bool:
        value = batch.get(rule.source) if rule.source is not None else None
        return not isinstance(value, Tensor) or rule.bad(value).numel() > 0


def read_checks(captured: Captured) -> Checks:
    """The checks of every lookup in a parameter and every cross entropy of ``captured``, at full vocabulary, whose rows
    or labels follow from the inputs alone; others are the model's own business."""
    graph = captured.graph_module.graph
    checks = []
    for node in graph.nodes:
        if node.target is aten.embedding.default and node.args[0].meta.get("is_parameter"):
            weight = node.args[0]
            checks.append(Check(node.args[1], int(weight.meta["val"].shape[0]), None, str(weight.target)))
        elif node.target is aten.cross_entropy_loss.default:
            logits, labels = (n.meta["val"] for n in node.args[:2])
            ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
            if not labels.is_floating_point():
                checks.append(Check(node.args[1], int(logits.shape[min(logits.ndim, 2) - 1]), int(ignored)))
    return _check_graph(captured, checks)


def _check_graph(captured: Captured, checks: Iterable[Check]) -> Checks:
    found = {c: {n.op for n in ancestors([c.node])} for c in dict.fromkeys(checks)}
    wanted = [c for c, kinds in found.items() if "placeholder" in kinds and "get_attr" not in kinds]
    if not wanted:
        return Checks()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed = {n for c in wanted for n in ancestors([c.node])}
    for node in captured.graph_module.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            env[node] = graph.placeholder(node.name)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].args, env[node].kwargs = fx.node.map_aggregate(
                (env[node].args, env[node].kwargs),
                lambda a: torch.device("cpu") if isinstance(a, torch.device) else a,
            )  # type: ignore[misc, assignment]
    graph.output(tuple(env[c.node] for c in wanted))
    rules = tuple(_Rule(_source(c), c.vocab, c.ignored, c.table) for c in wanted)
    inputs = tuple(str(n.target) for n in graph.find_nodes(op="placeholder"))
    return Checks(rules, inputs, fx.GraphModule({}, graph))


def _source(check: Check) -> str | None:
    node = check.node
    while node.op == "call_function":
        pads = node.target is aten.pad.default
        fill = node.args[3] if pads and len(node.args) > 3 else node.kwargs.get("value")
        if not (node.target in _SAME or (pads and check.ignored is not None and fill == check.ignored)):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return str(node.name)


def _host(value: object) -> object:
    return value.cpu() if isinstance(value, Tensor) else value


def _text(rule: _Rule, value: int, index: int) -> str:
    tokens = rule.ignored is not None or rule.source in ("input_ids", None)
    what = "label" if rule.ignored is not None else "token id" if tokens else "index"
    where = f"{rule.source} holds the {what}" if rule.source is not None else f"the model reads the {what}"
    table = "the vocabulary" if tokens else rule.table
    ignored = f", and {rule.ignored} is ignored" if rule.ignored is not None else ""
    return (
        f"{where} {value} in micro-batch {index}, but {table} has {rule.vocab} entries (0 to "
        f"{rule.vocab - 1}){ignored}; correct the batch, or resize the model's embeddings"
    )
