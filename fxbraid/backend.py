"""``torch.compile(model, backend="fxbraid", options={...})``: :func:`fxbraid.braid` for a loop that calls the model
and then ``loss.backward()``. docs/torch_compile.md says what differs.

Dynamo calls :func:`backend` with a graph of the whole batch, which is not what a pipeline runs. It serves to find the
module that is called, and as the proof that its forward is one graph. What Dynamo then caches for the call is a jump to
:class:`_First`, which braids the user's module for the arguments of the call and puts itself in place of Dynamo for all
calls to come: from then on parameters are shards, and nothing that Dynamo knows of the model is true.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from .adopt import Adopting
from .api import _build, braid
from .compat_dynamo import ModuleCall, Traced, return_instead, running, traced
from .compiled import CompiledCall, compiled_call, keywords
from .passes.errors import BraidError, UnsupportedError, VerifyError

_EXAMPLE = 'options={"tp_size": 2, "pp_size": 2, "n_microbatches": 8}'


def backend(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The entry point that ``torch.compile(backend="fxbraid")`` calls. ``options``: every keyword argument of
    :func:`fxbraid.braid`; ``n_microbatches`` must be there.

    What can't be done is raised as a :class:`BraidError` when the result runs, which is at once, and not here: Dynamo
    would wrap it in an exception of its own, or fall back without a word where it is told to suppress errors.
    """
    found = traced()
    if found.whole:
        return_instead(found.code, _First(dict(options or {}), mode, found.code))
        return _raising(
            VerifyError("this version of torch runs the graph that fxbraid has replaced; please report it")
        )
    return _raising(_refusal(found))


class _First:
    """Runs where Dynamo's code for the forward of a module would, of any module that its guards let through: it may be
    another one than Dynamo has traced."""

    def __init__(self, options: dict[str, Any], mode: str | None, code: types.CodeType) -> None:
        self._options, self._mode, self._code = options, mode, code

    @torch.compiler.disable
    def __call__(self) -> Any:
        call = running()
        if call is None:
            raise UnsupportedError(
                "fxbraid was to run a part of another module: its forward does not trace as one graph; "
                "TORCH_LOGS=graph_breaks says where it breaks"
            )
        compiled = compiled_call(call.module) or self._braid(call)
        if call.wrapper is not None:
            call.wrapper.forward = compiled
        return compiled.run(*call.args, **call.kwargs)

    def _braid(self, call: ModuleCall) -> CompiledCall:
        _check_options(self._options, self._mode)
        model = call.module
        asked = inspect.signature(braid).bind(model, keywords(model, call.args, call.kwargs), **self._options)
        asked.apply_defaults()
        arguments = {name: value for name, value in asked.arguments.items() if name != "model"}
        with torch.inference_mode(False):  # parameters outlive a first call in eval mode
            source = Adopting(model, seed=arguments["seed"])
            try:
                compiled = CompiledCall(model, _build(source, arguments), self._code)
            except BaseException:
                source.undo()
                raise
            compiled.braided._elsewhere = source.commit()
        model._compiled_call_impl = compiled
        return compiled


def _check_options(options: Mapping[str, Any], mode: str | None) -> None:
    known = [name for name in inspect.signature(braid).parameters if name not in ("model", "example_batch")]
    if mode is not None:
        raise BraidError(
            f"mode={mode!r} is one of Inductor's; fxbraid has none, leave it out and give {_EXAMPLE}"
        )
    if unknown := sorted(set(options) - set(known)):
        raise BraidError(
            f"{unknown[0]!r} is no option of fxbraid; options are the keyword arguments of fxbraid.braid(): "
            f"{', '.join(known)}"
        )
    if "n_microbatches" not in options:
        raise BraidError(
            f"options lack n_microbatches, the number of micro-batches that a batch is cut into; give {_EXAMPLE}"
        )


def _refusal(found: Traced) -> BraidError:
    if found.module is None:
        return UnsupportedError(
            f"fxbraid takes the call of a model, and this is the function {found.name} at {found.where}; compile the "
            'model itself: model = torch.compile(model, backend="fxbraid", ...), and call it from there'
        )
    if found.broken is not None:
        line, why = found.broken
        return UnsupportedError(
            f"the graph of {found.module} breaks at {line}{f' ({why})' if why else ''}, and fxbraid needs the forward "
            "as one graph; take that line out of the model's forward"
        )
    return UnsupportedError(
        f"Dynamo gives fxbraid a part of {found.module} alone, {found.name} at {found.where}, and fxbraid needs the "
        "forward as one graph; TORCH_LOGS=graph_breaks, or fullgraph=True, says which line breaks it"
    )


def _raising(error: Exception) -> Callable[..., NoReturn]:
    def refuse(*inputs: Any) -> NoReturn:
        raise error

    return refuse
