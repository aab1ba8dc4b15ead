"""Part of pass ``follow``: operators that only rearrange elements: views, slices, repetitions, concatenations.

A cut survives where what a rank has of the result is its part of the unsplit result, section by section::

    [b, s, 12 of 24] -> [b, s, 2 of 4, 6]       heads of 6: each rank has its own two
    [b, s, 12 of 24] -> [b, s, 4, 3 of 6]       four heads anywhere: an error
    [b, 2 of 4, s, 6] -> [b * (2 of 4), s, 6]   b sections, of each of which a rank has its part

The unsplit sizes are those of the twin; where there is none, the cut dimension is taken to be the outermost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from .cuts import LOST, WHOLE, Broken, Call, Laid, Odd, Partial, Placed, State, ends, lengths, shape_of
from .layout import Section

_OPEN = 2**63 - 1


def movement(rule: Callable[[Call, Laid], Any]) -> Callable[[Call], Any]:
    """A rule for an operator with one input that is arranged: a pending sum stays one, if its shape does."""

    def follow(call: Call) -> Any:
        state = call.state(call.node.args[0])
        if isinstance(state, Partial):
            if call.twin_shape not in (None, call.shape):
                raise call.pending(state)
            return state
        if isinstance(state, Placed):
            return _placed(call, state)
        laid = call.laid(call.node.args[0])
        if laid.whole and call.twin is None:
            return WHOLE
        return rule(call, laid)

    return follow


def _placed(call: Call, state: Placed) -> State:
    """A part among zeros, one place per rank, becomes a term of the sum that is the whole (``styles.gather``)."""
    if call.name in ("unsqueeze",) and state.laid is None:
        at = call.dim(1, ndim=len(call.shape))
        return Placed(state.at + (at <= state.at))
    merged = state.laid is not None and len(call.shape) == state.at + 1
    if merged and call.name in ("reshape", "view", "flatten"):
        laid: Laid = state.laid  # type: ignore[assignment]
        if len(laid.sections) == 1 and laid.sections[0].parts == call.tp_size:
            return Partial(laid.owner, call.node)
    raise Broken("can't be followed", definite=False)


# -- views -------------------------------------------------------------------------------------------------------


def view(call: Call, laid: Laid) -> State:
    before, after = shape_of(call.node.args[0]), call.shape
    full_before, full_after = laid.unsplit(before), call.twin_shape
    if laid.whole:
        if full_after in (None, after):
            return WHOLE
        return Odd(f"an arrangement of {list(before)} as {list(after)} on a rank, as {list(full_after or ())} unsplit")
    if full_after is None:
        full_after = _guess(before, after, laid)
    result = Laid()
    for ins, outs in _groups(full_before, full_after, laid.owner):
        if math.prod(before[d] for d in ins) != math.prod(after[d] for d in outs):
            raise _regroups(call, laid, full_after)
        even = [d for d, _ in laid.even if d in ins]
        if laid.dim is not None and laid.dim in ins:
            merged = _merged(call, laid, ins, before, full_before)
            dim, sections = _split(call, laid, merged, outs, after, full_after)
            result = replace(result, dim=dim, sections=sections, owner=laid.owner)
        elif even:
            if any(before[d] != 1 for d in ins if d not in even) and len(ins) > 1:
                raise Broken("rearranges a repetition that is shorter on a rank", laid.owner, definite=False)
            changed = tuple((d, full_after[d]) for d in outs if after[d] != full_after[d])
            result = replace(result, even=result.even + changed)
        elif any(after[d] != full_after[d] for d in outs):
            raise _regroups(call, laid, full_after)
    return result


def _regroups(call: Call, laid: Laid, full: Sequence[int]) -> Broken:
    return Broken(
        f"arranges its features as {list(call.shape)} on a rank and as {list(full)} unsplit, so that a rank's heads or groups "
        "are not some of the unsplit model's",
        laid.owner,
    )


def _groups(before: Sequence[int], after: Sequence[int], owner: str) -> list[tuple[range, range]]:
    """The smallest runs of dimensions of equal products."""
    if 0 in before or 0 in after:
        raise Broken("has no elements", owner, definite=False)
    found = []
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0, a, b = i, j, 1, 1
        while True:
            if a <= b and i < len(before) and (a < b or i == i0):
                a, i = a * before[i], i + 1
            elif j < len(after) and (b < a or j == j0):
                b, j = b * after[j], j + 1
            if a == b and (i > i0 or i == len(before)) and (j > j0 or j == len(after)):
                break
        found.append((range(i0, i), range(j0, j)))
    return found


def _merged(
    call: Call, laid: Laid, ins: range, before: Sequence[int], full: Sequence[int]
) -> tuple[Section, ...]:
    """The sections of all dimensions ``ins`` as one."""
    dim: int = laid.dim  # type: ignore[assignment]
    even = [d for d, _ in laid.even if d in ins]
    outer, inner = math.prod(before[d] for d in ins if d < dim), math.prod(before[d] for d in ins if d > dim)
    if not even:
        return tuple(Section(s.size * inner, s.parts) for s in laid.sections) * outer
    if outer == 1 and even == [dim + 1] and len(laid.sections) == 1:
        rest = math.prod(before[d] for d in ins if d > dim + 1)
        section = repeated(laid.sections[0], before[dim + 1], full[dim + 1], call.tp_size)
        if section is not None:
            return (Section(section.size * rest, section.parts),)
    raise Broken("rearranges a repetition that is shorter on a rank", laid.owner, definite=False)


def repeated(section: Section, local: int, full: int, tp_size: int) -> Section | None:
    """Heads that several ranks hold, each repeated ``local`` times on a rank and ``full`` times unsplit (key-value heads
    of grouped-query attention): cut over all ranks afterwards, where it fits."""
    copies = tp_size // section.parts
    width = section.length * local
    fits = width * tp_size == section.size * full and all(
        (rank * width + i) // full == (rank // copies) * section.length + i // local
        for rank in range(tp_size)
        for i in range(width)
    )
    return Section(section.size * full, tp_size) if fits else None


def _split(
    call: Call, laid: Laid, merged: tuple[Section, ...], outs: range, after: Sequence[int], full: Sequence[int]
) -> tuple[int, tuple[Section, ...]]:
    """Which of ``outs`` is cut, and how."""
    cut = [d for d in outs if after[d] != full[d]]
    if len(cut) == 1:
        sections = _pattern(merged, cut[0], outs, full)
        if sections is not None and sum(s.size for s in sections) == full[cut[0]]:
            return cut[0], sections
    raise _regroups(call, laid, full)


def _pattern(
    merged: tuple[Section, ...], dim: int, outs: range, sizes: Sequence[int]
) -> tuple[Section, ...] | None:
    """The sections of dimension ``dim`` among ``outs``, if those of all of them together can lie so."""
    outer, inner = math.prod(sizes[d] for d in outs if d < dim), math.prod(sizes[d] for d in outs if d > dim)
    if not inner or not outer or len(merged) % outer:
        return None
    pattern = merged[: len(merged) // outer]
    if pattern * outer != merged or any(s.size % inner or s.length % inner for s in pattern):
        return None
    return tuple(Section(s.size // inner, s.parts) for s in pattern)


def _guess(before: Sequence[int], after: Sequence[int], laid: Laid) -> tuple[int, ...]:
    """The unsplit shape of a result without a twin: cut in the fewest sections, then in the outermost dimension."""
    if laid.dim is None:
        raise Broken("can't be followed", definite=False)
    for ins, outs in _groups(before, after, laid.owner):
        if laid.dim in ins:
            outer = math.prod(before[d] for d in ins if d < laid.dim)
            inner = math.prod(before[d] for d in ins if d > laid.dim)
            merged = tuple(Section(s.size * inner, s.parts) for s in laid.sections) * outer
            found = {d: p for d in outs if (p := _pattern(merged, d, outs, after)) is not None}
            if found:
                dim = min(found, key=lambda d: (len(found[d]), d))
                return tuple(sum(s.size for s in found[d]) if d == dim else n for d, n in enumerate(after))
    raise Broken("arranges features in a way that can't be followed", laid.owner, definite=False)


# -- dimensions that move ----------------------------------------------------------------------------------------


def moved(order: Callable[[Call, int], Sequence[int]]) -> Callable[[Call], Any]:
    """An operator that permutes dimensions: ``order(call, ndim)`` says from where each one comes."""

    def rule(call: Call, laid: Laid) -> State:
        ndim = len(shape_of(call.node.args[0]))
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
    source, target = (([v] if isinstance(v, int) else list(v)) for v in call.node.args[1:3])
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
        raise Broken(f"repeats one of {sum(s.size for s in laid.sections)} along a dimension of them", laid.owner)
    even = {d + new: n for d, n in laid.even}
    full = call.twin_shape or out
    for d in range(len(out)):
        if (d < new or shape[d - new] == 1) and d - new != laid.dim and full[d] != out[d]:
            even[d] = full[d]
    result = Laid(None if laid.dim is None else laid.dim + new, laid.sections, laid.owner, tuple(sorted(even.items())))
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
                return _odd_or(laid, f"repeats {ours} times what is repeated {theirs} times unsplit")
            even[d] = theirs
        elif d - new == laid.dim:
            sections *= ours
        elif d in even:
            even[d] *= ours
    dim = None if laid.dim is None else laid.dim + new
    return Laid(dim, sections, laid.owner, tuple(sorted(even.items())))


def _odd_or(laid: Laid, why: str) -> State:
    if laid.whole:
        return Odd(why)
    raise Broken(why, laid.owner)


def repeat_interleave(call: Call, laid: Laid) -> State:
    ours, theirs = call.arg(1, "repeats"), call.twin_arg(1, "repeats")
    given = call.arg(2, "dim", None)
    if not isinstance(ours, int) or not isinstance(theirs, int) or given is None:
        raise Broken("repeats elements a number of times that can't be followed", laid.owner, definite=False)
    dim = int(given) % len(call.shape)
    if ours != theirs:
        section = repeated(laid.sections[0], ours, theirs, call.tp_size) if dim == laid.dim else None
        if section is None or len(laid.sections) > 1:
            return _odd_or(laid, f"repeats {ours} times what is repeated {theirs} times unsplit")
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
        return _odd_or(laid, f"takes every {step} where the unsplit model takes every {whole_step}")
    if dim != laid.dim:
        if (start, stop) == (whole_start, whole_stop):
            return laid
        if dim in dict(laid.even):
            return _even_slice(laid, dim, stop - start, whole_stop - whole_start)
        return _odd_or(laid, f"takes {start} to {stop} on every rank, where the unsplit model takes {whole_start} to {whole_stop}")
    if step != 1:
        if all(s.length % step == 0 for s in laid.sections) and stop == size and start == whole_start < step:
            return replace(laid, sections=tuple(Section(s.size // step, s.parts) for s in laid.sections))
        raise apart(call, laid, f"{start}:{stop}:{step}")
    return replace(laid, sections=between(call, laid, (start, stop), (whole_start, whole_stop)))


def _even_slice(laid: Laid, dim: int, ours: int, theirs: int) -> Laid:
    even = tuple((d, theirs if d == dim else n) for d, n in laid.even if d != dim or ours != theirs)
    return replace(laid, even=even)


def _bounds(node: fx.Node, size: int) -> tuple[int, int, int]:
    args = [*node.args[2:], None, None, None]
    start, stop, step = (args[i] if args[i] is not None else default for i, default in enumerate((0, _OPEN, 1)))
    start, stop = (max(0, n + size if n < 0 else n) for n in (start, stop))  # type: ignore[operator]
    return min(start, size), min(max(start, stop), size), step  # type: ignore[return-value, type-var]


def between(call: Call, laid: Laid, ours: tuple[int, int], theirs: tuple[int, int]) -> tuple[Section, ...]:
    """The sections of a slice of the cut dimension, which must end where sections end, here and unsplit."""
    local, full = ends(laid.sections)
    places = list(zip(local, full, strict=True))
    for first in (i for i, at in enumerate(places) if at == (ours[0], theirs[0])):
        for end in (i for i, at in enumerate(places) if at == (ours[1], theirs[1]) and i > first):
            return laid.sections[first:end]
    raise apart(call, laid, f"{ours[0]}:{ours[1]} of {local[-1]}")


def apart(call: Call, laid: Laid, taken: str) -> Broken:
    return Broken(
        f"takes {taken} out of a dimension of which each rank has {lengths(laid.sections)}: other features or heads than "
        "the unsplit model's",
        laid.owner,
    )


def select(call: Call, laid: Laid) -> State:
    ndim = len(shape_of(call.node.args[0]))
    dim = call.dim(1)
    if dim == laid.dim:
        raise apart(call, laid, f"number {call.arg(2, 'index')}")
    kept = [d for d in range(ndim) if d != dim]
    if call.arg(2, "index") != call.twin_arg(2, "index") and dim not in dict(laid.even):
        return _odd_or(laid, "takes another number than the unsplit model")
    return _map(laid, {d: i for i, d in enumerate(kept)})


def split(call: Call, laid: Laid) -> Any:
    """``split``, ``split_with_sizes``, ``chunk`` and ``unbind``: a state per result."""
    name = call.name
    values = call.node.meta["val"]
    dim = call.dim(1 if name == "unbind" else 2)
    twins = call.twin.meta["val"] if call.twin is not None else [None] * len(values)
    if len(twins) != len(values):
        if laid.whole:
            return tuple(Odd("one of another number of parts than unsplit") for _ in values)
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
            found.append(replace(laid, sections=between(call, laid, (start, stop), (whole_start, whole_stop))))
        elif (start, stop) == (whole_start, whole_stop):
            found.append(laid)
        elif dim in dict(laid.even):
            found.append(_even_slice(laid, dim, stop - start, whole_stop - whole_start))
        else:
            found.append(_odd_or(laid, f"takes {start} to {stop} on every rank, unsplit {whole_start} to {whole_stop}"))
        start, whole_start = stop, whole_stop
    return tuple(found)


def getitem(call: Call) -> Any:
    states = call.states.get(call.node.args[0])  # type: ignore[arg-type]
    index: Any = call.node.args[1]
    if isinstance(states, tuple):
        return states[index]
    return WHOLE if states is None else states if isinstance(states, Partial) else LOST


def cat(call: Call) -> State:
    nodes: list[fx.Node] = list(call.node.args[0])  # type: ignore[arg-type]
    dim = int(call.arg(1, "dim", 0)) % len(call.shape)
    if any(isinstance(call.state(n), Partial) for n in nodes):
        return _same(call, nodes)
    laid = [call.laid(n) for n in nodes]
    cut = next((a for a in laid if a.dim is not None), None)
    if cut is None or cut.dim != dim:
        other = [(a, n) for a, n in zip(laid, nodes, strict=True) if a.dim != (cut.dim if cut else None) or a.even]
        if other and cut is not None:
            raise Broken("puts together values that are cut and others that are not, or otherwise", cut.owner)
        if cut is not None and any(a.sections != cut.sections for a in laid):
            raise Broken("puts together values that are cut otherwise", cut.owner)
        if cut is None and any(a.even for a in laid):
            return _even_cat(call, laid, dim)
        return cut or WHOLE
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
    if isinstance(first, Partial) and all(isinstance(s, Partial) and s.factor == first.factor for s in states):
        return first
    for state in states:
        if isinstance(state, Partial):
            raise call.pending(state)
    laid = [call.laid(n) for n in nodes]
    if any((a.dim, a.sections, a.even) != (laid[0].dim, laid[0].sections, laid[0].even) for a in laid):
        raise Broken("puts together values that are cut differently", next((a.owner for a in laid if a.owner), ""))
    return laid[0]
