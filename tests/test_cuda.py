"""The CUDA path: what a CPU can check of it, and the rest where there are GPUs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxbraid
from fxbraid import batch as batches
from fxbraid.runtime import launch as launching
from fxbraid.runtime import mesh as meshes
from fxbraid.runtime.launch import launch, process_group
from fxbraid.runtime.mesh import Mesh
from fxbraid.runtime.offload import Away, Back, CudaLanes, HostMemory, Offload, Reload
from fxbraid.runtime.p2p import Outbox, Send

from .tiny import batch, qwen2

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
one_gpu = pytest.mark.skipif(GPUS < 1, reason=f"needs a GPU; this machine has {GPUS}")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs; this machine has {GPUS}")

CUDA = torch.device("cuda", 1)


# -- on any machine


class Calls(list[Any]):
    """Stands in for a function and keeps what it was called with."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.append((args, kwargs))
        return self.result


@pytest.mark.parametrize(("device", "eager"), [(CUDA, CUDA), (torch.device("cpu"), None)])
def test_groups_are_connected_while_they_are_made(
    device: torch.device, eager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, used = Calls(result="group"), Calls()
    monkeypatch.setattr(meshes, "dist", SimpleNamespace(new_group=new, all_reduce=used))
    monkeypatch.setattr(meshes.torch, "zeros", lambda *shape, device: ("zeros", device))
    mesh = Mesh(device, pp_size=2, tp_size=2, pp_rank=1, ranks=[[0, 1], [2, 3]], timeout=timedelta(seconds=9))
    assert mesh._new_group([0, 1]) == "group"
    assert [args[0] for args, _ in new] == [[0, 2], [1, 3]]  # every rank makes every column's group
    assert all(kwargs == {"timeout": timedelta(seconds=9), "device_id": eager} for _, kwargs in new)
    assert used == [((("zeros", device),), {"group": "group"})]  # its own column's, once


def test_every_channel_and_the_tensor_parallel_group_have_communicators_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    def new_group(ranks: Any, **_: Any) -> object:
        made.append(object())
        return made[-1]

    monkeypatch.setattr(meshes, "dist", SimpleNamespace(new_group=new_group, all_reduce=Calls()))
    tp = object()
    mesh = Mesh(torch.device("cpu"), pp_size=2, ranks=[[0], [1]], tp_group=tp)  # type: ignore[arg-type]
    groups = mesh.channel_groups(fxbraid.schedule.build("stp", p=2, m=4))
    assert (
        len(groups) == 4 == len({id(group) for group in groups.values()})
    )  # down, up, and both for gradients
    assert tp not in groups.values()


def test_which_gpu_a_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Calls()
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert meshes._device("cuda") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # CUDA_VISIBLE_DEVICES: one for each rank
    assert meshes._device("cuda") == torch.device("cuda", 0)
    assert [args[0].index for args, _ in chosen] == [3, 0]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(meshes.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=CUDA)))
    assert meshes._device("cuda") == CUDA
    assert meshes._device("cpu") == torch.device("cpu")


def test_host_tensors_have_a_group_where_the_default_one_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, *kinds: str) -> None:
            self.kinds = kinds

        def _get_backend(self, device: torch.device) -> object:
            if device.type not in self.kinds:
                raise RuntimeError(f"No backend type associated with device type {device.type}")
            return object()

    new = Calls(result="gloo group")
    monkeypatch.setattr(meshes, "dist", SimpleNamespace(new_group=new))
    both, cuda_alone = Group("cpu", "cuda"), Group("cuda")
    assert meshes._host_group(both, None) is both and new == []  # type: ignore[arg-type]
    assert meshes._host_group(cuda_alone, timedelta(seconds=5)) == "gloo group"  # type: ignore[arg-type, comparison-overlap]
    assert new == [((), {"backend": "gloo", "timeout": timedelta(seconds=5)})]
    assert meshes._host_group(None, None) is None


def test_the_process_group_is_bound_to_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, chosen = Calls(), Calls()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    monkeypatch.setattr(dist, "init_process_group", joined)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launching.init_process_group(timeout_s=7) == CUDA
    assert joined == [(("cpu:gloo,cuda:nccl",), {"timeout": timedelta(seconds=7), "device_id": CUDA})]
    assert chosen == [((CUDA,), {})]


def test_inputs_go_to_a_gpu_from_pinned_memory_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    copies = []

    def pin(self: Tensor) -> Tensor:
        pinned.append(self)
        return self.clone()

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        copies.append((self, device, non_blocking))
        return self

    monkeypatch.setattr(Tensor, "is_pinned", lambda self: False)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    ids = torch.ones(4, 3)
    moved = batches.move({"input_ids": ids, "use_cache": False}, CUDA)
    assert moved["use_cache"] is False and pinned[0] is ids and len(pinned) == 1
    (source, device, non_blocking) = copies[0]
    assert source is not ids and (device, non_blocking) == (CUDA, True)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: True)
    batches.move({"input_ids": ids}, CUDA)  # pinned by the user's loader
    assert len(pinned) == 1 and copies[-1][0] is ids
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: False)
    batches.move({"input_ids": ids}, torch.device("cpu"))
    assert len(pinned) == 1


