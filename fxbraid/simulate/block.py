"""One block on a clock: when each unit, each collective and each send happens, counted from the block's
start.

The order is ``weave``'s, or the one that ``listorder`` makes from costs. A collective starts when its unit has
ended and the collectives before it are done; the next unit of its strand waits for it. A boundary leaves when the
last unit of its part is done (and waited for, if it ends with a collective). Nothing of a block outlives it but its
sends, so its inner times depend on nothing outside: each kind of block is timed once, however often it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fxbraid.schedule import Action, Composite, Phase, Step
from fxbraid.schedule.listorder import Orders
from fxbraid.schedule.weave import Order, Strand, fetch_points, weave
from fxbraid.simulate.workload import UnitCost, Workload, strand

Lane = Literal["compute", "collective"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A box of a block. part: which action of the block. cause: the slot whose end it waited for, -1 for the
    block's start. others: for a collective, the compute slots that run meanwhile (what hides it); for a
    compute slot, the collectives that it hides. exposed: for a collective, the time in which its rank
    computes nothing.
    """

    lane: Lane
    part: int
    phase: str
    name: str
    start: float
    end: float
    cause: int
    others: tuple[int, ...] = ()
    exposed: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """length: until the rank goes on. compute: sum of its units. sends[part]: when the boundary of that part
    leaves, and the slot that made it (None for W). memory: (time, change in bytes), in order. last: the slot
    that ends it.
    """

    length: float
    compute: float
    slots: tuple[Slot, ...]
    sends: tuple[tuple[float, int] | None, ...]
    memory: tuple[tuple[float, float], ...]
    last: int

    @property
    def exposed(self) -> float:
        """Time in which the rank waits for a collective."""
        return self.length - self.compute


@dataclass(slots=True)
class _Line:
    part: int
    phase: str
    units: tuple[UnitCost, ...]
    pending: int | None = None
    left: int = 0
    #: slots of all-gathers under way, by the unit that reads them
    fetching: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Clock:
    """State while a block is timed."""

    braided: bool
    contention: float = 0.0
    now: float = 0.0
    cause: int = -1
    lane_free: float = 0.0
    lane_last: int = -1
    compute: float = 0.0
    slots: list[Slot] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def run(self, line: _Line, index: int) -> None:
        unit = line.units[index]
        if not unit.again:
            self.wait(line)
        self.wait_for(line.fetching.pop(index, None))
        start = self.now
        seconds = self.beside(unit.seconds)
        self.now += seconds
        self.compute += seconds
        phase = "R" if unit.again else line.phase
        self.slots.append(Slot("compute", line.part, phase, unit.name, start, self.now, self.cause))
        self.cause = len(self.slots) - 1
        if unit.saves:
            self.memory.append((start, unit.saves))
        if unit.frees:
            self.memory.append((self.now, -unit.frees))
        if unit.fetched:
            self.memory.append((self.now, -unit.fetched))
        line.left -= 1
        if unit.launches and unit.collective > 0:
            line.pending = self.launch(line, unit.name, unit.collective)
            if not self.braided:
                self.wait(line)

    def beside(self, seconds: float) -> float:
        """How long a unit takes while the collective lane is busy, as it is from now until it is free."""
        busy = self.lane_free - self.now
        if not self.contention or busy <= 0:
            return seconds
        done = busy * (1 - self.contention)
        return seconds / (1 - self.contention) if seconds <= done else busy + seconds - done

    def fetch(self, line: _Line, index: int) -> None:
        """Gather what unit ``index`` of ``line`` reads."""
        unit = line.units[index]
        if unit.fetched:
            self.memory.append((self.now, unit.fetched))
        slot = self.launch(line, unit.name, unit.fetch)
        if self.braided:
            line.fetching[index] = slot
        else:
            self.wait_for(slot)

    def launch(self, line: _Line, name: str, seconds: float) -> int:
        queued = self.lane_free > self.now
        start = max(self.now, self.lane_free)
        cause = self.lane_last if queued else self.cause
        self.lane_free = start + seconds
        self.slots.append(Slot("collective", line.part, line.phase, name, start, self.lane_free, cause))
        self.lane_last = len(self.slots) - 1
        return self.lane_last

    def wait(self, line: _Line) -> None:
        self.wait_for(line.pending)
        line.pending = None

    def wait_for(self, slot: int | None) -> None:
        if slot is None:
            return
        done = self.slots[slot].end
        if done > self.now:
            self.now, self.cause = done, slot


