"""What every rank of a step will hold, before a tensor exists: its program, run on ghosts (:mod:`runtime.ledger`).

The program is the one that would run: the same blocks, units and instructions, the same generated code. Only the
modules that it calls are others: a unit knows from its graph what it makes, what its results keep and when it has read
its arguments for the last time (:mod:`passes.storages`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..passes.block import Block, BlockContext, Collectives, block_name, braid
from ..passes.buffers import Layout
from ..passes.compile import Compile
from ..passes.cost import nbytes
from ..passes.joint import Phase
from ..passes.offload import stored
from ..passes.pipeline import Lowered
from ..passes.program import ONE, Program, program, reduction
from ..schedule import Action, Schedule
from ..schedule.listorder import CostOrder
from ..schedule.lower import channels
from ..schedule.offload import OffloadPlan
from ..schedule.received import received
from ..simulate.memory import Memory, RankMemory
from .bind import Call, bind
from .ghost_offload import GhostAway, GhostBack, GhostOffload, GhostReload
from .ghosts import (
    GhostArrive,
    GhostOutbox,
    GhostPost,
    GhostReduce,
    GhostSend,
    GhostSlot,
    GhostUnit,
    Library,
    size_of,
)
from .ledger import Ghost, Ledger, Room, moved

#: Bytes that an optimizer keeps for each element of a parameter, in units of the parameter's own type.
OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "adam": 2, "sgd_momentum": 1, "sgd": 0}


@dataclass(frozen=True, slots=True)
class Setting:
    """What else decides about memory. accumulated_in: of a parameter's type, what its gradients add up in. masters:
    float32 parameters for the optimizer beside the narrow ones. optimizer: a name of ``OPTIMIZERS``, or bytes per
    element. shared_by: over how many replicas the optimizer's state lies. reduces: are there replicas? offload: what
    goes to the host and back, of the ranks that are looked at.
    """

    collectives: Collectives = "overlap"
    order: CostOrder | None = None
    compile: Compile = "unit"
    accumulated_in: Callable[[torch.dtype], torch.dtype] = field(default=lambda dtype: dtype)
    masters: bool = False
    optimizer: str | float = "adamw"
    shared_by: int = 1
    reduces: bool = False
    offload: OffloadPlan | None = None


def predict_memory(
    lowered: Lowered,
    schedule: Schedule,
    setting: Setting = Setting(),
    *,
    ranks: Iterable[int] | None = None,
    library: Library | None = None,
    label: str = "a traced model",
) -> Memory:
    """Over one step, from its beginning to behind the optimizer's state. ``lowered`` must hold the chunks of ``ranks``
    (default: all). ``library``: of another prediction from the same traces, which then need not be read again."""
    library = library or Library(fused=setting.compile is not False)
    chosen = range(schedule.p) if ranks is None else ranks
    notes = []
    if setting.compile is not False:
        notes.append("temporaries inside units are those of a fusion that leaves kernels' inputs in memory")
    if setting.reduces:
        notes.append(
            "gradients that go over the replicas lie where they add up; buckets are not counted apart"
        )
    made = tuple(_Rank(lowered, schedule, rank, setting, library).run() for rank in chosen)
    return Memory(str(schedule), label, made, tuple(notes))


class _Rank:
    def __init__(
        self, lowered: Lowered, schedule: Schedule, rank: int, setting: Setting, library: Library
    ) -> None:
        self.lowered, self.schedule, self.rank, self.setting = lowered, schedule, rank, setting
        self.chunks = {c: lowered.chunks[c] for c in schedule.placement.chunks_of(rank)}
        self.ledger = Ledger()
        self.nothing = Room(self.ledger, "parameters", 0, pinned=True)
        self.outbox = GhostOutbox(received(schedule, rank))
        self.slots: dict[int, Room] = {}
        self.grads = self._grads()
        self.context = BlockContext(
            chunks=self.chunks,
            modules=self._modules(library),
            tp_group="",
            collectives=setting.collectives,
            order=setting.order,
        )
        self.blocks: dict[str, Block] = {}
        self.program: Program = program(
            schedule,
            rank,
            chunks=self.chunks,
            block=self._block,
            modules=dict(self.context.modules),
            offload=setting.offload,
        )

    def _block(self, actions: tuple[Action, ...]) -> Block:
        name = block_name(actions)
        if name not in self.blocks:
            self.blocks[name] = braid(actions, self.context)
        return self.blocks[name]

    def _modules(self, library: Library) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {}
        for index, chunk in self.chunks.items():
            for unit in (unit for units in chunk.units.values() for unit in units):
                modules[unit.label] = GhostUnit(
                    chunk, unit, library, self.ledger, self.nothing, self.grads[index]
                )
            if self.setting.reduces:
                modules[reduction(index)] = GhostReduce()
            if self.setting.offload is not None:
                modules[f"offload_{index}"] = GhostOffload(stored(chunk))
        if self.setting.offload is not None:
            copies = {"away": GhostAway(), "reload": GhostReload(self.ledger), "back": GhostBack()}
            modules |= copies
        for channel, source, target in channels(self.schedule):
            label = f"{channel.phase}{channel.chunk}"
            if self.rank == source:
                modules[f"send_{label}"] = GhostSend(self.ledger, self.outbox, channel)
            elif self.rank == target:
                joint = self.chunks[channel.target].joint
                nodes = joint.boundary if channel.phase == "F" else joint.tangents
                layouts = [Layout.of(node.meta["val"]) for node in nodes]
                modules[f"post_{label}"] = GhostPost(self.ledger, layouts, self.slots)
                modules[f"arrive_{label}"] = GhostArrive(self.outbox)
        return modules

    def _grads(self) -> dict[int, dict[str, GhostSlot]]:
        found: dict[int, dict[str, GhostSlot]] = {}
        for index, chunk in self.chunks.items():
            vals = {
                name: out.meta["val"]
                for unit in chunk.units[Phase.W]
                for out, name in zip(unit.outs, unit.grads, strict=True)
                if name is not None
            }
            found[index] = {
                name: GhostSlot(self.ledger, val, self.setting.accumulated_in(self._dtype(index, name, val)))
                for name, val in vals.items()
            }
        return found

    def _dtype(self, index: int, name: str, val: Tensor) -> torch.dtype:
        """What the optimizer sees of a parameter."""
        own = next(
            (n.meta["val"] for n, known in self.chunks[index].joint.state.items() if known == name), val
        )
        return torch.float32 if self.setting.masters and own.dtype.itemsize < 4 else own.dtype

    def run(self) -> RankMemory:
        """One step."""
        ledger = self.ledger
        parameters, trained = self._parameters()
        ledger.add("parameters", parameters)
        ledger.add("optimizer", self._optimizer(trained))
        for number, layout in enumerate(self.program.slots):
            self.slots[number] = Room(ledger, "communication", size_of(layout), pinned=True)
        ledger.mark("start")
        call = bind(self.program.graph_module, self._around)
        results = call(*(self._input(name) for name in self.program.inputs))
        self.outbox.flush()
        ledger.step = len(self.schedule.actions[self.rank])
        ledger.mark("messages")
        del results
        published = sum(
            val.numel() * val.dtype.itemsize
            for val in trained.values()
            if self.setting.accumulated_in(val.dtype) is not val.dtype
        )
        ledger.add("gradients", published)
        ledger.mark("gradients")
        steps = tuple(map(str, self.schedule.actions[self.rank]))
        return RankMemory(self.rank, tuple(ledger.samples), steps)

    def _input(self, name: str) -> Any:
        ghost = Ghost(self.nothing, 0)
        return ghost if name == ONE else [ghost] * self.schedule.m

    def _around(self, name: str, module: nn.Module, call: Call) -> Call:
        ledger = self.ledger
        block = next((b for b in self.blocks.values() if b.graph_module is module), None)
        if block is None:

            def small(*args: Any) -> Any:
                result = call(*args)
                ledger.mark(name)
                return result

            return small
        names = [name for names in block.outputs for name in names]

        def whole(*args: Any) -> Any:
            ledger.step += 1
            results = call(*args)
            for name, value in zip(names, results, strict=True):
                if name in ("for_I", "for_W"):
                    moved(value, "activations")
                elif name == "handed":
                    moved(value, "hand-over")
            ledger.mark(block.name)
            return results

        return whole

    def _parameters(self) -> tuple[int, dict[str, Tensor]]:
        """Bytes of what this rank reads, and the shapes of what its optimizer sees, by first name."""
        state: dict[str, Tensor] = {}
        for chunk in self.chunks.values():
            for node, name in chunk.joint.state.items():
                state[self.lowered.canonical.get(name, name)] = node.meta["val"]
        trained: dict[str, Tensor] = {}
        total = 0
        gradients = {
            self.lowered.canonical.get(name, name) for slots in self.grads.values() for name in slots
        }
        for name, val in state.items():
            total += nbytes(val)
            if name in gradients:
                mastered = self.setting.masters and val.dtype.itemsize < 4
                seen = torch.empty(val.shape, dtype=torch.float32 if mastered else val.dtype, device="meta")
                total += nbytes(seen) if mastered else 0
                trained[name] = seen
        return total, trained

    def _optimizer(self, trained: Mapping[str, Tensor]) -> int:
        kind = self.setting.optimizer
        if isinstance(kind, str):
            total: float = OPTIMIZERS[kind] * sum(map(nbytes, trained.values()))
        else:
            total = kind * sum(val.numel() for val in trained.values())
        return math.ceil(total / self.setting.shared_by)
