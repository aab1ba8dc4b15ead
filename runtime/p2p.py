"""Sends and receives between pipeline ranks, as modules that the program calls.

Every channel (phase and boundary) has a communicator of its own, made eagerly and in one order on all ranks: a
lazily made one blocks until the peer comes by, which deadlocks a pipeline, and two directions that share one queue
behind each other.

On CUDA nothing here blocks the host. A message runs on its group's stream, which first waits for what the compute
stream has been given so far (``ProcessGroupNCCL::pointToPoint``, syncStream), so a buffer may be posted again as soon
as its last reader is enqueued, and a tensor sent as soon as its unit is. ``wait`` makes the compute stream wait for
the message's end (``WorkNCCL::synchronizeStream``), and the host goes on. Memory that crosses streams is safe without
``record_stream`` calls of ours: torch makes them for every tensor of a message (pointToPoint), keeps those of a
collective until it is waited for (``stashed_for_allocator_safety_``), and receive buffers are never freed in a step.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import compat
from ..passes.buffers import Layout
from ..passes.errors import VerifyError

#: Seconds in which a thread of gloo lets go of a tensor.
LET_GO_S = 0.5


class Outbox:
    """Messages on their way: each tensor is held until its send has completed, and no longer.

    Nothing here waits before ``flush``, which on CUDA lets the compute stream wait and not the host.
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, work: dist.Work, tensor: Tensor) -> None:
        """Hold ``tensor`` for ``work``; let go of what has arrived."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def forget(self) -> None:
        """Drop what a step that failed left behind."""
        self._sent.clear()

    def tensors(self) -> list[Tensor]:
        """What is still held."""
        return [tensor for _, tensor in self._sent]


class Send(nn.Module):
    """``forward(*values)``: send each to the peer, without waiting."""

    def __init__(self, group: dist.ProcessGroup, peer: int, outbox: Outbox) -> None:
        super().__init__()
        self._group, self._peer, self._outbox = group, peer, outbox

    def forward(self, *values: Tensor) -> None:
        for value in values:
            tensor = value.contiguous()
            work = dist.isend(tensor, self._peer, group=self._group)
            if work is not None:
                self._outbox.put(work, tensor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(to rank {self._peer})"


class Buffers:
    """The receive buffers of one program, one per slot, made when first used and kept from step to step."""

    def __init__(self) -> None:
        self.layouts: Sequence[Layout] = ()
        self._made: dict[int, Tensor] = {}

    def get(self, slot: int) -> Tensor:
        """The buffer of ``slot``."""
        buffer = self._made.get(slot)
        if buffer is None:
            buffer = self._made[slot] = empty(self.layouts[slot])
        return buffer

    def tensors(self) -> list[Tensor]:
        """Those that are there, for the memory measurement."""
        return list(self._made.values())

    def drop(self) -> None:
        """Forget all: after a step that failed, a message may still be on its way into one of them."""
        self._made.clear()


def empty(layout: Layout) -> Tensor:
    """A buffer that holds anything."""
    return torch.empty(layout.shape, dtype=layout.dtype, device=layout.device)


class Release(nn.Module):
    """``forward(*slots)``: nothing reads these any more, the program says. Fills them with what would show (NaN), and
    raises where somebody still holds one: the debug mode of pass ``buffers``, FXBRAID_POISON=1."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self._memory = buffers

    def forward(self, *slots: int) -> None:
        for slot in slots:
            buffer = self._memory.get(slot)
            # A thread of gloo lets go of what an all-gather has sent a moment after it is done.
            deadline = time.monotonic() + LET_GO_S
            while (readers := _readers(buffer)) > 0 and time.monotonic() < deadline:
                time.sleep(1e-3)
            if readers > 0:
                raise VerifyError(f"receive buffer {slot} was released, but is still held {readers} times")
            buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)


def _readers(buffer: Tensor) -> int:
    """Beside the tensor itself: others on its storage, and other names for it than the four known here."""
    return compat.holders(buffer) - 1 + sys.getrefcount(buffer) - 4


Posted = list[tuple[dist.Work, Tensor]]


class Post(nn.Module):
    """``forward(*slots)``: give the next receive of this channel its buffers, new ones where the slot is None."""

    def __init__(
        self, group: dist.ProcessGroup, peer: int, layouts: Sequence[Layout], buffers: Buffers
    ) -> None:
        super().__init__()
        self._group, self._peer, self._layouts, self._memory = group, peer, tuple(layouts), buffers

    def forward(self, *slots: int | None) -> Posted:
        posted: Posted = []
        for layout, slot in zip(self._layouts, slots, strict=True):
            buffer = empty(layout) if slot is None else self._memory.get(slot)
            work = dist.irecv(buffer, self._peer, group=self._group)
            if work is None:
                raise RuntimeError(
                    f"rank {dist.get_rank()} is no member of the channel from rank {self._peer}"
                )
            posted.append((work, buffer))
        return posted

    def __repr__(self) -> str:
        return f"{type(self).__name__}(from rank {self._peer})"


class Arrive(nn.Module):
    """``forward(posted)``: wait for a posted receive and return its values."""

    def forward(self, posted: Posted) -> list[Tensor]:
        values = []
        for work, buffer in posted:
            work.wait()
            values.append(buffer)
        return values
