"""Towers: parts of a model that its own tensor-parallel plan leaves out, such as the vision tower in front of a
language model.

Contract: (captured graph at full size, the model's plan) -> the tower's nodes, for pass ``infer`` to find a plan among
them. A tower is what is made from images and parameters alone; where it meets the tokens, it ends::

    f = merger(blocks(patch_embed(pixels)))           tower
    x = masked_scatter(embedding(ids), mask, f)       language model, with the plan of transformers
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from torch import fx

from .capture import Captured
from .cost import flops

#: Inputs of transformers' models that a tower works on.
PIXELS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


def tower(captured: Captured, inputs: Iterable[str] = PIXELS) -> frozenset[fx.Node]:
    """The nodes that follow from ``inputs`` and parameters, and from no other input; () where there is no such input,
    or no other one."""
    graph = captured.graph_module.graph
    found: set[fx.Node] = set()
    other: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            (found if node.name in inputs else other).add(node)
        elif any(n in other for n in node.all_input_nodes):
            other.add(node)
        elif any(n in found for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found) if other else frozenset()


def without_features(captured: Captured) -> Captured:
    """The same graph without outputs that are a tower's alone (``image_outputs`` of transformers' models): they have a
    row for each patch of a micro-batch, and not for each sample."""
    output = captured.graph_module.graph.output_node()
    values: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
    nodes = tower(captured)
    kept = [i for i, node in enumerate(values) if node not in nodes]
    output.args = (tuple(values[i] for i in kept),)
    # As ``loss_alone`` does it: both modes have the same layers.
    captured.graph_module.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    captured.graph_module.recompile()
    return replace(captured, outputs=tuple(captured.outputs[i] for i in kept))


def cost_of_whole(
    captured: Captured, nodes: Collection[fx.Node], cut: Collection[str], tp_size: int
) -> list[str]:
    """For the report: what of ``nodes`` every rank computes whole, none of the modules ``cut`` being in it."""
    whole, total = _shares(captured, nodes, cut)
    if whole * 100 < total:
        return []
    return [
        f"of the tower's forward, {whole:,} FLOPs ({100 * whole / total:.0f} % of the model's {total:,} at full size) "
        f"are computed on every one of {tp_size} TP ranks"
    ]


def _shares(captured: Captured, nodes: Collection[fx.Node], cut: Collection[str]) -> tuple[int, int]:
    total = whole = 0
    for node in captured.graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        cost = flops(node)
        total += cost
        if node in nodes and cost and not _is_cut(node, cut):
            whole += cost
    return whole, total


def _is_cut(node: fx.Node, cut: Collection[str]) -> bool:
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    inner = paths[-1] if paths else ""
    return any(name == inner or name.startswith(f"{inner}.") for name in cut) if inner else False
