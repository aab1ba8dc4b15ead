"""Part of ``pipeline``'s tracing: may each rank take its own features apart as the model takes all of them?

Contract: (captured graph at local shapes, plan) -> for each parameter whose cut features the model splits somewhere
else than the plan cuts them, into how many equal sections it must be cut instead::

    gate, up = linear(x, W).chunk(2, -1)      # W [2 * inter, hid]: gate above up

Cut in one piece, W gives rank 0 all of gate and nothing of up: every shape fits, and every value is wrong. Cut in two
sections, rank 0 has its part of both. The same rule holds where parts are put side by side in front of a
row-parallel linear. What can't be mended by equal sections of one weight is refused with its name.

Followed are matrix products, element by element operators, and rearrangements; attention and reductions end the search.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from .errors import PlanError
from .experts import is_grouped_product
from .layout import TpPlan

aten = torch.ops.aten

#: An end that a slice without one has in a traced graph.
_OPEN = 2**63 - 1
_SPLITS = frozenset({"split", "split_with_sizes", "chunk", "unbind"})
_CASTS = frozenset({"to", "_to_copy", "contiguous", "clone", "alias", "detach"})
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})


@dataclass(frozen=True, slots=True)
class _Cut:
    """A value whose dimension ``dim`` is cut over the ranks: on each it consists of sections of ``lengths``.

    ``owner``: the parameter that it comes from. ``plain``: still the last dimension, as the product made it.
    """

    dim: int
    lengths: tuple[int, ...]
    owner: str
    plain: bool = True


@dataclass(slots=True)
class _Wanted:
    """(First) name of a parameter -> equal sections that it needs; ``strict``: raise where no sections would help."""

    strict: bool
    counts: dict[str, int] = field(default_factory=dict)


def taken_apart(
    graph: fx.Graph, plan: TpPlan, canonical: Mapping[str, str], *, strict: bool = True
) -> dict[str, int]:
    """See the module's docstring: (first) name of a parameter -> equal sections that it needs. Where no sections would
    help, raises :class:`PlanError` if ``strict``, else gives 0."""
    cuts: dict[fx.Node, _Cut] = {}
    wanted = _Wanted(strict)
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in canonical:
            shard = plan.params[canonical[str(node.target)]]
            if shard.dim is not None:
                lengths = tuple(piece.length for piece in shard.pieces(0))
                cuts[node] = _Cut(shard.dim, lengths, shard.name)
        elif node.op == "call_function" and any(n in cuts for n in node.all_input_nodes):
            found = _follow(node, cuts, wanted)
            if found is not None:
                cuts[node] = found
    return wanted.counts


def _follow(node: fx.Node, cuts: Mapping[fx.Node, _Cut], wanted: _Wanted) -> _Cut | None:
    """How the result of ``node`` is cut; None where that is not known."""
    name = getattr(node.target, "_opname", "")
    if (product := _operands(node)) is not None:
        return _product(node, *product, cuts, wanted)
    if node.target is operator.getitem:
        return _part(node, cuts)
    if name == "cat":
        return _joined(node, cuts)
    source = node.args[0] if node.args else None
    cut = cuts.get(source) if isinstance(source, fx.Node) else None
    if name in _SPLITS:
        return None if cut is None else _split(node, name, cut, wanted)
    if name in ("slice", "select"):
        return None if cut is None else _piece(node, name, cut, wanted)
    if cut is not None and (arrange := _ARRANGE.get(name)) is not None:
        return arrange(node, cut)
    return _pointwise(node, cuts, wanted)


# -- products ----------------------------------------------------------------------------------------------------


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """(input, weight, the weight's dimension of output features) of a product with a weight."""
    if node.target is aten.linear.default:
        return node.args[0], node.args[1], 0  # type: ignore[return-value]
    if node.target in (aten.mm.default, aten.bmm.default, aten.matmul.default) or is_grouped_product(node):
        return node.args[0], node.args[1], -1  # type: ignore[return-value]
    if node.target is aten.addmm.default:
        return node.args[1], node.args[2], -1  # type: ignore[return-value]
    return None


def _product(
    node: fx.Node, x: fx.Node, weight: fx.Node, out: int, cuts: Mapping[fx.Node, _Cut], wanted: _Wanted
) -> _Cut | None:
    cut = cuts.get(weight)
    if cut is None:
        return None
    ndim = weight.meta["val"].ndim
    if cut.dim == out % ndim:
        return _Cut(node.meta["val"].ndim - 1, cut.lengths, cut.owner)
    given = cuts.get(x)
    if (
        wanted.strict
        and given is not None
        and cut.dim == (1 if out == 0 else ndim - 2)
        and given.dim == x.meta["val"].ndim - 1
        and given.lengths != cut.lengths
        and sum(given.lengths) == sum(cut.lengths)
    ):
        raise PlanError(
            f"the tensor-parallel plan cuts the input features of {cut.owner} into {_sizes(cut.lengths)} on each rank, "
            f"but they come from {given.owner} as {_sizes(given.lengths)} side by side; cut both alike (the "
            "row-parallel one with style 'rowwise_split_input', and the one in front with 'colwise_gather_output'), "
            "or leave both out of tp_plan"
        )
    return None


def _sizes(lengths: tuple[int, ...]) -> str:
    return " + ".join(map(str, lengths))


# -- taking apart and putting together ---------------------------------------------------------------------------


def _split(node: fx.Node, name: str, cut: _Cut, wanted: _Wanted) -> _Cut | None:
    """The cut of what is split; :func:`_part` gives each result its own."""
    if _split_dim(node, name) == cut.dim:
        parts = _parts(node, name, cut.dim)
        if not _fits(parts, cut.lengths):
            _want(node, parts, cut, wanted)
            return None
    return cut


def _split_dim(node: fx.Node, name: str) -> int:
    position = 1 if name == "unbind" else 2
    dim: int = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)  # type: ignore[assignment]
    return dim % node.args[0].meta["val"].ndim  # type: ignore[union-attr, no-any-return]


