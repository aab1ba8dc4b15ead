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
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import compat
from ..passes.buffers import Layout
from ..passes.errors import VerifyError
from ..schedule.lower import Channel

#: Seconds in which a thread of gloo lets go of a tensor.
LET_GO_S = 0.5


class Outbox:
    """Messages on their way: each tensor is held until its send has completed, and no longer.

    Work of NCCL says that it has; gloo's never does, but what comes back from the peer proves it (``known``, of
    ``schedule.received``), so that a rank holds the messages of a few micro-batches and not of all. Waiting for what
    has arrived does not block, and nothing else is waited for before ``flush``, which on CUDA lets the compute stream
    wait and not the host.
    """

    def __init__(self, known: Sequence[Mapping[Channel, int]] = ()) -> None:
        self._known = known
        self._sent: dict[Channel | None, deque[tuple[tuple[dist.Work, ...], list[Tensor]]]] = {}
        self._gone: dict[Channel | None, int] = {}
        self._received = 0

    def put(
        self, works: Sequence[dist.Work], tensors: Sequence[Tensor], channel: Channel | None = None
    ) -> None:
        """Hold a message: ``tensors`` until ``works`` are done. Lets go of what is known to be over."""
        for own, queue in self._sent.items():
            while queue and all(work.is_completed() for work in queue[0][0]):
                self._drop(own)
        self._sent.setdefault(channel, deque()).append((tuple(works), list(tensors)))

    def received(self) -> None:
        """The next receive of the step is over."""
        if self._received < len(self._known):
            for channel, count in self._known[self._received].items():
                while self._gone.get(channel, 0) < count and self._sent.get(channel):
                    self._drop(channel)
        self._received += 1

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for channel, queue in self._sent.items():
            while queue:
                self._drop(channel)

    def _drop(self, channel: Channel | None) -> None:
        works, _ = self._sent[channel].popleft()
        self._gone[channel] = self._gone.get(channel, 0) + 1
        for work in works:
            if not work.is_completed():
                work.wait()

    def forget(self) -> None:
        """A step begins. Drops what one that failed left behind."""
        self._sent.clear()
        self._gone.clear()
        self._received = 0

    def tensors(self) -> list[Tensor]:
        """What is still held."""
        return [tensor for queue in self._sent.values() for _, held in queue for tensor in held]


class Send(nn.Module):
    """``forward(*values)``: send each to the peer, without waiting."""

    def __init__(
        self, group: dist.ProcessGroup, peer: int, outbox: Outbox, channel: Channel | None = None
    ) -> None:
        super().__init__()
        self._group, self._peer, self._outbox, self._channel = group, peer, outbox, channel

    def forward(self, *values: Tensor) -> None:
        tensors = [value.contiguous() for value in values]
        works = [dist.isend(tensor, self._peer, group=self._group) for tensor in tensors]
        self._outbox.put([work for work in works if work is not None], tensors, self._channel)

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
    """``forward(posted)``: wait for a posted receive and return its values. ``outbox`` learns from it what has arrived
    at the other end."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def forward(self, posted: Posted) -> list[Tensor]:
        values = []
        for work, buffer in posted:
            work.wait()
            values.append(buffer)
        self._outbox.received()
        return values
