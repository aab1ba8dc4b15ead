"""What runs inside ranks and processes for the tests of checkpoints."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxbraid
from fxbraid import BraidedModel, BraidError, Checkpointer
from fxbraid.checkpoint.folder import complete
from fxbraid.runtime.launch import process_group

from . import families
from .parity import share_traces
from .tiny import batch, qwen2

ROWS = 8
#: done when a run in ranks is saved
STEPS = 2


def braid(model: nn.Module, **options: Any) -> BraidedModel:
    rows = ROWS // options.get("dp_size", 1)
    return fxbraid.braid(model.train(), batch(rows), **{"n_microbatches": 4, "compile": False, **options})


def optimizer_of(model: BraidedModel, lr: float = 3e-3) -> torch.optim.Optimizer:
    """AdamW in two groups, of which a rank may have an empty one."""
    named = list(model.named_parameters())
    decay = [p for _, p in named if p.dim() > 1]
    rest = [p for _, p in named if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return fxbraid.zero_optimizer(model, torch.optim.AdamW, groups, lr=lr, eps=1e-5)


def train(model: BraidedModel, optimizer: torch.optim.Optimizer, step: int, scheduler: Any = None) -> float:
    """One step on the batch of ``step``; its loss."""
    replicas, here = model.mesh.dp_size, model.mesh.dp_rank
    loss = model.step(**{name: rows.chunk(replicas)[here] for name, rows in batch(ROWS, seed=step).items()})
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    return float(loss)


# -- resuming elsewhere


def build(name: str) -> nn.Module:
    """A tied one of four layers, with two key-value heads and a vocabulary that no tp_size divides; ``phi3``: q, k, v
    are one weight, gate and up are another."""
    sizes: dict[str, Any] = {"vocab_size": 97, "tie_word_embeddings": True, "num_key_value_heads": 2}
    if name == "qwen2":
        return qwen2(**sizes)
    return families.make(families.FAMILIES[name], num_hidden_layers=4, **sizes).float()


def save_in_ranks(place: Path, name: str, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Train 2 steps on 2 x 2, save, train 2 more; resume on 2 x 2 and on each of ``layouts``: all losses."""
    share_traces()
    with process_group(timeout_s=60, device_type="cpu"):
        same = {"tp_size": 2, "pp_size": 2}
        model = braid(build(name), **same)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(STEPS):
            train(model, optimizer, step, scheduler)
        with Checkpointer(place, timeout_s=60, max_file_bytes=30_000) as saving:
            saving.save(STEPS, model, optimizer, scheduler, data={"at": STEPS})
            wanted = [train(model, optimizer, STEPS + k, scheduler) for k in range(2)]
        model.save_pretrained(place / "hf", max_shard_size="30KB")
        damaged = damage_in_ranks(place, model)
        losses = [resume(place, model), *(resume(place, elsewhere(name, layout)) for layout in layouts)]
        if (
            "dp_size" in layouts[-1]
        ):  # its optimizer's state lies once over the replicas: saved from there, too
            replicated = elsewhere(name, layouts[-1])
            own = optimizer_of(replicated)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(own, 10)
            for step in range(STEPS):
                train(replicated, own, step, schedule)
            with Checkpointer(place / "dp", timeout_s=60) as saving:
                saving.save(STEPS, replicated, own, schedule, data={"at": STEPS})
            losses += [resume(place / "dp", model), resume(place / "dp", replicated)]
        return {"losses": [wanted, *losses], "damaged": damaged}


def resume_in_ranks(place: Path, name: str, layout: dict[str, Any]) -> list[float]:
    with process_group(timeout_s=60, device_type="cpu"):
        return resume(place, elsewhere(name, layout))


def elsewhere(name: str, layout: dict[str, Any]) -> BraidedModel:
    return braid(build(name), **layout)


def resume(place: Path, model: BraidedModel) -> list[float]:
    """The losses of the next two steps after loading into a model that has other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    optimizer = optimizer_of(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    data: dict[str, Any] = {}
    restored = Checkpointer(place).load(model, optimizer, scheduler, data=data)
    assert restored is not None and restored.step == STEPS and data == {"at": STEPS}
    return [train(model, optimizer, STEPS + k, scheduler) for k in range(2)]


def damage_in_ranks(place: Path, model: BraidedModel) -> str:
    """One bit is flipped in the file of another rank: what every rank says."""
    if dist.get_rank() == 0:
        for name in complete(place):
            shutil.copytree(place / name, place / "damaged" / name)
        path = sorted((place / "damaged").rglob("model-00002-*.safetensors"))[-1]
        data = bytearray(path.read_bytes())
        data[-1] ^= 4
        path.write_bytes(data)
    dist.barrier()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        Checkpointer(place / "damaged").load(model)
    except BraidError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return str(error)
    raise AssertionError("nobody noticed")


# -- kills


def kill_while_saving(root: str, kills: int, seed: int = 0) -> int:
    """A child saves in a loop, every tensor being the step; it is killed at a random moment, and what is there is
    loaded: at least the last step that it had reported, and nothing but that step. Returns how often that was so."""
    model = braid(qwen2(num_hidden_layers=2))
    moments = random.Random(seed)
    good = 0
    for k in range(kills):
        place = Path(root) / str(k % 2)  # also on top of what an earlier kill has left
        start = max([0, *Checkpointer(place).steps()])
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _save_for_ever(model, place, start, writing)
        os.close(writing)
        first = os.read(reading, 8)  # one is complete
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = first
        while more := os.read(reading, 1 << 16):
            told += more
        os.close(reading)
        reported = int.from_bytes(told[-8:], "little")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        restored = Checkpointer(place).load(model, optimizer, verify=True)
        assert restored is not None and restored.step in (reported, reported + 1), (restored, reported)
        assert restored.extra == {"step": restored.step}
        assert all(bool((p == restored.step).all()) for p in model.parameters())
        assert all(bool((s["momentum_buffer"] == restored.step).all()) for s in optimizer.state.values())
        good += 1
    return good


def _save_for_ever(model: BraidedModel, place: Path, step: int, writing: int) -> None:
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        saving = Checkpointer(place, keep=2)
        while True:
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
                    optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, step)}
            saving.save(step, model, optimizer, extra={"step": step}, blocking=True)
            os.write(writing, step.to_bytes(8, "little"))
    finally:
        os._exit(1)


def die_while_saving(root: str, victim: int, after_s: float) -> None:
    """Four ranks save in a loop, and one of them is killed."""
    with process_group(timeout_s=30, device_type="cpu"):
        model = braid(qwen2(), tp_size=2, pp_size=2)
        saving = Checkpointer(root, timeout_s=10)
        step, until = 0, None
        while True:
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            saving.save(step, model)
            if step == 2 and dist.get_rank() == victim:
                until = time.monotonic() + after_s
            if until is not None and time.monotonic() > until:
                os.kill(os.getpid(), signal.SIGKILL)