def test_a_send_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pending:
        def is_completed(self) -> bool:
            return False

        def wait(self) -> bool:
            raise AssertionError("a send waited before the end of the step")

    sent = Calls(result=Pending())
    monkeypatch.setattr("fxbraid.runtime.p2p.dist", SimpleNamespace(isend=sent))
    outbox = Outbox()
    send = Send("group", 3, outbox)  # type: ignore[arg-type]
    values = [torch.arange(6.0).view(2, 3).t(), torch.zeros(2)]
    for _ in range(3):
        send(*values)
    assert len(sent) == 6 and len(outbox.tensors()) == 6
    assert all(
        args[0].is_contiguous() and args[1] == 3 and kwargs == {"group": "group"} for args, kwargs in sent
    )
    assert torch.equal(sent[0][0][0], values[0])


class Stream:
    """Stands in for a CUDA stream: what it was given, in order, in the log of all of them."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log, self.events = name, log, 0

    def record_event(self) -> str:
        self.events += 1
        self.log.append((self.name, "record", f"{self.name}{self.events}"))
        return f"{self.name}{self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, "wait", event))

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "wait all of", other.name))


class FakeStreams:
    """torch.cuda with streams that only take notes; a copy goes to the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.made = iter(("out", "back"))
        self.current = [Stream("compute", self.log)]
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(self.made), self.log))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        plain = Tensor.copy_

        def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            self.log.append((self.current[-1].name, "copy", non_blocking))
            return plain(target, source)

        monkeypatch.setattr(Tensor, "copy_", copy)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


def test_copies_to_the_host_have_streams_of_their_own_and_events_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeStreams(monkeypatch)
    asked = Calls(result=torch.empty(4096, dtype=torch.uint8))
    lanes = CudaLanes(CUDA)
    memory = HostMemory(lanes)
    memory.sizes = (4096,)
    a, b = torch.arange(6.0), torch.arange(8)
    wanted = [a.clone(), b.clone()]
    places = [SimpleNamespace(places=[(0, 0)]), SimpleNamespace(places=[(1, 0)])]
    with monkeypatch.context() as patch:
        patch.setattr("fxbraid.runtime.offload.torch.empty", pinned_or(torch.empty, asked))
        parked = Offload(places, memory)([a], [b], 0, (0, 1))  # type: ignore[arg-type]
    assert [kwargs for _, kwargs in asked] == [{"dtype": torch.uint8, "pin_memory": True}]
    # Out: behind what compute was given so far, without a wait of the host; an event behind each storage.
    assert cuda.log == [
        ("compute", "record", "compute1"),
        ("out", "wait", "compute1"),
        ("out", "copy", True),
        ("out", "record", "out1"),
        ("out", "copy", True),
        ("out", "record", "out2"),
    ]
    cuda.log.clear()
    # Compute waits for a storage's own copy before it is let go of.
    away = Away(lanes)
    parked = away(parked, (0,))
    assert cuda.log == [("compute", "wait", "out1")]
    assert [storage.here is None for (storage,) in parked.items] == [True, False]
    parked = away(parked, (1,))
    cuda.log.clear()
    # Back: behind what compute was given so far, which may still read what had that memory before.
    parked = Reload(lanes, torch.device("cpu"))(parked, (1, 0))
    assert cuda.log == [
        ("compute", "record", "compute2"),
        ("back", "wait", "compute2"),
        ("back", "copy", True),
        ("back", "record", "back1"),
        ("back", "copy", True),
        ("back", "record", "back2"),
    ]
    cuda.log.clear()
    boxes = Back(lanes)(parked)
    assert sorted(cuda.log) == [("compute", "wait", "back1"), ("compute", "wait", "back2")]
    assert torch.equal(boxes[0][0], wanted[0]) and torch.equal(boxes[1][0], wanted[1])
    cuda.log.clear()
    memory.drop()  # a step failed: what is computed next must not get memory that is still copied into
    assert cuda.log == [("compute", "wait all of", "out"), ("compute", "wait all of", "back")]
    assert memory.tensors() == []


def pinned_or(plain: Any, asked: Calls) -> Any:
    """torch.empty that takes notes of pinned memory, which there is none of without a GPU."""
    return lambda *args, **kwargs: (asked if kwargs.get("pin_memory") else plain)(*args, **kwargs)


# -- on GPUs


