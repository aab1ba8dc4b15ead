"""Pass ``capture``: the model's forward as one FX graph at micro-batch shape.

Contract: (traceable copy of the model, one micro-batch of fake inputs) -> :class:`Captured`, whose graph has

* a ``placeholder`` per tensor input of the user, named like the keyword,
* a ``get_attr`` per parameter and buffer, its target the Hugging Face name,
* torch operators with their ``nn_module_stack``, without export's runtime assertions,
* an ``output``: one tuple, whose names are in ``outputs``,
* every call as the model made it; :func:`merge` computes equal ones once::

      def forward(self, input_ids, labels):
          embedding = aten.embedding(self.model.embed_tokens.weight, input_ids)
          ...
          return (cross_entropy_loss, logits)      # outputs == ("loss", "logits")

``use_cache=False`` holds for the trace only: the copy has a config of its own. What the trace may know of the values
of inputs is in ``passes.values``.
"""

from __future__ import annotations

import inspect
import operator
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..compat import FakeTensor, FakeTensorMode, fx_graph_cse, plain_index
from .errors import CaptureError, UnsupportedError
from .values import Count, Given, Needed, check_sizes, knowing

_ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


#: Key of a node's meta: it lies in a region that switches autocast off.
NO_AUTOCAST = "no_autocast"


@dataclass(frozen=True, slots=True)
class Captured:
    """The traced model; see the module's docstring."""

    graph_module: fx.GraphModule
    #: names of the graph's placeholders, in order
    inputs: tuple[str, ...]
    #: keys of the model's output, in the order of the graph's outputs
    outputs: tuple[str, ...]
    #: tensors that the forward makes or holds outside of parameters and buffers, by their name in the graph
    constants: Mapping[str, Any] = field(default_factory=dict)
    #: how many entries masks of the inputs select, which the shapes of the graph depend on
    counts: tuple[Count, ...] = ()


def capture(
    module: nn.Module,
    kwargs: Mapping[str, Any],
    *,
    fake_mode: FakeTensorMode,
    given: Given | None = None,
) -> Captured:
    """Trace ``module(**kwargs)``; non-tensor values in ``kwargs`` are constants of the trace, and so are the static
    inputs of ``given``.

    Raises :class:`CaptureError` naming the module and source line where tracing stopped
    (:class:`~fxbraid.passes.values.Needed` where it stopped for want of an input's numbers), and
    :class:`UnsupportedError` for dropout and for buffers that the forward writes.
    """
    accepted = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in accepted]
    if unknown:
        raise CaptureError(
            f"{type(module).__name__}.forward has no keyword {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(accepted)}"
        )
    static = given.static if given is not None else {}
    call = {name: _fake(value, fake_mode) for name, value in kwargs.items() if name not in static}
    if _without_cache(module) and "use_cache" in accepted:
        call["use_cache"] = False
    with _where_it_stops(module) as stack, knowing(module, given, stack) as values, plain_index():
        try:
            exported = torch.export.export(module, (), call, strict=False)
        except Needed:
            raise
        except Exception as error:
            text = _explain(module, error, stack)
            if values is not None and values.needed:
                raise Needed(text, frozenset(values.needed)) from error
            raise CaptureError(text) from error
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
    if any(_writes(node) or _vmapped(node) for graph in graphs for node in graph.nodes):
        # Export leaves in-place operators and vmap (in masks of a model's own) as they are; what follows takes a
        # functional graph.
        exported = exported.run_decompositions({})
    captured = _canonicalise(exported, module, call)
    if values is None:
        return captured
    captured.graph_module.graph.eliminate_dead_code()  # what the model's own checks of values have left
    check_sizes(captured.graph_module.graph, module, values)
    return replace(captured, counts=tuple(values.counts))


def _without_cache(module: nn.Module) -> bool:
    """Switch it off in every config of the copy, also in those of its parts; False where none knows of one."""
    configs: list[Any] = [getattr(module, "config", None)]
    configs += [getattr(configs[0], name, None) for name in getattr(configs[0], "sub_configs", ())]
    found = [config for config in configs if hasattr(config, "use_cache")]
    for config in found:
        config.use_cache = False
    return bool(found)


def _fake(value: Any, fake_mode: FakeTensorMode) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        raise TypeError("capture takes fake tensors; make them with fake_inputs()")
    return value


def fake_inputs(
    batch: Mapping[str, Any], *, fake_mode: FakeTensorMode, device: torch.device
) -> dict[str, Any]:
    """Fake tensors of the same shapes and dtypes on ``device`` (meta tensors are fine as input)."""
    with fake_mode:
        return {
            name: torch.empty(value.shape, dtype=value.dtype, device=device)
            if isinstance(value, Tensor)
            else value
            for name, value in batch.items()
        }