def _parts(node: fx.Node, name: str, dim: int) -> list[int]:
    results = node.meta["val"]
    return [1 if name == "unbind" else int(val.shape[dim]) for val in results]


def _fits(parts: list[int], lengths: tuple[int, ...]) -> bool:
    """Do parts end where sections end?"""
    return set(accumulate(parts)) <= set(accumulate(lengths))


def _want(node: fx.Node, parts: list[int], cut: _Cut, wanted: _Wanted) -> None:
    count = len(parts)
    one, equal = cut.plain and len(cut.lengths) == 1, len(set(parts)) == 1
    if one and equal and wanted.counts.setdefault(cut.owner, count) == count:
        return
    if not wanted.strict:
        wanted.counts[cut.owner] = 0
        return
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    raise PlanError(
        f"the tensor-parallel plan cuts {cut.owner} into {_sizes(cut.lengths)} on each rank, but module "
        f"{stack[-1][0] if stack else node.name!r} takes its features or heads apart into {_sizes(tuple(parts))} "
        f"({node.target}): each rank would take others; give the module the style 'colwise_gather_output' and the one "
        "behind it 'rowwise_split_input', or leave them out of tp_plan"
    )


def _part(node: fx.Node, cuts: Mapping[fx.Node, _Cut]) -> _Cut | None:
    """One result of a split."""
    split: fx.Node = node.args[0]  # type: ignore[assignment]
    name = getattr(split.target, "_opname", "")
    cut = cuts.get(split)
    if cut is None or name not in _SPLITS:
        return None
    dim = _split_dim(split, name)
    if dim != cut.dim:
        return replace(cut, dim=cut.dim - (name == "unbind" and dim < cut.dim))
    if name == "unbind":
        return None
    index: int = node.args[1]  # type: ignore[assignment]
    parts = _parts(split, name, dim)
    start = sum(parts[:index])
    return replace(cut, lengths=_inside(cut.lengths, start, start + parts[index]))


