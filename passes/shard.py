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
What the styles do stands in ``passes.styles``, what attention needs beyond them in ``passes.heads``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..compat import FakeTensorMode
from . import adapters
from . import styles as known
from .errors import PlanError
from .heads import Blocks, cut_mean, divisors, read_blocks, set_local
from .layout import ParamShard, Section, TpPlan
from .settle import TP_RANK

__all__ = ["ParamShard", "Sharded", "TpPlan", "canonical_names", "read_plan", "shard"]

#: What peft puts before the names of the model that it wraps.
_PEFT = "base_model.model."


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
    packed: Mapping[str, int] | None = None,
    whole: bool = False,
) -> Sharded:
    """See the module's docstring. ``packed``: into how many equal sections to cut a parameter of which the plan does
    not say it. ``whole``: the same marks around parameters of full shape, to compare a trace with (pass ``follow``).
    Raises :class:`PlanError` with the module, the sizes and the way out."""
    draft = _draft(model, tp_size=tp_size, tp_plan=tp_plan)
    draft.packed = dict(packed or {})
    plan = draft.finish(model)
    local = _local_copy(model, plan, fake_mode, device, whole=whole)
    ranks = 1 if whole else tp_size
    for name, heads in draft.blocks.local.items():
        if not whole:
            set_local(local.get_submodule(name), heads)
    for name in draft.blocks.norms:
        cut_mean(local.get_submodule(name), ranks)
    for name, style in draft.modules.items():
        known.apply(local.get_submodule(name), style, tp_size=ranks, rank=lambda: local.get_buffer(TP_RANK))
    _traceable_experts(local)
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
    return _draft(model, tp_size=tp_size, tp_plan=tp_plan).finish(model)


# -- from patterns to a plan -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """A plan while it is read: ``modules`` whose forward changes, ``params`` named by a pattern of their own."""

    tp_size: int
    modules: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    blocks: Blocks = field(default_factory=Blocks)
    packed: Mapping[str, int] = field(default_factory=dict)

    def finish(self, model: nn.Module) -> TpPlan:
        """Every parameter's shard. Raises :class:`PlanError` for a size that does not divide."""
        names = canonical_names(model)
        cuts: dict[str, tuple[int, tuple[Section, ...]]] = {}
        for name, style in self.modules.items():
            if style in known.COLUMNS | known.ROWS:
                for leaf, cut in self._linear(model.get_submodule(name), name, style).items():
                    cuts[names[f"{name}.{leaf}"]] = cut
        parameters = dict(model.named_parameters())
        for name, style in self.params.items():
            parameter = model.get_parameter(name)
            dim = known.cut_dim(parameter.ndim, style)
            sections = self._sections(name, style, parameter.shape[dim])
            cuts[names[name]] = (dim, sections)
        for name, sections in self.blocks.norms.items():
            cuts[names[f"{name}.weight"]] = (0, sections)
        shards = {}
        for name, parameter in parameters.items():
            dim, sections = cuts.get(name, (None, ()))  # type: ignore[assignment]
            if dim is not None:
                _check_size(name, parameter.shape[dim], dim, sections, self.tp_size)
            shards[name] = ParamShard(name, tuple(parameter.shape), dim, self.tp_size, sections)
        styles = {**self.modules, **self.params}
        return TpPlan(self.tp_size, styles, shards, tuple(self.notes))

    def _linear(self, module: nn.Module, name: str, style: str) -> dict[str, tuple[int, tuple[Section, ...]]]:
        turned = known.is_conv1d(module)
        dim = known.cut_dim(2, style, turned=turned)
        sections = self._sections(name, style, module.weight.shape[dim])  # type: ignore[union-attr, arg-type, index]
        cuts = {"weight": (dim, sections)}
        if style in known.COLUMNS and module.bias is not None:
            cuts["bias"] = (0, sections)
        return cuts

    def _sections(self, name: str, style: str, size: int) -> tuple[Section, ...]:
        if name in self.blocks.sections:
            return self.blocks.sections[name]
        if name in self.packed or f"{name}.weight" in self.packed:
            count = self.packed.get(name) or self.packed[f"{name}.weight"]
            return known.equal_sections(size, self.tp_size, count)
        return known.packed_sections(size, self.tp_size) if style.startswith("packed") else ()


