"""Ranks and groups: who holds which chunk, who shares a tensor-parallel group, who talks to whom.

A :class:`Mesh` is made once per ``braid``. With one process and no process group every group is None and nothing
here communicates.

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
    """This process's place among pp_size x tp_size ranks (pp the slower axis)."""

    device: torch.device
    pp_size: int = 1
    tp_size: int = 1
    pp_rank: int = 0
    tp_rank: int = 0
    #: global ranks, ranks[pp][tp]
    ranks: list[list[int]] = field(default_factory=lambda: [[0]])
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None
    #: the ranks of ``model_group``, for tensors of the host: another group only where that one takes CUDA tensors alone
    host_group: dist.ProcessGroup | None = None
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
    def model_rank(self) -> int:
        """This process's place in ``model_group``."""
        return dist.get_rank(self.model_group) if self.model_group is not None else 0

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
            for r, row in enumerate(self.ranks):
                for start in range(0, self.tp_size, size):
                    group = dist.new_group(row[start : start + size], timeout=self.timeout)
                    if r == self.pp_rank and start <= self.tp_rank < start + size:
                        self._shares[parts] = group
            # Communicators are made on first use (NCCL): use it now, where every member is here.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._shares[parts])
        return self._shares[parts]

    def _new_group(self, pp_ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of these pipeline ranks in every column; returns this column's where this rank is in it.

        All ranks make all groups: with ``use_local_synchronization`` torch derives a group's name from the number
        of groups that a rank has, which differs between the two ends of a channel, and they never meet.
        """
        mine: dist.ProcessGroup | None = None
        eager = self.device if self.device.type == "cuda" else None
        for column in range(self.tp_size):
            ranks = [self.ranks[r][column] for r in pp_ranks]
            group = dist.new_group(ranks, timeout=self.timeout, device_id=eager)
            if column == self.tp_rank and self.pp_rank in pp_ranks:
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
    if dp_size not in (None, 1):
        raise BraidError(f"dp_size={dp_size}: the data-parallel axis is not supported yet; use dp_size=1")
    if device_mesh is not None:
        agree()
        return _from_device_mesh(device_mesh, tp_size, pp_size)
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    pp, tp = _sizes(world, pp_size, tp_size)
    device = _device()
    if world == 1 and not dist.is_initialized():
        return Mesh(device=device)
    join()
    agree()
    mesh = init_device_mesh(device.type, (pp, tp), mesh_dim_names=("pp", "tp"))
    return _from_device_mesh(mesh, None, None)


def join() -> None:
    """Join the default process group that a launcher's environment describes, if this process is in none yet."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _device()
        dist.init_process_group()


def _sizes(world: int, pp_size: int | None, tp_size: int | None) -> tuple[int, int]:
    for name, size in (("pp_size", pp_size), ("tp_size", tp_size)):
        if size is not None and size < 1:
            raise BraidError(f"{name}={size} must be 1 or more")
    if tp_size is None and pp_size is None:
        tp_size, pp_size = 1, world
    elif tp_size is None and pp_size is not None:
        tp_size = max(world // pp_size, 1)
    elif pp_size is None and tp_size is not None:
        pp_size = max(world // tp_size, 1)
    pp, tp = pp_size or 1, tp_size or 1
    if pp * tp != world:
        raise BraidError(
            f"tp_size={tp} x pp_size={pp} needs {tp * pp} processes, but there are {world}; start "
            f"{tp * pp} (torchrun --nproc-per-node {tp * pp} ...) or choose sizes whose product is {world}"
        )
    return pp, tp


def _from_device_mesh(mesh: DeviceMesh, tp_size: int | None, pp_size: int | None) -> Mesh:
    if tp_size is not None or pp_size is not None:
        raise BraidError("give device_mesh or the sizes (tp_size, pp_size), not both")
    names = mesh.mesh_dim_names or ()
    if not set(names) <= {"pp", "tp", "dp"} or not names:
        raise BraidError(f'the axes of device_mesh are {names}; name them "pp" and "tp"')
    if "dp" in names and mesh["dp"].size() > 1:
        raise BraidError('the data-parallel axis "dp" of device_mesh is not supported yet; use size 1')
    ranks = mesh.mesh
    for axis in ("pp", "tp"):
        if axis not in names:
            ranks = ranks.unsqueeze(0 if axis == "pp" else -1)
    order = [n for n in names if n in ("pp", "tp")]
    if order == ["tp", "pp"]:
        raise BraidError(
            'put the "pp" axis of device_mesh before "tp": tensor-parallel ranks must be neighbours'
        )
    table = ranks.reshape(ranks.shape[-2], ranks.shape[-1]).tolist()
    me = dist.get_rank()
    world = dist.group.WORLD
    pp_rank, tp_rank = next((r, t) for r, row in enumerate(table) for t, rank in enumerate(row) if rank == me)
    everyone = [rank for row in table for rank in row]
    if len(everyone) != dist.get_world_size():
        raise BraidError(
            f"device_mesh has {len(everyone)} ranks, but the world has {dist.get_world_size()}; the mesh must hold "
            "all of them (the data-parallel axis is not supported yet)"
        )
    device = _device(mesh.device_type)
    timeout = timeout_of(world, device) if world is not None else None
    pp_group = mesh["pp"].get_group() if "pp" in names else None
    if len(table[0]) == 1:
        emulate.name_axis(pp_group, "pp")  # the default group: torch makes none for an axis over all ranks
    return Mesh(
        device=device,
        pp_size=len(table),
        tp_size=len(table[0]),
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        ranks=table,
        tp_group=mesh["tp"].get_group() if "tp" in names else None,
        pp_group=pp_group,
        model_group=world,
        host_group=_host_group(world, timeout),
        timeout=timeout,
    )


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
