"""What ``eval`` returns: the outputs of micro-batches, put together to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .passes.errors import UnsupportedError
from .passes.loss import AUXILIARY
from .passes.pipeline import Lowered
from .passes.reach import ancestors

#: The outputs of all micro-batches, in their order -> that of the batch.
Rule = Callable[[Sequence[Tensor]], Tensor]


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum of 0-d tensors, in their order."""
    result = values[0].detach().clone()
    for value in values[1:]:
        result = result + value.detach()
    return result


def rules(lowered: Lowered, *, rows: int, m: int) -> dict[str, Rule]:
    """How each output of the model is put together. ``rows``: of a micro-batch; ``m`` of them make the batch.

    The loss is a sum of shares. An auxiliary loss counts as in training, as the mean over micro-batches (pass
    ``loss``). What has rows is put one below the other, what follows from no input is the same for all.
    Raises :class:`UnsupportedError`, the same on every rank, for anything else of which there is more than one.
    """
    values = lowered.partition.chunks[-1].graph_module.graph.output_node().args[0]
    return {
        name: _rule(name, node, rows, m)
        for name, node in zip(lowered.outputs, values, strict=True)  # type: ignore[arg-type]
    }


def _rule(name: str, node: fx.Node, rows: int, m: int) -> Rule:
    if name == "loss":
        return total
    if name == AUXILIARY:
        return lambda values: torch.stack(list(values)).mean()
    if m == 1 or not any(n.op == "placeholder" for n in ancestors([node])):
        return lambda values: values[0]
    shape = tuple(node.meta["val"].shape)
    if not shape or shape[0] % rows:
        what = "one number" if not shape else f"of shape {shape}"
        raise UnsupportedError(
            f"the model's output {name!r} is {what} for a micro-batch of {rows} rows, and fxbraid can't tell what it "
            f"is for the batch of {m} micro-batches; leave it out of what the model returns, or braid() with "
            "n_microbatches=1 for eval"
        )
    return lambda values: torch.cat(list(values))


def nested(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """``{"hidden_states.0": x, "hidden_states.1": y}`` as ``{"hidden_states": (x, y)}``; an entry that the model left
    out is None, and so is all of it on a rank that has none of it."""
    result: dict[str, Any] = {}
    parts: dict[str, dict[int, dict[str, Any]]] = {}
    for name, value in outputs.items():
        key, _, rest = name.partition(".")
        index, _, inner = rest.partition(".")
        if not index.isdigit():
            result[name] = value
            continue
        parts.setdefault(key, {}).setdefault(int(index), {})[f"{key}.{inner}" if inner else key] = value
        result[key] = None  # keeps its place
    for key, entries in parts.items():
        found = {index: nested(entry)[key] for index, entry in entries.items()}
        if any(value is not None for value in found.values()):
            result[key] = tuple(found.get(index) for index in range(max(found) + 1))
    return result


def model_output(outputs: dict[str, Any]) -> Any:
    """``outputs`` as ``transformers`` returns them, for attributes and keys."""
    from transformers.utils.generic import ModelOutput

    return ModelOutput(**outputs)