def _check_size(name: str, size: int, dim: int, sections: tuple[Section, ...], tp_size: int) -> None:
    for section in sections or (Section(size, tp_size),):
        if section.size % section.parts:
            which = f"dim {dim} of {name} is {size}"
            if len(sections) > 1:
                which += f", of which a section of {section.size}"
            raise PlanError(
                f"{which}, not divisible by tp_size={section.parts}; use {divisors(section.size)}"
            )


def _draft(model: nn.Module, *, tp_size: int, tp_plan: str | Mapping[str, str]) -> _Draft:
    patterns = _patterns(model, tp_plan)
    if tp_size > 1 and not isinstance(tp_plan, str):
        _check_patterns(model, patterns)
    if not patterns and tp_size > 1:
        raise PlanError(
            f"{type(model).__name__} has no tensor-parallel plan (model._tp_plan); "
            'pass tp_plan={"pattern.of.modules.*": "colwise" | "rowwise", ...} or use tp_size=1'
        )
    draft = _Draft(tp_size)
    try:
        _match_modules(model, patterns, draft)
        _match_parameters(model, patterns, draft)
        draft.blocks = read_blocks(model, draft.modules, tp_size)
        draft.modules |= draft.blocks.styles
        adapters.follow(model, draft.modules, draft.blocks.sections)
        draft.notes += draft.blocks.notes.values()
    except PlanError:
        if tp_size > 1:
            raise
        return _Draft(tp_size)  # one rank needs no plan, whatever is wrong with this one
    if tp_size == 1:
        # Nothing to gather among one.
        draft.modules = {n: s for n, s in draft.modules.items() if s not in known.GATHER | known.SPLIT}
    elif not draft.modules and not draft.params:
        raise PlanError(
            f"the tensor-parallel plan shards no module of {type(model).__name__}: none of its patterns "
            f"({', '.join(patterns)}) matches a module with a style of "
            f"{', '.join(sorted(known.COLUMNS | known.ROWS))}; use tp_size=1 or another tp_plan"
        )
    return draft


def _patterns(model: nn.Module, tp_plan: str | Mapping[str, str]) -> dict[str, str]:
    if isinstance(tp_plan, str):
        if tp_plan != "auto":
            raise PlanError(f'tp_plan={tp_plan!r}: use "auto" or a dict of module patterns to styles')
        return own_plan(model)
    if not isinstance(tp_plan, Mapping):
        raise PlanError(f'tp_plan={tp_plan!r}: use "auto" or a dict of module patterns to styles')
    return dict(tp_plan)


def _names(model: nn.Module) -> list[str]:
    """Of modules and parameters."""
    return [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]


def matching(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """Those of ``patterns`` that match a module or parameter."""
    names = _names(model)
    return {p: style for p, style in patterns.items() if any(_match(name, (p,)) for name in names)}


def _check_patterns(model: nn.Module, patterns: Mapping[str, str]) -> None:
    """A user's pattern that matches nothing is a mistake that would only show as less parallelism than asked for."""
    if not patterns:
        raise PlanError(
            'tp_plan={} names no module; pass "auto", a dict of module patterns to styles, or use tp_size=1'
        )
    names = _names(model)
    for pattern in patterns:
        if not any(_match(name, (pattern,)) for name in names):
            raise PlanError(
                f"the pattern {pattern!r} of tp_plan matches no module or parameter of {type(model).__name__}; "
                f"names are like {names[len(names) // 2]!r}, and * stands for one part between dots"
            )


def own_plan(model: nn.Module) -> dict[str, str]:
    """The plan that transformers gives the model; empty where it has none."""
    return dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})


def kept_whole(
    model: nn.Module, tp_plan: str | Mapping[str, str], names: Mapping[str, str]
) -> frozenset[str]:
    """First names, of which ``names`` has all, of the parameters of modules that the user's patterns leave whole."""
    patterns = {} if isinstance(tp_plan, str) else tp_plan
    return frozenset(
        names[f"{name}.{leaf}"]
        for name, module in model.named_modules()
        if (pattern := _match(name, patterns)) is not None and patterns[pattern] in known.WHOLE
        for leaf, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    )


def has_plan(model: nn.Module) -> bool:
    """Does the model's own plan cut anything but the vocabulary?"""
    draft = _Draft(tp_size=1)
    try:
        _match_modules(model, own_plan(model), draft)
        _match_parameters(model, own_plan(model), draft)
    except PlanError:
        return True  # it has one, which does not fit: sharding says so
    return bool(draft.modules or draft.params)


