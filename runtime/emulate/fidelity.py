"""How true the emulation is here: durations asked for against durations got.

Each point is a chain of equal things, one behind the other, timed as a whole by ``stopwatch``:

=========== ============================================================================================
unit        ``device_time(d)`` (paced)
all_reduce  an all-reduce on a link with alpha = d, waited for at once
message     rank 2i sends to rank 2i + 1 on such a link, both wait
hidden      an all-reduce of d, a unit of d, wait: d in all, if the one hides behind the other (paced; on the
            wall clock the unit is a sleep)
=========== ============================================================================================
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .cluster import Clock, Cluster, Link
from .session import change, device_time, process_group, stopwatch

CHAIN_S = 0.25  # a chain takes about so long
ASKED_MS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
RANKS = (2, 4, 8)
KINDS = ("unit", "all_reduce", "message", "hidden")
BUSY_S = 600.0  # a load ends by itself after so long, whatever happens to its parent


@dataclass(frozen=True, slots=True)
class Point:
    """Asked for ``asked_s`` each, got ``got_s`` each on average over ``count``; ``worst_s``: the largest single
    lateness of any rank; ``load``: "idle" (what else runs here is not ours) or "loaded"."""

    clock: str
    load: str
    ranks: int
    kind: str
    asked_s: float
    got_s: float
    worst_s: float
    count: int

    @property
    def error(self) -> float:
        return self.got_s / self.asked_s - 1


def measure(clock: Clock, load: str, asked_s: Sequence[float]) -> list[Point]:
    """In every rank of a ``launch``: all kinds and durations on ``clock``."""
    torch.set_num_threads(1)
    idle = Link(0.0)
    points = []
    with process_group(Cluster(idle, idle, clock=clock), timeout_s=60):
        for _ in range(3):
            _once("all_reduce", 0.0, clock)
            _once("message", 0.0, clock)
        for seconds in asked_s:
            change(tp_link=Link(seconds), pp_link=Link(seconds))
            for kind in KINDS:
                if kind == "unit" and clock == "wall":
                    continue
                points.append(_chain(kind, seconds, clock, load))
            change(tp_link=idle, pp_link=idle)
    return points


def _chain(kind: str, seconds: float, clock: Clock, load: str) -> Point:
    count = min(max(round(CHAIN_S / seconds), 5), 100)
    with stopwatch() as reading:
        for _ in range(count):
            _once(kind, seconds, clock)
    worst = torch.tensor(reading.lateness.worst_s, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    ranks = dist.get_world_size()
    return Point(clock, load, ranks, kind, seconds, reading.seconds / count, float(worst), count)


def _once(kind: str, seconds: float, clock: Clock) -> None:
    if kind == "unit":
        device_time(seconds)
    elif kind == "message":
        rank = dist.get_rank()
        tensor = torch.zeros(16)
        work = dist.irecv(tensor, rank - 1) if rank % 2 else dist.isend(tensor, rank + 1)
        assert work is not None
        work.wait()
    else:
        work = dist.all_reduce(torch.zeros(16), async_op=True)
        assert work is not None
        if kind == "hidden" and clock == "wall":
            time.sleep(seconds)
        elif kind == "hidden":
            device_time(seconds)
        work.wait()


@contextmanager
def busy(loaded: bool) -> Iterator[None]:
    """A busy process for each processor while the body runs, if ``loaded``."""
    code = f"import time\nend = time.monotonic() + {BUSY_S}\nwhile time.monotonic() < end: pass"
    count = (os.cpu_count() or 1) if loaded else 0
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
