"""Tensors that are not there: what runs in their place when a program is run for its memory alone.

A :class:`Ghost` stands for a tensor and holds its :class:`Room`, the storage; rooms are entered in a :class:`Ledger`
when they are made and crossed out when the last ghost lets go of them, by Python's own counting of references. So the
program's generated code, with its lists that empty themselves, decides what lives how long, as it does with tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..passes.launches import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, aten
from ..simulate.memory import KINDS, Levels, Sample

NUMBER: Mapping[str, int] = {kind: k for k, kind in enumerate(KINDS)}


class Ledger:
    """Bytes by kind, now and at the highest moment since the last mark; marks become samples."""

    def __init__(self) -> None:
        self.levels = [0] * len(KINDS)
        self.total = 0
        self.samples: list[Sample] = []
        #: the step of the rank's list that runs
        self.step = -1
        self._high = 0
        self._split: Levels = tuple(self.levels)

    def add(self, kind: str, nbytes: int) -> None:
        """``nbytes`` (below 0: fewer) of ``kind``."""
        self.levels[NUMBER[kind]] += nbytes
        self.total += nbytes
        if self.total > self._high:
            self._high, self._split = self.total, tuple(self.levels)

    def mark(self, node: str) -> None:
        """``node`` of the program is done."""
        levels = tuple(self.levels)
        high = self._split if self._high > self.total else levels
        self.samples.append(Sample(self.step, node, levels, high))
        self._high, self._split = self.total, levels


class Room:
    """A storage of ``nbytes``. pinned: of a kind that does not change (a receive buffer)."""

    __slots__ = ("kind", "ledger", "nbytes", "pinned")

    def __init__(self, ledger: Ledger, kind: str, nbytes: int, *, pinned: bool = False) -> None:
        self.ledger, self.kind, self.nbytes, self.pinned = ledger, kind, nbytes, pinned
        ledger.add(kind, nbytes)

    def become(self, kind: str) -> None:
        """It is for something else from now on."""
        if not self.pinned and kind != self.kind:
            # Together, so that it is never counted twice.
            self.ledger.add(self.kind, -self.nbytes)
            self.kind = kind
            self.ledger.add(kind, self.nbytes)

    def __del__(self) -> None:
        self.ledger.add(self.kind, -self.nbytes)


class Ghost:
    """Stands for a tensor. nbytes: of its elements; dense: are they contiguous? then: what a collective's result on it
    is for. keeps: what lives until the collective has been waited for."""

    __slots__ = ("dense", "keeps", "nbytes", "room", "then")

    def __init__(
        self,
        room: Room,
        nbytes: int,
        *,
        dense: bool = True,
        then: str = "temporaries",
        keeps: Any = None,
    ) -> None:
        self.room, self.nbytes, self.dense, self.then, self.keeps = room, nbytes, dense, then, keeps

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What a block itself does with tensors: collectives, and what takes their place where they are left out."""
        source: Ghost = args[0]
        if func is WAIT:
            source.keeps = None
            source.room.become(source.then)
            return source
        if func is aten.slice.Tensor:
            return Ghost(source.room, source.nbytes, dense=False, then=source.then)
        ledger = source.room.ledger
        if func is aten.repeat.default:
            many = source.nbytes * args[1][0]
            return Ghost(Room(ledger, "temporaries", many), many)
        if func is ALL_REDUCE:
            # It works on a copy; the original is free.
            return Ghost(Room(ledger, "communication", source.nbytes), source.nbytes, then=source.then)
        if func is ALL_GATHER:
            size = source.nbytes * args[1]
        elif func is REDUCE_SCATTER:
            size = source.nbytes // args[2]
        else:
            raise NotImplementedError(f"{func} is not known to the prediction of memory")
        return Ghost(Room(ledger, "communication", size), size, then=source.then, keeps=source)


def moved(value: Any, kind: str) -> None:
    """What ``value`` (ghosts in lists) holds is of ``kind`` from now on, unless it was for more than passing before."""
    if isinstance(value, Ghost):
        if value.room.kind in ("temporaries", "communication"):
            value.room.become(kind)
    elif isinstance(value, list | tuple):
        for item in value:
            moved(item, kind)
