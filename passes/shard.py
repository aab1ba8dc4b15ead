"""Pass ``shard``: the tensor-parallel plan, the local shape of every parameter, and the marks.

Contract: (model, plan, tp_size) -> :class:`Sharded`. The model is not touched: what is traced afterwards is a
structural copy of it whose parameters are fake tensors of their local shape, with a mark before each
column-parallel linear and after each row-parallel one::

    h = norm(x)                              h = norm(x)
    q = linear(h, Wq)      # [hid, hid]      q = linear(tp_copy(h), Wq)      # [hid/t, hid]
    ...                               =>     ...
    y = linear(o, Wo)      # [hid, hid]      y = tp_reduce(linear(o, Wo))    # [hid, hid/t]

The marks go in while the model is traced (and not into the traced graph) because this is the contract that
Hugging Face's plans are written for: every module of a model with a ``_tp_plan`` runs on local shapes, its head
counts follow from ``view(b, s, -1, head_dim)``. A graph traced at full size has the full head counts baked into
``expand`` and ``reshape`` (grouped-query attention with a mask), which no local replay could undo safely.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..compat import FakeTensorMode
from .errors import PlanError
from .marks import TP_COPY, TP_REDUCE, tp_copy, tp_reduce

#: Styles that leave a module whole on every TP rank. The two vocabulary styles shard the embedding and the
#: head in transformers; here both stay replicated, which is exact, and said so in the report.
REPLICATED = frozenset({"replicated", "embedding_rowwise", "colwise_gather_output", "colwise_rep"})
SHARDED = frozenset({"colwise", "rowwise"})


@dataclass(frozen=True, slots=True)
class ParamShard:
    """How one parameter lies over the TP ranks.

    ``shape`` is the full shape; ``dim`` the dimension that is cut into ``tp_size`` equal parts, or None where
    every rank has the whole.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    tp_size: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return tuple(n // self.tp_size if d == self.dim else n for d, n in enumerate(self.shape))

    def take(self, full: Tensor, tp_rank: int) -> Tensor:
        """This rank's part of ``full``, a view."""
        if self.dim is None:
            return full
        return full.chunk(self.tp_size, self.dim)[tp_rank]


@dataclass(frozen=True, slots=True)
class TpPlan:
    """Styles by module, shards by parameter: ``model.plan.tp``."""

    tp_size: int
    styles: Mapping[str, str]
    params: Mapping[str, ParamShard]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sharded:
    """The traceable copy (fake parameters, marks in place) and its plan."""

    module: nn.Module
    plan: TpPlan
    #: every name of a tied parameter -> the first one
    canonical: Mapping[str, str]


def shard(
    model: nn.Module,
    *,
    tp_size: int,
    tp_plan: str | Mapping[str, str] = "auto",
    fake_mode: FakeTensorMode,
    device: torch.device,
) -> Sharded:
    """See the module's docstring. Raises :class:`PlanError` with the module, the sizes and the way out."""
    plan = read_plan(model, tp_size=tp_size, tp_plan=tp_plan)
    local = _local_copy(model, plan, fake_mode, device)
    for name, style in plan.styles.items():
        _mark(local.get_submodule(name), style)
    return Sharded(module=local, plan=plan, canonical=canonical_names(model))


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every parameter name to the first name of the same tensor (tied parameters have several)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def read_plan(model: nn.Module, *, tp_size: int, tp_plan: str | Mapping[str, str]) -> TpPlan:
    """Match the model's own plan (transformers >= 5) or the user's patterns against the model's modules."""
    patterns = _patterns(model, tp_plan)
    if tp_size > 1:
        if not patterns:
            raise PlanError(
                f"{type(model).__name__} has no tensor-parallel plan (model._tp_plan); "
                'pass tp_plan={"pattern.of.modules.*": "colwise" | "rowwise", ...} or use tp_size=1'
            )
        _check_heads(model, tp_size)
    names = canonical_names(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    dims: dict[str, int] = {}
    styles: dict[str, str] = {}
    notes: list[str] = []
    for name, module in model.named_modules():
        pattern = _match(name, patterns)
        if pattern is None:
            continue
        style = patterns[pattern]
        if style in REPLICATED:
            if style != "replicated" and tp_size > 1:
                notes.append(f"{name}: style {style} is kept replicated, whole on every TP rank")
            continue
        if style not in SHARDED:
            if tp_size > 1:
                raise PlanError(
                    f"the plan gives module {name} the style {style!r}, which fxbraid does not know; "
                    f"known are {', '.join(sorted(SHARDED | REPLICATED))}; use tp_size=1, or a tp_plan without it"
                )
            continue
        if not isinstance(module, nn.Linear) and tp_size == 1:
            continue
        if not isinstance(module, nn.Linear):
            raise PlanError(f"style {style!r} wants nn.Linear, but module {name} is {type(module).__name__}")
        styles[name] = style
        dims.update(_linear_dims(name, module, style, tp_size, names))
    if tp_size > 1 and not styles:
        raise PlanError(
            f"the tensor-parallel plan shards no module of {type(model).__name__}: none of its patterns "
            f"({', '.join(patterns)}) matches a module with a style of {', '.join(sorted(SHARDED))}; use tp_size=1 or "
            "another tp_plan"
        )
    params = {
        name: ParamShard(name, shape, dims.get(name) if tp_size > 1 else None, tp_size)
        for name, shape in shapes.items()
    }
    return TpPlan(tp_size=tp_size, styles=styles, params=params, notes=tuple(notes))


def _patterns(model: nn.Module, tp_plan: str | Mapping[str, str]) -> dict[str, str]:
    if isinstance(tp_plan, str):
        if tp_plan != "auto":
            raise PlanError(f'tp_plan={tp_plan!r}: use "auto" or a dict of module patterns to styles')
        own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        return dict(own or {})
    return dict(tp_plan)


def _match(name: str, patterns: Mapping[str, str]) -> str | None:
    for pattern in patterns:
        regex = r"\.".join(r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
        if re.fullmatch(regex, name):
            return pattern
    return None


def _linear_dims(
    name: str, module: nn.Linear, style: str, tp_size: int, canonical: Mapping[str, str]
) -> dict[str, int]:
    dim = 0 if style == "colwise" else 1
    size = module.weight.shape[dim]
    if size % tp_size:
        raise PlanError(
            f"dim {dim} of {name}.weight is {size}, not divisible by tp_size={tp_size}; use {_divisors(size)}"
        )
    dims = {canonical[f"{name}.weight"]: dim}
    if style == "colwise" and module.bias is not None:
        dims[canonical[f"{name}.bias"]] = 0
    return dims


def _check_heads(model: nn.Module, tp_size: int) -> None:
    """Attention shards by whole heads; a plan alone does not show it (9 heads of 64 divide by 2 as 576 features)."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    heads = [
        (key, value)
        for key in ("num_attention_heads", "num_key_value_heads")
        if isinstance(value := getattr(config, key, None), int)
    ]
    for key, value in heads:
        if value % tp_size:
            common = math.gcd(*(number for _, number in heads))
            raise PlanError(
                f"{key}={value} is not divisible by tp_size={tp_size}; use tp_size {_divisors(common)}"
            )


def _divisors(n: int) -> str:
    found = [str(d) for d in range(1, min(n, 128) + 1) if n % d == 0]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + f" or {found[-1]}"


def _local_copy(model: nn.Module, plan: TpPlan, fake_mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Copy the module tree with every parameter and buffer replaced by a fake one; no storage is copied."""
    memo: dict[int, Any] = {}
    with fake_mode:
        for name, parameter in model.named_parameters():
            local = torch.empty(plan.params[name].local_shape, dtype=parameter.dtype, device=device)
            memo[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        for _, buffer in model.named_buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    copied: nn.Module = copy.deepcopy(model, memo)
    _untie(model, copied, fake_mode)
    return copied


def _untie(model: nn.Module, local: nn.Module, fake_mode: FakeTensorMode) -> None:
    """Give every name of a tied parameter a fake tensor of its own in the copy.

    Their gradients stay apart in the graph and are summed at the end of the step, in one order whatever the
    chunks: inside one chunk autograd would add them up per micro-batch, which is another order of additions.
    """
    for name, first in canonical_names(model).items():
        if name != first:
            owner, _, leaf = name.rpartition(".")
            tied = local.get_parameter(name)
            with fake_mode:
                own = nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
            setattr(local.get_submodule(owner), leaf, own)


def _mark(module: nn.Module, style: str) -> None:
    if style == "colwise":
        module.register_forward_pre_hook(lambda _, args: (tp_copy(args[0]), *args[1:]))
        return

    def forward(x: Tensor) -> Tensor:
        # The bias is added once, after the sum over ranks.
        y = tp_reduce(F.linear(x, module.weight))  # type: ignore[arg-type]
        return y if module.bias is None else y + module.bias  # type: ignore[operator]

    module.forward = forward  # type: ignore[method-assign]


def check_partial_gradients(graph: fx.Graph, plan: TpPlan) -> None:
    """Refuse a whole parameter that is read between column- and row-parallel linears (Qwen3's q and k norms): each
    rank would see only the gradient of its own heads. Raises :class:`PlanError`."""
    if plan.tp_size == 1:
        return
    inside: set[fx.Node] = set()
    weights: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and node.meta.get("is_parameter") and node.meta["val"].requires_grad:
            shard = plan.params.get(str(node.target))
            if shard is not None and shard.dim is None:
                weights[node] = str(node.target)
        elif node.op == "call_function":
            sources = node.all_input_nodes
            held = [weights[n] for n in sources if n in weights]
            if node.target is TP_COPY or any(n in inside for n in sources):
                if held:
                    raise PlanError(
                        f"parameter {held[0]} is whole on every TP rank but read on each rank's own part of the "
                        "features, so its gradient would be only that part's; summing it over TP "
                        "(replicated_with_grad_allreduce) is not supported yet: use tp_size=1"
                    )
                if node.target is not TP_REDUCE:
                    inside.add(node)
            elif held and len(held) == len(sources):
                weights[node] = held[0]
