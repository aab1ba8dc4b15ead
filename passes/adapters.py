"""Part of pass ``shard``: adapters of peft follow the linear that they wrap.

A LoRA adapter ``y = W x + B A x`` is cut with its ``W``::

    W column-parallel      B cut like W, A whole       (its gradient a part: pass ``settle``)
    W row-parallel         A cut like W, B whole       A x is summed over the ranks, as W x is

Any other adapter of a module that a plan cuts is refused: DoRA takes norms of ``W + B A`` over dimensions that are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import nn

from .errors import PlanError
from .layout import Section
from .styles import COLUMNS

#: What peft calls the linear inside of an adapted module.
_BASE = "base_layer"
_CUT = ("colwise", "packed_colwise", "rowwise")


def base(module: nn.Module) -> nn.Module:
    """The module that ``module`` adapts, or itself."""
    inner = getattr(module, _BASE, module)
    return inner if isinstance(inner, nn.Module) else module


def follow(
    model: nn.Module, styles: MutableMapping[str, str], sections: MutableMapping[str, tuple[Section, ...]]
) -> None:
    """Put in place of every adapted module in ``styles`` its parts with theirs, and so in ``sections``.

    Raises :class:`PlanError` for an adapter that can't be cut, with module, reason and way out.
    """
    for name, style in list(styles.items()):
        module = model.get_submodule(name)
        if base(module) is module:
            continue
        why = _refusal(module, style)
        if why is not None:
            raise PlanError(
                f"module {name} carries an adapter ({type(module).__module__.rpartition('.')[0]}) that can't be cut "
                f"over the tensor-parallel ranks: {why}. Adapt with plain LoRA, leave {name} and the linears that it "
                "works with out of tp_plan, or use tp_size=1"
            )
        del styles[name]
        own = sections.pop(name, None)
        side = "lora_B" if style in COLUMNS else "lora_A"
        followers = [f"{name}.{_BASE}", *(f"{name}.{side}.{leaf}" for leaf in getattr(module, side))]
        for follower in followers:
            styles[follower] = style
            if own is not None:
                sections[follower] = own


def _refusal(module: nn.Module, style: str) -> str | None:
    pairs = [getattr(module, side, None) for side in ("lora_A", "lora_B")]
    if not all(isinstance(p, nn.ModuleDict) and _linears(p.values()) for p in pairs):
        return "it is no pair of linears, lora_A and lora_B"
    variants = sorted({type(v).__name__ for v in dict(getattr(module, "lora_variant", None) or {}).values()})
    if variants or any(dict(getattr(module, "use_dora", None) or {}).values()):
        return (
            f"it is a variant of LoRA ({', '.join(variants) or 'DoRA'}) that reads the whole weight or input"
        )
    if style not in _CUT:
        return f"the plan's style {style!r} gathers or splits what the adapter works on"
    return None


def _linears(modules: Iterable[nn.Module]) -> bool:
    return all(isinstance(module, nn.Linear) for module in modules)


def set_aside(model: nn.Module) -> None:
    """Let every adapted module of ``model``, a copy, run what it adapts alone: a plan is inferred from that."""
    for module in list(model.modules()):
        inner: Any = base(module)
        if inner is not module:
            module.forward = inner.forward


def without_base(pattern: str) -> str:
    """The pattern of an adapted module, or a parameter's name, from that of what it adapts."""
    return pattern.replace(f".{_BASE}.", ".").removesuffix(f".{_BASE}")
