"""Where a model can be cut: its graph as a row of stretches, in the order in which they run.

Contract: (graph, its activations) -> :class:`Stretches`: layer k is stretch 2k + 1, and what runs before it, between
it and the layer in front or behind the last one is a *gap*, stretch 2k::

    0 gap     image patches             3 layer 1   visual.blocks.1         6 gap     (empty)
    1 layer 0 visual.blocks.0           4 gap       merger, embedding       7 layer 3 layers.1
    2 gap     (empty)                   5 layer 2   layers.0                8 gap     norm, head, loss

Layers are the children of *every* container of layers (``nn.ModuleList`` and the like, with a number in the path), in
the order in which they first run: a vision tower and a language model, or the halves of a U-Net, make one row. A node
outside all layers lies with what it reads, or in the gap behind that where it reads a container's last layer. What
follows from inputs and parameters alone (an embedding) lies right before the first stretch that reads it.

Every edge of the graph goes from a stretch to itself or to a later one.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx, nn

from .cost import flops
from .errors import PartitionError


class Place(NamedTuple):
    """A layer: the path of what holds it, and its number there."""

    container: str
    number: int


@dataclass(frozen=True, slots=True)
class Stretches:
    """``of``: the stretch of every activation (``call_function``); passes that add nodes add them here. ``layers``:
    the path of every layer, in order. ``seams``: the gaps between layers of different containers."""

    of: dict[fx.Node, int]
    layers: tuple[str, ...]
    seams: tuple[int, ...]

    @property
    def count(self) -> int:
        """Layers, the gaps before each, and the one behind the last."""
        return 2 * len(self.layers) + 1


def stretches(graph: fx.Graph, live: set[fx.Node], n_chunks: int, keyed: Mapping[str, Place]) -> Stretches:
    """See the module's docstring. ``live``: the activations; ``keyed``: layers that have a name in place of a number
    (:func:`keyed_layers`), which count where too few have a number.

    Raises :class:`PartitionError` where there are no layers.
    """
    calls = [node for node in graph.nodes if node in live and node.op == "call_function"]
    found = _layers(calls, _numbered)
    if len(found) < n_chunks:
        named = _layers(calls, lambda path: keyed.get(path))
        found = named if named and (not found or len(named) >= n_chunks) else found
    if not found:
        tops = sorted({path for node in live for path, _ in modules(node) if path and "." not in path})
        raise PartitionError(
            "no layers were found in the traced model, and fxbraid cuts between layers: modules with a number "
            "(model.layers.0, ...; an nn.ModuleList or nn.Sequential), or those of an nn.ModuleDict that are all of "
            f"one type; this model computes in {', '.join(tops) or 'no module'}"
        )
    layers = list(found.values())
    seams = tuple(2 * (layer.number + 1) for layer in layers[:-1] if layer.ends)
    return Stretches(_assign(calls, found), tuple(layer.path for layer in layers), seams)


def keyed_layers(model: nn.Module) -> dict[str, Place]:
    """Path -> (container, position) of the children of every ``nn.ModuleDict`` whose children are of one type."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleDict) and len({type(child) for child in module.values()}) == 1:
            for i, key in enumerate(module):
                found[f"{path}.{key}" if path else key] = Place(path, i)
    return found


def modules(node: fx.Node) -> list[tuple[str, str]]:
    """(path, class by its full name) of the modules around a node, outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [
        (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for path, kind in stack
    ]


_PlaceOf = Callable[[str], Place | None]


def _numbered(path: str) -> Place | None:
    match = re.fullmatch(r"(.*?)\.?(\d+)", path)
    return None if match is None else Place(match.group(1), int(match.group(2)))


# -- which modules are layers


@dataclass(slots=True)
class _Layer:
    """``number``: among all layers; ``kind``: its class; ``ends``: no layer of its container comes behind it."""

    path: str
    kind: str
    place: Place
    place_of: _PlaceOf
    flops: int = 0
    number: int = -1
    ends: bool = False


def _outermost(node: fx.Node, place_of: _PlaceOf) -> tuple[Place, str, str] | None:
    for path, kind in modules(node):
        place = place_of(path)
        if place is not None:
            return place, path, kind
    return None


def _layers(calls: list[fx.Node], place_of: _PlaceOf) -> dict[Place, _Layer]:
    """The outermost layers, in the order in which they first run: those of the container that computes most, and of
    every other whose children are of the same class or of the model's own, not single operators of torch.nn."""
    found: dict[Place, _Layer] = {}
    weight: Counter[str] = Counter()
    for node in calls:
        at = _outermost(node, place_of)
        if at is not None:
            place, path, kind = at
            layer = found.setdefault(place, _Layer(path, kind, place, place_of))
            layer.flops += flops(node)
            weight[place.container] += max(flops(node), 1)
    if not found:
        return {}
    heaviest = max(weight, key=lambda name: weight[name])
    kinds = {layer.kind for layer in found.values() if layer.place.container == heaviest}
    inside: dict[str, list[_Layer]] = {}
    for layer in found.values():
        inside.setdefault(layer.place.container, []).append(layer)
    kept = {
        name
        for name, layers in inside.items()
        if name == heaviest
        or (
            len(layers) > 1
            and all(one.flops and (one.kind in kinds or not _plain(one.kind)) for one in layers)
        )
    }
    result = {place: layer for place, layer in found.items() if place.container in kept}
    last: dict[str, _Layer] = {}
    for number, layer in enumerate(result.values()):
        layer.number = number
        last[layer.place.container] = layer
    for layer in last.values():
        layer.ends = True
    return result


def _plain(kind: str) -> bool:
    return kind.startswith("torch.nn.modules.") and not kind.endswith((".Sequential", ".ModuleList"))


# -- which stretch a node lies in


def _assign(calls: list[fx.Node], layers: dict[Place, _Layer]) -> dict[fx.Node, int]:
    place_of = next(iter(layers.values())).place_of
    ordered = list(layers.values())
    of: dict[fx.Node, int] = {}
    early: list[fx.Node] = []
    floating: set[fx.Node] = set()
    for node in calls:
        at = _outermost(node, place_of)
        own = layers.get(at[0]) if at is not None else None
        read = [n for n in node.all_input_nodes if n in of or n in floating]
        before = max((of[n] for n in read if n in of), default=-1)
        if own is not None:
            of[node] = max(2 * own.number + 1, before)
        elif before < 0:
            floating.add(node)
            early.append(node)
        elif before % 2 and ordered[before // 2].ends:
            of[node] = before + 1
        else:
            of[node] = before
    for node in reversed(early):
        # Outside of all layers, and nothing of one goes into it: as late as can be, before whatever reads it first.
        readers = [of[user] for user in node.users if user in of]
        of[node] = min((at - at % 2 for at in readers), default=2 * len(layers))
    for node in calls:
        # The parts of one operator's results are no boundary values of their own.
        if node.target is operator.getitem and node.args[0] in of:
            of[node] = of[node.args[0]]  # type: ignore[index]
    return {node: of[node] for node in calls}
