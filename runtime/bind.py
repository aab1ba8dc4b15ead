"""The generated code of a program, run without what nn.Module adds to every call.

``bind(program)`` is the code that ``print(program.code)`` shows, the same function, whose ``self`` is a plain
namespace: ``self.attn3_F`` is then one attribute of one object and the call behind it one function, where on a module
the name is looked up in Python and the call passes through hooks (about 2 microseconds each time).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

from torch import fx, nn


def bind(module: fx.GraphModule) -> Callable[..., Any]:
    """``module.forward`` with every module below it bound as well. As of now: a graph that is changed and recompiled
    afterwards must be bound again."""
    return _bind(module, {})


def _bind(module: fx.GraphModule, done: dict[nn.Module, Callable[..., Any]]) -> Callable[..., Any]:
    if module not in done:
        space = SimpleNamespace()
        for node in module.graph.nodes:
            if node.op == "call_module":
                child = module.get_submodule(str(node.target))
                call = _bind(child, done) if isinstance(child, fx.GraphModule) else child.forward
                setattr(space, str(node.target), call)
            elif node.op == "get_attr":
                setattr(space, str(node.target), getattr(module, str(node.target)))
        done[module] = MethodType(type(module).forward, space)
    return done[module]