def plain(model: nn.Module, data: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model, in float64 on the CPU."""
    double = copy.deepcopy(model).double()
    loss = double(**data).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in double.named_parameters() if p.grad is not None}


def compare(tp: int, pp: int, m: int, compile: Any, schedule: str = "stp") -> tuple[float, float]:
    """On this rank: the largest relative errors of loss and gradients over two steps."""
    model, data = qwen2(num_hidden_layers=4), batch(2 * m)
    wanted, grads = plain(model, data)
    braided = fxbraid.braid(
        model, data, tp_size=tp, pp_size=pp, n_microbatches=m, compile=compile, schedule=schedule
    )
    braided.train()
    worst_loss = worst_grad = 0.0
    for _ in range(2):
        braided.zero_grad()
        loss = braided.step(**data)
        assert loss.device.type == "cuda"
        worst_loss = max(worst_loss, abs(float(loss) - float(wanted)) / abs(float(wanted)))
        for name, parameter in braided.named_parameters():
            whole = grads[name]
            shard = braided.plan.tp.params[name].take(whole, braided._mesh.tp_rank)
            assert parameter.grad is not None
            error = (parameter.grad.double().cpu() - shard).abs().max() / whole.abs().max()
            worst_grad = max(worst_grad, float(error))
    return worst_loss, worst_grad


def compare_in_rank(*args: Any) -> tuple[float, float]:
    with process_group(timeout_s=120, device_type="cuda"):
        return compare(*args)


@one_gpu
@pytest.mark.parametrize("compile", [False, "unit"])
def test_parity_on_one_gpu(compile: Any) -> None:
    loss, grad = compare(1, 1, 3, compile)
    assert loss <= 1e-5 and grad <= 1e-4


@two_gpus
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("schedule", ["stp", "1f1b"])
def test_parity_on_two_gpus(tp: int, pp: int, schedule: str) -> None:
    for loss, grad in launch(compare_in_rank, (tp, pp, 4, "unit", schedule), nproc=2, timeout_s=500):
        assert loss <= 1e-5 and grad <= 1e-4


def steps_without_a_wait(tp: int, pp: int, m: int) -> None:
    """Any operator that makes the host wait for the device raises."""
    data = batch(2 * m)
    model = fxbraid.braid(qwen2(), data, tp_size=tp, pp_size=pp, n_microbatches=m)
    model.train()
    for _ in range(2):  # the first calls of artefacts and communicators may wait
        model.step(**data)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model.zero_grad()
            model.step(**data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_without_a_wait_in_rank(tp: int, pp: int, m: int) -> None:
    with process_group(timeout_s=120, device_type="cuda"):
        steps_without_a_wait(tp, pp, m)


@one_gpu
def test_a_step_never_waits_for_the_device() -> None:
    steps_without_a_wait(1, 1, 3)


@one_gpu
def test_offload_changes_no_bit_and_holds_less_on_one_gpu() -> None:
    """gpipe on one rank holds all micro-batches; no operator of a step makes the host wait."""
    data = batch(16, seq=128)
    found = []
    for offload in (None, "chunk0"):
        model = fxbraid.braid(
            qwen2(hidden_size=128), data, n_microbatches=8, schedule="gpipe", compile=False, offload=offload
        )
        model.train()
        for _ in range(2):
            model.zero_grad()
            model.step(**data)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        model.zero_grad()
        loss = model.step(**data)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        found.append((loss.cpu(), [p.grad.cpu() for p in model.parameters() if p.grad is not None], peak))
        moved = model._offloading.own.moved(0) if model._offloading is not None else 0.0
        del model
    (loss, grads, peak), (other, others, lower) = found
    assert torch.equal(loss, other) and all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert moved == 0 or lower < peak


@two_gpus
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_step_of_two_ranks_never_waits_for_the_device(tp: int, pp: int) -> None:
    launch(steps_without_a_wait_in_rank, (tp, pp, 4), nproc=2, timeout_s=500)


@one_gpu
def test_memory_follows_the_schedule() -> None:
    """1F1B of one rank holds one micro-batch, GPipe all of them; what the allocator saw lies near what was counted."""
    m, data = 8, batch(32, seq=128)
    seen: dict[str, tuple[int, int]] = {}
    for name in ("1f1b", "gpipe"):
        model = fxbraid.braid(qwen2(hidden_size=128), data, n_microbatches=m, schedule=name)
        model.train()
        for _ in range(2):
            model.step(**data)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.step(**data)
        torch.cuda.synchronize()
        seen[name] = torch.cuda.max_memory_allocated() - before, model.measure_peak(**data)
        del model
    allocated, counted = zip(*seen.values(), strict=True)
    assert allocated[1] > 4 * allocated[0]
    assert allocated[1] == pytest.approx(counted[1], rel=0.3)  # temporaries inside a unit are not counted