def _writes(node: fx.Node) -> bool:
    """Does the node change one of its inputs?"""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _vmapped(node: fx.Node) -> bool:
    """Does the node begin what runs under ``torch.vmap``?"""
    return getattr(node.target, "__name__", "") == "_add_batch_dim"


@contextmanager
def _where_it_stops(module: nn.Module) -> Iterator[list[str]]:
    """Keep the path of the module that runs: on an error its last entry says where the trace stopped."""
    stack: list[str] = []
    handles = []
    for name, child in module.named_modules():

        def enter(_m: nn.Module, _args: Any, name: str = name) -> None:
            stack.append(name)

        def leave(_m: nn.Module, _args: Any, _out: Any) -> None:
            stack.pop()

        handles.append(child.register_forward_pre_hook(enter, prepend=True))
        handles.append(child.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _explain(module: nn.Module, error: Exception, stack: list[str]) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and "/fxbraid/" not in f.filename]
    own = [f for f in own if f.filename != __file__ and f.name != "__torch_function__"]
    where = stack[-1] if stack and stack[-1] else type(module).__name__
    line = f' at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}: "{own[-1].line}"' if own else ""
    cause = str(error).strip().splitlines()
    advice = ""
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        advice = (
            "Control flow that depends on a tensor's values can't be traced; make it depend on shapes or on "
            "constants, or pass the value in as a keyword."
        )
    return (
        f"{type(module).__name__} does not trace: torch.export stopped in module {where!r}{line}. "
        f"Cause: {type(error).__name__}: {cause[0] if cause else ''} "
        f"{advice}"
    ).rstrip()


def _canonicalise(exported: Any, module: nn.Module, call: Mapping[str, Any]) -> Captured:
    signature = exported.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise UnsupportedError(
            f"the forward of {type(module).__name__} writes its "
            f"{', '.join([*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()])}; "
            "fxbraid does not carry state from one micro-batch to the next yet"
        )
    state: dict[str, Any] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
        **exported.constants,
    }
    attribute_of = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    graph = fx.Graph()
    env: dict[fx.Node, _Value] = {}
    used: dict[str, Any] = {}
    inputs: list[str] = []
    for node in exported.graph.find_nodes(op="placeholder"):
        target = attribute_of.get(node.name)
        if target is not None:
            if node.users:
                used[target] = state[target]
                made = env[node] = graph.get_attr(target)
                made.meta["val"] = node.meta["val"]
                made.meta["is_parameter"] = node.name in signature.inputs_to_parameters
        elif isinstance(call.get(node.name), Tensor):
            inputs.append(node.name)
            made = env[node] = graph.placeholder(node.name)
            made.meta = dict(node.meta)
    leaves = _copy_body(exported.graph_module, graph, env)
    graph.output(tuple(leaf for leaf in leaves if leaf is not None))
    names = _output_names(exported)
    return Captured(fx.GraphModule(used, graph), tuple(inputs), names, exported.constants)


def merge(captured: Captured) -> Captured:
    """The same function, each value computed once: one tp_copy for the linears that share an input (q, k, v), one table
    for the layers that share it."""
    graph = fx_graph_cse(captured.graph_module.graph)
    graph.eliminate_dead_code()
    return replace(captured, graph_module=fx.GraphModule(captured.graph_module, graph))


#: A node of the copy, or the results of a region that was copied in place of its call.
_Value = fx.Node | tuple["fx.Node | None", ...]


def _copy_body(
    source: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, _Value], *, plain: bool = False
) -> tuple[fx.Node | None, ...]:
    """Copy the calls of ``source`` into ``graph``; returns its outputs (None for what is no value). ``plain``: autocast
    is off there.

    Regions that some versions of export keep apart (``torch.no_grad``, ``torch.autocast``) are copied inline.
    """
    for node in source.graph.nodes:
        if node.op in ("placeholder", "output") or node.target in _ASSERTIONS:
            continue
        if node.op == "get_attr" and isinstance(_attribute(source, node), fx.GraphModule):
            continue  # the body of a region, copied where it is called
        if node.op != "call_function":
            raise UnsupportedError(f"the traced graph has a node of kind {node.op}: {node.format_node()}")
        region = env.get(node.args[0]) if node.target is operator.getitem else None  # type: ignore[arg-type]
        if isinstance(region, tuple):
            value = region[node.args[1]]  # type: ignore[index, misc]
            if value is not None:
                env[node] = value
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            env[node] = _copy_region(source, node, graph, env, plain=plain)
        else:
            _refuse_dropout(node)
            if getattr(node.target, "_opname", "") == "dropout":  # it does nothing: see above
                env[node] = env[node.args[0]]  # type: ignore[index]
                continue
            if node.target is torch.ops.aten.copy.default:
                env[node] = _copied(graph, node, env)
                continue
            made = env[node] = graph.node_copy(node, env.__getitem__)  # type: ignore[arg-type]
            if plain:
                made.meta[NO_AUTOCAST] = True
            if made.target is torch.ops.aten.view.default:
                # Attention lays its result out otherwise once gradients are wanted: a copy is then needed.
                made.target = torch.ops.aten.reshape.default
    results = source.graph.output_node().args[0]
    leaves = results if isinstance(results, list | tuple) else (results,)
    return tuple(env[n] if isinstance(n, fx.Node) else None for n in leaves)  # type: ignore[misc]


