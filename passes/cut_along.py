"""Part of pass ``follow``: operators along some dimensions of one input: softmax, scans, sorts, norms, reductions.

Along a dimension that is cut they are an error; but a sum over it is a pending sum, and so is a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from .cut_sums import aligned, combine
from .cuts import Broken, Call, Laid, Partial, State, for_each, lengths, shape_of


def along(call: Call, position: int = 1, default: int = -1) -> Any:
    """An operator that works along one dimension and keeps it; as many results as the node has."""
    x = call.node.args[0]
    ndim = len(shape_of(x))
    dims = aligned(ndim)
    result = combine(call, [(x, dims)], dims, mixes={dims[call.dim(position, default=default, ndim=ndim)]})
    call.same_constants()
    return for_each(call, result)


def at(position: int, default: int = -1) -> Callable[[Call], Any]:
    """:func:`along` with its dimension at ``position`` of the arguments."""
    return lambda call: along(call, position, default)


def all_dims(call: Call) -> Any:
    """Flip and roll: the dimensions stand last among the arguments."""
    x = call.node.args[0]
    given = call.arg(2 if call.name == "roll" else 1, "dims", [])
    dims = aligned(len(shape_of(x)))
    mixed = {dims[d] for d in given} or set(dims)
    result = combine(call, [(x, dims)], dims, mixes=mixed)
    call.same_constants()
    return result


def last(count: int) -> Callable[[Call], Any]:
    """An operator on the last ``count`` dimensions, which it may change: pooling, triangles, padding."""

    def rule(call: Call) -> Any:
        x = call.node.args[0]
        dims = aligned(len(shape_of(x)))
        result = combine(call, [(x, dims)], dims, mixes=set(dims[-count:]))
        call.same_constants()
        return for_each(call, result)

    return rule


def padded(call: Call) -> Any:
    return last(len(call.arg(1, "pad", [])) // 2)(call)


def normalised(call: Call) -> State:
    """``layer_norm`` and ``rms_norm``, over the last dimensions."""
    x, count = call.node.args[0], len(call.arg(1, "normalized_shape"))
    dims = aligned(len(shape_of(x)))
    more = [n for n in call.node.all_input_nodes if n is not x]
    operands = [(x, dims), *((n, dims[-count:]) for n in more)]
    result = combine(call, operands, dims, mixes=set(dims[-count:]))
    call.same_constants()
    return result


def reduced(call: Call) -> Any:
    """Reductions; sums and means over what is cut leave a pending sum."""
    x = call.node.args[0]
    shape = shape_of(x)
    position = 2 if call.name in ("norm", "linalg_vector_norm") else 1
    given = call.arg(position, "dim", None)
    overload = str(getattr(call.node.target, "_overloadname", ""))
    if overload in ("default", "Scalar") and call.name in (
        "sum",
        "mean",
        "max",
        "min",
        "any",
        "all",
        "prod",
        "std",
        "var",
        "norm",
    ):
        given = None
    dims = [given] if isinstance(given, int) else list(given) if given else list(range(len(shape)))
    reduced_dims = {d % max(len(shape), 1) for d in dims}
    labels = aligned(len(shape))
    gone: set[Hashable] = {labels[d] for d in reduced_dims if d < len(labels)}
    keep = len(call.shape or _first_shape(call)) == len(shape)
    out: list[Hashable] = [(label, "reduced") if label in gone else label for label in labels]
    out = out if keep else [label for label in labels if label not in gone]
    if call.name not in ("sum", "mean"):
        result = combine(call, [(x, labels)], out, mixes=gone)
        call.same_constants()
        return for_each(call, result)
    result = combine(call, [(x, labels)], out, sums=gone, linear=True)
    if call.name == "mean" and isinstance(result, Partial) and isinstance(call.state(x), Laid):
        local = full = 1
        for d in reduced_dims:
            local, full = local * shape[d], full * call.unsplit(x)[d]
        result = replace(result, factor=result.factor * Fraction(full, local))
    call.same_constants()
    return result


def _first_shape(call: Call) -> tuple[int, ...]:
    val = call.node.meta.get("val")
    return tuple(val[0].shape) if isinstance(val, tuple | list) else ()


def gated(call: Call) -> State:
    """``glu``: the first half of a dimension with the second."""
    x = call.node.args[0]
    laid, dim = call.laid(x), call.dim(1, default=-1)
    half = len(laid.sections) // 2
    if laid.dim == dim:
        if laid.sections[:half] != laid.sections[half:]:
            raise Broken(
                f"pairs two halves of a dimension of which each rank has {lengths(laid.sections)}", laid.owner
            )
        return replace(laid, sections=laid.sections[:half])
    return along(call)  # type: ignore[no-any-return]


def loss(call: Call) -> State:
    """Cross entropy and the like: of whole values."""
    result = combine(
        call,
        [(n, [(i, d) for d in range(len(shape_of(n)))]) for i, n in enumerate(call.node.all_input_nodes)],
        [],
        mixes=[(i, d) for i, n in enumerate(call.node.all_input_nodes) for d in range(len(shape_of(n)))],
    )
    return result
