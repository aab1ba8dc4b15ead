"""Interleaved rounds: one step of every engine in each, so that a slow moment of the machine hits them all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxbraid.bench.engines import Batch, BraidEngine, Engine
from fxbraid.runtime import emulate
from fxbraid.runtime.ranks import gather

LOOPBACK = "wall clock, gloo on loopback"


@dataclass(slots=True)
class Sample:
    """Seconds of the slowest rank, and the share of them that is the emulation's own."""

    seconds: float = 0.0
    error: float = 0.0


@contextmanager
def clocked() -> Iterator[Sample]:
    """Time the body on this run's clock: the emulation's, or the time of day. Collective."""
    sample = Sample()
    if emulate.active() is not None:
        with emulate.stopwatch() as reading:
            yield sample
        sample.seconds, sample.error = reading.seconds, reading.error
        return
    dist.barrier()
    start = time.perf_counter()
    yield sample
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    sample.seconds = float(seconds)


def interleaved(
    engines: Mapping[str, Engine], batch: Batch, rounds: int, tell: Callable[[str], None]
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """(seconds, error shares) of ``rounds`` steps of each engine, A B A B. Errors are empty on a real clock."""
    found: dict[str, list[Sample]] = {name: [] for name in engines}
    for number in range(rounds):
        tell(f"timing, round {number + 1} of {rounds}")
        for name, engine in engines.items():
            engine.zero_grad()
            with clocked() as sample:
                engine.step(batch)
            found[name].append(sample)
    emulated = emulate.active() is not None
    return {
        name: (tuple(s.seconds for s in samples), tuple(s.error for s in samples if emulated))
        for name, samples in found.items()
    }


def shares(engine: Engine) -> dict[str, float]:
    """Mean over ranks of the shares of the last step; empty where the engine does not say. Collective."""
    mine: dict[str, float] = {}
    if isinstance(engine, BraidEngine):
        last = getattr(engine.model, "last_step", None)
        for name in ("bubble", "exposed_tp", "exposed_p2p"):
            value = getattr(last, f"{name}_share", None)
            if value is not None:
                mine[name] = float(value)
    everyone: list[dict[str, float]] = gather(mine)
    names = set.intersection(*(set(one) for one in everyone))
    return {name: sum(one[name] for one in everyone) / len(everyone) for name in sorted(names)}
