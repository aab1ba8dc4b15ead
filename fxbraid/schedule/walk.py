"""Walking a schedule: the one place that knows which action waits for which.

Rules (c = chunk, j = micro-batch): F(c, j) needs F(c-1, j); I or B (c, j) needs F(c, j) and I or B (c+1, j);
W(c, j) needs I(c, j). The parts of a composite start together and need all their inputs at its start.

P2P model: a send is asynchronous, and there is one channel per (source rank, destination rank) on which the
receiver posts its receives ahead, in the sender's order. A message therefore waits for nothing but its
producer: with buffers because the buffer takes it, with zero buffers (rendezvous) because its receive is
posted and every earlier message of the channel was produced earlier. So both deadlock exactly when the rules
above and the order of the lists form a cycle, and one walk decides both.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxbraid.schedule.action import Action, Composite, Phase, Step
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.schedule import Schedule

Need = tuple[Phase, int, int]
"""A result: (F, c, j) is an activation, (I, c, j) an input gradient, by whichever of I and B made it."""


def needs(action: Action, n_chunks: int) -> tuple[Need, ...]:
    """The results that ``action`` waits for."""
    phase, chunk, microbatch = action.phase, action.chunk, action.microbatch
    if phase is Phase.F:
        return ((Phase.F, chunk - 1, microbatch),) if chunk else ()
    if phase is Phase.W:
        return ((Phase.I, chunk, microbatch),)
    if chunk + 1 == n_chunks:
        return ((Phase.F, chunk, microbatch),)
    return ((Phase.I, chunk + 1, microbatch), (Phase.F, chunk, microbatch))


def execution_order(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yields every (rank, position) once, in list order per rank and after all that it needs. Linear time.

    Expects each action once; raises ScheduleError that names the cycle if the lists deadlock.
    """
    position = [0] * schedule.p
    yield from walk(schedule, position)
    if any(at < len(row) for at, row in zip(position, schedule.actions, strict=True)):
        raise ScheduleError(_explain_deadlock(schedule, position))


def walk(schedule: Schedule, position: list[int]) -> Iterator[tuple[int, int]]:
    """``execution_order`` that moves ``position`` and simply stops where nothing can go on."""
    m, n_chunks = schedule.m, schedule.n_chunks
    forward, weight = Phase.F, Phase.W
    # One byte per (chunk, micro-batch), and one more row: what chunk 0 and the last chunk need is there.
    activations = bytearray(b"\1") * m + bytearray(n_chunks * m)
    gradients = bytearray(n_chunks * m) + bytearray(b"\1") * m
    waiting: dict[tuple[bool, int], list[int]] = {}
    ready = list(range(schedule.p - 1, -1, -1))
    while ready:
        rank = ready.pop()
        row = schedule.actions[rank]
        at = position[rank]
        while at < len(row):
            step = row[at]
            both = step.parts if isinstance(step, Composite) else (step,)
            blocked = None
            for action in both:
                here = action.chunk * m + action.microbatch
                if action.phase is forward:
                    if not activations[here]:
                        blocked = (True, here)
                        break
                elif action.phase is weight:
                    if not gradients[here]:
                        blocked = (False, here)
                        break
                elif not activations[here + m]:
                    blocked = (True, here + m)
                    break
                elif not gradients[here + m]:
                    blocked = (False, here + m)
                    break
            if blocked is not None:
                waiting.setdefault(blocked, []).append(rank)
                break
            position[rank] = at + 1
            yield rank, at
            at += 1
            for action in both:
                if action.phase is weight:
                    continue
                here = action.chunk * m + action.microbatch
                if action.phase is forward:
                    here += m
                    activations[here] = 1
                else:
                    gradients[here] = 1
                woken = waiting.pop((action.phase is forward, here), None)
                if woken is not None:
                    ready += woken


def _explain_deadlock(schedule: Schedule, position: list[int]) -> str:
    """Follows who waits for whom from a stuck rank until it meets itself."""
    made: dict[Need, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for at, step in enumerate(row):
            for action in step.parts if isinstance(step, Composite) else (step,):
                if action.phase is not Phase.W:
                    made[Phase.F if action.phase is Phase.F else Phase.I, action.chunk, action.microbatch] = (
                        rank,
                        at,
                    )
    rank = next(r for r, row in enumerate(schedule.actions) if position[r] < len(row))
    path: list[int] = []
    lines: dict[int, str] = {}
    while rank not in path:
        path.append(rank)
        step = schedule.actions[rank][position[rank]]
        need, (source, at) = _unmet(schedule, step, made, position)
        what = f"{need[1]}{'F' if need[0] is Phase.F else 'I'}{need[2]}"
        if (source, at) == (rank, position[rank]):
            return (
                f"rank {rank}, step {at}: {step} holds {what} and what needs it, but the parts of a "
                "composite start together; run them one after the other"
            )
        lines[rank] = (
            f"rank {rank} stands at step {position[rank]} ({step}), which needs {what} "
            f"(step {at} of rank {source})"
        )
        rank = source
    cycle = path[path.index(rank) :]
    return "deadlock: " + "; ".join(lines[r] for r in cycle) + ". Move one of these steps."


def _unmet(
    schedule: Schedule, step: Step, made: dict[Need, tuple[int, int]], position: list[int]
) -> tuple[Need, tuple[int, int]]:
    for action in step.parts if isinstance(step, Composite) else (step,):
        for need in needs(action, schedule.n_chunks):
            rank, at = made[need]
            if at >= position[rank]:
                return need, (rank, at)
    raise AssertionError("unreachable: a stuck rank waits for something")  # pragma: no cover
