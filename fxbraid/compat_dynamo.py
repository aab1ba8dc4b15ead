"""What the ``torch.compile`` backend needs to know of Dynamo, in one place, as ``compat`` is for everything else.

Dynamo calls a backend with a graph of the whole batch; what is wanted here is the module that is called, its
arguments, and to return its result in place of the graph's. Read on torch 2.13; ``tests/test_backend.py`` fails loudly
where a version moves one of the names.

The stack while a backend runs, outermost first (and while the code runs that it made, without the lines of Dynamo)::

    OptimizedModule.__call__                  of torch.compile(model); model.compile() has none
    _TorchDynamoContext.__call__ compile_wrapper
    Module._wrapped_call_impl
    Module._call_impl                         locals: self, args, kwargs
    CatchErrorsWrapper.__call__ ...           Dynamo, for the frame that _call_impl calls: model.forward
    OutputGraph.call_user_compiler ...
    the backend
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_instruction,
    create_load_const,
    transform_code_object,
)
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.output_graph import OutputGraph
from torch._guards import CompileContext

__all__ = [
    "ModuleCall",
    "OptimizedModule",
    "Traced",
    "forget",
    "hooked",
    "return_instead",
    "running",
    "traced",
]

_MODULE_FILE = nn.Module._call_impl.__code__.co_filename
_RESUMED = "torch_dynamo_resume_in_"


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a compiled module: ``module(*args, **kwargs)``; ``wrapper``: what ``torch.compile`` returned for it,
    None for ``module.compile()``."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    wrapper: OptimizedModule | None


@dataclass(frozen=True, slots=True)
class Traced:
    """The frame that Dynamo has traced. ``whole``: it is the forward of the module that was compiled, from beginning to
    end. ``broken``: where tracing stopped, if it did; ``where``: where the frame begins, ``name``: its function."""

    code: types.CodeType
    whole: bool
    module: str | None
    name: str
    where: str
    broken: tuple[str, str] | None


def running() -> ModuleCall | None:
    """The call of a compiled module that is running, seen from below; None outside of one, and inside of a module
    that it calls."""
    frames = _to_compile_wrapper(sys._getframe(1))
    calls = [frame for frame in frames if _is_call(frame)]
    if len(calls) != 1:
        return None
    values = calls[-1].f_locals
    module = values["self"]
    wrapper = None
    above = frames[-1].f_back
    while above is not None and _in(above, _MODULE_FILE):
        above = above.f_back
    if above is not None and isinstance(found := above.f_locals.get("self"), OptimizedModule):
        wrapper = found
    return ModuleCall(module, tuple(values["args"]), dict(values["kwargs"]), wrapper)


def traced() -> Traced:
    """What Dynamo calls the backend for. Only inside of a backend."""
    frames = _to_compile_wrapper(sys._getframe(1))
    output = next(f.f_locals["self"] for f in frames if isinstance(f.f_locals.get("self"), OutputGraph))
    code: types.CodeType = output.root_tx.f_code
    last = max(i for i, f in enumerate(frames) if _in(f, convert_frame.__file__))
    outer = frames[last + 1 :]  # the frame that calls the traced one, ..., compile_wrapper
    calls = [f for f in outer if _is_call(f)]
    resumed = code.co_name.startswith(_RESUMED)
    reason = output.compile_subgraph_reason
    broken: tuple[str, str] | None = None
    if reason is not None and reason.graph_break:
        broken = (_place(reason.user_stack), str(reason.reason).split("\n")[0])
    elif resumed:
        broken = (f"{code.co_filename}:{code.co_name.rpartition('_at_')[2]}", "")
    direct = bool(outer) and all(_in(f, _MODULE_FILE) for f in outer[:-1]) and len(calls) == 1
    return Traced(
        code=code,
        whole=direct and broken is None,
        module=type(calls[-1].f_locals["self"]).__name__ if calls else None,
        name=code.co_name,
        where=f"{code.co_filename}:{code.co_firstlineno}",
        broken=broken,
    )


def return_instead(code: types.CodeType, function: Callable[[], Any]) -> None:
    """Make what Dynamo is about to generate for ``code`` return ``function()``, with nothing of the graph around it.
    Only inside of a backend; the code that comes out is cached behind Dynamo's guards, as any."""
    expected, compiling = code, CompileContext.current_compile_id()

    def hook(code: types.CodeType, new_code: types.CodeType) -> types.CodeType | None:
        handle.remove()
        # Dynamo gave up behind the backend, and this is another frame: not ours.
        if code is not expected or CompileContext.current_compile_id() != compiling:
            return None
        return _returning(code, function)

    handle = convert_frame.register_bytecode_hook(hook)


def _returning(code: types.CodeType, function: Callable[[], Any]) -> types.CodeType:
    """``code``, with its arguments, cells and names, whose body is ``return function()``."""

    def body(instructions: list[Any], options: dict[str, Any]) -> None:
        begin = next(i for i, one in enumerate(instructions) if one.opname == "RESUME")
        instructions[begin + 1 :] = [
            create_load_const(function, checked=False),
            *create_call_function(0, push_null=True),
            create_instruction("RETURN_VALUE"),
        ]

    return transform_code_object(code, body)[0]


def forget(code: types.CodeType) -> None:
    """Drop what Dynamo has cached for ``code``, of every backend. Not while it runs."""
    reset_code(code)


def hooked(parameter: nn.Parameter) -> bool:
    """Does somebody wait for autograd to come by ``parameter`` (``register_hook``,
    ``register_post_accumulate_grad_hook``)?"""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _to_compile_wrapper(frame: types.FrameType | None) -> list[types.FrameType]:
    """Outwards from ``frame`` to the frame of ``torch.compile``, that included; nothing where there is none."""
    found = []
    while frame is not None:
        found.append(frame)
        # Its name has changed between versions; what it closes over has not.
        if _in(frame, eval_frame.__file__) and isinstance(
            frame.f_locals.get("self"), eval_frame.OptimizeContext
        ):
            return found
        frame = frame.f_back
    return []


def _is_call(frame: types.FrameType) -> bool:
    return frame.f_code.co_name == "_call_impl" and _in(frame, _MODULE_FILE)


def _in(frame: types.FrameType, file: str | None) -> bool:
    return frame.f_code.co_filename == file


def _place(stack: Sequence[Any]) -> str:
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown line"
