"""Schedule in, schedule out: transformations that keep a valid schedule valid. (Braiding is in ``braid``.)"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from fxbraid.schedule.action import COMPOSITES, Action, Composite, Phase, Step, parts
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.schedule import Schedule


def with_rows(schedule: Schedule, rows: Iterable[Iterable[Step]], name: str | None = None) -> Schedule:
    """The same schedule with other lists."""
    return Schedule(name or schedule.name, schedule.placement, schedule.m, tuple(tuple(row) for row in rows))


def unbraid(schedule: Schedule, kinds: Collection[str] = COMPOSITES) -> Schedule:
    """Every composite (of ``kinds``: "FB", "FI", ...) becomes its parts, one after the other in their order;
    nothing overlaps.

    before   (0F4;1B3)OVERLAP_F_B 0F5
    after    0F4 1B3 0F5
    """

    def apart(step: Step) -> tuple[Step, ...]:
        both = parts(step)
        return both if "".join(action.phase for action in both) in kinds else (step,)

    return with_rows(schedule, ([one for step in row for one in apart(step)] for row in schedule.actions))


def split_backward(schedule: Schedule) -> Schedule:
    """Every B becomes I and then W: alone two steps, in F&B a step F&I and then W."""

    def split(step: Step) -> tuple[Step, ...]:
        last = parts(step)[-1]
        if last.phase is not Phase.B:
            return (step,)
        i = Action(Phase.I, last.chunk, last.microbatch)
        w = Action(Phase.W, last.chunk, last.microbatch)
        return (Composite((*step.parts[:-1], i)), w) if isinstance(step, Composite) else (i, w)

    return with_rows(schedule, ([new for step in row for new in split(step)] for row in schedule.actions))


def merge_backward(schedule: Schedule) -> Schedule:
    """Every I that its own W follows at once becomes a B, also in F&I; the inverse of ``split_backward``."""

    def merge(row: Iterable[Step]) -> list[Step]:
        merged: list[Step] = []
        for step in row:
            if merged and isinstance(step, Action) and step.phase is Phase.W:
                before = parts(merged[-1])
                last = before[-1]
                if last.phase is Phase.I and (last.chunk, last.microbatch) == (step.chunk, step.microbatch):
                    full = Action(Phase.B, step.chunk, step.microbatch)
                    merged[-1] = Composite((*before[:-1], full)) if len(before) > 1 else full
                    continue
            merged.append(step)
        return merged

    return with_rows(schedule, (merge(row) for row in schedule.actions))


def reproducible(schedule: Schedule) -> Schedule:
    """Runs every chunk's W's in micro-batch order: gradients add up in one order whatever the schedule.

    A B whose chunk has older W's queued becomes its I and the oldest of them in its own W's place; every
    later W of the chunk is then the oldest queued too. Steps, their times and the number queued at every
    point stay.

    before   0I4            0B5            (0F9;0B6)OVERLAP_F_B          0W4
    after    0I4  (0I5;0W4)OVERLAP_I_W  (0F9;0I6;0W5)OVERLAP_F_I_W       0W6
    """
    return with_rows(schedule, (_in_order(row) for row in schedule.actions))


def _in_order(row: Iterable[Step]) -> list[Step]:
    queues: dict[int, deque[int]] = {}
    out: list[Step] = []
    for step in row:
        done: list[Action] = []
        handed: list[tuple[int, int]] = []  # I's of this step: their W's come in a later one
        for action in parts(step):
            queue = queues.setdefault(action.chunk, deque())
            if action.phase is Phase.I:
                handed.append((action.chunk, action.microbatch))
                done.append(action)
            elif action.phase is Phase.W:
                done.append(Action(Phase.W, action.chunk, queue.popleft()))
            elif action.phase is Phase.B and queue:
                queue.append(action.microbatch)
                done.append(Action(Phase.I, action.chunk, action.microbatch))
                done.append(Action(Phase.W, action.chunk, queue.popleft()))
            else:
                done.append(action)
        for chunk, microbatch in handed:
            queues[chunk].append(microbatch)
        out.append(done[0] if len(done) == 1 else Composite(tuple(done)))
    return out


def truncate(schedule: Schedule, m: int) -> Schedule:
    """The first ``m`` micro-batches of a schedule; what they need stays, so it stays valid."""
    if not 1 <= m <= schedule.m:
        raise ScheduleError(
            f"can't cut a schedule of m={schedule.m} micro-batches to {m}; give 1 to {schedule.m}"
        )
    rows: list[list[Step]] = []
    for row in schedule.actions:
        kept: list[Step] = []
        for step in row:
            left = tuple(action for action in parts(step) if action.microbatch < m)
            if left:
                kept.append(left[0] if len(left) == 1 else Composite(left))
        rows.append(kept)
    return Schedule(schedule.name, schedule.placement, m, tuple(tuple(row) for row in rows))


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of ``schedule`` in their order: what ``eval`` runs."""
    rows = ([a for step in row for a in parts(step) if a.phase is Phase.F] for row in schedule.actions)
    return with_rows(schedule, rows, f"{schedule.name} (forward)")
