"""Artefacts in boxed form: called with a list that they empty, so that an input is freed behind its last reader
inside the unit, and not when the unit returns.

``boxed(artefact)(inputs)`` does what ``artefact(*inputs)`` does. A compiled artefact is called without the wrappers
that ``standalone_compile`` puts around it (about 7 microseconds of 16 for a small unit).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import Tensor, fx

from .. import compat
from ..passes.block import unbox
from ..passes.compile import Artefact

#: Takes a list of tensors, leaves it empty, returns the outs.
Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


def boxed(artefact: Artefact) -> Boxed:
    """``artefact`` in boxed form."""
    if (compiled := compat.inductor_code(artefact)) is not None:
        return _Compiled(compiled)
    owner = getattr(artefact, "__self__", None)
    if isinstance(owner, fx.GraphModule):  # the bound forward of an eager unit
        return unpacked(owner)
    return lambda inputs: artefact(*unbox(inputs))


class _Compiled:
    """The code that Inductor generated; the first call goes through torch's own, which ends autotuning."""

    def __init__(self, compiled: compat.CompiledFxGraph) -> None:
        self._call: Boxed = compiled
        self._compiled = compiled
        self._warm = False

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        if self._warm:
            return self._call(inputs)
        outs = self._compiled(inputs)
        self._call, self._warm = self._compiled.current_callable, True  # type: ignore[assignment]
        return outs


def unpacked(module: fx.GraphModule) -> Boxed:
    """The graph of ``module``, taking its inputs from a list that it empties."""
    graph = fx.Graph()
    values = graph.call_function(unbox, (graph.placeholder("inputs"),))
    env: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(module.graph.find_nodes(op="placeholder")):
        env[node] = graph.call_function(operator.getitem, (values, k))
    for node in module.graph.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    made = fx.GraphModule(module, graph, class_name="BoxedUnit")
    return made.forward  # type: ignore[no-any-return]
