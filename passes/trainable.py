"""Which values of a captured graph have a gradient: with frozen parameters, or with values on the side that no
gradient flows through (a count of tokens per expert), not every float has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..compat import FakeTensor
from .capture import Captured


def wants_grad(captured: Captured) -> set[fx.Node]:
    """The nodes whose value has a gradient, found by running the graph on its fake tensors."""
    found: set[fx.Node] = set()

    class Recorder(fx.Interpreter):
        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            value = super().get_attr(target, args, kwargs)
            # Constants of static inputs are real.
            real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
            return mode.from_tensor(value) if real else value

        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and result.requires_grad:
                found.add(n)
            return result

    graph = captured.graph_module.graph
    inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    mode = next(v.fake_mode for v in inputs)
    with mode, torch.enable_grad():
        Recorder(captured.graph_module).run(*inputs)
    return found
