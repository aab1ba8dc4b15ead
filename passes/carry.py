"""Part of pass ``partition``: what crosses boundaries, and what goes through chunks in which it isn't made.

A value that is read in a later chunk than the next one is handed on from chunk to chunk, as one more boundary value.
In the backward each chunk adds its own part of the gradient to the one that it is given, and hands the sum on::

    chunk 0: h = encoder(x)        chunk 1: (h) -> layer(h), h          chunk 2: (y, h) -> loss
                                   dh = dh_1 + dh_2            <=         dh_2 = cross attention's part

``carry`` marks stand for the handing on while autograd looks at the chunk; nothing is left of them in its program, and
the tensor that was received is the one that is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .cost import nbytes
from .marks import CARRY
from .stretches import modules

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Skip:
    """A value that goes through chunks. ``name``: the module that makes it; ``made``: its chunk; ``read``: those that
    read it; ``through``: those that hand it on; ``nbytes``: of one micro-batch."""

    name: str
    made: int
    read: tuple[int, ...]
    through: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return (
            f"skip connection: {self.name} ({self.nbytes:,} bytes a micro-batch) is made in chunk {self.made} and read "
            f"in {_chunks(self.read)}, so that {_chunks(self.through)} {'hand' if len(self.through) > 1 else 'hands'} "
            "it on, and its gradient back"
        )


def _chunks(numbers: tuple[int, ...]) -> str:
    return f"chunk{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


#: Other views of a whole tensor.
_VIEWS = frozenset(
    {
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
    }
)


def view_again(graph: fx.Graph, stretch: dict[fx.Node, int], chunk_of: Sequence[int]) -> None:
    """A chunk that reads a view of an activation of another one makes the view itself: what crosses is the activation,
    once, whatever is made of it. ``stretch``: of every activation; ``chunk_of``: of every stretch."""

    def chunk(node: fx.Node) -> int:
        return chunk_of[stretch[node]]

    for node in reversed(list(stretch)):
        if node.target not in _VIEWS or node.args[0] not in stretch:
            continue
        readers = [user for user in node.users if user in stretch]
        for there in sorted({chunk(user) for user in readers} - {chunk(node)}):
            mine = [user for user in readers if chunk(user) == there]
            with graph.inserting_after(node):
                again = graph.node_copy(node)
            stretch[again] = min(stretch[user] for user in mine)
            for user in mine:
                user.replace_input_with(node, again)
        if not node.users:
            del stretch[node]
            graph.erase_node(node)


def dense(graph: fx.Graph, owner: dict[fx.Node, int]) -> None:
    """What crosses a boundary is contiguous: it arrives so, whatever its strides were."""
    for node in list(owner):
        val = node.meta["val"]
        later = [user for user in node.users if owner.get(user, owner[node]) > owner[node]]
        if not later or not isinstance(val, Tensor) or val.is_contiguous():
            continue
        with graph.inserting_after(node):
            made = graph.call_function(
                aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        made.meta = {**node.meta, "val": val.contiguous()}
        owner[made] = owner[node]
        for user in later:
            user.replace_input_with(node, made)


def carry_on(graph: fx.Graph, owner: dict[fx.Node, int], last: int, *, outputs: bool) -> tuple[Skip, ...]:
    """Hand what is read in a later chunk than the next one on from chunk to chunk; with ``outputs``, the model's
    outputs to the ``last`` one. Returns what goes through any chunk."""
    found = []
    for node in [n for n in graph.nodes if n in owner and isinstance(n.meta["val"], Tensor)]:
        made = owner[node]
        readers = {user: owner[user] if user in owner else last + 1 for user in node.users}
        if not outputs:
            readers = {user: at for user, at in readers.items() if at <= last}
        furthest = max(readers.values(), default=made)
        read = tuple(sorted({min(at, last) for at in readers.values()} - {made}))
        here = node
        for index in range(made + 1, furthest):
            with graph.inserting_after(here):
                there = graph.call_function(CARRY, (here,))
            there.meta = {"val": node.meta["val"]}
            owner[there] = index
            for user, at in readers.items():
                if at > index:
                    user.replace_input_with(here, there)
            here = there
        through = tuple(index for index in range(made + 1, min(furthest, last)))
        if through:
            found.append(Skip(_name(node), made, read, through, nbytes(node.meta["val"])))
    return tuple(found)


def _name(node: fx.Node) -> str:
    """The module that makes a value, and how."""
    while str(node.target).startswith("fxbraid."):
        node = node.all_input_nodes[0]
    inner = [path for path, _ in modules(node) if path]
    operator = str(node.target).removeprefix("aten.").split(".")[0]
    return f"{operator} of {inner[-1]}" if inner else f"{operator} of the model"
