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

Call = Callable[..., Any]


def bind(module: fx.GraphModule, around: Callable[[str, nn.Module, Call], Call] | None = None) -> Call:
    """``module.forward`` with every module below it bound as well. As of now: a graph that is changed and recompiled
    afterwards must be bound again. ``around``: makes of the name, the module and the call of each module below what is
    called in its place."""
    return _bind(module, {}, around)


def _bind(
    module: fx.GraphModule,
    done: dict[nn.Module, Call],
    around: Callable[[str, nn.Module, Call], Call] | None,
) -> Call:
    if module not in done:
        space = SimpleNamespace()
        for node in module.graph.nodes:
            name = str(node.target)
            if node.op == "call_module" and not hasattr(space, name):
                child = module.get_submodule(name)
                call = _bind(child, done, around) if isinstance(child, fx.GraphModule) else child.forward
                setattr(space, name, call if around is None else around(name, child, call))
            elif node.op == "get_attr":
                setattr(space, name, getattr(module, name))
        done[module] = MethodType(type(module).forward, space)
    return done[module]
