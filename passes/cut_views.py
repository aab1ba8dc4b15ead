"""Part of pass ``follow``: operators that arrange the elements of one input: views, and what all of them share.

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

from .cuts import WHOLE, Broken, Call, Laid, Partial, Placed, State, shape_of
from .layout import Section


def movement(rule: Callable[[Call, Laid], Any]) -> Callable[[Call], Any]:
    """A rule for an operator with one input that is arranged: a pending sum stays one, if its shape does."""

    def follow(call: Call) -> Any:
        state = call.state(call.node.args[0])
        if isinstance(state, Partial):
            if call.twin_shape not in (None, call.shape):
                raise call.pending(state)
            if rule is not view:
                call.same_constants()
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


def view(call: Call, laid: Laid) -> State:
    before, after = shape_of(call.node.args[0]), call.shape
    full_before, full_after = laid.unsplit(before), call.twin_shape
    if laid.whole:
        if full_after in (None, after):
            return WHOLE
        raise _regroups(call, laid, full_after or ())
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
    if list(call.shape) == list(full):
        return Broken(
            f"arranges its features as {list(full)} on a rank as well as unsplit, so that each rank takes a part of "
            "one head for a whole one (fewer heads than ranks?)",
            laid.owner,
        )
    return Broken(
        f"arranges its features as {list(call.shape)} on a rank and as {list(full)} unsplit, so that a rank's heads or "
        "groups are not some of the unsplit model's",
        laid.owner,
    )


def _groups(before: Sequence[int], after: Sequence[int], owner: str) -> list[tuple[range, range]]:
    """The smallest runs of dimensions of equal products."""
    if 0 in before or math.prod(before) != math.prod(after):
        raise Broken("has other numbers of elements", owner, definite=False)
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
    """Heads that several ranks hold, each repeated ``local`` times on a rank and ``full`` times unsplit (key-value
    heads of grouped-query attention): cut over all ranks afterwards, where it fits."""
    copies = tp_size // section.parts
    width = section.length * local
    fits = width * tp_size == section.size * full and all(
        (rank * width + i) // full == (rank // copies) * section.length + i // local
        for rank in range(tp_size)
        for i in range(width)
    )
    return Section(section.size * full, tp_size) if fits else None


def _split(
    call: Call,
    laid: Laid,
    merged: tuple[Section, ...],
    outs: range,
    after: Sequence[int],
    full: Sequence[int],
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
    if before[laid.dim] == 1 and list(after).count(1) > 1:  # which of them it is, nobody can tell
        raise Broken("has several dimensions of one entry", laid.owner, definite=False)
    for ins, outs in _groups(before, after, laid.owner):
        if laid.dim in ins:
            outer = math.prod(before[d] for d in ins if d < laid.dim)
            inner = math.prod(before[d] for d in ins if d > laid.dim)
            merged = tuple(Section(s.size * inner, s.parts) for s in laid.sections) * outer
            found = {d: p for d in outs if (p := _pattern(merged, d, outs, after)) is not None}
            if found and (
                len(found) == 1 or all(after[d] > 1 for d in found)
            ):  # one head on a rank may be any
                dim = min(found, key=lambda d: (len(found[d]), d))
                return tuple(sum(s.size for s in found[d]) if d == dim else n for d, n in enumerate(after))
    raise Broken("arranges features in a way that can't be followed", laid.owner, definite=False)
