"""Which inputs of a trace are static: constants of it, their values a part of the program (``passes.values``).

Contract: (micro-batch, what the user says) -> what ``capture`` may know. With "auto", an integer input becomes static
when a trace stops for want of its numbers; tokens, labels and masks never do, for they change with every batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import CaptureError, PlanError
from .values import Given, Needed

#: Integer inputs that are another tensor's rows or positions: their values change with every batch.
_TEXT = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "labels",
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "mm_token_type_ids",
        "cache_position",
        "decoder_input_ids",
        "decoder_attention_mask",
        "num_items_in_batch",
    }
)


@dataclass(slots=True)
class InputValues:
    """The integer inputs of a micro-batch whose values a trace may ask for, by name (``known``), and those that are
    static: constants of the trace. ``auto``: what a trace needs as numbers becomes static."""

    known: Mapping[str, Tensor] = field(default_factory=dict)
    static: set[str] = field(default_factory=set)
    auto: bool = True
    #: are there inputs that are no text?
    more: bool = False

    @classmethod
    def of(cls, microbatch: Mapping[str, Any], static: str | Collection[str]) -> InputValues:
        """``static``: "auto", or names. Raises :class:`PlanError` for a name that is no integer tensor with values."""
        known = {
            name: value
            for name, value in microbatch.items()
            if isinstance(value, Tensor)
            and not (value.is_floating_point() or value.is_complex())
            and value.device.type != "meta"
        }
        more = any(isinstance(value, Tensor) and name not in _TEXT for name, value in microbatch.items())
        if isinstance(static, str):
            return cls(known, more=more)
        for name in (n for n in static if n in microbatch and n not in known):
            value = microbatch[name]
            have = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            raise PlanError(
                f"static_inputs: {name!r} must be an integer tensor with values, and it is {have}"
            )
        return cls(known, {name for name in static if name in known}, auto=False, more=more)

    def given(self, device: torch.device) -> Given | None:
        """For ``capture``; None for text alone, which needs none of it."""
        if not self.static and not self.more:
            return None
        could = self.known.keys() - self.static - _TEXT if self.auto else set()
        static = {name: self.known[name].to(device, copy=True) for name in sorted(self.static)}
        return Given(static, self.known, frozenset(could))

    def add(self, error: Needed) -> None:
        """Make the inputs static that a trace has asked for; raise ``error`` where that can't be or does not help."""
        new = (error.names & self.known.keys()) - self.static - _TEXT
        if self.auto and new:
            self.static |= new
            return
        absent = error.names - self.known.keys() - _TEXT
        if absent:
            raise CaptureError(
                f"{error}. It needs the numbers of {', '.join(sorted(absent))}; give an example batch with real values "
                "there, not on the meta device"
            ) from error
        if new:
            raise CaptureError(
                f"{error}. It reads {', '.join(sorted(new))} as numbers; add it to static_inputs, for a program of its "
                "own for each value"
            ) from error
        raise error

    @property
    def notes(self) -> list[str]:
        """For the report."""
        how = "found by tracing" if self.auto else "as asked for"
        return [
            f"{name} is a static input ({how}): its values are part of the program"
            for name in sorted(self.static)
        ]
