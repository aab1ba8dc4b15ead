"""What a rank's value is of the unsplit model's, and the words for what is wrong with it: the data of pass ``follow``.

Every value of the graph on local shapes stands for one of the unsplit model:

* :class:`Laid`: the same, or a part of it. One dimension may be cut: it consists of sections, of each of which the
  rank has its part. Dimensions along which all elements are equal (an expanded mask) fit any cut: they are ``even``;
* :class:`Partial`: the sum over the ranks is ``factor`` times the unsplit value;
* :class:`Odd`: something else. That matters only where it is read;
* :data:`LOST`: not known, and said already, or trusted.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from .layout import Section


@dataclass(frozen=True, slots=True)
class Laid:
    """``dim`` is cut in ``sections`` (of the unsplit value), as ``owner``, a parameter, is; None where nothing is cut.
    ``even``: (dimension, its unsplit size) of dimensions that are shorter here, with all elements equal along them."""

    dim: int | None = None
    sections: tuple[Section, ...] = ()
    owner: str = ""
    even: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> bool:
        return self.dim is None and not self.even

    def unsplit(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The unsplit shape of a value whose shape on a rank is ``shape``."""
        sizes = dict(self.even)
        if self.dim is not None:
            sizes[self.dim] = sum(section.size for section in self.sections)
        return tuple(sizes.get(d, n) for d, n in enumerate(shape))


@dataclass(frozen=True, slots=True)
class Partial:
    """Terms of a sum over the ranks, made by ``source``."""

    owner: str
    source: fx.Node
    factor: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Odd:
    """A value that depends on the sizes on a rank in a way that is no cut: ``why``."""

    why: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A rank's part (``laid``) in its place along a new dimension ``at`` of one entry per rank, zeros elsewhere;
    without ``laid``: 1 in the rank's place."""

    at: int
    laid: Laid | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Not known; what there was to say about it has been said."""


WHOLE = Laid()
LOST = Lost()
State = Laid | Partial | Odd | Placed | Lost


class Broken(Exception):
    """A rule's verdict. ``definite``: the values are wrong; else no rule is known by which they are right."""

    def __init__(self, what: str, owner: str = "", *, definite: bool = True) -> None:
        super().__init__(what)
        self.owner, self.definite = owner, definite


@dataclass(frozen=True, slots=True)
class Finding:
    """``text``: a sentence; ``owner``: the parameter that made the value local (empty if unknown)."""

    text: str
    owner: str
    definite: bool


def lengths(sections: Sequence[Section]) -> str:
    """``6 of 12 + 6 of 12``."""
    return " + ".join(f"{section.length} of {section.size}" for section in sections)


def ends(sections: Sequence[Section]) -> tuple[list[int], list[int]]:
    """Where sections end, on a rank and in the unsplit dimension, from 0."""
    local, full = (s.length for s in sections), (s.size for s in sections)
    return list(accumulate(local, initial=0)), list(accumulate(full, initial=0))


@dataclass(slots=True)
class Call:
    """One operator: its ``node``, its ``twin`` in the graph of the unsplit model (None where there is none to compare
    with), and the states of its inputs."""

    node: fx.Node
    twin: fx.Node | None
    states: Mapping[fx.Node, Any]
    tp_size: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        target = self.node.target
        self.name = "getitem" if target is operator.getitem else getattr(target, "_opname", str(target))

    def state(self, node: Any) -> State:
        """Of an input; a value without a state is whole."""
        found = self.states.get(node, WHOLE) if isinstance(node, fx.Node) else WHOLE
        return found if isinstance(found, Laid | Partial | Odd | Placed) else LOST

    def laid(self, node: Any) -> Laid:
        """The state of an input that must be neither a pending sum nor unknown."""
        state = self.state(node)
        if isinstance(state, Partial):
            raise self.pending(state)
        if not isinstance(state, Laid):
            raise Broken(f"reads a value that {self.name} can't be followed through", definite=False)
        return state

    def arg(self, position: int, key: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        return _argument(self.node, position, key, default)

    def twin_arg(self, position: int, key: str, default: Any = None) -> Any:
        """The same in the unsplit model; this rank's where there is no twin."""
        return _argument(self.twin or self.node, position, key, default)

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.node)

    @property
    def twin_shape(self) -> tuple[int, ...] | None:
        return None if self.twin is None else shape_of(self.twin)

    def unsplit(self, node: Any) -> tuple[int, ...]:
        """The unsplit shape of an input."""
        state = self.state(node)
        return state.unsplit(shape_of(node)) if isinstance(state, Laid) else shape_of(node)

    def dim(self, position: int, key: str = "dim", default: int = 0, ndim: int | None = None) -> int:
        """A dimension among the arguments, counted from the left."""
        value = self.arg(position, key, default)
        size = ndim if ndim is not None else len(shape_of(self.node.args[0]))
        if value != self.twin_arg(position, key, default):
            raise Broken("works along another dimension than in the unsplit model", self.owner)
        return int(value) % max(size, 1)

    @property
    def owner(self) -> str:
        """A parameter whose cut lies behind an input; empty where there is none."""
        states = (self.state(n) for n in self.node.all_input_nodes)
        return next((s.owner for s in states if isinstance(s, Laid | Partial) and s.owner), "")

    def pending(self, partial: Partial) -> Broken:
        """``partial`` is read by an operator that is not linear in it."""
        made = getattr(partial.source.target, "_opname", str(partial.source.target))
        return Broken(
            f"reads what {made}{place(partial.source)} has summed over this rank's features alone: its sum over the "
            "ranks is still missing (a linear's weight that is read without calling its module gets none)",
            partial.owner,
        )

    def same_constants(self) -> None:
        """Raise where a number among the arguments is another one than in the unsplit model."""
        if self.twin is not None:
            for ours, theirs in zip(constants(self.node), constants(self.twin), strict=False):
                if ours != theirs:
                    raise Broken(f"computes with {ours} where the unsplit model has {theirs}", self.owner)


def _argument(node: fx.Node, position: int, key: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(key, default)


def constants(node: fx.Node) -> list[Any]:
    """The arguments of a call that are no values of the graph, in order."""
    found: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                collect(item)
        elif isinstance(value, Mapping):
            for key in sorted(value):
                collect(value[key])
        elif not isinstance(value, fx.Node):
            found.append(value)

    collect(node.args)
    collect(node.kwargs)
    return found


def read(node: fx.Node) -> list[fx.Node]:
    """What a call reads, in the order of its arguments, once for each."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def shape_of(node: Any) -> tuple[int, ...]:
    """Of a value that is a tensor; () for anything else."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(val.shape) if isinstance(val, Tensor) else ()


def place(node: fx.Node) -> str:
    """Where in the user's code: ``' (model.py:13: "q = h.view(...)")'``, or nothing."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").strip().splitlines()]
    at = max(
        (i for i, line in enumerate(lines) if line.startswith("File ") and "<eval_with" not in line),
        default=None,
    )
    if at is None:
        return ""
    parts = lines[at].split('"')
    number = lines[at].partition(", line ")[2].partition(",")[0]
    code = f": {lines[at + 1]}" if at + 1 < len(lines) else ""
    return f" ({parts[1].rpartition('/')[2] if len(parts) > 1 else '?'}:{number}{code})"


def module_of(node: fx.Node) -> str:
    """The path of the module whose forward calls ``node``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else node.name


def for_each(call: Call, state: State) -> Any:
    """``state`` for every result of a call, as many as it has."""
    val = call.node.meta.get("val")
    return tuple(state for _ in val) if isinstance(val, tuple | list) else state
