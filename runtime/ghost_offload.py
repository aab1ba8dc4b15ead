"""Offload as it runs for its memory alone: the modules of :mod:`runtime.offload`, with ghosts for tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..passes.block import unbox
from ..passes.offload import Stored
from .ledger import Ghost, Ledger, Room


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a value belongs in the boxes, and what a ghost of it has."""

    box: int
    index: int
    nbytes: int
    dense: bool
    then: str


@dataclass(slots=True)
class _Storage:
    """One storage that leaves: all values in it, its room here (None while it is away), what it is for."""

    spots: list[_Spot]
    room: Room | None
    kind: str
    nbytes: int


@dataclass(slots=True)
class GhostParked:
    """A parcel: both boxes without what leaves, and the storages of each item."""

    boxes: tuple[list[Any], list[Any]]
    items: list[list[_Storage]] = field(default_factory=list)


class GhostOffload(nn.Module):
    """``forward(for_I, for_W, slot, numbers)``: those storages start to leave."""

    def __init__(self, stored: Sequence[Stored]) -> None:
        super().__init__()
        self._places = [one.places for one in stored]

    def forward(
        self, for_I: list[Ghost], for_W: list[Ghost], slot: int, numbers: Sequence[int]
    ) -> GhostParked:
        boxes: tuple[list[Any], list[Any]] = (unbox(for_I), unbox(for_W))  # type: ignore[arg-type]
        together: dict[Room, list[_Spot]] = {}
        for box, values in enumerate(boxes):
            for index, value in enumerate(values):
                spot = _Spot(box, index, value.nbytes, value.dense, value.then)
                together.setdefault(value.room, []).append(spot)
        parked = GhostParked(boxes)
        for number in numbers:
            parked.items.append([])
            for box, index in self._places[number]:
                value = boxes[box][index]
                if value is None or value.room.nbytes == 0:
                    continue
                room: Room = value.room
                for spot in together[room]:
                    boxes[spot.box][spot.index] = None
                parked.items[-1].append(_Storage(together[room], room, room.kind, room.nbytes))
        return parked


class GhostAway(nn.Module):
    """``forward(parked, items)``: these are let go of."""

    def forward(self, parked: GhostParked, items: Sequence[int]) -> GhostParked:
        for storage in (storage for k in items for storage in parked.items[k]):
            storage.room = None
        return parked


class GhostReload(nn.Module):
    """``forward(parked, items)``: these have memory again."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def forward(self, parked: GhostParked, items: Sequence[int]) -> GhostParked:
        for storage in (storage for k in items for storage in parked.items[k]):
            storage.room = Room(self._ledger, storage.kind, storage.nbytes)
        return parked


class GhostBack(nn.Module):
    """``forward(parked)``: both boxes, as they were."""

    def forward(self, parked: GhostParked) -> tuple[list[Ghost], list[Ghost]]:
        for storage in (storage for item in parked.items for storage in item):
            assert storage.room is not None
            for spot in storage.spots:
                ghost = Ghost(storage.room, spot.nbytes, dense=spot.dense, then=spot.then)
                parked.boxes[spot.box][spot.index] = ghost
        parked.items.clear()
        return parked.boxes
