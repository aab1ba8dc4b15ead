"""Part of pass ``follow``: operators that move, repeat, take apart and put together.

Taking apart must end where sections end, on a rank and unsplit; what is put together must be cut alike::

    chunk(2) of 12 of 24                  -> an error: rank 0 would take 0..5 for 0..11
    chunk(2) of 6 of 12 + 6 of 12         -> 6 of 12 each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from .cut_views import movement, repeated
from .cuts import WHOLE, Broken, Call, Laid, Partial, State, ends, lengths, shape_of
from .layout import Section

_OPEN = 2**63 - 1


# -- dimensions that move ----------------------------------------------------------------------------------------


def moved(order: Callable[[Call, int], Sequence[int]]) -> Callable[[Call], Any]:
    """An operator that permutes dimensions: ``order(call, ndim)`` says from where each one comes."""

    def rule(call: Call, laid: Laid) -> State:
        ndim = len(shape_of(call.node.args[0]))
        call.same_constants()
        return _map(laid, {d % ndim: i for i, d in enumerate(order(call, ndim))})

    return movement(rule)


def _map(laid: Laid, places: dict[int, int]) -> Laid:
    """The same with dimension ``d`` at ``places[d]``; what has no place is gone."""
    even = tuple((places[d], n) for d, n in laid.even if d in places)
    if laid.dim is None:
        return Laid(even=even)
    return replace(laid, dim=places[laid.dim], even=even)


def swapped(call: Call, ndim: int) -> list[int]:
    a, b = (call.arg(1, "dim0", 0), call.arg(2, "dim1", 1)) if len(call.node.args) > 2 else (-2, -1)
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def permuted(call: Call, ndim: int) -> list[int]:
    return [int(d) % ndim for d in call.arg(1, "dims")]


def reversed_dims(call: Call, ndim: int) -> list[int]:
    return list(reversed(range(ndim)))


def movedim(call: Call, ndim: int) -> list[int]:
    source, target = (
        ([v] if isinstance(v, int) else list(v)) for v in (call.arg(1, "source"), call.arg(2, "destination"))
    )
    order = [d for d in range(ndim) if d not in {s % ndim for s in source}]
    for place, dim in sorted((t % ndim, s % ndim) for s, t in zip(source, target, strict=True)):
        order.insert(place, dim)
    return order


def unsqueeze(call: Call, laid: Laid) -> State:
    at = call.dim(1, ndim=len(call.shape))
    return _map(laid, {d: d + (at <= d) for d in range(len(call.shape) - 1)})


def squeeze(call: Call, laid: Laid) -> State:
    shape = call.unsplit(call.node.args[0])
    given = call.arg(1, "dim", None)
    dims = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = {d % len(shape) for d in dims if shape[d] == 1}
    kept = [d for d in range(len(shape)) if d not in gone]
    if len(kept) != len(call.shape):
        raise Broken("drops a dimension that has one entry on a rank and more unsplit", laid.owner)
    return _map(laid, {d: i for i, d in enumerate(kept)})


# -- repetitions -------------------------------------------------------------------------------------------------


def expand(call: Call, laid: Laid) -> State:
    shape, out = shape_of(call.node.args[0]), call.shape
    new = len(out) - len(shape)
    if laid.dim is not None and out[laid.dim + new] != shape[laid.dim]:
        raise Broken(
            f"repeats one of {sum(s.size for s in laid.sections)} along a dimension of them", laid.owner
        )
    even = {d + new: n for d, n in laid.even}
    full = call.twin_shape or out
    for d in range(len(out)):
        if (d < new or shape[d - new] == 1) and d - new != laid.dim and full[d] != out[d]:
            even[d] = full[d]
    result = Laid(
        None if laid.dim is None else laid.dim + new, laid.sections, laid.owner, tuple(sorted(even.items()))
    )
    return result if result.dim is not None or even else WHOLE


def repeat(call: Call, laid: Laid) -> State:
    shape = shape_of(call.node.args[0])
    counts, full = list(call.arg(1, "repeats")), list(call.twin_arg(1, "repeats"))
    pad = len(shape) - len(counts)
    counts, full = [1] * pad + counts, [1] * pad + full
    new = len(counts) - len(shape)
    even = {d + new: n for d, n in laid.even}
    sections = laid.sections
    for d, (ours, theirs) in enumerate(zip(counts, full, strict=True)):
        single = d < new or (shape[d - new] == 1 and d - new != laid.dim)
        if ours != theirs:
            if not single:
                raise Broken(f"repeats {ours} times what is repeated {theirs} times unsplit", laid.owner)
            even[d] = theirs
        elif d - new == laid.dim:
            sections *= ours
        elif d in even:
            even[d] *= ours
    dim = None if laid.dim is None else laid.dim + new
    return Laid(dim, sections, laid.owner, tuple(sorted(even.items())))


def repeat_interleave(call: Call, laid: Laid) -> State:
    ours, theirs = call.arg(1, "repeats"), call.twin_arg(1, "repeats")
    given = call.arg(2, "dim", None)
    if not isinstance(ours, int) or not isinstance(theirs, int) or given is None:
        raise Broken("repeats elements a number of times that can't be followed", laid.owner, definite=False)
    dim = call.dim(2, ndim=len(call.shape))
    if ours != theirs:
        section = repeated(laid.sections[0], ours, theirs, call.tp_size) if dim == laid.dim else None
        if section is None or len(laid.sections) > 1:
            raise Broken(f"repeats {ours} times what is repeated {theirs} times unsplit", laid.owner)
        return replace(laid, sections=(section,))
    if dim == laid.dim:
        return replace(laid, sections=tuple(Section(s.size * ours, s.parts) for s in laid.sections))
    return replace(laid, even=tuple((d, n * ours if d == dim else n) for d, n in laid.even))


# -- taking apart and putting together ---------------------------------------------------------------------------


def slice_(call: Call, laid: Laid) -> State:
    dim = call.dim(1)
    size, full = shape_of(call.node.args[0])[dim], call.unsplit(call.node.args[0])[dim]
    start, stop, step = _bounds(call.node, size)
    whole_start, whole_stop, whole_step = _bounds(call.twin or call.node, full)
    if call.twin is None and dim != laid.dim:
        return laid
    if call.twin is None:
        _, wholes = ends(laid.sections)
        locals_, _ = ends(laid.sections)
        whole_start = wholes[locals_.index(start)] if start in locals_ else -1
        whole_stop = wholes[locals_.index(stop)] if stop in locals_ else -1
    if step != whole_step:
        raise Broken(f"takes every {step} where the unsplit model takes every {whole_step}", laid.owner)
    if dim != laid.dim:
        if (start, stop) == (whole_start, whole_stop):
            return laid
        if dim in dict(laid.even):
            return _even_slice(laid, dim, stop - start, whole_stop - whole_start)
        raise _elsewhere(laid, (start, stop), (whole_start, whole_stop))
    if step != 1:
        if all(s.length % step == 0 for s in laid.sections) and stop == size and start == whole_start < step:
            return replace(laid, sections=tuple(Section(s.size // step, s.parts) for s in laid.sections))
        raise apart(call, laid, f"{start}:{stop}:{step}")
    return _within(call, laid, (start, stop), (whole_start, whole_stop))


def _within(call: Call, laid: Laid, ours: tuple[int, int], theirs: tuple[int, int]) -> Laid:
    """A slice of the cut dimension; one of sections that every rank has whole is not cut."""
    sections = between(call, laid, ours, theirs)
    if all(s.parts == 1 for s in sections):
        return Laid(even=laid.even)
    return replace(laid, sections=sections)


def _even_slice(laid: Laid, dim: int, ours: int, theirs: int) -> Laid:
    even = tuple((d, theirs if d == dim else n) for d, n in laid.even if d != dim or ours != theirs)
    return replace(laid, even=even)


def _bounds(node: fx.Node, size: int) -> tuple[int, int, int]:
    args = [*node.args[2:], None, None, None]
    start, stop, step = (
        args[i] if args[i] is not None else default for i, default in enumerate((0, _OPEN, 1))
    )
    start, stop = (max(0, n + size if n < 0 else n) for n in (start, stop))  # type: ignore[operator, type-var]
    return min(start, size), min(max(start, stop), size), step  # type: ignore[return-value, type-var]


def between(call: Call, laid: Laid, ours: tuple[int, int], theirs: tuple[int, int]) -> tuple[Section, ...]:
    """The sections of a slice of the cut dimension, which must end where sections end, here and unsplit."""
    local, full = ends(laid.sections)
    places = list(zip(local, full, strict=True))
    for first in (i for i, at in enumerate(places) if at == (ours[0], theirs[0])):
        for end in (i for i, at in enumerate(places) if at == (ours[1], theirs[1]) and i > first):
            return laid.sections[first:end]
    raise apart(call, laid, f"{ours[0]}:{ours[1]} of {local[-1]}")


def _elsewhere(laid: Laid, ours: tuple[int, int], theirs: tuple[int, int]) -> Broken:
    return Broken(
        f"takes {ours[0]} to {ours[1]} on every rank, where the unsplit model takes {theirs[0]} to {theirs[1]}",
        laid.owner,
    )


def apart(call: Call, laid: Laid, taken: str) -> Broken:
    return Broken(
        f"takes {taken} out of a dimension of which each rank has {lengths(laid.sections)}: other features or heads "
        "than the unsplit model's",
        laid.owner,
    )


def select(call: Call, laid: Laid) -> State:
    ndim = len(shape_of(call.node.args[0]))
    dim = call.dim(1)
    if dim == laid.dim:
        raise apart(call, laid, f"number {call.arg(2, 'index')}")
    kept = [d for d in range(ndim) if d != dim]
    if call.arg(2, "index") != call.twin_arg(2, "index") and dim not in dict(laid.even):
        raise Broken("takes another number than the unsplit model", laid.owner)
    return _map(laid, {d: i for i, d in enumerate(kept)})


def split(call: Call, laid: Laid) -> Any:
    """``split``, ``split_with_sizes``, ``chunk`` and ``unbind``: a state per result."""
    name = call.name
    values = call.node.meta["val"]
    dim = call.dim(1 if name == "unbind" else 2)
    twins = call.twin.meta["val"] if call.twin is not None else [None] * len(values)
    if len(twins) != len(values):
        raise apart(call, laid, f"{len(values)} parts, not {len(twins)},")
    if name == "unbind":
        if dim == laid.dim:
            raise apart(call, laid, "one at a time")
        kept = [d for d in range(len(shape_of(call.node.args[0]))) if d != dim]
        return tuple(_map(laid, {d: i for i, d in enumerate(kept)}) for _ in values)
    found, start, whole_start = [], 0, 0
    local, full = ends(laid.sections)
    for value, twin in zip(values, twins, strict=True):
        stop = start + int(value.shape[dim])
        if twin is not None:
            whole_stop = whole_start + int(twin.shape[dim])
        elif dim == laid.dim:
            whole_stop = full[local.index(stop)] if stop in local else -1
        else:
            whole_stop = stop
        if dim == laid.dim:
            found.append(_within(call, laid, (start, stop), (whole_start, whole_stop)))
        elif (start, stop) == (whole_start, whole_stop):
            found.append(laid)
        elif dim in dict(laid.even):
            found.append(_even_slice(laid, dim, stop - start, whole_stop - whole_start))
        else:
            raise _elsewhere(laid, (start, stop), (whole_start, whole_stop))
        start, whole_start = stop, whole_stop
    return tuple(found)


def getitem(call: Call) -> Any:
    states = call.states.get(call.node.args[0])  # type: ignore[arg-type]
    index: Any = call.node.args[1]
    if isinstance(states, tuple):
        return states[index]
    return WHOLE if states is None else states


def cat(call: Call) -> State:
    nodes: list[fx.Node] = list(call.node.args[0])  # type: ignore[arg-type]
    dim = int(call.arg(1, "dim", 0)) % len(call.shape)
    if any(isinstance(call.state(n), Partial) for n in nodes):
        return _same(call, nodes)
    laid = [call.laid(n) for n in nodes]
    cut = next((a for a in laid if a.dim is not None), None)
    if int(call.twin_arg(1, "dim", 0)) % len(call.shape) != dim:
        raise Broken("works along another dimension than in the unsplit model", call.owner)
    if cut is None:
        return _even_cat(call, laid, dim) if any(a.even for a in laid) else WHOLE
    if cut.dim != dim:
        same = Laid(even=((cut.dim, sum(s.size for s in cut.sections)),))  # type: ignore[arg-type]
        if any(a != same and (a.dim, a.sections, a.even) != (cut.dim, cut.sections, ()) for a in laid):
            raise Broken("puts together values that are cut and others that are not, or otherwise", cut.owner)
        return cut
    if any(d != dim for a in laid for d, _ in a.even):
        raise Broken("puts together repetitions that are shorter on a rank", cut.owner, definite=False)
    sections: tuple[Section, ...] = ()
    for a, n in zip(laid, nodes, strict=True):
        full = dict(a.even).get(dim)
        if a.dim == dim:
            sections += a.sections
        elif full is not None and full == shape_of(n)[dim] * call.tp_size:
            sections += (Section(full, call.tp_size),)
        elif shape_of(n)[dim]:
            raise Broken("puts a whole value beside one of which each rank has a part", cut.owner)
    return replace(cut, sections=sections)


def _even_cat(call: Call, laid: Sequence[Laid], dim: int) -> State:
    if all(a == laid[0] for a in laid) and dim not in dict(laid[0].even):
        return laid[0]
    raise Broken("puts together repetitions of other lengths", definite=False)


def stack(call: Call) -> State:
    nodes: list[fx.Node] = list(call.node.args[0])  # type: ignore[arg-type]
    first = _same(call, nodes)
    if not isinstance(first, Laid):
        return first
    at = call.dim(1, ndim=len(call.shape))
    return _map(first, {d: d + (at <= d) for d in range(len(call.shape) - 1)})


def _same(call: Call, nodes: Sequence[fx.Node]) -> State:
    states = [call.state(n) for n in nodes]
    first = states[0]
    if isinstance(first, Partial) and all(
        isinstance(s, Partial) and s.factor == first.factor for s in states
    ):
        return first
    for state in states:
        if isinstance(state, Partial):
            raise call.pending(state)
    laid = [call.laid(n) for n in nodes]
    if any((a.dim, a.sections, a.even) != (laid[0].dim, laid[0].sections, laid[0].even) for a in laid):
        raise Broken(
            "puts together values that are cut differently", next((a.owner for a in laid if a.owner), "")
        )
    return laid[0]
