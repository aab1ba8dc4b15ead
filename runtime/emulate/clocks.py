"""The three clocks: what a unit, a launch and a wait do to the time of this rank.

========  ==================  ==========================  ============================================
clock     ``stamp``           ``advance`` (a unit)        ``meet`` (a wait)
========  ==================  ==========================  ============================================
virtual   device clock        adds to the device clock    device clock = max(device clock, finish)
paced     device clock        adds, sleeps until then     the same, and sleeps until then
wall      the time of day     nothing: units are real     sleeps until finish
========  ==================  ==========================  ============================================

A paced device clock runs on absolute times, so that an overslept sleep is made up for at the next one, as a GPU
whose queue is full does not notice its host's hiccups. Only a host that lags by more than ``run_ahead_s`` pushes
the device clock; the sum of pushes is reported. All times here are integer picoseconds (``cluster.PER_SECOND``).
"""

from __future__ import annotations

import ctypes
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .cluster import Cluster, to_ps, to_s

PR_SET_TIMERSLACK = 29
PR_GET_TIMERSLACK = 30


@contextmanager
def fine_sleep() -> Iterator[None]:
    """Let this thread's sleeps end within microseconds (the kernel's default slack is 50 us)."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_TIMERSLACK, max(before, 0), 0, 0, 0)


def monotonic() -> int:
    """The time of day, for all processes of this machine (ps)."""
    return time.monotonic_ns() * 1000


def sleep_until(when: int) -> None:
    """Sleep (never spin) until ``monotonic()`` is at least ``when`` (ps)."""
    while (left := when - monotonic()) > 0:
        time.sleep(to_s(left))


@dataclass(slots=True)
class Lateness:
    """How far the wall clock lagged behind what was asked, over the waits and units since the last reset.

    count: how many. late_s: the sum, worst_s: the largest of them, in seconds. pushed_s: how much of it became
    device time (paced only). All zero on the virtual clock.
    """

    count: int = 0
    late_s: float = 0.0
    worst_s: float = 0.0
    pushed_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.late_s / self.count if self.count else 0.0

    def add(self, ps: int) -> None:
        """Count one wait or unit that ended ``ps`` too late."""
        seconds = to_s(ps)
        self.count += 1
        self.late_s += seconds
        self.worst_s = max(self.worst_s, seconds)


class RankClock(ABC):
    """This rank's time, in picoseconds with an origin that all ranks share."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lateness = Lateness()

    @abstractmethod
    def now(self) -> int:
        """What a stopwatch on this rank shows: device time (virtual) or the time of day."""

    @abstractmethod
    def stamp(self) -> int:
        """When something that is launched now starts at the earliest."""

    @abstractmethod
    def advance(self, finish: int) -> None:
        """A unit that began at ``stamp()`` ends at ``finish``."""

    @abstractmethod
    def meet(self, finish: int, since: int) -> None:
        """Whoever waits, since the time of day ``since``, for what ends at ``finish`` goes on then."""

    @abstractmethod
    def reached(self, finish: int) -> bool:
        """Has this rank's time come to ``finish``?"""

    @abstractmethod
    def align(self, start: int) -> None:
        """Start anew at ``start``, the largest ``now()`` of all ranks: nothing that came before counts."""


class VirtualClock(RankClock):
    """A device clock that only units and waits move. Exactly repeatable."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.time = 0

    def now(self) -> int:
        return self.time

    def stamp(self) -> int:
        return self.time

    def advance(self, finish: int) -> None:
        self.time = finish

    def meet(self, finish: int, since: int) -> None:
        self.time = max(self.time, finish)

    def reached(self, finish: int) -> bool:
        return self.time >= finish

    def align(self, start: int) -> None:
        self.time = start


class PacedClock(RankClock):
    """A device clock that the wall clock follows by sleeping."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.time = monotonic()

    def now(self) -> int:
        return monotonic()

    def stamp(self) -> int:
        earliest = monotonic() - to_ps(self.cluster.run_ahead_s)
        if earliest > self.time:
            self.lateness.pushed_s += to_s(earliest - self.time)
            self.time = earliest
        return self.time

    def advance(self, finish: int) -> None:
        self.time = finish
        sleep_until(finish)
        self.lateness.add(monotonic() - finish)

    def meet(self, finish: int, since: int) -> None:
        if finish > self.time:
            self.time = finish
            sleep_until(finish)
            self.lateness.add(monotonic() - finish)

    def reached(self, finish: int) -> bool:
        return monotonic() >= finish

    def align(self, start: int) -> None:
        sleep_until(start)
        self.time = start


class WallClock(RankClock):
    """The time of day: computing is real, only links are modelled."""

    def now(self) -> int:
        return monotonic()

    def stamp(self) -> int:
        return monotonic()

    def advance(self, finish: int) -> None:
        pass

    def meet(self, finish: int, since: int) -> None:
        sleep_until(finish)
        self.lateness.add(max(monotonic() - max(finish, since), 0))

    def reached(self, finish: int) -> bool:
        return monotonic() >= finish

    def align(self, start: int) -> None:
        sleep_until(start)


def make_clock(cluster: Cluster) -> RankClock:
    """The clock that ``cluster`` names."""
    kinds = {"virtual": VirtualClock, "paced": PacedClock, "wall": WallClock}
    return kinds[cluster.clock](cluster)  # type: ignore[abstract]