def _inside(lengths: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    ends = [0, *accumulate(lengths)]
    return lengths[ends.index(start) : ends.index(end)]


def _piece(node: fx.Node, name: str, cut: _Cut, wanted: _Wanted) -> _Cut | None:
    """``slice(x, dim, start, end, step)`` or ``select(x, dim, index)``."""
    source: Any = node.args[0]
    val = source.meta["val"]
    size = int(val.shape[cut.dim])
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if dim % val.ndim != cut.dim:
        return replace(cut, dim=cut.dim - (name == "select" and dim % val.ndim < cut.dim))
    if name == "select":
        index: Any = node.args[2]
        start, end, step = index % size, index % size + 1, 1
    else:
        start, end, step = _range(node, size)
    if step != 1:
        return None  # every other feature: an interleaved layout, whose parts are cut alike
    if (start, end) == (0, size):
        return cut
    ends = [0, *accumulate(cut.lengths)]
    if start < end and start in ends and end in ends:
        return None if name == "select" else replace(cut, lengths=_inside(cut.lengths, start, end))
    width = max(end - start, 0)
    equal = width > 0 and end <= size and size % width == 0 and start % width == 0
    _want(node, [width] * (size // width) if equal else [start, width], cut, wanted)
    return None


def _range(node: fx.Node, size: int) -> tuple[int, int, int]:
    """Start, end and step of a slice; past the end where the model counts on features that other ranks have."""
    start, end, step = ([*node.args[2:], None, None, None])[:3]  # type: ignore[misc]
    start, end, step = start or 0, _OPEN if end is None else end, step or 1
    start, end = (n + size if n < 0 else n for n in (start, end))  # type: ignore[operator, misc]
    return start, size if end >= _OPEN else end, step  # type: ignore[operator, return-value]


def _joined(node: fx.Node, cuts: Mapping[fx.Node, _Cut]) -> _Cut | None:
    values: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    given = [cuts.get(v) for v in values]
    dim = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].ndim  # type: ignore[operator]
    first = given[0]
    if first is None or any(g is None or g.dim != first.dim for g in given):
        return None
    if dim != first.dim:
        return first
    return replace(first, lengths=tuple(n for g in given for n in g.lengths), plain=False)  # type: ignore[union-attr]


# -- arranging and computing -------------------------------------------------------------------------------------


def _viewed(node: fx.Node, cut: _Cut) -> _Cut | None:
    """A view keeps the cut where it divides or joins whole dimensions with the cut one outermost."""
    before: list[int] = list(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    after: list[int] = list(node.meta["val"].shape)
    outer = 1
    for n in before[: cut.dim]:
        outer *= n
    product, dim = 1, 0
    while dim < len(after) and product < outer:
        product *= after[dim]
        dim += 1
    inner_before = _count(before[cut.dim + 1 :])
    if product != outer or dim == len(after):
        return None
    inner = _count(after[dim + 1 :])
    lengths = [n * inner_before for n in cut.lengths]
    if any(n % inner for n in lengths):
        return None
    plain = cut.plain and dim == len(after) - 1
    return _Cut(dim, tuple(n // inner for n in lengths), cut.owner, plain)


def _count(sizes: list[int]) -> int:
    product = 1
    for n in sizes:
        product *= n
    return product


def _moved(dims: Callable[[fx.Node, int], list[int]]) -> Callable[[fx.Node, _Cut], _Cut]:
    """An operator that permutes dimensions: ``dims(node, ndim)`` says from where each one comes."""

    def arrange(node: fx.Node, cut: _Cut) -> _Cut:
        ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
        order = [d % ndim for d in dims(node, ndim)]
        return replace(cut, dim=order.index(cut.dim), plain=False)

    return arrange


def _swapped(node: fx.Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    a, b = (node.args[1], node.args[2]) if len(node.args) > 2 else (0, 1)
    order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return order


def _unsqueezed(node: fx.Node, cut: _Cut) -> _Cut:
    at = node.args[1] % node.meta["val"].ndim  # type: ignore[operator]
    return replace(cut, dim=cut.dim + (at <= cut.dim), plain=False)


def _expanded(node: fx.Node, cut: _Cut) -> _Cut:
    return replace(cut, dim=cut.dim + node.meta["val"].ndim - node.args[0].meta["val"].ndim, plain=False)  # type: ignore[union-attr]


def _kept(_node: fx.Node, cut: _Cut) -> _Cut:
    return cut


_ARRANGE: Mapping[str, Callable[[fx.Node, _Cut], _Cut | None]] = {
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(_CASTS, _kept),
    "transpose": _moved(_swapped),
    "permute": _moved(lambda node, _: list(node.args[1])),  # type: ignore[arg-type]
    "t": _moved(lambda _, ndim: list(reversed(range(ndim)))),
    "unsqueeze": _unsqueezed,
    "expand": _expanded,
}


def _pointwise(node: fx.Node, cuts: Mapping[fx.Node, _Cut], wanted: _Wanted) -> _Cut | None:
    """The cut of the inputs of the result's own shape, for an operator that torch calls pointwise: one for all."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return None
    shape = getattr(node.meta.get("val"), "shape", None)
    given = [cuts[n] for n in node.all_input_nodes if n in cuts and _shape(n) == shape]
    most = max(given, key=lambda cut: len(cut.lengths), default=None)
    for cut in given:
        if most is not None and cut.dim == most.dim and cut.lengths != most.lengths:
            _want(node, list(most.lengths), cut, wanted)
    return most


def _shape(node: fx.Node) -> object:
    return getattr(node.meta.get("val"), "shape", None)
