"""Activation checkpointing: which units of F keep nothing for the backward but what leads into them.

Contract: (split joint graph, policy) -> numbers of units of F, for pass ``saves``, which has the backward compute them
again: once, in a unit of its own (``mlp3_R``) in front of the unit of I that reads it first.

=================  ==============================================================================================
``"none"``         nothing
``"mlp"``          units named after an MLP (or a mixture of experts)
``"attention"``    units named after attention
``"attention+mlp"`` both
``"all"``          every unit: embedding, norms, head and loss as well
callable           asked for each unit: ``policy(unit) -> bool``, a :class:`ForwardUnit`
=================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import fx

from .assign import assign
from .cost import flops
from .errors import UnsupportedError
from .joint import JointGraph, Phase
from .marks import is_mark, is_matmul
from .names import kind_of, unit_name

Named = Literal["none", "mlp", "attention", "attention+mlp", "all"]
NAMES: tuple[str, ...] = get_args(Named)


@dataclass(frozen=True, slots=True)
class ForwardUnit:
    """A unit of F, as a policy sees it. name: ``mlp3``. kind: "attention", "mlp", "norm", "embedding", "head", "tail"
    (behind the last collective), "pre" (masks and tables), or what the model calls the module. layer: None outside of
    layers. matmuls, flops: of one micro-batch on one rank."""

    name: str
    kind: str
    layer: int | None
    chunk: int
    matmuls: int
    flops: int


Checkpointing = Named | Callable[[ForwardUnit], bool]


def check_policy(policy: object) -> None:
    """Raise :class:`UnsupportedError` for what is no policy."""
    if not callable(policy) and policy not in NAMES:
        known = ", ".join(f'"{name}"' for name in NAMES)
        raise UnsupportedError(
            f"checkpoint={policy!r}: use {known}, or a function of a unit that says True or False"
        )


def forward_units(joint: JointGraph) -> dict[int, ForwardUnit]:
    """The units of F by number."""
    unit_of = assign(joint)
    groups: dict[int, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if joint.phase.get(node) is Phase.F and not is_mark(node):
            groups.setdefault(unit_of[node], []).append(node)
    found = {}
    for index, nodes in sorted(groups.items()):
        name = unit_name(joint, Phase.F, index, _state(joint, nodes), [], nodes)
        kind, layer = kind_of(name)
        found[index] = ForwardUnit(
            name=name,
            kind=kind,
            layer=layer,
            chunk=joint.chunk.index,
            matmuls=sum(is_matmul(node) for node in nodes),
            flops=sum(flops(node) for node in nodes),
        )
    return found


def _state(joint: JointGraph, nodes: list[fx.Node]) -> list[fx.Node]:
    """The parameters and buffers that ``nodes`` read, as they are or as views."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        todo = list(node.all_input_nodes)
        while todo:
            source = todo.pop()
            if source in joint.state:
                found[source] = None
            elif source in joint.free:
                todo += source.all_input_nodes
    return list(found)


def choose_units(joint: JointGraph, policy: Checkpointing) -> frozenset[int]:
    """See the module's docstring. Raises :class:`UnsupportedError` where a policy answers neither True nor False."""
    if policy == "none":
        return frozenset()
    chosen = set()
    for index, unit in forward_units(joint).items():
        if callable(policy):
            try:
                wanted = policy(unit)
            except Exception as error:
                raise UnsupportedError(
                    f"checkpoint raised {type(error).__name__} when it was asked of unit {unit.name}: {error}"
                ) from error
            if not isinstance(wanted, bool):
                raise UnsupportedError(
                    f"checkpoint says {wanted!r} of unit {unit.name}; a policy answers True or False"
                )
        else:
            wanted = policy == "all" or unit.kind in policy.split("+")
        if wanted:
            chosen.add(index)
    return frozenset(chosen)
