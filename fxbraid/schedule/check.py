"""The checker: a schedule that passes can run on every rank without error or deadlock."""

from __future__ import annotations

from fxbraid.schedule.action import Action, Composite, Phase
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.memory import peak_live
from fxbraid.schedule.schedule import Schedule
from fxbraid.schedule.walk import execution_order


def check(schedule: Schedule, *, max_live: int | None = None) -> None:
    """Raises ScheduleError, naming rank, action and what is wrong, unless all of this holds:

    - every action is on its chunk's rank, and each (chunk, micro-batch) has one F and either one B or one I
      and one W;
    - per chunk, the F's run in micro-batch order, and so do the I's and B's (the executor relies on it);
    - no part of a composite needs another part of it;
    - the lists run to their end with buffered and with zero-buffer sends (the model is that of ``walk``);
    - if ``max_live`` is given, no rank ever holds more chunk activations than that (``memory.peak_live``).

    Linear in the number of actions.
    """
    _check_rows(schedule)
    for _ in execution_order(schedule):
        pass
    if max_live is not None:
        for rank, live in enumerate(peak_live(schedule)):
            if live > max_live:
                raise ScheduleError(
                    f"rank {rank} holds {live} chunk activations at once, over the limit of {max_live}; "
                    "raise the limit or take a schedule with less in flight (v_half, v_min)"
                )


def _check_rows(schedule: Schedule) -> None:
    placement, m = schedule.placement, schedule.m
    if m < 1:
        raise ScheduleError(f"m={m} micro-batches; a schedule needs at least 1")
    if len(schedule.actions) != placement.p:
        raise ScheduleError(
            f"{len(schedule.actions)} lists for p={placement.p} ranks; give one list per rank"
        )
    for rank, row in enumerate(schedule.actions):
        chunks = placement.chunks_of(rank)
        # Next micro-batch of each chunk's F and of its I or B; as they run in order, a counter proves "once".
        forwards, gradients = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
        owed: set[tuple[int, int]] = set()  # weight gradients whose I has run
        paid: set[tuple[int, int]] = set()
        for at, step in enumerate(row):
            for action in step.parts if isinstance(step, Composite) else (step,):
                chunk, microbatch = action.chunk, action.microbatch
                if chunk not in forwards:
                    raise ScheduleError(_misplaced(schedule, action, rank, at))
                if not 0 <= microbatch < m:
                    raise ScheduleError(
                        f"rank {rank}, step {at}: {action} is outside of the {m} micro-batches 0..{m - 1}"
                    )
                if action.phase is Phase.F:
                    if forwards[chunk] != microbatch:
                        raise ScheduleError(_out_of_order(action, "F", forwards[chunk], rank, at))
                    forwards[chunk] = microbatch + 1
                    continue
                key = (chunk, microbatch)
                if action.phase is Phase.W:
                    if key not in owed:
                        raise ScheduleError(
                            _unowed(action, key in paid or microbatch < gradients[chunk], rank, at)
                        )
                    owed.remove(key)
                    paid.add(key)
                    continue
                if gradients[chunk] != microbatch:
                    raise ScheduleError(_out_of_order(action, "I or B", gradients[chunk], rank, at))
                if forwards[chunk] <= microbatch:
                    raise ScheduleError(
                        f"rank {rank}, step {at}: {action} comes before {chunk}F{microbatch}, which it needs"
                    )
                gradients[chunk] = microbatch + 1
                if action.phase is Phase.I:
                    owed.add(key)
        _check_complete(rank, m, forwards, gradients, owed)


def _check_complete(
    rank: int, m: int, forwards: dict[int, int], gradients: dict[int, int], owed: set[tuple[int, int]]
) -> None:
    for chunk, count in forwards.items():
        if count < m:
            raise ScheduleError(
                f"rank {rank} never runs {chunk}F{count}; m={m} needs {chunk}F0 to {chunk}F{m - 1}"
            )
    for chunk, count in gradients.items():
        if count < m:
            raise ScheduleError(
                f"rank {rank} never runs {chunk}B{count} (nor {chunk}I{count} and {chunk}W{count})"
            )
    if owed:
        chunk, microbatch = min(owed)
        raise ScheduleError(f"rank {rank} runs {chunk}I{microbatch} but never {chunk}W{microbatch}")


def _misplaced(schedule: Schedule, action: Action, rank: int, at: int) -> str:
    if not 0 <= action.chunk < schedule.n_chunks:
        return f"rank {rank}, step {at}: {action}, but there are {schedule.n_chunks} chunks"
    home = schedule.placement.rank_of(action.chunk)
    return f"rank {rank}, step {at}: {action}, but chunk {action.chunk} lies on rank {home}; move it there"


def _out_of_order(action: Action, phase: str, expected: int, rank: int, at: int) -> str:
    where = f"rank {rank}, step {at}: {action}"
    if action.microbatch < expected:
        return f"{where} runs a second time; each {phase} runs once"
    return (
        f"{where}, but the next {phase} of chunk {action.chunk} is that of micro-batch {expected}; "
        f"each chunk's {phase} run in micro-batch order, once"
    )


def _unowed(action: Action, done: bool, rank: int, at: int) -> str:
    if done:
        return f"rank {rank}, step {at}: {action} runs a second time (a B holds its own W); each W runs once"
    return f"rank {rank}, step {at}: {action} comes before {action.chunk}I{action.microbatch}, which it needs"
