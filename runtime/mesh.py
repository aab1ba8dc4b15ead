"""Ranks and groups: who holds which chunk, who shares a tensor-parallel group, who talks to whom.

A :class:`Mesh` is made once per ``braid``: dp_size replicas of the model, each pp_size x tp_size ranks. All that runs
inside a step lies within one replica, except the sums over ``dp_group``. Where groups are made, every rank walks the
same list, that of all replicas. With one process and no process group every group is None and nothing here
communicates.

On CUDA a group is an NCCL communicator with a stream of its own, on which its operations queue: TP has one, every
channel (phase and boundary) has one, the loss and the norm have theirs, so none of them waits behind another. Each is
connected while it is made: an NCCL communicator that is made on first use stops the host until its peer comes by, and
for a plain send that would be a third one, of the two ranks, whatever has been connected before (lazy mode of
``ProcessGroupNCCL::pointToPoint``); ``device_id`` makes a group eager, and then a send uses the group's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..compat import serves, timeout_of
from ..passes.errors import BraidError
from ..schedule import Placement, Schedule
from ..schedule.lower import Channel, channels
from . import emulate


@dataclass(slots=True)
class Mesh:
    """This process's place among dp_size x pp_size x tp_size ranks (dp the slowest axis)."""

    device: torch.device
    pp_size: int = 1
    tp_size: int = 1
    pp_rank: int = 0
    tp_rank: int = 0
    #: global ranks of this replica, ranks[pp][tp]
    ranks: list[list[int]] = field(default_factory=lambda: [[0]])
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    #: all ranks of this replica
    model_group: dist.ProcessGroup | None = None
    #: the ranks of ``model_group``, for tensors of the host: another group only where that one takes CUDA tensors alone
    host_group: dist.ProcessGroup | None = None
    dp_size: int = 1
    dp_rank: int = 0
    #: the ranks at this place in every replica, in their order; None where there is one replica
    dp_group: dist.ProcessGroup | None = None
    #: all ranks of all replicas; ``world_host_group``: for tensors of the host
    world_group: dist.ProcessGroup | None = None
    world_host_group: dist.ProcessGroup | None = None
    #: global ranks of the other replicas too, [dp][pp][tp]; empty where there is one
    replicas: list[list[list[int]]] = field(default_factory=list)
    #: of every group that is made here: that of the default group (torch would take 30 minutes instead)
    timeout: timedelta | None = None
    _pairs: dict[tuple[Placement, Channel], dist.ProcessGroup | None] = field(default_factory=dict)
    _ties: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    _shares: dict[int, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def tp_group_name(self) -> str:
        """What a functional collective calls the group; "" where there is none."""
        return self.tp_group.group_name if self.tp_group is not None else ""

    @property
    def world_rank(self) -> int:
        """This process's place in ``world_group``: rank 0 decides for all replicas."""
        return dist.get_rank(self.world_group) if self.world_group is not None else 0

    @property
    def tables(self) -> list[list[list[int]]]:
        """Global ranks of all replicas, [dp][pp][tp]."""
        return self.replicas or [self.ranks]

    def global_rank(self, pp_rank: int) -> int:
        """The global rank of pipeline rank ``pp_rank`` in this process's column."""
        return self.ranks[pp_rank][self.tp_rank]

    def channel_groups(self, schedule: Schedule) -> dict[Channel, dist.ProcessGroup]:
        """The communicators of this rank's channels. Collective over all ranks: each walks the whole list, makes
        every group that is not there yet, and keeps its own."""
        found: dict[Channel, dist.ProcessGroup] = {}
        for channel, source, target in channels(schedule):
            key = (schedule.placement, channel)
            if key not in self._pairs:
                self._pairs[key] = self._new_group([source, target])
            group = self._pairs[key]
            if group is not None:
                found[channel] = group
        return found

    def tie_group(self, pp_ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """The group of the ranks of this column that share a tied parameter; None where this rank is not one of
        them, or the only one. Collective over all ranks."""
        members = tuple(sorted(set(pp_ranks)))
        if len(members) < 2:
            return None
        if members not in self._ties:
            self._ties[members] = self._new_group(members)
        return self._ties[members]

    def share_group(self, parts: int) -> dist.ProcessGroup | None:
        """The neighbours of this TP group that hold the same one of ``parts`` parts of a weight; None where this
        rank is alone. Collective over all ranks."""
        if self.tp_size == 1 or parts == self.tp_size:
            return None
        if parts == 1:
            return self.tp_group
        if parts not in self._shares:
            size = self.tp_size // parts
            me = self.ranks[self.pp_rank][self.tp_rank]
            for row in (row for table in self.tables for row in table):
                for start in range(0, self.tp_size, size):
                    members = row[start : start + size]
                    group = dist.new_group(members, timeout=self.timeout)
                    if me in members:
                        self._shares[parts] = group
            # Communicators are made on first use (NCCL): use it now, where every member is here.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._shares[parts])
        return self._shares[parts]

    def _new_group(self, pp_ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of these pipeline ranks in every column of every replica; returns this one's where this rank is
        in it.

        All ranks make all groups: with ``use_local_synchronization`` torch derives a group's name from the number
        of groups that a rank has, which differs between the two ends of a channel, and they never meet.
        """
        mine: dist.ProcessGroup | None = None
        eager = self.device if self.device.type == "cuda" else None
        me = self.ranks[self.pp_rank][self.tp_rank]
        for table in self.tables:
            for column in range(self.tp_size):
                ranks = [table[r][column] for r in pp_ranks]
                group = dist.new_group(ranks, timeout=self.timeout, device_id=eager)
                if me in ranks:
                    mine = group
        if mine is not None:
            emulate.name_axis(mine, "pp")
            # Where torch does not connect a group at once, it is used here, where every member is.
            dist.all_reduce(torch.zeros(1, device=self.device), group=mine)
        return mine


def make_mesh(
    device_mesh: DeviceMesh | None,
    *,
    tp_size: int | None,
    pp_size: int | None,
    dp_size: int | None,
    agree: Callable[[], None] = lambda: None,
) -> Mesh:
    """Check the sizes against the world and make the groups.

    ``agree``: called when the default process group is there and no other group has been made, to find out whether
    all ranks ask for the same. Raises :class:`BraidError` before any collective where they do not fit.
    """
    if device_mesh is not None:
        agree()
        return _from_device_mesh(device_mesh, (tp_size, pp_size, dp_size))
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    dp, pp, tp = _sizes(world, dp_size, pp_size, tp_size)
    device = _device()
    if world == 1 and not dist.is_initialized():
        return Mesh(device=device)
    join()
    agree()
    shape, names = ((pp, tp), ("pp", "tp")) if dp == 1 else ((dp, pp, tp), ("dp", "pp", "tp"))
    return _from_device_mesh(init_device_mesh(device.type, shape, mesh_dim_names=names))


def join() -> None:
    """Join the default process group that a launcher's environment describes, if this process is in none yet."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _device()
        dist.init_process_group()


def _sizes(world: int, dp_size: int | None, pp_size: int | None, tp_size: int | None) -> tuple[int, int, int]:
    """dp, pp, tp: one replica unless more are asked for; of the other two, a missing one is what the world leaves."""
    for name, size in (("pp_size", pp_size), ("tp_size", tp_size), ("dp_size", dp_size)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise BraidError(f"{name}={size} must be a whole number, 1 or more")
    dp = dp_size or 1
    left = max(world // dp, 1)
    if tp_size is None and pp_size is None:
        tp_size, pp_size = 1, left
    elif tp_size is None and pp_size is not None:
        tp_size = max(left // pp_size, 1)
    elif pp_size is None and tp_size is not None:
        pp_size = max(left // tp_size, 1)
    pp, tp = pp_size or 1, tp_size or 1
    needed = dp * pp * tp
    if needed != world:
        more = "" if dp_size is None else f" x dp_size={dp}"
        replicas = world // needed if dp_size is None and world % needed == 0 else 1
        way = f", pass dp_size={replicas} for as many replicas," if replicas > 1 else ""
        raise BraidError(
            f"tp_size={tp} x pp_size={pp}{more} needs {needed} processes, but there are {world}; start {needed} "
            f"(torchrun --nproc-per-node {needed} ...){way} or choose sizes whose product is {world}"
        )
    return dp, pp, tp


AXES = ("dp", "pp", "tp")


def _from_device_mesh(mesh: DeviceMesh, sizes: Sequence[int | None] = ()) -> Mesh:
    if any(size is not None for size in sizes):
        raise BraidError("give device_mesh or the sizes (tp_size, pp_size, dp_size), not both")
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(AXES):
        raise BraidError(
            f'the axes of device_mesh are {names}; name them "pp" and "tp", and "dp" for replicas'
        )
    if "tp" in names and names[-1] != "tp":
        raise BraidError(
            f'put the "{names[-1]}" axis of device_mesh before "tp": tensor-parallel ranks must be neighbours'
        )
    tables = _tables(mesh, names)
    if (count := mesh.mesh.numel()) != dist.get_world_size():
        raise BraidError(
            f"device_mesh has {count} ranks, but the world has {dist.get_world_size()}; the mesh must hold all of "
            'them (a "dp" axis makes replicas)'
        )
    me, world = dist.get_rank(), dist.group.WORLD
    dp_rank, pp_rank, tp_rank = next(
        (d, r, t)
        for d, table in enumerate(tables)
        for r, row in enumerate(table)
        for t, rank in enumerate(row)
        if rank == me
    )
    device = _device(mesh.device_type)
    timeout = timeout_of(world, device) if world is not None else None
    pp_group = mesh["pp"].get_group() if "pp" in names else None
    if len(tables[0][0]) == 1:
        emulate.name_axis(pp_group, "pp")  # the default group: torch makes none for an axis over all ranks
    made = Mesh(
        device=device,
        pp_size=len(tables[0]),
        tp_size=len(tables[0][0]),
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        ranks=tables[dp_rank],
        tp_group=mesh["tp"].get_group() if "tp" in names else None,
        pp_group=pp_group,
        model_group=world,
        host_group=_host_group(world, timeout),
        timeout=timeout,
        dp_rank=dp_rank,
        world_group=world,
    )
    made.world_host_group = made.host_group
    if len(tables) > 1:
        _add_replicas(made, tables, mesh["dp"].get_group())
    return made


def _tables(mesh: DeviceMesh, names: Sequence[str]) -> list[list[list[int]]]:
    """Global ranks, [dp][pp][tp], whatever the order of the axes, and with those that are left out."""
    ranks = mesh.mesh
    for axis in AXES:
        if axis not in names:
            ranks, names = ranks.unsqueeze(-1), (*names, axis)
    return ranks.permute([list(names).index(axis) for axis in AXES]).tolist()  # type: ignore[no-any-return]


def _add_replicas(made: Mesh, tables: list[list[list[int]]], dp_group: dist.ProcessGroup) -> None:
    """Make the groups of each replica and of each place in them. Collective over all ranks."""
    made.dp_size, made.dp_group, made.replicas = len(tables), dp_group, tables
    own_host = made.host_group is not made.world_group
    for d, table in enumerate(tables):
        members = [rank for row in table for rank in row]
        group = dist.new_group(members, timeout=made.timeout)
        host = dist.new_group(members, backend="gloo", timeout=made.timeout) if own_host else group
        if d == made.dp_rank:
            made.model_group, made.host_group = group, host
    emulate.name_axis(dp_group, "dp")
    # Connected here, where every rank comes by, and not in the middle of a program (NCCL connects on first use).
    for group in (dp_group, made.model_group):
        dist.all_reduce(torch.zeros(1, device=made.device), group=group)


def _host_group(world: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """``world`` where it takes CPU tensors, else a gloo group of its ranks. Collective over all ranks."""
    if world is None or serves(world, torch.device("cpu")):
        return world
    return dist.new_group(backend="gloo", timeout=timeout)


def _device(kind: str | None = None) -> torch.device:
    """This rank's device: the one that the default group is bound to, else this process's share of the machine's."""
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if dist.is_initialized() else None
    if bound is not None:
        return torch.device(bound)
    local = int(os.environ.get("LOCAL_RANK", "-1"))
    # A launcher may show each rank one GPU alone: then that is number 0, whatever the rank is.
    known = 0 <= local < torch.cuda.device_count()
    device = torch.device("cuda", local if known else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device
