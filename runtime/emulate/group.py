"""The process group: real data through gloo, emulated time around it.

Each method publishes this rank's launch, starts the real operation on gloo, and returns a work. Waiting for the work
waits for the real data and then for the emulated end (``RankClock.meet``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .clocks import monotonic
from .cluster import Op, collective_seconds, to_ps
from .queues import Queue, Ticket
from .stamps import Stamp, Stamps
from .torch_names import NAMES, AnyProcessGroup, AnyWork, adopt, call, make_gloo, plain_group

if TYPE_CHECKING:
    from .session import Session


class EmulatedWork(AnyWork):
    """A collective or message under way. ``wait()`` returns with the data there and the clock at the emulated end."""

    def __init__(
        self, real: Any, ticket: Ticket, queue: Queue, session: Session, *, message: bool = False
    ) -> None:
        super().__init__()
        self._message = message
        self._real, self._ticket, self._queue, self._session = real, ticket, queue, session

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As ``Work.wait``; zero means the group's own timeout."""
        since, before = monotonic(), self._session.clock.now()
        if timeout:
            self._real.wait(timeout)
        else:
            self._real.wait()
        self._session.clock.meet(self._queue.wait(self._ticket), since)
        if not self._message:
            self._session.waited += self._session.clock.now() - before
        return True

    def is_completed(self) -> bool:
        """Is the data there and the emulated end past? Does not move the clock, and on the virtual clock may say
        False for a while after the end."""
        if not self._real.is_completed():
            return False
        finish = self._queue.poll(self._ticket)
        return finish is not None and self._session.clock.reached(finish)

    def is_success(self) -> bool:
        return self.is_completed() and bool(self._real.is_success())

    def exception(self) -> Any:
        return self._real.exception()

    def result(self) -> list[Tensor]:
        return list(self._real.result())

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return int(self._real.source_rank())

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result, completed by a thread at the emulated end (wall, paced) or when the data is
        there (virtual). It never moves this rank's clock: only ``wait()`` of the work does."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def follow() -> None:
            try:
                self._real.wait()
                self._session.follow(self._queue.settled(self._ticket))
                future.set_result(self._real.result())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=follow, daemon=True).start()
        return future


