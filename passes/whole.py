"""Pass ``check_whole``: what would take a rank's part of a parameter for all of it is refused.

Contract: (captured graph with the plan's marks, plan) -> nothing, or :class:`PlanError`. Two things that a graph on
local shapes can show and no later pass could make right::

    loss = cross_entropy(...) + q_proj.weight.square().sum()      # each rank adds the sum of its own rows
    return loss, attention_probabilities                          # each rank returns its own heads
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, fx

from .capture import Captured
from .errors import PlanError
from .layout import TpPlan
from .reach import ancestors
from .settle import Kind, infer


def check_whole(captured: Captured, plan: TpPlan, canonical: Mapping[str, str]) -> None:
    """See the module's docstring. ``canonical``: the first name of every parameter, under which ``plan`` has it."""
    if plan.tp_size == 1:
        return
    graph = captured.graph_module.graph
    cut = frozenset(name for name, first in canonical.items() if plan.params[first].dim is not None)
    kinds = infer(graph, cut)
    for node in graph.nodes:
        if node.op == "call_function" and kinds[node] is Kind.LOCAL:
            _check_number(node, kinds, cut, plan.tp_size)
    for name, node in zip(captured.outputs, graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
        if name != "loss" and kinds[node] is Kind.LOCAL:  # type: ignore[index]
            raise PlanError(
                f"the model's output {name!r} follows from {_listed(_sources(node, kinds, cut))}, of which each of the "  # type: ignore[arg-type]
                f"{plan.tp_size} tensor-parallel ranks has its own features or heads alone, so no rank has the whole "
                f"output; switch it off ({_switch(name)}), or use tp_size=1"
            )


def _check_number(node: fx.Node, kinds: Mapping[fx.Node, Kind], cut: Collection[str], tp_size: int) -> None:
    """``node``: a value with parts on other ranks. A single number that follows from weights alone is refused."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or val.ndim or not val.is_floating_point():
        return
    names = _sources(node, kinds, cut)
    if not names or any(n.op == "placeholder" for n in ancestors([node])):
        return
    modules = sorted({name.rpartition(".")[0] for name in names})
    raise PlanError(
        f"the model computes one number ({node.target}) from {_listed(names)}, which tensor parallelism cuts into "
        f"{tp_size} parts: each rank would take the number of its own part for that of the whole (a penalty on weights "
        f"would be wrong). Leave {_listed(modules)} out of tp_plan, use tp_size=1, or leave the penalty to the "
        "optimizer (weight_decay)"
    )


def _sources(node: fx.Node, kinds: Mapping[fx.Node, Kind], cut: Collection[str]) -> list[str]:
    """The cut parameters that make ``node`` a part."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += [s for s in n.all_input_nodes if kinds[s] is Kind.LOCAL]
    return sorted(str(n.target) for n in found if n.op == "get_attr" and str(n.target) in cut)


def _listed(names: list[str], most: int = 2) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _switch(name: str) -> str:
    return f"output_{name.partition('.')[0]}=False"
