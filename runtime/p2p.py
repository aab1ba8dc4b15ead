"""Sends and receives between pipeline ranks, as modules that the program calls.

Every channel (phase and boundary) has a communicator of its own, made eagerly and in one order on all ranks: a
lazily made one blocks until the peer comes by, which deadlocks a pipeline, and two directions that share one queue
behind each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and type of one value that crosses a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(val: Tensor) -> Layout:
        """The layout of a (fake) tensor."""
        return Layout(tuple(val.shape), val.dtype, val.device)


class Outbox:
    """Messages on their way: each tensor is held until its send has completed, and no longer."""

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
        """What is still held, for the memory measurement."""
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


Posted = list[tuple[dist.Work, Tensor]]


class Post(nn.Module):
    """``forward()``: give the next receive of this channel its buffers."""

    def __init__(self, group: dist.ProcessGroup, peer: int, layouts: Sequence[Layout]) -> None:
        super().__init__()
        self._group, self._peer, self._layouts = group, peer, tuple(layouts)

    def forward(self) -> Posted:
        posted: Posted = []
        for layout in self._layouts:
            buffer = torch.empty(layout.shape, dtype=layout.dtype, device=layout.device)
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