class EmulatedGroup(AnyProcessGroup):
    """One process group of an emulated cluster. ``ranks``: its members as global ranks. ``axis``: see ``name_axis``.

    Its collectives are those of ``COLLECTIVES``, below.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, ranks: Sequence[int], timeout: timedelta, session: Session
    ) -> None:
        super().__init__(rank, size)
        self.session = session
        self._me, self._ranks, self.axis = rank, list(ranks), ""
        self._timeout = timeout
        self._stamps = Stamps(store, rank, size, timeout)
        gloo = make_gloo(store, rank, size, timeout)
        self.real = plain_group(store, rank, size, gloo)
        adopt(self, gloo)
        self._collectives: Queue | None = None
        self._messages: dict[tuple[int, int], Queue] = {}

    # -- collectives

    def _collective(self, op: Op, buffers: Iterable[Tensor], start: Callable[[], Any]) -> EmulatedWork:
        if self._collectives is None:
            who = f"the collectives of group {self.group_name} (ranks {self._ranks})"
            self._collectives = Queue(
                self._stamps.collectives(), self._me, who, timeout_s=self._timeout.total_seconds()
            )
            self.session.watch(self._collectives)
        cluster = self.session.cluster
        link = cluster.link(self._ranks, message=False, description=self.axis or self.group_desc)
        nbytes = sum(map(_nbytes, buffers))
        seconds = collective_seconds(link, op, nbytes, len(self._ranks))
        ticket = self._collectives.launch(Stamp(self.session.clock.stamp(), to_ps(seconds), 0, int(op)))
        return EmulatedWork(start(), ticket, self._collectives, self.session)

    # -- messages

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> EmulatedWork:
        return self._message(self._me, dst, tensors, tag, lambda: self.real.send(tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> EmulatedWork:
        return self._message(src, self._me, tensors, tag, lambda: self.real.recv(tensors, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> EmulatedWork:
        raise NotImplementedError(
            "a receive from any source has no channel to queue on, here as on NCCL; name the rank that sends"
        )

    def _message(
        self, source: int, target: int, tensors: list[Tensor], tag: int, start: Callable[[], Any]
    ) -> EmulatedWork:
        cluster = self.session.cluster
        link = cluster.link([self._ranks[source], self._ranks[target]], message=True)
        key = (source, target)
        if key not in self._messages:
            who = f"the messages from rank {self._ranks[source]} to {self._ranks[target]} in group {self.group_name}"
            self._messages[key] = Queue(
                self._stamps.messages(source, target),
                0 if self._me == source else 1,
                who,
                timeout_s=self._timeout.total_seconds(),
                rendezvous=link.rendezvous,
            )
        time = self.session.clock.stamp()
        moves = to_ps(sum(map(_nbytes, tensors)) / link.beta_bytes_per_s)
        if self._me == source:
            time = self.session.book(self._ranks[target], time, moves)
        ticket = self._messages[key].launch(Stamp(time, moves, to_ps(link.alpha_s), tag))
        return EmulatedWork(start(), ticket, self._messages[key], self.session, message=True)


def name_axis(group: Any, axis: str) -> None:
    """Say that the members of ``group`` lie along ``axis`` ("dp", "pp" or "tp") of the mesh; nothing where nothing is
    emulated. torch gives an axis over all ranks the default group, and its description does not name the axis."""
    if isinstance(group, EmulatedGroup):
        group.axis = axis


#: What each collective's whole buffer is (see ``cluster.factor``): of which argument, and how often.
COLLECTIVES: dict[str, tuple[Op, Callable[..., list[Tensor]]]] = {
    "allreduce": (Op.ALL_REDUCE, lambda n, tensors, *_: _flat(tensors)),
    "allreduce_coalesced": (Op.ALL_REDUCE, lambda n, tensors, *_: _flat(tensors)),
    "allgather": (Op.ALL_GATHER, lambda n, outputs, *_: _flat(outputs)),
    "allgather_coalesced": (Op.ALL_GATHER, lambda n, outputs, *_: _flat(outputs)),
    "all_gather_single": (Op.ALL_GATHER, lambda n, output, *_: _flat(output)),
    "all_gather_single_coalesced": (Op.ALL_GATHER, lambda n, outputs, *_: _flat(outputs)),
    "reduce_scatter": (Op.REDUCE_SCATTER, lambda n, outputs, inputs, *_: _flat(inputs)),
    "reduce_scatter_single": (Op.REDUCE_SCATTER, lambda n, output, whole, *_: _flat(whole)),
    "reduce_scatter_single_coalesced": (Op.REDUCE_SCATTER, lambda n, outputs, inputs, *_: _flat(inputs)),
    "all_to_all_single": (Op.ALL_TO_ALL, lambda n, output, whole, *_: _flat(whole)),
    "alltoall": (Op.ALL_TO_ALL, lambda n, outputs, inputs, *_: _flat(inputs)),
    "broadcast": (Op.BROADCAST, lambda n, tensors, *_: _flat(tensors)),
    "reduce": (Op.REDUCE, lambda n, tensors, *_: _flat(tensors)),
    # The root alone has all parts, and they are equally large.
    "gather": (Op.GATHER, lambda n, outputs, inputs, *_: _flat(inputs) * n),
    "scatter": (Op.SCATTER, lambda n, outputs, *_: _flat(outputs) * n),
    "barrier": (Op.BARRIER, lambda n, *_: []),
}


def _method(name: str, op: Op, buffers: Callable[..., list[Tensor]]) -> Callable[..., EmulatedWork]:
    def method(self: EmulatedGroup, *args: Any, **kwargs: Any) -> EmulatedWork:
        whole = buffers(self.size(), *args)
        return self._collective(op, whole, lambda: call(self.real, name, *args, **kwargs))

    method.__name__ = name
    method.__doc__ = f"``ProcessGroup.{name}``, in emulated time."
    return method


for _name, (_op, _buffers) in COLLECTIVES.items():
    for _alias in NAMES.get(_name, (_name,)):  # older names too: both C++ and Python may look for them
        setattr(EmulatedGroup, _alias, _method(_name, _op, _buffers))


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
