"""Part of pass ``follow``: operators whose dimensions have names: products, reductions, softmax, norms, attention.

Each says which dimension of an input is which of the result (equal labels), which are summed over and which are mixed.
A cut dimension stays where it is, or leaves a pending sum, or is an error::

    linear  x [.. i], W [o, i] -> [.. o]     sums i
    softmax x [.. d]           -> [.. d]     mixes d
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch import fx

from .cuts import WHOLE, Broken, Call, Laid, Partial, State, lengths, read, shape_of
from .layout import Section

Labels = Sequence[Hashable]
#: An input (None: left out) and the label of each of its dimensions.
Operand = tuple[Any, Labels]


def combine(
    call: Call,
    operands: Sequence[Operand],
    out: Labels,
    *,
    sums: Collection[Hashable] = (),
    mixes: Collection[Hashable] = (),
    linear: bool = False,
) -> State:
    """The state of a result with dimensions ``out``. ``linear``: in each operand, so that one may be a pending sum."""
    operands = [(node, labels) for node, labels in operands if isinstance(node, fx.Node)]
    partial = [s for node, _ in operands if isinstance(s := call.state(node), Partial)]
    if partial:
        others = [s for node, _ in operands if not isinstance(s := call.state(node), Partial)]
        if linear and len(partial) == 1 and all(isinstance(s, Laid) and s.whole for s in others):
            return partial[0]
        raise call.pending(partial[0])
    found: dict[Hashable, tuple[tuple[Section, ...], str]] = {}
    even: dict[Hashable, int] = {}
    for node, labels in operands:
        laid = call.laid(node)
        for dim, label in enumerate(labels):
            if laid.dim == dim:
                known = found.setdefault(label, (laid.sections, laid.owner))
                if call.twin is None and _as_long(known[0], laid.sections):
                    # Heads that several ranks hold meet others: the plan's author knows that they fit.
                    found[label] = max(known, (laid.sections, laid.owner), key=lambda k: k[0][0].parts)
                elif known[0] != laid.sections:
                    raise Broken(
                        f"brings together features cut as {lengths(known[0])} and as {lengths(laid.sections)}",
                        laid.owner,
                    )
            for d, full in laid.even:
                if d == dim and even.setdefault(label, full) != full:
                    raise Broken(f"brings together {even[label]} and {full} of one dimension")
    _check_whole(call, operands, found, even)
    return _result(call, out, found, even, sums, mixes)


def _as_long(a: Sequence[Section], b: Sequence[Section]) -> bool:
    return [s.length for s in a] == [s.length for s in b]


def _check_whole(
    call: Call,
    operands: Sequence[Operand],
    found: Mapping[Hashable, tuple[tuple[Section, ...], str]],
    even: Mapping[Hashable, int],
) -> None:
    """Inputs with all of a dimension must not meet others with a part of it."""
    for node, labels in operands:
        laid, shape = call.laid(node), shape_of(node)
        dims = dict(laid.even)
        for dim, label in enumerate(labels):
            if (
                dim == laid.dim
                or dim in dims
                or shape[dim] == 1
                or (label not in found and label not in even)
            ):
                continue
            sections, owner = found.get(label, ((), ""))
            if call.twin is None and sections and shape[dim] == sum(s.length for s in sections):
                continue  # made for this rank's part, as it fits; the plan's author knows
            part = lengths(sections) if sections else f"part of {even[label]}"
            raise Broken(
                f"brings together a dimension of which a rank has {part} and a whole one of {shape[dim]}",
                owner,
            )


def _result(
    call: Call,
    out: Labels,
    found: Mapping[Hashable, tuple[tuple[Section, ...], str]],
    even: Mapping[Hashable, int],
    sums: Collection[Hashable],
    mixes: Collection[Hashable],
) -> State:
    for label in mixes:
        if label in found:
            sections, owner = found[label]
            raise Broken(f"works across a dimension of which each rank has {lengths(sections)}", owner)
    rest = {label: full for label, full in even.items() if label not in found}
    if any(label in mixes or label in sums for label in rest):
        raise Broken("works across a dimension that is shorter on a rank")
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise Broken(
            f"combines every feature of {first[1]} with every one of {second[1]}, but a rank has parts of both",
            first[1],
        )
    places = {label: i for i, label in enumerate(out)}
    kept = tuple(sorted((places[label], full) for label, full in rest.items() if label in places))
    for label, (sections, owner) in found.items():
        if label in sums:
            if len({s.parts for s in sections}) > 1:
                raise Broken(
                    f"sums over heads of which some are held by several ranks ({lengths(sections)})", owner
                )
            # What several ranks hold is counted several times.
            return Partial(owner, call.node, Fraction(call.tp_size, sections[0].parts))
        if label not in places:
            raise Broken(f"takes away a dimension of which each rank has {lengths(sections)}", owner)
        return Laid(places[label], sections, owner, kept)
    return Laid(even=kept) if kept else WHOLE


def aligned(ndim: int, tag: str = "b") -> list[Hashable]:
    """Labels of ``ndim`` dimensions that broadcast from the right."""
    return [(tag, ndim - d) for d in range(ndim)]


# -- element by element ------------------------------------------------------------------------------------------

#: Operators that are linear in their first input (or in each), every other one being whole.
_LINEAR = frozenset(
    [
        "mul",
        "multiply",
        "div",
        "divide",
        "true_divide",
        "neg",
        "negative",
        "to",
        "_to_copy",
        "type_as",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "lift_fresh_copy",
    ]
)
_ADD = frozenset({"add", "sub", "subtract"})


def pointwise(call: Call) -> State:
    """Inputs broadcast from the right."""
    nodes = read(call.node)
    if call.name == "type_as":
        nodes = nodes[:1]
    states = [call.state(n) for n in nodes]
    scaled = _scaled(call, states)
    if scaled is not None:
        return scaled
    if call.name in _ADD and len(states) == 2:
        a, b = states
        if isinstance(a, Partial) and isinstance(b, Partial) and a.factor == b.factor:
            call.same_constants()
            return a
        for one, other, node in ((a, b, nodes[1]), (b, a, nodes[0])):
            if isinstance(one, Partial) and other == WHOLE and is_zero(node):
                return one
    operands = [(n, aligned(len(shape_of(n)))) for n in nodes]
    result = combine(call, operands, aligned(len(call.shape)), linear=_is_linear(call))
    call.same_constants()
    return result


def _is_linear(call: Call) -> bool:
    """In each input, the others being whole?"""
    if call.name == "masked_fill":
        return call.arg(2, "value") == 0 and not isinstance(call.state(call.arg(1, "mask")), Partial)
    if call.name in ("div", "divide", "true_divide"):
        return call.arg(2, "rounding_mode") is None and not isinstance(
            call.state(call.arg(1, "other")), Partial
        )
    val = call.node.meta["val"]
    return call.name in _LINEAR and (val.is_floating_point() or val.is_complex())


def _scaled(call: Call, states: Sequence[State]) -> State | None:
    """A pending sum times or over another number than in the unsplit model: a mean over the ranks."""
    if (
        call.name not in ("mul", "div")
        or len(states) != 1
        or not isinstance(states[0], Partial)
        or call.twin is None
    ):
        return None
    ours, theirs = call.arg(1, "other"), call.twin_arg(1, "other")
    if not isinstance(ours, int | float) or not isinstance(theirs, int | float) or not ours or not theirs:
        return None
    ratio = Fraction(ours) / Fraction(theirs)
    return replace(states[0], factor=states[0].factor * (ratio if call.name == "mul" else 1 / ratio))


def is_zero(node: Any) -> bool:
    """Is it made of zeros alone?"""
    while getattr(node.target, "_opname", "") in ("to", "_to_copy", "expand", "clone"):
        node = node.all_input_nodes[0]
    return getattr(node.target, "_opname", "") in ("zeros", "zeros_like", "new_zeros")


# -- products ----------------------------------------------------------------------------------------------------


def linear(call: Call) -> State:
    x, weight, bias = call.arg(0, "input"), call.arg(1, "weight"), call.arg(2, "bias")
    batch = aligned(len(shape_of(x)) - 1)
    return _biased(call, [(x, [*batch, "i"]), (weight, ["o", "i"])], [*batch, "o"], bias, ["o"])


def _biased(
    call: Call, operands: list[Operand], out: Labels, bias: Any, labels: Labels, sums: str = "i"
) -> State:
    """A product and what is added to it, which no rank may add to its own part of a sum."""
    result = combine(call, operands, out, sums={sums}, linear=True)
    if not isinstance(bias, fx.Node):
        return result
    if isinstance(result, Partial):
        raise Broken(
            "adds a bias to a sum over this rank's features alone, which each rank would add: call the module instead "
            "of reading its weight",
            result.owner,
        )
    return combine(call, [*operands, (bias, labels)], out, sums={sums})


def matmul(call: Call) -> State:
    """Also mm, bmm, mv and dot."""
    a, b = call.node.args[:2]
    return combine(call, *_matmul(a, b), sums={"k"}, linear=True)


def _matmul(a: Any, b: Any) -> tuple[list[Operand], Labels]:
    m, n = len(shape_of(a)), len(shape_of(b))
    left: list[Hashable] = [*aligned(m - 2), "m", "k"] if m > 1 else ["k"]
    right: list[Hashable] = [*aligned(n - 2), "k", "n"] if n > 1 else ["k"]
    batch = aligned(max(m, n, 2) - 2)
    return [(a, left), (b, right)], [*batch, *(["m"] if m > 1 else []), *(["n"] if n > 1 else [])]


def addmm(call: Call) -> State:
    """``addmm`` and ``baddbmm``: a bias and a product."""
    bias, a, b = call.node.args[:3]
    operands, out = _matmul(a, b)
    result = _biased(
        call, operands, out, bias, out[-len(shape_of(bias)) :] if shape_of(bias) else [], sums="k"
    )
    call.same_constants()
    return result


def outer(call: Call) -> State:
    return combine(call, [(call.node.args[0], ["a"]), (call.node.args[1], ["b"])], ["a", "b"], linear=True)


def einsum(call: Call) -> State:
    equation, nodes = str(call.arg(0, "equation")).replace(" ", ""), list(call.arg(1, "tensors"))
    terms, arrow, result = equation.partition("->")
    inputs = terms.split(",")
    if not arrow or any(
        len(set(t.replace("...", ""))) != len(t.replace("...", "")) for t in [*inputs, result]
    ):
        raise Broken("can't be followed through this equation", definite=False)

    def labels(term: str, ndim: int) -> list[Hashable]:
        before, dots, after = term.partition("...")
        rest = ndim - len(before) - len(after)
        return [*before, *(aligned(rest) if dots else []), *after]

    operands = [(n, labels(t, len(shape_of(n)))) for n, t in zip(nodes, inputs, strict=True)]
    out = labels(result, len(call.shape))
    sums = {label for _, ls in operands for label in ls} - set(out)
    return combine(call, operands, out, sums=sums, linear=True)


def grouped(call: Call) -> State:
    """All experts' products at once: rows [S, in] by [E, in, out], the rows sorted by expert."""
    x, weight, offsets = call.node.args[:3]
    operands = [(x, ["s", "i"]), (weight, ["e", "i", "o"]), (offsets, ["e"])]
    return combine(call, operands, ["s", "o"], sums={"i"}, mixes={"e", "s"}, linear=True)


def embedding(call: Call) -> State:
    weight, ids = call.node.args[:2]
    rows = aligned(len(shape_of(ids)))
    return combine(call, [(weight, ["v", "h"]), (ids, rows)], [*rows, "h"], mixes={"v"})