def time_block(
    actions: Sequence[Action],
    workload: Workload,
    braided: bool = True,
    ordered_by: Workload | None = None,
    orders: Callable[[Sequence[Strand]], Order] | None = None,
) -> BlockTimes:
    """The times of the block of ``actions``; with ``braided=False`` every collective is waited for at once,
    the same units in the same order with nothing hidden. ordered_by: the costs that the order is made from,
    by ``orders``; None is the paper's order.
    """
    lines = _lines(actions, workload)
    own = {part for part, action in enumerate(actions) if action.phase is Phase.B}
    planned = lines if ordered_by is None else _lines(actions, ordered_by)
    strands = [
        strand(
            ln.units, ln.phase, ln.phase == "W" and ln.part in own, None if ordered_by is None else plan.units
        )
        for ln, plan in zip(lines, planned, strict=True)
    ]
    if ordered_by is None:
        orders = weave
    elif orders is None:
        orders = Orders(ordered_by.contention)
    clock = _Clock(braided, workload.contention)
    sends: list[tuple[float, int] | None] = [None] * len(actions)
    order = orders(strands)
    fetches = fetch_points(strands, order)
    for position, (s, u) in enumerate(order):
        for other, unit in fetches.get(position, ()):
            clock.fetch(lines[other], unit)
        line = lines[s]
        clock.run(line, u)
        if line.phase != "W" and not line.left and line.pending is None:
            sends[line.part] = (clock.now, clock.cause)
    for line in lines:
        clock.wait(line)
        if line.phase != "W" and sends[line.part] is None:
            sends[line.part] = (clock.now, clock.cause)
    slots = _with_others(clock.slots)
    memory = tuple(sorted(clock.memory))  # at one moment, what is freed comes first
    return BlockTimes(clock.now, clock.compute, slots, tuple(sends), memory, clock.cause)


@dataclass(slots=True)
class BlockClock:
    """``time_block`` that remembers: chunks that share one ``ChunkCost`` share their blocks' times."""

    workload: Workload
    braided: bool = True
    ordered_by: Workload | None = None
    known: dict[tuple[tuple[Phase, int], ...], BlockTimes] = field(default_factory=dict)
    orders: Orders | None = None

    def __post_init__(self) -> None:
        if self.ordered_by is not None:
            self.orders = Orders(self.ordered_by.contention)

    def time(self, step: Step) -> BlockTimes:
        """The times of a step's block."""
        actions = step.parts if isinstance(step, Composite) else (step,)
        chunks = self.workload.chunks
        key = tuple([(action.phase, id(chunks[action.chunk])) for action in actions])
        if self.ordered_by is not None and self.ordered_by is not self.workload:
            planned = self.ordered_by.chunks
            key += tuple([(action.phase, id(planned[action.chunk])) for action in actions])
        found = self.known.get(key)
        if found is None:
            found = time_block(actions, self.workload, self.braided, self.ordered_by, self.orders)
            self.known[key] = found
        return found


def _lines(actions: Sequence[Action], workload: Workload) -> list[_Line]:
    lines = []
    for part, action in enumerate(actions):
        chunk = workload.chunks[action.chunk]
        for phase in ("I", "W") if action.phase is Phase.B else (action.phase.value,):
            units = chunk.of(phase)
            lines.append(_Line(part, phase, units, left=len(units)))
    return lines


def _with_others(slots: list[Slot]) -> tuple[Slot, ...]:
    """Fill in what hides what."""
    compute = [k for k, slot in enumerate(slots) if slot.lane == "compute" and slot.end > slot.start]
    others: list[list[int]] = [[] for _ in slots]
    exposed = [0.0] * len(slots)
    for k, slot in enumerate(slots):
        if slot.lane == "compute":
            continue
        covered = 0.0
        for c in compute:
            shared = min(slot.end, slots[c].end) - max(slot.start, slots[c].start)
            if shared > 1e-12 * slot.end:
                covered += shared
                others[k].append(c)
                others[c].append(k)
        exposed[k] = max(0.0, slot.end - slot.start - covered)
    return tuple(
        Slot(s.lane, s.part, s.phase, s.name, s.start, s.end, s.cause, tuple(o), e)
        for s, o, e in zip(slots, others, exposed, strict=True)
    )