def _attribute(source: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(source, str(node.target), None)


def _copy_region(
    source: fx.GraphModule, node: fx.Node, graph: fx.Graph, env: dict[fx.Node, _Value], *, plain: bool
) -> tuple[fx.Node | None, ...]:
    kind = node.target.name()  # type: ignore[union-attr]
    bodies = [i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    if kind == "wrap_with_autocast" and node.args[2]:
        raise UnsupportedError(
            "the model enables torch.autocast inside its forward; fxbraid does not trace that yet"
        )
    if kind not in ("wrap_with_set_grad_enabled", "wrap_with_autocast") or len(bodies) != 1:
        raise UnsupportedError(
            f"the traced graph calls {kind}, which fxbraid does not know: {node.format_node()}"
        )
    body = _attribute(source, node.args[bodies[0]])  # type: ignore[arg-type]
    inner: dict[fx.Node, _Value] = {
        placeholder: env[arg]  # type: ignore[index]
        for placeholder, arg in zip(
            body.graph.find_nodes(op="placeholder"), node.args[bodies[0] + 1 :], strict=True
        )
    }
    results = _copy_body(body, graph, inner, plain=plain or kind == "wrap_with_autocast")
    if kind == "wrap_with_set_grad_enabled" and not node.args[0]:
        return tuple(_detached(graph, value) for value in results)
    return results


def _copied(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, _Value]) -> fx.Node:
    """What an assignment ``x[...] = y`` becomes in a functional graph is ``copy(x[...], y)``, which has no derivative:
    it is ``y`` in the shape and type of ``x[...]``."""
    target, source = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    made: fx.Node = env[node.args[1]]  # type: ignore[index, assignment]
    if source.shape != target.shape:
        made = graph.call_function(torch.ops.aten.expand.default, (made, list(target.shape)))
        made.meta = {**node.meta, "val": source.expand(target.shape)}
    if source.dtype != target.dtype:
        made = graph.call_function(torch.ops.aten.to.dtype, (made, target.dtype))
        made.meta = dict(node.meta)
    return made


def _detached(graph: fx.Graph, value: fx.Node | None) -> fx.Node | None:
    """What leaves a no_grad region carries no gradient back into it."""
    if value is None:
        return None
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = dict(value.meta)
    return detached


def _refuse_dropout(node: fx.Node) -> None:
    name = getattr(node.target, "_opname", "")
    args = (*node.args, *node.kwargs.values())
    if name == "scaled_dot_product_attention":
        p = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    elif name == "dropout":
        p = args[1] if args[2] else 0.0
    elif "dropout" in name:
        p = 1.0
    else:
        _refuse_random(node)
        return
    if p:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        where = stack[-1][0] if stack else "the model"
        raise UnsupportedError(
            f"module {where!r} uses dropout p={p} in training mode; fxbraid does not support dropout yet "
            "(the random state of a recomputed or reordered micro-batch is not carried): set the dropout "
            "probabilities of the config to 0, or call model.eval() before braid()"
        )


def _refuse_random(node: fx.Node) -> None:
    """A router that draws lots in training (PhiMoE) would draw other ones on every rank and micro-batch."""
    if (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    ):
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        raise UnsupportedError(
            f"module {stack[-1][0] if stack else 'the model'!r} draws random numbers ({node.target}); fxbraid does not "
            "carry a random state over ranks and micro-batches yet: switch the noise off in the config, or call "
            "model.eval() before braid()"
        )


def _output_names(exported: Any) -> tuple[str, ...]:
    """A name per tensor that the model returns: its key, ``key.i`` inside a nested output, and for a plain tensor
    or a tuple "loss" for a first 0-d one, as Hugging Face models return it without a dict."""
    spec = exported.call_spec.out_spec
    leaves = exported.graph.output_node().args[0]
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = {index: path for path, index in pytree.tree_flatten_with_path(tree)[0]}
    names = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, fx.Node):
            continue
        keys = [
            str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in paths[index]
        ]
        name = ".".join(keys) if keys else "output"
        val = leaf.meta["val"]
        if index == 0 and not isinstance(tree, Mapping) and val.ndim == 0 and val.is_floating_point():
            name = "loss"
        names.append(name)
    return tuple(names)
