"""How parameters lie over the tensor-parallel ranks: pure data, and the slices that follow from it.

A parameter is whole on every rank, or cut along one dimension. A fused weight (q, k and v in one, gate and up in
one) is cut section by section, so that each rank gets its heads of each; a section with fewer parts than ranks
(two key-value heads over four ranks) is held several times, by neighbours::

    qkv [12 rows: 8 q | 2 k | 2 v], tp_size 4       Section(8, 4), Section(2, 2), Section(2, 2)
    rank 0: q0 q1 | k0 | v0     rank 1: q2 q3 | k0 | v0     rank 2: q4 q5 | k1 | v1     rank 3: q6 q7 | k1 | v1

A vocabulary that does not divide is padded: every rank holds equally many rows, the last ones zeros::

    embedding [10 rows], tp_size 4                  Section(10, 4)
    rank 0: 0 1 2               rank 1: 3 4 5               rank 2: 6 7 8               rank 3: 9 . .
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Section:
    """``size`` rows that are cut into ``parts`` equal parts, the last ones padded with zeros where it does not divide;
    ``tp_size / parts`` neighbours hold the same one."""

    size: int
    parts: int

    @property
    def length(self) -> int:
        """Rows of one part, padding included."""
        return -(-self.size // self.parts)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of one section: ``length`` rows, from ``start`` in the full dimension and from ``local``
    in the rank's own, then ``padding`` rows of zeros. ``first``: no rank before this one holds the same rows."""

    start: int
    local: int
    length: int
    parts: int
    first: bool
    padding: int = 0


@dataclass(frozen=True, slots=True)
class ParamShard:
    """How one parameter lies over the TP ranks.

    ``shape`` is the full shape; ``dim`` the dimension that is cut, or None where every rank has the whole.
    ``sections`` say how; none means one section of ``tp_size`` parts.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    tp_size: int
    sections: tuple[Section, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        local = sum(piece.length + piece.padding for piece in self.pieces(0))
        return tuple(local if d == self.dim else n for d, n in enumerate(self.shape))

    def pieces(self, tp_rank: int) -> Iterator[Piece]:
        """What ``tp_rank`` holds, in order; nothing for a parameter that is whole."""
        if self.dim is None:
            return
        start = local = 0
        for section in self.sections or (Section(self.shape[self.dim], self.tp_size),):
            length, copies = section.length, self.tp_size // section.parts
            part = tp_rank // copies
            begin = min(part * length, section.size)
            real = min(length, section.size - begin)
            yield Piece(
                start + begin, local, real, section.parts, tp_rank % copies == 0, padding=length - real
            )
            start += section.size
            local += length

    def take(self, full: Tensor, tp_rank: int) -> Tensor:
        """This rank's part of ``full``: a view where it lies in one piece without padding."""
        dim = self.dim
        if dim is None:
            return full
        return self.collect(lambda start, length: full.narrow(dim, start, length), tp_rank)

    def collect(self, rows: Callable[[int, int], Tensor], tp_rank: int) -> Tensor:
        """This rank's part of a parameter that is cut, of which ``rows(start, length)`` gives a slice along ``dim``."""
        assert self.dim is not None
        parts = []
        for piece in self.pieces(tp_rank):
            parts.append(rows(piece.start, piece.length))
            if piece.padding:
                size = [piece.padding if d == self.dim else n for d, n in enumerate(self.shape)]
                parts.append(parts[-1].new_zeros(size))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The full tensor from what the ranks hold, in rank order: what ``take`` undoes. Padding is left out, and of
        rows that several ranks hold the first one's count."""
        if self.dim is None:
            return parts[0]
        full = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            for piece in self.pieces(rank):
                if piece.first:
                    rows = part.narrow(self.dim, piece.local, piece.length)
                    full.narrow(self.dim, piece.start, piece.length).copy_(rows)
        return full

    @property
    def shared(self) -> bool:
        """Are some rows on several ranks (and others, or all, not)?"""
        return any(piece.parts < self.tp_size for piece in self.pieces(0))


@dataclass(frozen=True, slots=True)
class TpPlan:
    """Styles by module or parameter, shards by parameter: ``model.plan.tp``.

    ``partial``: names of parameters whose gradient on each rank is only that rank's part, although the parameter is
    whole (a norm over each head, the router of a mixture of experts): summed over TP once, at the end of the step.
    """

    tp_size: int
    styles: Mapping[str, str]
    params: Mapping[str, ParamShard]
    notes: tuple[str, ...]
    partial: frozenset[str] = frozenset()
    #: what was inferred from the graph: patterns and styles as in ``tp_plan``
    inferred: Mapping[str, str] = field(default_factory=dict)
