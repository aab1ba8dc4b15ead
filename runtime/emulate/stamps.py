"""Launch times of all ranks of one group, in memory that they share.

A *lane* is a sequence of launches that all its writers make in the same order: the collectives of a group (a
writer per rank), or the messages of one direction between two ranks (sender and receiver). Launch number k of a
writer is one *slot* of five int64::

    number + 1 | time of launch | time on the lane | time behind the lane | kind

written in this order but for the number, which comes last: a reader that sees the number sees the rest (stores
become visible in order on x86; elsewhere the collective's own data orders them). Slots are used again
after ``slots`` launches; a writer looks first at how far every reader is.

The memory is an anonymous file of the group's first rank that the others open through /proc: nothing is left
behind, however the ranks end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple, Protocol

WIDTH = 5
COLLECTIVES = 1024  # slots of a group's collectives
MESSAGES = 256  # slots of one direction between two ranks


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class Stamp(NamedTuple):
    """One rank's launch: ``time``, ``occupies`` (how long the lane is taken), ``latency`` (behind that), all in
    picoseconds, and ``kind``, a number that must agree between writers (operation, or tag)."""

    time: int
    occupies: int
    latency: int
    kind: int


class Lane:
    """One sequence of launches; ``writers`` of them, with ``slots`` slots each, from ``base`` of ``view`` on."""

    def __init__(self, view: memoryview[int], base: int, writers: int, slots: int) -> None:
        self._view, self._base = view, base
        self.writers, self.slots = writers, slots

    @staticmethod
    def size(writers: int, slots: int) -> int:
        """In int64."""
        return writers * (1 + slots * WIDTH)

    def _slot(self, writer: int, number: int) -> int:
        return self._base + self.writers + (writer * self.slots + number % self.slots) * WIDTH

    def write(self, writer: int, number: int, stamp: Stamp) -> None:
        """Publish launch ``number`` of ``writer``."""
        at, view = self._slot(writer, number), self._view
        view[at + 1], view[at + 2], view[at + 3], view[at + 4] = stamp
        view[at] = number + 1

    def read(self, writer: int, number: int) -> Stamp | None:
        """Launch ``number`` of ``writer``; None where it has not come to it."""
        at, view = self._slot(writer, number), self._view
        if view[at] != number + 1:
            return None
        return Stamp(view[at + 1], view[at + 2], view[at + 3], view[at + 4])

    def set_read(self, writer: int, count: int) -> None:
        """``writer`` needs the first ``count`` launches no more."""
        self._view[self._base + writer] = count

    def all_read(self) -> int:
        """How many launches nobody needs any more."""
        return min(self._view[self._base : self._base + self.writers])


class Stamps:
    """The lanes of one group of ``size`` ranks. Collective: every rank makes it, with the group's own ``store``."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._size = size
        total = Lane.size(size, COLLECTIVES) + size * size * Lane.size(2, MESSAGES)
        with _shared_file(store, rank, size, total * 8, timeout) as descriptor:
            self._memory = mmap.mmap(descriptor, total * 8)
        self._view = memoryview(self._memory).cast("q")

    def collectives(self) -> Lane:
        """Of the whole group; a writer is a rank."""
        return Lane(self._view, 0, self._size, COLLECTIVES)

    def messages(self, source: int, target: int) -> Lane:
        """From ``source`` to ``target``; writer 0 sends and writer 1 receives."""
        pair = source * self._size + target
        base = Lane.size(self._size, COLLECTIVES) + pair * Lane.size(2, MESSAGES)
        return Lane(self._view, base, 2, MESSAGES)


@contextlib.contextmanager
def _shared_file(store: Store, rank: int, size: int, nbytes: int, timeout: timedelta) -> Iterator[int]:
    """The descriptor of a file of zeros that all ranks share. Ends when all have left the body."""
    if sys.platform != "linux":
        raise RuntimeError(f"the emulated cluster needs Linux (memfd, /proc); this is {sys.platform}")
    if rank == 0:
        descriptor = os.memfd_create("fxbraid-stamps", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        store.set("fxbraid/stamps", f"{os.uname().nodename} /proc/{os.getpid()}/fd/{descriptor}")
    else:
        host, path = store.get("fxbraid/stamps").decode().split(" ")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"rank {rank} cannot open {path}, the launch times that the group's first rank keeps on {host}: "
                f"{error}; all ranks of an emulated cluster must be processes of one user on one machine"
            ) from error
    try:
        yield descriptor
        store.set(f"fxbraid/mapped/{rank}", "")
        if rank == 0:  # its descriptor is what the others open
            store.wait([f"fxbraid/mapped/{other}" for other in range(size)], timeout)
    finally:
        os.close(descriptor)
