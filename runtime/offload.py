"""Saved activations on their way to the host and back, as modules that the program calls.

A copy is started early and waited for late, as a message is. On CUDA each way has a stream of its own and nothing here
blocks the host: a copy out waits for what the compute stream has been given so far (the values are made), ``away``
makes the compute stream wait for the copy's event before the values are let go of; a copy back waits for the compute
stream once more (whatever had that memory before is done with it), and ``back`` makes the compute stream wait for its
event. So memory is freed, and taken again, at a place of the program and in the order of the compute stream.

``record_stream`` would say the same and give the memory back later: it waits, where the tensor is freed, for all that
the copying stream has been given by then, also for later parcels; and the allocator only looks whether that has
happened, which it has not yet, since the host runs ahead. The one case that events of the program don't cover is a step
that fails with copies in flight: then ``drop`` makes the compute stream wait for both ways before anything else can get
that memory.

Buffers on the host are pinned, one per slot of the program, made when first used and kept from step to step. A slot is
used again behind ``back``: its copy out then waits for a compute stream that has waited for the copy back.

On the CPU a copy is made at once, into memory of its own, and the values are freed at ``away`` as on a GPU; on an
emulated cluster it takes the time that ``Cluster.host_link`` says, on the device clock, and occupies no unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..passes.block import unbox
from ..passes.offload import Stored
from ..passes.program import HOST_ALIGN
from . import emulate

Way = Literal["out", "back"]


class Lanes(Protocol):
    """What copies, each way in the order in which it is asked."""

    def copy(self, way: Way, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        """Start to copy each (source, target); a ticket for each."""

    def wait(self, ticket: Any) -> None:
        """What is computed from now on is computed behind the copy of ``ticket``."""

    def host(self, nbytes: int) -> Tensor:
        """Memory on the host."""

    def drop(self) -> None:
        """A step has failed: nothing that is computed from now on is disturbed by copies in flight."""


class CudaLanes:
    """A stream each way, and events in both directions. See the module's docstring."""

    def __init__(self, device: torch.device) -> None:
        self._streams = {way: torch.cuda.Stream(device) for way in ("out", "back")}

    def copy(self, way: Way, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        stream = self._streams[way]
        stream.wait_event(torch.cuda.current_stream().record_event())
        tickets = []
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                tickets.append(stream.record_event())
        return tickets

    def wait(self, ticket: Any) -> None:
        torch.cuda.current_stream().wait_event(ticket)

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def drop(self) -> None:
        for stream in self._streams.values():
            torch.cuda.current_stream().wait_stream(stream)


class CpuLanes:
    """Copies at once; on an emulated cluster, tickets are the times at which they would be done."""

    def __init__(self) -> None:
        self._session = emulate.active()

    def copy(self, way: Way, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        for source, target in pairs:
            target.copy_(source)
        if self._session is None:
            return [None] * len(pairs)
        return self._session.copy_times(way, [source.nbytes for source, _ in pairs])

    def wait(self, ticket: Any) -> None:
        if self._session is not None:
            self._session.meet(ticket)

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def drop(self) -> None:
        pass


class HostMemory:
    """The buffers of one program on the host, one per slot. ``sizes``: bytes of each, from the program."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.sizes: Sequence[int] = ()
        self._made: dict[int, Tensor] = {}

    def get(self, slot: int, nbytes: int) -> Tensor:
        """The buffer of ``slot``, of at least ``nbytes``: a compiled unit may keep a value in a larger storage than its
        graph says."""
        buffer = self._made.get(slot)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._made[slot] = self.lanes.host(max(nbytes, self.sizes[slot]))
        return buffer

    def drop(self) -> None:
        """A step has failed: forget what may still be copied into."""
        self.lanes.drop()
        self._made.clear()

    def tensors(self) -> list[Tensor]:
        """The buffers."""
        return list(self._made.values())


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a value belongs in the boxes, and how it lies in its storage."""

    box: int
    index: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


@dataclass(slots=True)
class _Storage:
    """One storage that leaves: all values in it, its bytes here (None while it is away) and on the host."""

    spots: list[_Spot]
    here: Tensor | None
    there: Tensor
    ticket: Any = None


@dataclass(slots=True)
class Parked:
    """A parcel: both boxes without what leaves, and what leaves: an item is one storage, none where it lay in the
    storage of another item, or several where values that the graph keeps together lie apart."""

    boxes: tuple[list[Any], list[Any]]
    items: list[list[_Storage]] = field(default_factory=list)

    def tensors(self) -> Iterator[Tensor]:
        """What of it lies on the device."""
        for box in self.boxes:
            yield from (value for value in box if value is not None)
        for storage in (storage for item in self.items for storage in item):
            if storage.here is not None:
                yield storage.here


class Offload(nn.Module):
    """``forward(for_I, for_W, slot, numbers)``: take the values out of both lists, and start to copy those storages to
    the host, in this order; the rest stays as it is. ``stored``: the chunk's storages by number."""

    def __init__(self, stored: Sequence[Stored], memory: HostMemory) -> None:
        super().__init__()
        self._places = [one.places for one in stored]
        self._memory = memory

    def forward(self, for_I: list[Tensor], for_W: list[Tensor], slot: int, numbers: Sequence[int]) -> Parked:
        boxes: tuple[list[Any], list[Any]] = (unbox(for_I), unbox(for_W))
        # By what they really lie in: compiled code may put values together that the graph keeps apart.
        together: dict[int, list[tuple[int, int]]] = {}
        for box, values in enumerate(boxes):
            for index, value in enumerate(values):
                together.setdefault(value.untyped_storage().data_ptr(), []).append((box, index))
        taken: list[list[tuple[list[_Spot], Tensor]]] = []
        total = 0
        for number in numbers:
            taken.append([])
            for box, index in self._places[number]:
                value = boxes[box][index]
                if value is None or value.untyped_storage().nbytes() == 0:
                    continue
                here = _bytes(value)
                spots = [_spot(boxes, *place) for place in together[here.data_ptr()]]
                for spot in spots:
                    boxes[spot.box][spot.index] = None
                taken[-1].append((spots, here))
                total += aligned(here.nbytes)
        buffer, at = self._memory.get(slot, total), 0
        parked = Parked(boxes)
        for item in taken:
            parked.items.append([])
            for spots, here in item:
                parked.items[-1].append(_Storage(spots, here, buffer[at : at + here.nbytes]))
                at += aligned(here.nbytes)
        _start(self._memory.lanes, "out", [storage for item in parked.items for storage in item])
        return parked


class Away(nn.Module):
    """``forward(parked, items)``: wait until these are on the host, and let go of them here."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self._lanes = lanes

    def forward(self, parked: Parked, items: Sequence[int]) -> Parked:
        for storage in (storage for k in items for storage in parked.items[k]):
            self._lanes.wait(storage.ticket)
            storage.here = storage.ticket = None
        return parked


class Reload(nn.Module):
    """``forward(parked, items)``: take memory for these, and start to copy them back, in this order."""

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        super().__init__()
        self._lanes, self._device = lanes, device

    def forward(self, parked: Parked, items: Sequence[int]) -> Parked:
        returning = [storage for k in items for storage in parked.items[k]]
        for storage in returning:
            storage.here = torch.empty(storage.there.nbytes, dtype=torch.uint8, device=self._device)
        _start(self._lanes, "back", returning)
        return parked


class Back(nn.Module):
    """``forward(parked)``: wait for all of it; both boxes, as they were."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self._lanes = lanes

    def forward(self, parked: Parked) -> tuple[list[Tensor], list[Tensor]]:
        for storage in (storage for item in parked.items for storage in item):
            self._lanes.wait(storage.ticket)
            assert storage.here is not None
            memory = storage.here.untyped_storage()
            for spot in storage.spots:
                value = torch.empty(0, dtype=spot.dtype, device=storage.here.device)
                parked.boxes[spot.box][spot.index] = value.set_(memory, spot.offset, spot.shape, spot.stride)
        parked.items.clear()
        return parked.boxes


def _start(lanes: Lanes, way: Way, storages: Sequence[_Storage]) -> None:
    """Start to copy each, out or back."""
    pairs = []
    for storage in storages:
        assert storage.here is not None
        pairs.append((storage.here, storage.there) if way == "out" else (storage.there, storage.here))
    for storage, ticket in zip(storages, lanes.copy(way, pairs), strict=True):
        storage.ticket = ticket


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to where the next value may start."""
    return -(-nbytes // HOST_ALIGN) * HOST_ALIGN


def _bytes(value: Tensor) -> Tensor:
    """The storage of ``value`` as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _spot(boxes: Sequence[Sequence[Tensor]], box: int, index: int) -> _Spot:
    value = boxes[box][index]
    return _Spot(box, index, value.dtype, value.shape, value.stride(), value.storage_offset())


def make_lanes(device: torch.device) -> Lanes:
    """Those of this rank's device."""
    return CudaLanes(device) if device.type == "cuda" else CpuLanes()