def covers(patterns: Iterable[str], parameter: str) -> bool:
    """Does one of ``patterns`` match a parameter or the module that it belongs to?"""
    return any(_match(name, patterns) for name in (parameter, parameter.rpartition(".")[0]))


def _match(name: str, patterns: Iterable[str]) -> str | None:
    for pattern in patterns:
        regex = r"\.".join(r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
        if re.fullmatch(regex, name) or re.fullmatch(regex, name.removeprefix(_PEFT)):
            return pattern
    return None


def _match_modules(model: nn.Module, patterns: Mapping[str, str], draft: _Draft) -> None:
    heads = _output_heads(model)
    for name, module in model.named_modules():
        pattern = _match(name, patterns)
        if pattern is None:
            continue
        style = patterns[pattern]
        if style not in known.KNOWN:
            raise PlanError(
                f"the plan gives module {name} the style {style!r}, which fxbraid does not know; "
                f"known are {', '.join(sorted(known.KNOWN))}; use tp_size=1, or a tp_plan without it"
            )
        vocabulary = known.vocabulary_style(name, module, style, is_head=id(module) in heads)
        if vocabulary is not None:
            continue
        if style == "sequence_parallel" and draft.tp_size > 1:
            draft.notes.append(f"{name}: style {style} is kept replicated, on whole sequences")
        if style in known.WHOLE:
            continue
        if style not in known.FORWARD_ONLY and not known.is_linear(adapters.base(module)):
            raise PlanError(f"style {style!r} wants nn.Linear, but module {name} is {type(module).__name__}")
        draft.modules[name] = style


def _output_heads(model: nn.Module) -> set[int]:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    return {id(head), id(adapters.base(head))} if head is not None else set()


def _match_parameters(model: nn.Module, patterns: Mapping[str, str], draft: _Draft) -> None:
    """Parameters that a plan names themselves: experts in one tensor, attention sinks."""
    for name, parameter in model.named_parameters():
        pattern = _match(name, patterns)
        if pattern is None or patterns[pattern] in known.WHOLE:
            continue
        style = patterns[pattern]
        if style not in known.COLUMNS | known.ROWS:
            raise PlanError(
                f"the plan gives parameter {name} {list(parameter.shape)} the style {style!r}; known for parameters "
                f"are {', '.join(sorted(known.COLUMNS | known.ROWS))}"
            )
        owner = name.rpartition(".")[0]
        if known.is_linear(model.get_submodule(owner)):
            # Its shard alone would leave the linear's output unsummed: what a style does is done around the module.
            raise PlanError(
                f"the plan gives the style {style!r} to parameter {name}, which belongs to a linear module; "
                f"name the module, {owner}"
            )
        draft.params[name] = style


# -- the traceable copy ------------------------------------------------------------------------------------------


def _local_copy(
    model: nn.Module, plan: TpPlan, fake_mode: FakeTensorMode, device: torch.device, *, whole: bool
) -> nn.Module:
    """Copy the module tree with every parameter and buffer replaced by a fake one; no storage is copied."""
    memo: dict[int, Any] = {}
    with fake_mode:
        for name, parameter in model.named_parameters():
            shape = parameter.shape if whole else plan.params[name].local_shape
            local = torch.empty(shape, dtype=parameter.dtype, device=device)
            memo[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        for _, buffer in model.named_buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    copied: nn.Module = copy.deepcopy(model, memo)
    _untie(model, copied, fake_mode)
    if any(style in known.GATHER | known.SPLIT for style in plan.styles.values()):
        with fake_mode:
            copied.register_buffer(TP_RANK, torch.empty(1, dtype=torch.long, device=device), persistent=False)
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


def _traceable_experts(local: nn.Module) -> None:
    """A loop over the experts that were hit depends on values and can't be traced; the grouped product of all
    experts computes the same."""
    for config in _configs(local):
        if getattr(config, "_experts_implementation", None) == "eager":
            config._experts_implementation = "grouped_mm"


def _configs(local: nn.Module) -> Iterable[Any]:
    found = {id(c): c for m in local.modules() if (c := getattr(m, "config", None)) is not None}
    return found.values()
