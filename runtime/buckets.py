"""Gradients summed over the data-parallel replicas, in buckets, while the rest of the step goes on.

The sums of one step of a chunk's parameters are made in flat buffers. Behind the chunk's last W the program launches
one all-reduce for each of them and goes on: W's of other chunks, messages and the other ranks' cool-down hide it.
Everything is waited for once, at the end of the step.

A bucket holds parameters of one layer, in order of their names, and is cut where it would grow beyond its size. So
neither the schedule nor the number of chunks, which are made of whole layers, has any say in which bytes travel
together: what a ring adds up, and in which order, is the same in all of them. A parameter that several layers read
has buckets of its own: where they lie in several chunks, its gradient is put together from theirs afterwards.

Every step has new buffers, and where a parameter has no ``.grad`` yet its part of the buffer becomes it, without a
copy: a gradient that somebody keeps stays as it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .unit import GradSlot

#: Bytes at whose multiples gradients begin in a buffer: vectorised kernels of optimizers want 16, memory lines 128.
ALIGN = 128

DEFAULT_MB = 25.0


class Bucket:
    """One flat buffer of a step, and the slots whose sums are made in it (of one type and device)."""

    def __init__(self, slots: Sequence[GradSlot]) -> None:
        self._slots = tuple(slots)
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None
        self._starts: list[int] = []
        size = 0
        for k, slot in enumerate(slots):
            slot.home = partial(self._view, k)
            self._starts.append(size)
            size += padded(slot) // slot.dtype.itemsize
        self._size = size

    @property
    def nbytes(self) -> int:
        """What its all-reduce moves."""
        return self._size * self._slots[0].dtype.itemsize

    def _view(self, k: int) -> Tensor:
        slot, start = self._slots[k], self._starts[k]
        if self._flat is None:
            self._flat = torch.empty(self._size, dtype=slot.dtype, device=slot.parameter.device)
        return self._flat[start : start + slot.parameter.numel()].view(slot.parameter.shape)

    def launch(self, group: dist.ProcessGroup) -> None:
        """Start the all-reduce. Nothing where this step has no gradient for any of it, as on all replicas."""
        if self._flat is None:
            return
        for k, slot in enumerate(self._slots):
            start, numel = self._starts[k], slot.parameter.numel()
            end = self._starts[k + 1] if k + 1 < len(self._slots) else self._size
            if slot.total is None:
                numel = 0
            if start + numel < end:
                self._flat[start + numel : end].zero_()
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def wait(self) -> None:
        """The sums are those of all replicas."""
        if self._work is not None:
            self._work.wait()
        self.drop()

    def drop(self) -> None:
        """Let go of the buffer: whoever still reads a part of it has a view. A work that runs holds it by itself."""
        self._work = self._flat = None


class Reducer:
    """The buckets of a rank's chunks. ``group``: the ranks with this one's place in every replica."""

    def __init__(
        self,
        slots: Mapping[int, Mapping[str, GradSlot]],
        layer_of: Mapping[str, int],
        group: dist.ProcessGroup,
        *,
        apart: Container[str],
        bucket_mb: float = DEFAULT_MB,
    ) -> None:
        """``slots``: by chunk and parameter, ``layer_of``: by parameter; ``apart``: those in buckets of their own."""
        limit = max(1, round(bucket_mb * 2**20))
        self._group = group
        self.buckets: dict[int, list[Bucket]] = {
            chunk: [Bucket(found) for found in _grouped(own, layer_of, apart, limit)]
            for chunk, own in slots.items()
        }
        self._launched: list[Bucket] = []
        self.modules: dict[int, nn.Module] = {chunk: Reduce(self, chunk) for chunk in slots}

    def launch(self, chunk: int) -> None:
        """``chunk``'s sums are complete on this replica: start to add up those of all. Collective over the group, in
        one order on all of it, which is that of the program."""
        for bucket in self.buckets[chunk]:
            self._launched.append(bucket)
            bucket.launch(self._group)

    def wait(self) -> None:
        """Wait for all that was launched."""
        for bucket in self._launched:
            bucket.wait()
        self._launched.clear()

    def forget(self) -> None:
        """Drop what a step that an exception cut short has left."""
        self._launched.clear()
        for bucket in (bucket for buckets in self.buckets.values() for bucket in buckets):
            bucket.drop()


class Reduce(nn.Module):
    """``forward()``: a chunk's last W is done."""

    def __init__(self, reducer: Reducer, chunk: int) -> None:
        super().__init__()
        self._reducer, self._chunk = reducer, chunk

    def forward(self) -> None:
        self._reducer.launch(self._chunk)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(chunk {self._chunk}, {len(self._reducer.buckets[self._chunk])} buckets)"
        )


def padded(slot: GradSlot) -> int:
    """Bytes of a gradient in its buffer."""
    nbytes = slot.parameter.numel() * slot.dtype.itemsize
    return -(-nbytes // ALIGN) * ALIGN


def _grouped(
    slots: Mapping[str, GradSlot], layer_of: Mapping[str, int], apart: Container[str], limit: int
) -> Iterator[list[GradSlot]]:
    """The slots of each bucket, the last layer first, as backwards go."""

    def kind(name: str) -> tuple[int, str, str]:
        return -layer_of[name], str(slots[name].dtype), name if name in apart else ""

    found: list[GradSlot] = []
    last: tuple[int, str, str] | None = None
    size = 0
    wanted = [name for name, slot in slots.items() if slot.parameter.requires_grad]
    for name in sorted(wanted, key=lambda name: (*kind(name), name)):
        own = padded(slots[name])
        if found and (kind(name) != last or size + own > limit):
            yield found
            found, size = [], 0
        found.append(slots[name])
        last, size = kind(name), size + own
    if found:
        yield found
