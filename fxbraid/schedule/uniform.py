"""Unit-level times of steps where all chunks are alike, from four numbers: what generated schedules are judged by.

(The simulator does the same for any chunks and with messages; this one lives beside the schedules, which may not
import it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fxbraid.schedule.action import Action, Phase, Step, parts
from fxbraid.schedule.listorder import Orders, leaving
from fxbraid.schedule.makespan import Costs
from fxbraid.schedule.weave import Order, Strand


@dataclass(slots=True)
class UniformTimes:
    """``local.StepTimes`` of chunks of ``layers`` layers, two units each, that share ``costs`` equally; messages take
    no time. orders: of units in blocks, from costs (``Orders()``) or the paper's (``weave``).
    """

    costs: Costs
    layers: int = 4
    orders: Callable[[Sequence[Strand]], Order] = field(default_factory=Orders)
    known: dict[str, tuple[float, tuple[float, ...]]] = field(default_factory=dict)

    def duration(self, step: Step) -> float:
        return self._times(step)[0]

    def leaves(self, step: Step) -> Sequence[float]:
        return self._times(step)[1]

    def delay(self, action: Action) -> float:
        return 0.0

    def _times(self, step: Step) -> tuple[float, tuple[float, ...]]:
        kind = "".join([action.phase.value for action in parts(step)])
        if kind not in self.known:
            self.known[kind] = self._measure(kind)
        return self.known[kind]

    def _measure(self, kind: str) -> tuple[float, tuple[float, ...]]:
        strands: list[Strand] = []
        part_of: list[int] = []
        for part, phase in enumerate(kind):
            made = [self._strand(p, own=phase == Phase.B) for p in ("IW" if phase == Phase.B else phase)]
            strands += made
            part_of += [part] * len(made)
        length, ends = leaving(strands, self.orders(strands))
        sent = [length] * len(kind)
        for part, strand, end in zip(part_of, strands, ends, strict=True):
            if strand.phase != Phase.W:
                sent[part] = end
        return length, tuple(sent)

    def _strand(self, phase: str, *, own: bool) -> Strand:
        count = 2 * self.layers
        costs = self.costs
        if phase == Phase.W:
            flat = (False,) * count
            seconds = (costs.w / count,) * count
            return Strand(phase, flat, (True,) * count, tuple(range(count)), own, seconds, (0.0,) * count)
        each = (costs.f if phase == Phase.F else costs.i) / count
        # The tail stands for what reads the last all-reduce: the boundary is complete only behind it.
        return Strand(
            phase,
            (True,) * count + (False,),
            (True,) * count + (False,),
            tuple(range(count + 1)),
            False,
            (each,) * count + (0.0,),
            (costs.ar / count,) * count + (0.0,),
        )
