"""Runs inside ranks: what the tests of the emulated cluster do there."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link
from fxbraid.runtime.launch import process_group

MS = 1e-3
TP, PP = Link(10 * MS, 1e6), Link(20 * MS, 1e6)  # 1 kB takes 1 ms
SUM = "sum"


def timed(body: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of the slowest rank on the cluster's clock, and what the body returned."""
    with emulate.stopwatch() as reading:
        value = body()
    return round(reading.seconds * 1e3, 9), value


def tour() -> dict[str, Any]:
    """In each of 2 x 2 ranks: one of everything, on the virtual clock."""
    torch.set_num_threads(1)
    with emulate.process_group(Cluster(TP, PP), timeout_s=30):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        found: dict[str, Any] = {}
        for part in (collectives, overlap, functional, messages, dtensors, slow):
            found |= {f"{part.__name__}: {name}": timed(body) for name, body in part(mesh).items()}
        return found


def ones(count: int = 250) -> Tensor:
    return torch.full((count,), 1.0)


def collectives(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    rank, tp = dist.get_rank(), mesh["tp"].get_group()
    here = dist.get_group_rank(tp, rank)
    peers = dist.get_process_group_ranks(tp)

    def reduce_pp() -> float:
        value = ones()
        dist.all_reduce(value, group=mesh["pp"].get_group())
        return float(value[0])

    def gather() -> list[float]:
        parts = [torch.zeros(250) for _ in range(2)]
        dist.all_gather(parts, ones() * here, group=tp)
        return [float(part[0]) for part in parts]

    def gather_single() -> list[float]:
        whole = torch.zeros(500)
        dist.all_gather_into_tensor(whole, ones() * here, group=tp)
        return [float(whole[0]), float(whole[-1])]

    def scatter_single() -> float:
        part = torch.zeros(250)
        dist.reduce_scatter_tensor(part, torch.cat([ones(), 2 * ones()]), group=tp)
        return float(part[0])

    def exchange() -> list[float]:
        got = torch.zeros(2)
        dist.all_to_all_single(got, torch.tensor([here * 10.0, here * 10.0 + 1]), group=tp)
        return got.tolist()

    def broadcast() -> float:
        value = ones() * rank
        dist.broadcast(value, peers[0], group=tp)
        return float(value[0]) - peers[0]

    def scatter() -> float:
        part = torch.zeros(250)
        dist.scatter(part, [ones(), 2 * ones()] if here == 0 else None, peers[0], group=tp)
        return float(part[0]) - here

    def objects() -> list[Any]:
        values: list[Any] = [None, None]
        dist.all_gather_object(values, {"rank": here}, group=tp)
        return [value["rank"] for value in values]

    def barrier() -> None:
        emulate.device_time(rank * MS)
        dist.barrier()

    return {
        "all_reduce over the pp axis": reduce_pp,
        "all_gather": gather,
        "all_gather_into_tensor": gather_single,
        "reduce_scatter_tensor": scatter_single,
        "all_to_all_single": exchange,
        "broadcast": broadcast,
        "scatter": scatter,
        "barrier": barrier,
        "objects": lambda: objects() == [0, 1],
    }


def overlap(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    tp = mesh["tp"].get_group()
    all_ranks = dist.new_group([0, 1, 2, 3])

    def launch(group: Any = tp) -> dist.Work:
        work = dist.all_reduce(torch.zeros(0), group=group, async_op=True)
        assert work is not None
        return work

    def three() -> list[float]:
        start, works = emulate.now(), [launch() for _ in range(3)]
        ends = []
        for work in works:
            work.wait()
            ends.append(round((emulate.now() - start) / MS, 6))
        return ends

    def two_groups() -> None:
        for work in [launch(), launch(all_ranks)]:
            work.wait()

    def hide(seconds: float) -> None:
        work = launch()
        emulate.device_time(seconds)
        work.wait()

    def late() -> None:
        if dist.get_rank() % 2:
            emulate.device_time(7 * MS)
        work = launch()
        emulate.device_time(1 * MS)
        work.wait()

    def never_waited() -> None:
        launch()
        launch().wait()

    def completed() -> list[bool]:
        work = launch()
        emulate.device_time(9 * MS)
        early = work.is_completed()
        work.wait()
        return [early, work.is_completed()]

    return {
        "three queue": three,
        "two groups do not": two_groups,
        "hidden in part": lambda: hide(4 * MS),
        "hidden": lambda: hide(15 * MS),
        "a late rank": late,
        "never waited for": never_waited,
        "is_completed": completed,
    }


def functional(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    name = mesh["tp"].get_group().group_name
    ops = torch.ops._c10d_functional

    def braid(x: Tensor) -> Tensor:
        first = ops.all_reduce(x * 2, SUM, name)
        second = ops.all_reduce(x * 3, SUM, name)
        return ops.wait_tensor(first) + ops.wait_tensor(second)

    def gathered(x: Tensor) -> Tensor:
        return ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name)) * 2

    compiled, compiled_gather = torch.compile(braid), torch.compile(gathered)
    compiled(ones()), compiled_gather(ones())  # the first call traces
    return {
        "eager": lambda: float(braid(ones())[0]),
        "compiled": lambda: float(compiled(ones())[0]),
        "all_gather eager": lambda: float(gathered(ones()).sum()),
        "all_gather compiled": lambda: float(compiled_gather(ones()).sum()),
    }


def messages(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    rank, pp = dist.get_rank(), mesh["pp"].get_group()
    row, peer = dist.get_group_rank(pp, rank), (rank + 2) % 4

    def one_way() -> float:
        if row == 0:
            emulate.device_time(3 * MS)
            dist.send(ones() * 5, peer, group=pp)
            return 5.0
        value = torch.zeros(250)
        work = dist.irecv(value, peer, group=pp)
        assert work is not None
        work.wait()
        return float(value[0])

    def late_receiver() -> None:
        value = ones()
        if row == 0:
            work = dist.isend(value, peer, group=pp)
        else:
            emulate.device_time(3 * MS)
            work = dist.irecv(value, peer, group=pp)
        assert work is not None
        work.wait()

    def four_queue() -> None:
        value = [ones() for _ in range(4)]
        works = [(dist.irecv if row else dist.isend)(v, peer, group=pp) for v in value]
        for work in works:
            assert work is not None
            work.wait()

    others = [dist.new_group([column, column + 2]) for column in (0, 1)]

    def two_groups() -> None:
        works = [(dist.irecv if row else dist.isend)(ones(), peer, group=g) for g in (pp, others[rank % 2])]
        for work in works:
            assert work is not None
            work.wait()

    def both_ways() -> float:
        mine, theirs = ones() * rank, torch.zeros(250)
        ops = [dist.P2POp(dist.isend, mine, peer, pp), dist.P2POp(dist.irecv, theirs, peer, pp)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return float(theirs[0]) - peer

    return {
        "one way": one_way,
        "a late receiver": late_receiver,
        "four queue": four_queue,
        "two groups, one wire": two_groups,
        "both ways at once": both_ways,
    }


def dtensors(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    x, w = torch.randn(4, 8), torch.randn(8, 16)

    def row_parallel() -> float:
        left = distribute_tensor(x, mesh["tp"], [Shard(1)], src_data_rank=None)
        right = distribute_tensor(w, mesh["tp"], [Shard(0)], src_data_rank=None)
        product = left @ right
        assert isinstance(product, DTensor)
        whole = product.redistribute(placements=[Replicate()]).to_local()
        return float((whole - x @ w).abs().max()) < 1e-5

    return {"row parallel": row_parallel}


def slow(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    tp = mesh["tp"].get_group()

    def beside() -> None:
        emulate.change(slowdown=2.0)
        work = dist.all_reduce(torch.zeros(0), group=tp, async_op=True)
        assert work is not None
        emulate.device_time(8 * MS)  # 10 ms beside it do 5 of 8
        work.wait()
        emulate.device_time(2 * MS)
        emulate.change(slowdown=1.0)

    def faster_link() -> None:
        emulate.change(tp_link=Link(1 * MS))
        dist.all_reduce(ones(), group=tp)
        emulate.change(tp_link=TP)

    return {"slowdown 2": beside, "another link": faster_link}


def real_clock(clock: Any, asked_s: float) -> dict[str, Any]:
    """In 2 ranks: asked against got on a clock that sleeps, and the processor's time beside it."""
    torch.set_num_threads(1)
    link = Link(asked_s)
    with emulate.process_group(Cluster(link, link, clock=clock), timeout_s=30):
        rank = dist.get_rank()
        dist.all_reduce(ones())

        def reduce() -> None:
            dist.all_reduce(ones())

        def two() -> None:
            works = [dist.all_reduce(ones(), async_op=True) for _ in range(2)]
            for work in works:
                assert work is not None
                work.wait()

        def message() -> None:
            work = (dist.irecv if rank else dist.isend)(ones(), 1 - rank)
            assert work is not None
            work.wait()

        def hide() -> None:
            work = dist.all_reduce(ones(), async_op=True)
            assert work is not None
            if clock == "wall":
                time.sleep(asked_s)
            else:
                emulate.device_time(asked_s)
            work.wait()

        def future() -> float:
            work = dist.all_reduce(ones(), async_op=True)
            assert work is not None
            return float(work.get_future().wait()[0][0])

        message()
        used = time.process_time()
        found = {body.__name__: timed(body) for body in (reduce, two, message, hide, future)}
        found["processor"] = time.process_time() - used
        with emulate.stopwatch() as reading:
            reduce()
        found["error"], found["label"] = reading.error, reading.label
        return found


def gpipe(m: int) -> list[tuple[float, list[float], str]]:
    """In 2 ranks: torch's own GPipe on hand-cut stages, on gloo and twice on the virtual clock, with and without
    rendezvous: (virtual ms, losses, digest of the gradients) of each."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.set_num_threads(1)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return emulate.spend(y, 2 * MS, 4 * MS) if emulate.active() else y

    def run(reading: Any) -> tuple[float, list[float], str]:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        module = Stage()
        x = torch.zeros(2, 8, device="meta", requires_grad=rank > 0)
        y = torch.zeros(2, 8, device="meta", requires_grad=True)
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=x, output_args=y)
        schedule = ScheduleGPipe(stage, m, loss_fn=lambda out, target: ((out - target) ** 2).mean())
        torch.manual_seed(9)
        batch, target = torch.randn(2 * m, 8), torch.randn(2 * m, 8)
        losses: list[Tensor] = []
        seconds = 0.0
        for _ in range(2):
            module.zero_grad()
            losses.clear()
            with reading() as clock:
                schedule.step(batch) if rank == 0 else schedule.step(target=target, losses=losses)
            seconds = getattr(clock, "seconds", 0.0)
        digest = hashlib.sha256()
        for parameter in module.parameters():
            assert parameter.grad is not None
            digest.update(parameter.grad.numpy().tobytes())
        return round(seconds * 1e3, 9), [loss.item() for loss in losses], digest.hexdigest()

    with process_group(timeout_s=30):
        found = [run(nullcontext)]
    for rendezvous in (True, False):
        cluster = Cluster(Link(0.0), Link(1 * MS, rendezvous=rendezvous))
        with emulate.process_group(cluster, timeout_s=30):
            found.append(run(emulate.stopwatch))
    return found


def missing_peer() -> None:
    """In 2 ranks: one never comes to a collective."""
    with emulate.process_group(Cluster(Link(0.0), Link(0.0)), timeout_s=3):
        if dist.get_rank() == 0:
            dist.all_reduce(ones())
        else:
            time.sleep(20)
