"""When launches end: collectives of a group one behind the other, messages of a direction one behind the other.

    ready  = max over the lane's writers of the time of launch (of the sender alone without rendezvous)
    start  = max(ready, when the lane is free)
    finish = start + occupies + latency;   the lane is free again at start + occupies

Every rank computes this for itself from the shared stamps, in the order of launch, and comes to the same result
(integers, ps). A collective occupies its lane for all of its time; a message only while its bytes move, so that
latencies overlap.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .cluster import Op
from .stamps import Lane, Stamp

FIRST_NAP_S = 5e-5
LONGEST_NAP_S = 1e-3


class OutOfOrder(RuntimeError):
    """Two ranks launched different things as the same number of a lane."""


@dataclass(slots=True, eq=False)
class Ticket:
    """Launch ``number`` of a lane at ``time``. ``finish`` is None until every rank has launched it.

    ``start``, ``end``: when it is in flight on this rank *by what this rank has seen in its own program order*
    (its launches and waits): a lower bound that does not depend on how fast processes happen to run.
    """

    number: int
    time: int
    occupies: int
    start: int
    end: int
    finish: int | None = None


class Queue:
    """This rank's view of one lane. ``writer``: who of the lane's writers it is. ``who``: for messages of errors."""

    def __init__(
        self, lane: Lane, writer: int, who: str, *, timeout_s: float, rendezvous: bool = True
    ) -> None:
        self._lane, self._writer, self._who = lane, writer, who
        self._timeout_s = timeout_s
        self._waits_for = range(lane.writers) if rendezvous else range(1)
        self._pending: deque[Ticket] = deque()
        self._launched = 0
        self._free = 0
        self._open: list[Ticket] = []  # launched and not waited for
        self._seen_free = 0  # when the lane is free by what this rank has seen
        self._lock = threading.RLock()

    def launch(self, stamp: Stamp) -> Ticket:
        """Publish the next launch of this rank."""
        with self._lock:
            number = self._launched
            self._settle()
            self._make_room(number)
            start = max(stamp.time, self._seen_free)
            self._seen_free = start + stamp.occupies
            ticket = Ticket(number, stamp.time, stamp.occupies, start, self._seen_free)
            self._open = [*self._open[1 - self._lane.slots :], ticket]  # those never waited for go at last
            self._lane.write(self._writer, number, stamp)
            self._launched += 1
            self._pending.append(ticket)
            return ticket

    def wait(self, ticket: Ticket) -> int:
        """When ``ticket`` ends. Sleeps, without using the processor, until all its ranks have launched it."""
        finish = self._finish(ticket)
        with self._lock:
            if ticket in self._open:
                self._see(ticket, finish)
        return finish

    def in_flight(self, now: int) -> list[tuple[int, int]]:
        """From when to when each launch that is not waited for is in flight, where that is later than ``now``."""
        with self._lock:
            self._open = [ticket for ticket in self._open if ticket.end > now]
            return [(ticket.start, ticket.end) for ticket in self._open]

    def settled(self, ticket: Ticket) -> int:
        """As ``wait``, for another thread than the rank's own: what this rank has seen does not change."""
        return self._finish(ticket)

    def _see(self, ticket: Ticket, finish: int) -> None:
        """This rank has waited for ``ticket``: what it launched behind it started no earlier."""
        self._open = [later for later in self._open if later.number > ticket.number]
        free = finish
        for later in self._open:
            later.start = max(later.time, free)
            later.end = free = later.start + later.occupies
        self._seen_free = max(self._seen_free, free)

    def _finish(self, ticket: Ticket) -> int:
        if ticket.finish is None:
            self._nap_until(lambda: self.poll(ticket) is not None, f"launch {ticket.number} of {self._who}")
        assert ticket.finish is not None
        return ticket.finish

    def poll(self, ticket: Ticket) -> int | None:
        """When ``ticket`` ends, or None where some rank has not launched it."""
        if ticket.finish is None:
            with self._lock:
                self._settle(ticket.number)
        return ticket.finish

    def _settle(self, last: int | None = None) -> None:
        """Compute what can be computed, in order, up to launch ``last``."""
        while self._pending and (last is None or self._pending[0].number <= last):
            ticket = self._pending[0]
            stamps = [self._lane.read(writer, ticket.number) for writer in range(self._lane.writers)]
            known = [stamp for stamp in stamps if stamp is not None]
            if any(stamps[writer] is None for writer in self._waits_for):
                return
            self._check(ticket, known)
            ready = max(stamps[writer].time for writer in self._waits_for)  # type: ignore[union-attr]
            occupies = max(stamp.occupies for stamp in known)
            start = max(ready, self._free)
            self._free = start + occupies
            ticket.finish = self._free + max(stamp.latency for stamp in known)
            self._pending.popleft()
            self._lane.set_read(self._writer, ticket.number + 1)

    def _check(self, ticket: Ticket, stamps: list[Stamp]) -> None:
        if len({stamp.kind for stamp in stamps}) > 1:
            what = ", ".join(str(stamp.kind) for stamp in stamps)
            raise OutOfOrder(
                f"launch {ticket.number} of {self._who} is not the same on all its ranks (operations or tags {what}; "
                f"operations are {', '.join(f'{op.value} {op.name.lower()}' for op in Op)}); launch collectives, and "
                "messages of one direction, in one order everywhere"
            )

    def _make_room(self, number: int) -> None:
        """Wait for a free slot, as a full CUDA stream does."""
        oldest = number - self._lane.slots + 1
        while self._pending and self._pending[0].number < oldest:
            self._finish(self._pending[0])
        if self._lane.all_read() < oldest:
            self._nap_until(lambda: self._lane.all_read() >= oldest, f"a free slot of {self._who}")

    def _nap_until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + self._timeout_s
        nap = FIRST_NAP_S
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {self._timeout_s:g} s for {what}: some rank of the group never came to it; look at "
                    "where the others stand, or raise timeout_s"
                )
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)
