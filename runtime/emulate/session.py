"""One rank's part of an emulated cluster: its clock, and what is in flight beside its units.

The session hangs on the default process group, and nowhere else: there is one exactly while ``process_group`` is
open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .clocks import Lateness, fine_sleep, make_clock, monotonic, sleep_until
from .cluster import Cluster, Link, to_ps, to_s
from .group import EmulatedGroup
from .queues import Queue
from .torch_names import PrefixStore, rendezvous

if TYPE_CHECKING:
    from .units import UnitTimes

BACKEND = "fxbraid_emulated"


class Session:
    """The state of one rank. ``units``: what ``unit_times`` was given. ``waited``: ps for which this rank has waited
    for collectives, wherever the wait was, also inside compiled code."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.clock = make_clock(cluster)
        self.units: UnitTimes | None = None
        self.waited = 0
        self._queues: list[Queue] = []
        self._lanes: dict[str, int] = {}  # when the way to this rank's host, and the way back, is free
        self._wires: dict[int, int] = {}  # when this rank's wire to each other one is free

    def watch(self, queue: Queue) -> None:
        """Units slow down while something of ``queue`` is in flight."""
        self._queues.append(queue)

    def book(self, target: int, now: int, moves: int) -> int:
        """When bytes that leave now for global rank ``target`` get onto the wire, which messages of all groups share
        in the order in which they are sent. It is booked as if the receive were posted: one that is posted late
        delays its own message and holds nobody up."""
        start = max(now, self._wires.get(target, 0))
        self._wires[target] = start + moves
        return start

    def copy_times(self, way: str, sizes: Sequence[int]) -> list[int]:
        """When each of ``sizes`` bytes, copied to the host or ``way`` back from now on, one behind the other and behind
        what went that way before, is there. Compute goes on beside them."""
        now, link = self.clock.stamp(), self.cluster.host_link
        if link is None or not sizes:
            return [now] * len(sizes)
        start = max(now, self._lanes.get(way, 0)) + to_ps(link.alpha_s)
        ends = [start + to_ps(size / link.beta_bytes_per_s) for size in accumulate(sizes)]
        self._lanes[way] = ends[-1]
        return ends

    def meet(self, finish: int) -> None:
        """This rank's device goes on at ``finish`` at the earliest."""
        self.clock.meet(finish, monotonic())

    def spend(self, seconds: float) -> None:
        """A unit of ``seconds`` of device time runs now."""
        if self.cluster.clock == "wall":
            return
        if not seconds >= 0:
            raise ValueError(f"device_time({seconds}): give seconds, 0 or more")
        start = self.clock.stamp()
        windows: list[tuple[int, int]] = []
        if self.cluster.slowdown > 1:
            windows = [window for queue in self._queues for window in queue.in_flight(start)]
        self.clock.advance(end_of_unit(start, to_ps(seconds), windows, self.cluster.slowdown))

    def follow(self, finish: int) -> None:
        """In another thread than the rank's own: sleep until ``finish`` where clocks are real."""
        if self.cluster.clock != "virtual":
            sleep_until(finish)

    def change(self, **fields: Any) -> None:
        """See ``change``."""
        self.cluster = self.clock.cluster = replace(self.cluster, **fields)


def end_of_unit(start: int, alone: int, windows: list[tuple[int, int]], slowdown: float) -> int:
    """When a unit that takes ``alone`` by itself ends, if it runs ``slowdown`` times slower inside the union of
    ``windows``. All in ps."""
    now, left = start, alone
    for begin, end in sorted(windows):
        begin, end = max(begin, now), max(end, now)
        if left <= begin - now:
            break
        left -= begin - now
        if left * slowdown <= end - begin:
            return begin + round(left * slowdown)
        left -= round((end - begin) / slowdown)
        now = end
    return now + left


def active() -> Session | None:
    """This rank's session, or None outside an emulated cluster."""
    if not dist.is_initialized():
        return None
    return getattr(dist.group.WORLD, "session", None)


def current() -> Session:
    """This rank's session; raises ``RuntimeError`` outside an emulated cluster."""
    if (session := active()) is None:
        raise RuntimeError("there is no emulated cluster here; open one with emulate.process_group(cluster)")
    return session


