"""What units are called: after the parameters that they read, and in words for policies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import fx

from .joint import JointGraph, Phase
from .marks import is_matmul


def unit_name(
    joint: JointGraph,
    phase: Phase,
    index: int,
    state: Iterable[fx.Node],
    grads: list[str],
    nodes: list[fx.Node],
) -> str:
    """After the parameters with the most elements that the unit reads (or, in W, whose gradients it makes)."""
    chunk = joint.chunk.index
    if index < 0:
        return f"pre_c{chunk}"
    sizes: Counter[str] = Counter()
    by_name = {name: n for n, name in joint.state.items()}
    named = grads if phase is Phase.W else [joint.state[n] for n in state]
    for name in named:
        if name in joint.chunk.params:
            own = short_name(name) or _outside(name, matmul=any(is_matmul(n) for n in nodes))
            sizes[own] += by_name[name].meta["val"].numel()
    if not sizes or not (any(is_matmul(n) for n in nodes) or phase is not Phase.I):
        return f"tail_c{chunk}"
    return max(sizes, key=lambda key: sizes[key])


def _outside(parameter: str, *, matmul: bool) -> str:
    """The same for what lies in no layer: ``matmul``: the unit has a matrix product."""
    if matmul:
        return "head"
    return "norm" if re.search(r"norm|(^|\.)ln", parameter.lower()) else "embed"


def short_name(parameter: str) -> str | None:
    """``model.layers.3.self_attn.q_proj.weight`` -> ``attn3``; None for what lies in no layer."""
    match = re.fullmatch(r"(?:.*?\.)?(\d+)\.(.*?)(?:\.(?:weight|bias))?", parameter)
    if match is None:
        return None
    layer, rest = match.groups()
    first = rest.split(".")[0].lower()
    if "norm" in first or first.startswith("ln"):
        kind = "norm"
    elif "attn" in first or "attention" in first:
        kind = "attn"
    elif "mlp" in first or "ffn" in first or "feed_forward" in first or "moe" in first:
        kind = "mlp"
    else:
        kind = re.sub(r"\W", "_", first)
    return f"{kind}{layer}"


#: The beginning of a unit's name -> what a policy calls it.
_KINDS = {"attn": "attention", "mlp": "mlp", "norm": "norm", "embed": "embedding", "head": "head"}


def kind_of(name: str) -> tuple[str, int | None]:
    """``attn3`` -> ("attention", 3); ``tail_c1`` -> ("tail", None)."""
    match = re.match(r"([a-z]+)(\d*)", name)
    word, layer = match.groups() if match is not None else (name, "")
    return _KINDS.get(word, word), int(layer) if layer else None
