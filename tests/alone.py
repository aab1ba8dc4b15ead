"""One rank of a pipeline in this process: its program runs whole, and nobody is at the other end of its channels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxbraid.passes.compile import Artefacts, Compile
from fxbraid.passes.pipeline import Lowered
from fxbraid.runtime import p2p
from fxbraid.runtime.engine import Engine
from fxbraid.runtime.mesh import Mesh
from fxbraid.runtime.unit import GradSlot
from fxbraid.schedule import Action, Phase, Placement, Schedule, Step, check
from fxbraid.schedule.braid import pair_neighbours
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.lower import channels
from fxbraid.schedule.offload import OffloadPlan


class LoneMesh(Mesh):
    """The groups of a rank's channels, None each."""

    def channel_groups(self, schedule: Schedule) -> dict[Any, Any]:
        return {c: None for c, source, target in channels(schedule) if self.pp_rank in (source, target)}


class Done:
    """A message that has arrived; one that was sent is on its way until somebody waits for it."""

    def __init__(self, arrived: bool) -> None:
        self.arrived = arrived

    def wait(self) -> bool:
        self.arrived = True
        return True

    def is_completed(self) -> bool:
        return self.arrived


class Wire:
    """Stands in for torch.distributed: what is received are random numbers, what is sent is copied (``keeps``)."""

    def __init__(self, seed: int = 0, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self.generator = torch.Generator().manual_seed(seed)
        self.sent: list[Tensor] = []
        self.received: list[int] = []

    def isend(self, tensor: Tensor, peer: int, *, group: Any) -> Done:
        if self.keeps:
            self.sent.append(tensor.clone())
        return Done(arrived=False)

    def irecv(self, tensor: Tensor, peer: int, *, group: Any) -> Done:
        tensor.normal_(generator=self.generator)
        self.received.append(tensor.data_ptr())
        return Done(arrived=True)


def engine(
    model: nn.Module,
    lowered: Lowered,
    schedule: Schedule,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    compile: Compile = False,
    seed: int = 0,
    offload: OffloadPlan | None = None,
    keeps: bool = True,
) -> tuple[Engine, Wire]:
    """The engine of ``rank``, whose messages go over a :class:`Wire`."""
    wire = Wire(seed, keeps=keeps)
    monkeypatch.setattr(p2p, "dist", wire)
    p = schedule.p
    mesh = LoneMesh(torch.device("cpu"), pp_size=p, pp_rank=rank, ranks=[[r] for r in range(p)])
    mine = {c: lowered.chunks[c] for c in schedule.placement.chunks_of(rank)}
    own = Lowered(**{**{f: getattr(lowered, f) for f in lowered.__slots__}, "chunks": mine})
    names = {name for chunk in mine.values() for name in chunk.joint.state.values()}
    state = {name: attribute(model, name) for name in names}
    slots = {
        index: {n: GradSlot(state[n], shared=False) for n in chunk.joint.chunk.params}  # type: ignore[arg-type]
        for index, chunk in mine.items()
    }
    made = Engine(
        own, schedule, mesh, state=state, slots=slots, artefacts=Artefacts(compile), offload=offload
    )
    return made, wire


def attribute(model: nn.Module, name: str) -> Any:
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def inputs(lowered: Lowered, micro: dict[str, Tensor], m: int) -> dict[str, list[Tensor]]:
    """The same micro-batch ``m`` times, and the loss's denominator."""
    counts = {name: torch.tensor(float(m * 20)) for name in lowered.counts}
    return {name: [value] * m for name, value in {**micro, **counts}.items()}


def random_schedule(seed: int, placement: Placement, m: int) -> Schedule:
    """Any valid schedule may come out: ranks take turns at random, and each does something that it can do; then some
    neighbours are braided."""
    for attempt in range(200):
        rng = random.Random(f"{seed}/{attempt}")
        rows = _walk(rng, placement, m)
        schedule = Schedule(f"random{seed}", placement, m, tuple(map(tuple, rows)))
        try:
            check(schedule)
            schedule = pair_neighbours(
                schedule, rng.choice([0.0, 1.0, float("inf")]), forwards=rng.random() < 0.5
            )
            check(schedule)
        except ScheduleError:  # a deadlock without buffers: try another one
            continue
        return schedule
    raise AssertionError("no valid schedule in 200 attempts")


def _walk(rng: random.Random, placement: Placement, m: int) -> list[list[Step]]:
    last = placement.n_chunks - 1
    rows: list[list[Step]] = [[] for _ in range(placement.p)]
    forwards, backwards = [0] * (last + 1), [0] * (last + 1)
    owed: list[list[tuple[int, int]]] = [[] for _ in range(placement.p)]
    whole = rng.random()

    def possible(rank: int) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for c in placement.chunks_of(rank):
            f, b = forwards[c], backwards[c]
            if f < m and (c == 0 or forwards[c - 1] > f):
                found.append(lambda c=c: forward(rank, c))  # type: ignore[misc]
            if b < f and (c == last or backwards[c + 1] > b):
                found.append(lambda c=c: backward(rank, c))  # type: ignore[misc]
        if owed[rank]:
            found.append(lambda: weights(rank))
        return found

    def forward(rank: int, c: int) -> None:
        rows[rank].append(Action(Phase.F, c, forwards[c]))
        forwards[c] += 1

    def backward(rank: int, c: int) -> None:
        split = rng.random() > whole
        rows[rank].append(Action(Phase.I if split else Phase.B, c, backwards[c]))
        if split:
            owed[rank].append((c, backwards[c]))
        backwards[c] += 1

    def weights(rank: int) -> None:
        c, mb = owed[rank].pop(rng.randrange(len(owed[rank])))
        rows[rank].append(Action(Phase.W, c, mb))

    while True:
        ready = [(rank, found) for rank in range(placement.p) if (found := possible(rank))]
        if not ready:
            return rows
        _, found = rng.choice(ready)
        rng.choice(found)()
