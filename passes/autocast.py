"""Pass ``autocast``: the casts that ``torch.autocast`` makes at run time, written into the graph.

Contract: (graph whose ``val`` were traced with autocast on) -> the same graph in which every operator gets its inputs
in the types that it runs on, so that it means the same where autocast is off::

    y = linear(x, w)              x1, w1 = to(x, bfloat16), to(w, bfloat16)
                          =>      y = linear(x1, w1)                           # val of y: bfloat16, before and after

Which inputs an operator casts is not read from a list: it is run on fake tensors with autocast on, and what it casts
is seen from below. Regions that switch autocast off (rotary tables) were marked by pass ``capture``. A value that
several operators of one layer read is cast once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from .capture import NO_AUTOCAST, Captured
from .errors import UnsupportedError

_CAST = torch.ops.aten._to_copy.default


def write_casts(captured: Captured, dtype: torch.dtype, device: torch.device) -> Captured:
    """See the module's docstring. ``dtype``: autocast's. Changes ``captured`` in place.

    Raises :class:`UnsupportedError` for an operator that casts something else than its inputs.
    """
    graph = captured.graph_module.graph
    casts: dict[tuple[fx.Node, torch.dtype, str], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.meta.get(NO_AUTOCAST):
            continue
        for source, wanted in _wanted(node, dtype, device).items():
            key = (source, wanted, _module(node))
            if key not in casts:
                with graph.inserting_before(node):
                    casts[key] = graph.call_function(torch.ops.aten.to.dtype, (source, wanted))
                casts[key].meta = {**node.meta, "val": source.meta["val"].to(wanted)}
            node.replace_input_with(source, casts[key])
        _check(node)
    graph.lint()
    captured.graph_module.recompile()
    return captured


class _Seen(TorchDispatchMode):
    """Keeps the casts that are made of ``tensors``, in order: (index, dtype)."""

    def __init__(self, tensors: Mapping[int, fx.Node]) -> None:
        super().__init__()
        self._tensors = tensors
        self.casts: dict[fx.Node, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _CAST and kwargs.get("dtype") is not None and id(args[0]) in self._tensors:
            self.casts.setdefault(self._tensors[id(args[0])], kwargs["dtype"])
        return func(*args, **kwargs)


def _wanted(node: fx.Node, dtype: torch.dtype, device: torch.device) -> dict[fx.Node, torch.dtype]:
    """The inputs that ``node`` casts under autocast, and to what."""
    if node.target in (torch.ops.aten.to.dtype, _CAST):
        return {}
    values = {n: n.meta["val"] for n in node.all_input_nodes if _floats(n.meta.get("val"))}
    if not values:
        return {}
    with _Seen({id(val): n for n, val in values.items()}) as seen:
        _run(node, dtype, device)
    return seen.casts


def _floats(val: object) -> bool:
    return isinstance(val, Tensor) and val.is_floating_point()


def _run(node: fx.Node, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The operator on the fake values of its inputs, with autocast to ``dtype`` or (None) off."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not None):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _check(node: fx.Node) -> None:
    """Without autocast, on what it now reads, ``node`` must give the types that it gave with it."""
    want = node.meta.get("val")
    first = next((n.meta["val"] for n in node.all_input_nodes if _floats(n.meta.get("val"))), None)
    if first is None or not isinstance(want, Tensor):
        return
    got = _run(node, None, first.device)
    if got.dtype is not want.dtype:
        raise UnsupportedError(
            f"module {_module(node)!r} calls {node.target}, which gives {want.dtype} under torch.autocast, and "
            f"{got.dtype} on inputs cast as autocast casts them; call braid() outside of autocast, with the model "
            "converted to bfloat16 (master_weights=True keeps float32 weights)"
        )


def _module(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else node.name
