"""What every step leaves behind: totals of waits and the times of messages, for ``BraidedModel.last_step``.

Always on, so it is small: a wait for a collective or a message reads the clock twice (about 0.3 microseconds), a send
once, a unit never. The step's numbers then travel to all ranks in one asynchronous all-gather that nobody waits for
until ``last_step`` is read. On a GPU the host's clock says nothing of the device, so only the step as a whole is timed
there, with two events; shares come from a recorded step (``record_step``).
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from ..metrics import Messages, RankLog, messages
from ..passes.block import Block
from ..passes.launches import WAIT
from ..schedule import Schedule
from ..schedule.lower import Channel, Run
from . import emulate
from .emulate.cluster import PER_SECOND
from .mesh import Mesh

NOISE_S = 20e-6
"""A wait for a message that is there already takes less than this on a real clock."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock that counts on this rank. now: ticks. noise: ticks of a wait that did not wait. label: what every
    output of it must carry."""

    now: Callable[[], int]
    per_second: int
    noise: int
    label: Callable[[], str]


def make_clock() -> Clock:
    """The emulated cluster's clock where there is one, else the machine's."""
    session = emulate.active()
    if session is None:
        # Not perf_counter: this one is the same in all processes of a machine, by definition.
        return Clock(time.monotonic_ns, 10**9, round(NOISE_S * 1e9), lambda: "wall clock of the host")
    noise = 0 if session.cluster.clock == "virtual" else round(NOISE_S * PER_SECOND)
    return Clock(session.clock.now, PER_SECOND, noise, emulate.label)


class Meter:
    """One engine's notebook; every run of the program starts a new page.

    ``watch`` wraps sends and receives, ``attach`` the waits of a block; both leave what they are given as it is where
    the device is a GPU.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh) -> None:
        self.clock = make_clock()
        self.host_times_count = mesh.device.type == "cpu"
        self.plan: list[Messages] = messages(schedule)
        self.mine = self.plan[mesh.pp_rank]
        #: bytes of activations, once somebody has asked (``runtime.measure``)
        self.peak_predicted: int | None = None
        self.peak_measured: int | None = None
        self.tp_size, self.session = mesh.tp_size, emulate.active()
        #: Is there a block whose waits are inside compiled code?
        self.compiled_waits = False
        self.waited = self.started = self.ended = 0
        #: seconds of an all-reduce by its bytes, where the links are known
        self.collective_s = collective_time(mesh)
        #: bytes of each all-reduce of a step
        self.launches: list[int] = []
        self.sent: dict[str, list[int]] = {}
        self.arrivals: list[tuple[int, int]] = []

    def read_program(self, program: fx.GraphModule) -> None:
        """Count the collectives of a step. Once, when the program is complete."""
        self.launches = list(_launches(program))

    def begin(self) -> None:
        """The program starts."""
        self.waited = -self._emulated_waits()
        self.arrivals.clear()
        for times in self.sent.values():
            times.clear()
        self.started = self.clock.now()

    def end(self) -> None:
        """Its last block is done (messages may still be on their way)."""
        self.ended = self.clock.now()
        self.waited += self._emulated_waits()

    def _emulated_waits(self) -> int:
        """The cluster sees waits that this meter can't: those inside compiled code."""
        return self.session.waited if self.session is not None and self.compiled_waits else 0

    @property
    def blind(self) -> bool:
        """Are there waits that nobody sees?"""
        return self.compiled_waits and self.session is None

    def watch(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """``send_*`` and ``arrive_*`` with their times taken."""
        if not self.host_times_count:
            return dict(modules)
        found: dict[str, nn.Module] = {}
        for name, module in modules.items():
            if name.startswith("send_"):
                module = SendMeter(
                    module, self.sent.setdefault(name.removeprefix("send_"), []), self.clock.now
                )
            elif name.startswith("arrive_"):
                module = ArriveMeter(module, self.arrivals, self.clock.now)
            found[name] = module
        return found

    def attach(self, block: Block) -> None:
        """Let the block wait for its collectives through this meter: ``wait_x = self.wait(launch_x)``."""
        if not self.host_times_count:
            return
        module = block.graph_module
        if any("piece" in node.meta for node in module.graph.nodes):
            self.compiled_waits = self.tp_size > 1
            return
        waits = module.graph.find_nodes(op="call_function", target=WAIT)
        for node in waits:
            with module.graph.inserting_before(node):
                metered = module.graph.create_node("call_module", "wait", node.args)
            metered.meta = node.meta
            node.replace_all_uses_with(metered)
            module.graph.erase_node(node)
            metered.name = node.name
        if waits:
            module.add_submodule("wait", WaitMeter(self))
            module.recompile()

    def label(self) -> str:
        """What the numbers must carry: the clock, and that some were left out."""
        return self.clock.label() if self.host_times_count else f"{torch.cuda.get_device_name()}, CUDA events"

    def log(self, began: int) -> RankLog:
        """The page, at the end of a ``step()`` that ``began`` then."""
        return RankLog(
            host=host_number(),
            began=began,
            started=self.started,
            ended=self.ended,
            left=self.clock.now(),
            waited=-1 if self.blind else self.waited,
            collective=self._collective(),
            sent={
                channel: list(self.sent.get(f"{channel.phase}{channel.chunk}", ())) for channel in self._out()
            },
            arrivals=list(self.arrivals),
        )

    def _collective(self) -> int:
        if self.collective_s is None:
            return -1
        return round(sum(map(self.collective_s, self.launches)) * self.clock.per_second)

    def _out(self) -> Iterator[Channel]:
        yield from self.mine.outgoing


def _launches(program: fx.GraphModule) -> Iterator[int]:
    for node in program.graph.nodes:
        if isinstance(node.meta.get("instruction"), Run):
            block = program.get_submodule(str(node.target))
            assert isinstance(block, fx.GraphModule)
            for inner in block.graph.nodes:
                if "launch" in inner.meta:
                    yield inner.meta["launch"].nbytes
                elif "piece" in inner.meta:  # a compiled one: its graph has them
                    inside = inner.meta["piece"].graph_module.graph
                    yield from (node.meta["nbytes"] for node in inside.nodes if "nbytes" in node.meta)


def collective_time(mesh: Mesh) -> Callable[[int], float] | None:
    """Seconds of an all-reduce over the TP group by its bytes, where the links are known: on an emulated cluster."""
    session = emulate.active()
    if session is None or mesh.tp_group is None:
        return None
    ranks, described = mesh.ranks[mesh.pp_rank], mesh.tp_group.group_desc

    def seconds(nbytes: int) -> float:
        link = session.cluster.link(ranks, message=False, description=described)
        return emulate.collective_seconds(link, emulate.Op.ALL_REDUCE, nbytes, mesh.tp_size)

    return seconds


class WaitMeter(nn.Module):
    """``forward(launch)``: wait for a functional collective, and add up for how long."""

    _meter: Meter

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._now = meter.clock.now

    def forward(self, launch: Tensor) -> Tensor:
        began = self._now()
        value = WAIT(launch)
        self._meter.waited += self._now() - began
        return value  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class SendMeter(nn.Module):
    """``forward(*values)``: send them, and note when."""

    def __init__(self, send: nn.Module, times: list[int], now: Callable[[], int]) -> None:
        super().__init__()
        self.send = send
        self._send, self._times, self._now = send.forward, times, now

    def forward(self, *values: Tensor) -> Any:
        self._times.append(self._now())
        return self._send(*values)


class ArriveMeter(nn.Module):
    """``forward(posted)``: wait for a receive, and note from when to when."""

    def __init__(self, arrive: nn.Module, times: list[tuple[int, int]], now: Callable[[], int]) -> None:
        super().__init__()
        self.arrive = arrive
        self._arrive, self._times, self._now = arrive.forward, times, now

    def forward(self, *posted: Any) -> Any:
        began = self._now()
        values = self._arrive(*posted)
        self._times.append((began, self._now()))
        return values


def host_number() -> int:
    """A number that processes share whose monotonic clocks are one."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = socket.gethostname()
    return zlib.crc32(text.encode())


# -- to all ranks


@dataclass(slots=True)
class Rows:
    """One row of integers from every rank of this replica, under way. ``get`` is local: every rank has sent its own."""

    mesh: Mesh
    parts: list[Tensor]
    work: dist.Work | None

    def get(self) -> list[list[list[int]]]:
        """rows[pp][tp], once they are here."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        rows = dict(zip(_members(self.mesh), (part.tolist() for part in self.parts), strict=True))
        return [[rows[rank] for rank in row] for row in self.mesh.ranks]


def share(mesh: Mesh, row: Sequence[int]) -> Rows:
    """Send ``row`` to every rank of this replica, without waiting. Collective, in the same order on all ranks."""
    mine = torch.tensor(row, dtype=torch.int64)
    group = quiet_group(mesh)
    if group is None:
        return Rows(mesh, [mine], None)
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    return Rows(mesh, parts, group.allgather([parts], [mine]))


def share_bytes(mesh: Mesh, payload: bytes) -> list[bytes]:
    """``payload`` of every rank of this replica, in the order of their ranks. Collective, and waits."""
    sizes = share(mesh, [len(payload)]).get()
    width = max(row[0] for column in sizes for row in column)
    mine = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
    group = quiet_group(mesh)
    if group is None:
        return [payload]
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([parts], [mine]).wait()
    length = {rank: sizes[pp][tp][0] for pp, row in enumerate(mesh.ranks) for tp, rank in enumerate(row)}
    return [part.numpy().tobytes()[: length[rank]] for rank, part in zip(_members(mesh), parts, strict=True)]


def quiet_group(mesh: Mesh, *, world: bool = False) -> Any:
    """A group of all ranks of this replica, or of the ``world``, for CPU tensors, whose traffic costs nothing on an
    emulated clock; None for one rank."""
    group = mesh.world_host_group if world else mesh.host_group
    return group if group is None else getattr(group, "real", group)


def _members(mesh: Mesh) -> list[int]:
    """Global ranks in the order of ``host_group``."""
    return sorted(rank for row in mesh.ranks for rank in row)
