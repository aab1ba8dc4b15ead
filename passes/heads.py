"""Part of pass ``shard``: attention is cut by whole heads, whatever the layout of its projections.

What a plan's styles do not say, shapes do:

* fewer key-value heads than ranks: neighbours hold the same head (:class:`~.layout.Section`);
* q, k and v, or gate and up, in one weight whose plan would gather its output: cut in sections instead, so that
  nothing is gathered;
* a norm over all heads at once (OLMo 2): its weight is cut like the projection before it and its mean is taken
  over all ranks;
* head counts that a forward reads from its module or config: set to the local ones in the traced copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .adapters import base
from .errors import PlanError
from .layout import Section
from .marks import tp_reduce
from .styles import COLUMNS, GATHER, ROWS, SPLIT, is_linear, packed_sections

#: Attributes that count heads, of a module or its config.
_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
#: Attributes that count features of all heads.
_WIDTHS = ("split_size", "all_head_size", "inner_dim")
_KEY_NAMES = frozenset({"k_proj", "v_proj", "key", "value", "wk", "wv", "k", "v"})
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_per_head")


@dataclass(slots=True)
class Blocks:
    """What reading shapes adds to a plan.

    ``styles``: by module, in place of the plan's. ``sections``: by module, for its output features. ``norms``: modules
    that take a mean over a cut dimension. ``local``: attention modules and their local counts. ``notes`` by style.
    """

    styles: dict[str, str] = field(default_factory=dict)
    sections: dict[str, tuple[Section, ...]] = field(default_factory=dict)
    norms: dict[str, tuple[Section, ...]] = field(default_factory=dict)
    local: dict[str, LocalHeads] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalHeads:
    """Full and local numbers of one attention module; 0 where it has none."""

    queries: int
    keys: int
    tp_size: int

    @property
    def key_parts(self) -> int:
        """Into how many parts key-value heads are cut."""
        return self.tp_size if self.keys % self.tp_size == 0 else self.keys

    @property
    def local_queries(self) -> int:
        return self.queries // self.tp_size

    @property
    def local_keys(self) -> int:
        return self.keys // self.key_parts


def read_blocks(model: nn.Module, styles: Mapping[str, str], tp_size: int) -> Blocks:
    """Look at every module whose children the plan cuts. ``styles``: by full module name."""
    result = Blocks()
    for name, parent in model.named_modules():
        children = {
            leaf: styles[f"{name}.{leaf}" if name else leaf]
            for leaf, child in parent.named_children()
            if is_linear(base(child)) and (f"{name}.{leaf}" if name else leaf) in styles
        }
        if any(style in COLUMNS | ROWS for style in children.values()):
            _read_block(model, name, parent, children, tp_size, result)
    return result


def _read_block(
    model: nn.Module, name: str, parent: nn.Module, children: dict[str, str], tp_size: int, result: Blocks
) -> None:
    size = next((n for key in _HEAD_SIZES if isinstance(n := getattr(parent, key, None), int)), None)
    outs = {
        leaf: _features(base(parent.get_submodule(leaf)))[1] for leaf, s in children.items() if s in COLUMNS
    }
    ins = {leaf: _features(base(parent.get_submodule(leaf)))[0] for leaf, s in children.items() if s in ROWS}
    heads = _heads(model, name, parent, outs, size, tp_size)
    gathered = {leaf for leaf, style in children.items() if style in GATHER}
    split = {leaf for leaf, style in children.items() if style in SPLIT}
    if len(gathered) == len(split) == 1 and not set(outs) - gathered:
        (a,), (b,) = gathered, split
        sections = _fused(outs[a], ins[b], heads, size, tp_size)
        if sections:
            result.styles |= {f"{name}.{a}": "packed_colwise", f"{name}.{b}": "rowwise"}
            result.sections[f"{name}.{a}"] = sections
            result.notes[a] = (
                f"{a} is cut in sections of {', '.join(str(s.size) for s in sections)}: no gather"
            )
            gathered, split = set(), set()
    elif (
        gathered
        and split
        and heads
        and outs.keys() == gathered
        and ins.keys() == split
        and _cut_norms(name, parent, outs, heads, tp_size, result)
    ):
        result.styles |= {f"{name}.{leaf}": "colwise" for leaf in gathered}
        result.styles |= {f"{name}.{leaf}": "rowwise" for leaf in split}
        gathered, split = set(), set()
    if heads and not gathered and outs:
        result.local[name] = heads
        for leaf, out in outs.items():
            if leaf in _KEY_NAMES and heads.key_parts < tp_size:
                result.sections[f"{name}.{leaf}"] = (Section(out, heads.key_parts),)
                result.notes["kv"] = (
                    f"{heads.keys} key-value heads over {tp_size} ranks: each is held by "
                    f"{tp_size // heads.key_parts}, and their gradients are summed"
                )


def _features(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return int(module.weight.shape[0]), int(module.weight.shape[1])  # type: ignore[union-attr, arg-type, index]


def _heads(
    model: nn.Module, name: str, parent: nn.Module, outs: Mapping[str, int], size: int | None, tp_size: int
) -> LocalHeads | None:
    """Head counts of an attention module, checked against ``tp_size``; None for any other module."""
    if size is None or not outs:
        return None
    config: Any = getattr(parent, "config", None) or getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    queries = _count(parent, _QUERY_COUNTS) or _count(config, _QUERY_COUNTS)
    if not queries:
        return None
    keys = _count(parent, _KEY_COUNTS) or _count(config, _KEY_COUNTS) or queries
    named = next((outs[leaf] for leaf in ("k_proj", "key", "wk") if leaf in outs), None)
    if named is not None and named % size == 0:
        keys = named // size  # a layer may have counts of its own
    heads = LocalHeads(queries, keys, tp_size)
    if queries % tp_size:
        raise PlanError(
            f"num_attention_heads={queries} of {name} is not divisible by tp_size={tp_size}; use tp_size "
            f"{divisors(queries)}"
        )
    if keys % tp_size and tp_size % keys:
        raise PlanError(
            f"num_key_value_heads={keys} of {name} neither divides by tp_size={tp_size} nor divides it; use tp_size "
            f"{divisors(keys)}, or a multiple of {keys}"
        )
    return heads


def _count(owner: Any, names: tuple[str, ...]) -> int | None:
    return next((n for key in names if isinstance(n := getattr(owner, key, None), int) and n > 0), None)


def divisors(n: int) -> str:
    """``1, 2 or 4``."""
    found = [str(d) for d in range(1, min(n, 128) + 1) if n % d == 0]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + f" or {found[-1]}"


def _fused(
    out: int, rows: int, heads: LocalHeads | None, size: int | None, tp_size: int
) -> tuple[Section, ...] | None:
    """Sections of a weight with ``out`` output features in front of one with ``rows`` input features."""
    if heads and size and rows == heads.queries * size and out == rows + 2 * heads.keys * size:
        keys = Section(heads.keys * size, heads.key_parts)
        return Section(rows, tp_size), keys, keys
    if out == 2 * rows and rows % tp_size == 0:
        return packed_sections(out, tp_size)
    return None


def _cut_norms(
    name: str, parent: nn.Module, outs: Mapping[str, int], heads: LocalHeads, tp_size: int, result: Blocks
) -> bool:
    """Norms between gathered projections and split ones: can they work on the rank's own heads?"""
    found: dict[str, tuple[Section, ...]] = {}
    for leaf, child in parent.named_children():
        if is_linear(base(child)):
            continue
        weights = list(child.parameters())
        if not weights:
            continue
        size = weights[0].shape[0]
        if len(weights) > 1 or weights[0].ndim != 1 or "RMSNorm" not in type(child).__name__:
            return False
        if size in outs.values():
            # q_norm goes with q_proj where both fit.
            owner = max((o for o, out in outs.items() if out == size), key=lambda o: o[:1] == leaf[:1])
            parts = heads.key_parts if owner in _KEY_NAMES else tp_size
            found[f"{name}.{leaf}"] = (Section(size, parts),)
    result.norms |= found
    if found:
        result.notes["norm"] = (
            f"{', '.join(sorted(n.rpartition('.')[2] for n in found))} normalise over all heads: one more all-reduce "
            "of one number per token for each"
        )
    return True


