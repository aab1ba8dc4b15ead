"""GPipe: all forwards, then all backwards (Huang et al., NeurIPS 2019)."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Phase
from fxbraid.schedule.placement import Placement
from fxbraid.schedule.schedule import Schedule


def gpipe(p: int, m: int) -> Schedule:
    """Bubble (p-1)(T_F + T_I + T_W); peak m activations of a rank's one chunk. Equal to torch's table."""
    rows = tuple(
        tuple(Action(phase, rank, j) for phase in (Phase.F, Phase.B) for j in range(m)) for rank in range(p)
    )
    return Schedule("gpipe", Placement("loop", p, 1), m, rows)
