"""A tensor-parallel plan for a model that has none, read from its graph at full size.

Contract: (captured graph at full size, numbered layers) -> patterns like a model's own ``_tp_plan``. A linear whose
input comes from linears alone, through operators that work on features or heads one by one, is row-parallel, and
those linears are column-parallel::

    q, k, v = linear(h), linear(h), linear(h)         q_proj, k_proj, v_proj: colwise
    y = linear(attention(q, k, v))              =>    o_proj: rowwise
    z = linear(gelu(linear(h)))                       fc1: colwise, fc2: rowwise

One linear that makes q, k and v side by side is cut in sections. A norm or a reduction over features in between, or
features that are read elsewhere as well, leave a pair whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from .reach import ancestors

aten = torch.ops.aten

_LINEARS = {
    aten.linear.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.mm.default: (0, 1),
    aten.matmul.default: (0, 1),
}
#: Operators that mix features, by name: no linear in front of them can be cut, unless they work head by head.
_MIXING = re.compile(
    r"norm|mean|sum|softmax_backward|cumsum|sort|topk|argmax|conv|pool|fft|index_add|scatter"
)
_ATTENTION = re.compile(r"scaled_dot_product|softmax")
_SPLITTING = frozenset({"split", "split_with_sizes", "chunk", "slice"})
#: Operators that pair heads with others, where they work on the dimension of heads: the position of the dimension
#: among their arguments.
_PAIRING = {
    "split": 2,
    "split_with_sizes": 2,
    "chunk": 2,
    "slice": 1,
    "select": 1,
    "cat": 1,
    "roll": 2,
    "flip": 1,
}


@dataclass(frozen=True, slots=True)
class Inferred:
    """``patterns`` for ``tp_plan``; ``left``: what stays whole and why. ``attention``: the patterns that cut heads;
    ``groups``: patterns that are cut together or not at all."""

    patterns: Mapping[str, str]
    left: tuple[str, ...] = field(default=())
    attention: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """One per pattern, for ``model.plan``."""
        return tuple(f"{name}: inferred from the graph, {style}" for name, style in self.patterns.items())

    def parts(self) -> list[frozenset[str]]:
        """The patterns, those that are cut together in one set, in the order of the model."""
        found: list[frozenset[str]] = []
        for group in [*self.groups, *(frozenset({pattern}) for pattern in self.patterns)]:
            mine = frozenset(group & self.patterns.keys())
            apart = [other for other in found if not other & mine]
            joined = mine.union(*(other for other in found if other & mine))
            found = [*apart, joined] if joined else apart
        order = list(self.patterns)
        return sorted(found, key=lambda group: min(map(order.index, group)))

    def without_attention(self, why: str) -> Inferred:
        """The same for all but attention."""
        rest = {name: style for name, style in self.patterns.items() if name not in self.attention}
        return replace(self, patterns=rest, left=(*self.left, f"attention stays whole: {why}"))

    def without(self, parameters: Mapping[str, str]) -> Inferred:
        """The same without what is cut together with ``parameters``, by name, each with why."""
        reasons = {
            pattern: why
            for name, why in parameters.items()
            for pattern in (_pattern(name), _pattern(name.rpartition(".")[0]))
            if pattern in self.patterns
        }
        changed = True
        while changed:
            changed = False
            for group in self.groups:
                why = next((reasons[p] for p in sorted(group & reasons.keys())), None)
                if why is not None and not group <= reasons.keys():
                    reasons |= dict.fromkeys(group - reasons.keys(), why)
                    changed = True
        rest = {pattern: style for pattern, style in self.patterns.items() if pattern not in reasons}
        gone = [p for p in self.patterns if p in reasons]
        by_reason = {
            why: [p for p in gone if reasons[p] == why] for why in dict.fromkeys(reasons[p] for p in gone)
        }
        left = [f"{', '.join(names)} stays whole: {why}" for why, names in by_reason.items()]
        return replace(self, patterns=rest, left=(*self.left, *left))


def infer_plan(graph: fx.Graph, *, tower: Collection[fx.Node] = (), alone: bool = False) -> Inferred:
    """See the module's docstring. ``tower``: nodes of a tower of a larger model, whose linears count outside of
    numbered layers as well; ``alone``: no others do. Empty patterns where nothing can be cut."""
    linears = {
        n: name
        for n in graph.nodes
        if (n in tower or not alone) and (name := _module_of(n, numbered=n not in tower)) is not None
    }
    votes: dict[str, set[str]] = {}
    left: dict[str, str] = {}
    heads: set[str] = set()
    groups: list[frozenset[str]] = []
    for node, name in linears.items():
        found = _sources(node, linears, pairs=node not in tower)
        pattern = _pattern(name)
        if isinstance(found, str):
            left[pattern] = found
            continue
        sources, attention, scalars = found
        if attention:
            heads |= {pattern, *(_pattern(linears[s]) for s in sources), *map(_pattern, scalars)}
        groups.append(frozenset({pattern, *(_pattern(linears[s]) for s in sources), *map(_pattern, scalars)}))
        for parameter in sorted(scalars):
            votes.setdefault(_pattern(parameter), set()).add("colwise")
        fused = attention and len(sources) == 1 and _is_split(next(iter(sources)), stacked=node in tower)
        votes.setdefault(pattern, set()).add("rowwise_split_input" if fused else "rowwise")
        for source in (n for n in linears if n in sources):  # in the graph's order, the same on every rank
            style = "colwise_gather_output" if fused else "colwise"
            votes.setdefault(_pattern(linears[source]), set()).add(style)
    patterns = {pattern: next(iter(styles)) for pattern, styles in votes.items() if len(styles) == 1}
    kept = tuple(f"{p} stays whole: {why}" for p, why in left.items() if p not in patterns and "*" in p)
    return Inferred(patterns, kept, frozenset(heads), tuple(dict.fromkeys(groups)))


def _module_of(node: fx.Node, *, numbered: bool) -> str | None:
    """The module of a linear; ``numbered``: of one inside a numbered layer."""
    if node.op != "call_function" or node.target not in _LINEARS:
        return None
    weight = node.args[_LINEARS[node.target][1]]  # type: ignore[index]
    while isinstance(weight, fx.Node) and weight.op == "call_function" and len(weight.all_input_nodes) == 1:
        weight = weight.all_input_nodes[0]
    if not isinstance(weight, fx.Node) or not weight.meta.get("is_parameter"):
        return None
    name = str(weight.target).rpartition(".")[0]
    return name if not numbered or re.search(r"\.\d+\.", name) else None


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _layer(name: str) -> str:
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def _sources(
    row: fx.Node, linears: Mapping[fx.Node, str], *, pairs: bool
) -> tuple[set[fx.Node], bool, set[str]] | str:
    """``pairs``: heads must not be told apart by their number (else what follows the plan's values will find it). The
    linears that ``row``'s input comes from, whether attention lies between, and the parameters with one number
    per head that meet it; or why it can't be cut."""
    start = row.args[_LINEARS[row.target][0]]  # type: ignore[index]
    sources: set[fx.Node] = set()
    between: set[fx.Node] = set()
    scalars: set[str] = set()
    attention = False
    todo = [start]
    while todo:
        node: fx.Node = todo.pop()  # type: ignore[assignment]
        if node in between or node in sources:
            continue
        if node in linears:
            sources.add(node)
            continue
        if node.op != "call_function" or not _is_activation(node):
            scalars |= _per_head(node)
            continue
        name = getattr(node.target, "_opname", "")
        if _MIXING.search(name) and not _by_head(node):
            return f"{name} lies before it"
        if pairs and _pairs_heads(node, name):
            return f"{name} over heads lies before it"
        attention = attention or bool(_ATTENTION.search(name))
        between.add(node)
        todo += node.all_input_nodes
    if not sources or not between:
        return "its input comes from no linear"
    if {_layer(linears[s]) for s in sources} != {_layer(linears[row])}:
        return "its input comes from another layer"
    reading = between | {row}
    if any(user not in reading for node in (*sources, *between) for user in node.users):
        return "what it reads is read elsewhere too"
    return sources, attention, scalars


def _per_head(node: fx.Node) -> set[str]:
    """The parameter with one number per head (an attention sink) that ``node`` is in the shape [_, heads, _, 1]."""
    val = node.meta.get("val")
    source = node
    while source.op == "call_function" and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if not source.meta.get("is_parameter") or getattr(val, "ndim", 0) != 4:
        return set()
    heads = source.meta["val"].shape
    return {str(source.target)} if len(heads) == 1 and tuple(val.shape[1::2]) == (heads[0], 1) else set()  # type: ignore[union-attr]


def _by_head(node: fx.Node) -> bool:
    """Does a norm or a mean work on the last dimension of [batch, heads, sequence, size] or the like?"""
    source = node.all_input_nodes[0].meta.get("val")
    return source is not None and not isinstance(source, tuple | list) and source.ndim >= 4


def _pairs_heads(node: fx.Node, name: str) -> bool:
    """Does it bring together or tell apart heads by their number (DiffLlama pairs the first half with the second)?
    On a rank's own heads it would do so with others, and every shape would fit."""
    val = node.all_input_nodes[0].meta.get("val")
    if val is None or isinstance(val, tuple | list) or val.ndim < 4:
        return False
    if name == "repeat":
        counts = list(node.args[1])  # type: ignore[arg-type]
        return any(count != 1 for count in counts[1:3])
    if name not in _PAIRING:
        return False
    at = _PAIRING[name]
    dim = node.args[at] if len(node.args) > at else 0
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return any(d % val.ndim in (1, 2) for d in dims)


def _is_activation(node: fx.Node) -> bool:
    """Does the value follow from a parameter and an input?"""
    above = ancestors([node])
    return any(n.op == "placeholder" for n in above) and any(n.meta.get("is_parameter") for n in above)


def _is_split(node: fx.Node, *, stacked: bool) -> bool:
    """Are the features of a linear taken apart side by side (and not head by head)? ``stacked``: also where a view
    makes them a dimension of their own, [..., 3, heads, size]."""
    users: Iterable[fx.Node] = node.users
    while len(list(users)) == 1:
        user = next(iter(users))
        name = getattr(user.target, "_opname", "")
        if name in _SPLITTING:
            return True
        if name not in ("view", "reshape") or user.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            if not (stacked and name in ("view", "reshape")):
                return False
            parts = user.meta["val"].shape[node.meta["val"].ndim - 1 :]
            return len(parts) == 3 and parts[0] == 3
        users = user.users
    return all(getattr(u.target, "_opname", "") in _SPLITTING for u in users)
