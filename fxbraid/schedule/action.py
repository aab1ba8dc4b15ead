"""Actions: what one rank does in one step of a schedule, as data and as text.

The text is that of ``torch.distributed.pipelining``'s ``_Action``: ``2F5`` is chunk 2, forward, micro-batch
5; ``(0F4;1B3)OVERLAP_F_B`` runs a forward and a full backward braided. torch knows only ``OVERLAP_F_B``; the
other composites extend its suffix in the same way: ``(0F4;1I3)OVERLAP_F_I``, ``OVERLAP_F_W``,
``OVERLAP_F_F``, ``OVERLAP_I_W`` and ``OVERLAP_F_I_W``. torch's one suffix is read for all of them, and written where
it is asked for: its parser takes any actions within the brackets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from fxbraid.schedule.errors import ScheduleError


class Phase(StrEnum):
    """F: forward. I: input gradient. W: weight gradient. B: full backward, that is I and then W."""

    F = "F"
    I = "I"
    W = "W"
    B = "B"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One phase of one chunk for one micro-batch; its text is ``<chunk><phase><microbatch>``."""

    phase: Phase
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.phase.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``; raises ScheduleError for anything else."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action; write chunk, phase (F, I, W or B) and micro-batch, for example 2F5"
            )
        return cls(Phase(match[2]), int(match[1]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Composite:
    """Two or three actions that start together and run braided.

    Allowed are F&F, F&B, F&I, F&W, I&W and F&I&W, with the parts in this order. That no part depends on
    another (F & F of the next chunk, W on the I beside it, ...) is the checker's business: it needs the whole
    schedule.
    """

    parts: tuple[Action, ...]

    def __post_init__(self) -> None:
        if "".join([part.phase.value for part in self.parts]) not in COMPOSITES:
            shown = " & ".join(str(part) for part in self.parts)
            known = ", ".join("&".join(name) for name in COMPOSITES)
            raise ScheduleError(
                f"{shown or 'nothing'} can't run braided; a composite is one of {known}, in that order"
            )

    def __str__(self) -> str:
        suffix = "_".join(part.phase.value for part in self.parts)
        return f"({';'.join(str(part) for part in self.parts)})OVERLAP_{suffix}"

    def for_torch(self) -> str:
        """The text with the suffix that torch knows, whatever the phases."""
        return f"({';'.join(str(part) for part in self.parts)}){TORCH_SUFFIX}"

    @classmethod
    def parse(cls, text: str) -> Composite:
        """The inverse of ``str``; the parts may stand in any order and are put into the canonical one."""
        match = _COMPOSITE.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is no composite; write its actions and a suffix, for example (0F4;1B3)OVERLAP_F_B"
            )
        found = sorted(
            (Action.parse(part) for part in match[1].split(";")), key=lambda part: _RANK[part.phase]
        )
        suffix = "_".join(part.phase.value for part in found)
        if f"OVERLAP_{match[2]}" not in (f"OVERLAP_{suffix}", TORCH_SUFFIX):
            raise ScheduleError(
                f"{text!r} holds the phases {suffix} but says OVERLAP_{match[2]}; let them agree"
            )
        return cls(tuple(found))


Step = Action | Composite
"""One entry of a rank's list."""

COMPOSITES = ("FF", "FB", "FI", "FW", "IW", "FIW")
"""The phases of every composite that the executor can run, in the order of its parts."""

TORCH_SUFFIX = "OVERLAP_F_B"
"""The one composite of torch's grammar."""

_RANK = {Phase.F: 0, Phase.I: 1, Phase.B: 1, Phase.W: 2}
_ACTION = re.compile(r"(\d+)(F|I|W|B)(\d+)")
_COMPOSITE = re.compile(r"\(([^()]*)\)OVERLAP_([FIWB](?:_[FIWB])*)")


def parts(step: Step) -> tuple[Action, ...]:
    """The actions of a step: its parts if it is a composite, else itself alone."""
    return step.parts if isinstance(step, Composite) else (step,)


def parse_step(text: str) -> Step:
    """An action or a composite from its text."""
    return Composite.parse(text) if text.lstrip().startswith("(") else Action.parse(text)