# -- the traced copy ---------------------------------------------------------------------------------------------


def set_local(module: nn.Module, heads: LocalHeads) -> None:
    """Head counts of ``module``, a copy, and of a config of its own become the local ones."""
    owners: list[Any] = [module]
    if getattr(module, "config", None) is not None:
        module.config = copy.copy(module.config)  # type: ignore[assignment]
        owners.append(module.config)
    for owner in owners:
        for keys, full, local in (
            (_QUERY_COUNTS, heads.queries, heads.local_queries),
            (_KEY_COUNTS, heads.keys, heads.local_keys),
        ):
            for key in keys:
                if getattr(owner, key, None) == full and isinstance(getattr(owner, key), int):
                    setattr(owner, key, local)
    for key in _GROUPS:
        if isinstance(getattr(module, key, None), int):
            setattr(module, key, heads.local_queries // heads.local_keys)
    for key in _WIDTHS:
        if isinstance(getattr(module, key, None), int) and module.__dict__[key] % heads.tp_size == 0:
            setattr(module, key, module.__dict__[key] // heads.tp_size)


class _GlobalMean(TorchFunctionMode):
    """The mean over the last dimension is the mean over all ranks' parts of it, which are equally long."""

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.tp_size = tp_size

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.mean, torch.mean):
            return tp_reduce(result / self.tp_size)
        return result


def cut_mean(module: nn.Module, tp_size: int) -> None:
    """Let a norm on this rank's features take its mean over those of all ranks."""
    original: Callable[..., Tensor] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with _GlobalMean(tp_size):
            return original(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