@contextlib.contextmanager
def process_group(cluster: Cluster, timeout_s: float = 60.0) -> Iterator[torch.device]:
    """As ``fxbraid.runtime.launch.process_group``, on the emulated ``cluster``; gives the CPU device.

    Every rank calls it with an equal ``cluster``. Inside, every process group (``new_group``, ``init_device_mesh``)
    is an emulated one. A collective that a peer never joins fails after ``timeout_s`` seconds of real time. After an
    exception the group is left as it is, so that the launcher hears of the cause first.
    """
    session = Session(cluster)

    def create(options: Any, _: Any) -> EmulatedGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return EmulatedGroup(
            options.store,
            options.group_rank,
            options.group_size,
            ranks=list(ranks),
            timeout=options.timeout,
            session=session,
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    with fine_sleep():
        store, rank, size = _fresh_store(timedelta(seconds=timeout_s))
        dist.init_process_group(
            BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        yield torch.device("cpu")
        dist.destroy_process_group()


def _fresh_store(timeout: timedelta) -> tuple[Any, int, int]:
    """The store that the environment describes, below a prefix of its own for each time that a rank comes here:
    one launch can open several clusters, one after the other."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    times = store.add(f"{BACKEND}/opened/{rank}", 1)
    return PrefixStore(f"{BACKEND}/{times}", store), rank, size


def device_time(seconds: float) -> None:
    """What ran just now took ``seconds`` on this rank's device.

    Moves the device clock (virtual), or sleeps out what is left of them (paced). Does nothing on the wall clock,
    where computing takes the time that it takes. With ``slowdown`` it takes longer beside a collective.
    """
    current().spend(seconds)


def now() -> float:
    """This rank's clock in seconds, with an origin that is the same on all ranks: device time (virtual), or
    ``time.monotonic()`` (paced, wall)."""
    return to_s(current().clock.now())


def label() -> str:
    """What every output of an emulated run must carry: the clock, the links, and what was left out."""
    session = current()
    skipped = session.units is not None and session.units.skip
    return str(session.cluster) + (", timing only: no arithmetic" if skipped else "")


def change(
    *,
    tp_link: Link | None = None,
    pp_link: Link | None = None,
    slowdown: float | None = None,
    run_ahead_s: float | None = None,
    host_link: Link | None = None,
) -> Cluster:
    """Run on with other links or another slowdown, without new groups; returns the cluster as it is then.

    Every rank calls it at the same point, with nothing in flight. The clock, and whether messages rendezvous, stay.
    """
    session = current()
    given = {
        "tp_link": tp_link,
        "pp_link": pp_link,
        "slowdown": slowdown,
        "run_ahead_s": run_ahead_s,
        "host_link": host_link,
    }
    if pp_link is not None and pp_link.rendezvous != session.cluster.pp_link.rendezvous:
        raise ValueError(
            "rendezvous is fixed once a message may have been sent; open another process_group for it"
        )
    session.change(**{name: value for name, value in given.items() if value is not None})
    return session.cluster


@dataclass(slots=True)
class Reading:
    """What ``stopwatch`` measured; complete once its body has ended. The same on every rank.

    seconds: from the common start to the end of the slowest rank, on the cluster's clock. rank_seconds: this rank's
    own. modelled_s: the same by device clocks alone (paced; elsewhere equal to ``seconds``). lateness: this rank's.
    error: share of ``seconds`` that is the emulation's own doing, the worst rank's: the wall clock's lag behind the
    device clock at the end, and what was pushed into it (paced); how long waits went on behind the emulated end,
    since gloo and sleeping take time too (wall); 0 on the virtual clock.
    """

    label: str
    seconds: float = 0.0
    rank_seconds: float = 0.0
    modelled_s: float = 0.0
    lateness: Lateness = field(default_factory=Lateness)
    error: float = 0.0

    def valid(self, tolerance: float) -> bool:
        """Is the emulation's own share of the time at most ``tolerance``?"""
        return self.error <= tolerance


@contextlib.contextmanager
def stopwatch() -> Iterator[Reading]:
    """Measure the body on this cluster's clock. Collective over all ranks.

    All ranks start at the same time: on entry and exit they meet outside the emulation, at no emulated cost. Wait
    for everything that you launched before you enter and before you leave.
    """
    session = current()
    clock = session.clock
    reading = Reading(label())
    start = _max([clock.now()])[0]
    if session.cluster.clock != "virtual":
        start += to_ps(0.002)  # so that every rank has heard of it
    clock.align(start)
    clock.lateness = Lateness()
    yield reading
    ended = clock.now()
    device = clock.time if hasattr(clock, "time") else ended
    reading.lateness, reading.rank_seconds = clock.lateness, to_s(ended - start)
    reading.label = label()
    late = clock.lateness.late_s if session.cluster.clock == "wall" else clock.lateness.pushed_s
    worst, modelled, own = _max([ended - start, device - start, to_ps(late)])
    reading.seconds, reading.modelled_s = to_s(worst), to_s(modelled)
    if worst > 0:
        reading.error = (worst - modelled + own) / worst


def _max(values: list[int]) -> list[int]:
    """The largest over all ranks, on the real group: costs nothing on any emulated clock."""
    world = dist.group.WORLD
    assert isinstance(world, EmulatedGroup)
    tensor = torch.tensor(values, dtype=torch.int64)
    world.real.allreduce([tensor], dist.ReduceOp.MAX).wait()  # type: ignore[arg-type]
    return [int(value) for value in tensor]
