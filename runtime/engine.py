"""One traced signature on one rank: units bound to parameters, blocks, the program, and running it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from ..compat import alias_group, below_autograd
from ..passes.block import Block, BlockContext, Collectives, block_kind, block_name, braid
from ..passes.buffers import Layout
from ..passes.compile import Artefacts
from ..passes.errors import BraidError
from ..passes.joint import Phase
from ..passes.offload import stored
from ..passes.pipeline import Lowered
from ..passes.program import ONE, program, reduction
from ..passes.verify import verify_block, verify_offload
from ..schedule import Action, Schedule, parts
from ..schedule import Phase as Do
from ..schedule.listorder import CostOrder
from ..schedule.lower import Channel
from ..schedule.offload import OffloadPlan
from ..schedule.received import received
from .bind import bind
from .emulate import check_times, timed
from .mesh import Mesh
from .offload import Away, Back, HostMemory, Offload, Reload, make_lanes
from .p2p import Arrive, Buffers, Outbox, Post, Release, Send
from .piece import compile_block
from .record import Meter
from .unit import BoundUnit, GradSlot

#: The eight kinds of block (DESIGN section 2) and the two that a reproducible order needs.
KINDS = ("F", "B", "I", "W", "F&B", "F&I", "F&W", "F&F", "I&W", "F&I&W")


class Blocks(Mapping[str, Block]):
    """The blocks of this rank: ``blocks["F0&B3"]`` by chunks, ``blocks["F&B"]`` any of that kind.

    A block that no schedule asked for yet is built on demand.
    """

    def __init__(
        self, context: BlockContext, meter: Meter, compile_: Callable[[Block], None] | None = None
    ) -> None:
        self._context, self._meter, self._compile = context, meter, compile_
        self._built: dict[str, Block] = {}

    def get_block(self, parts: Sequence[Action]) -> Block:
        """The block of one step's actions."""
        name = block_name(parts)
        if name not in self._built:
            block = braid(parts, self._context)
            verify_block(block)
            if self._compile is not None:
                self._compile(block)
            self._meter.attach(block)
            self._built[name] = block
        return self._built[name]

    def __getitem__(self, key: str) -> Block:
        if key in self._built:
            return self._built[key]
        for name, block in self._built.items():
            if "&".join(part[0] for part in name.split("&")) == key:
                return block
        return self.get_block(self._parse(key))

    def _parse(self, key: str) -> list[Action]:
        mine = sorted(self._context.chunks)
        parts: list[Action] = []
        for text in key.split("&"):
            phase, chunk = text[:1], text[1:]
            if phase not in ("F", "I", "W", "B") or (chunk and not chunk.isdigit()):
                raise KeyError(
                    f"{key!r} names no block; kinds are {', '.join(KINDS)}, with chunks as in 'F0&B3'"
                )
            default = mine[0] if phase == "F" and not parts else mine[-1]
            parts.append(Action(Do(phase), int(chunk) if chunk else default, len(parts)))
            if parts[-1].chunk not in mine:
                raise KeyError(f"chunk {parts[-1].chunk} is not on this rank, which holds {mine}")
        if block_kind(parts) not in KINDS:
            raise KeyError(f"{block_kind(parts)} is not a kind of block; kinds are {', '.join(KINDS)}")
        return parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._built)

    def __len__(self) -> int:
        return len(self._built)


class Engine:
    """Runs one schedule on one rank for one signature of inputs.

    ``state``: this rank's parameters and buffers by name; ``slots``: the gradient slots by chunk and parameter;
    ``order``: of units in blocks by costs, None for the paper's; ``reduces``: by chunk, what starts to sum its
    gradients over replicas, empty where there is one; ``offload``: what F saves that goes to the host and back.
    """

    def __init__(
        self,
        lowered: Lowered,
        schedule: Schedule,
        mesh: Mesh,
        *,
        state: Mapping[str, Tensor],
        slots: Mapping[int, Mapping[str, GradSlot]],
        artefacts: Artefacts,
        collectives: Collectives = "overlap",
        order: CostOrder | None = None,
        reduces: Mapping[int, nn.Module] | None = None,
        offload: OffloadPlan | None = None,
    ) -> None:
        self.lowered, self.schedule, self.mesh = lowered, schedule, mesh
        self.slots, self.collectives, self.order = slots, collectives, order
        self.outbox, self.buffers = Outbox(received(schedule, mesh.pp_rank)), Buffers()
        self.offload = offload
        self.host = HostMemory(make_lanes(mesh.device)) if offload is not None else None
        self.meter = Meter(schedule, mesh)
        modules: dict[str, nn.Module] = {}
        phases = {part.phase for step in schedule.actions[mesh.pp_rank] for part in parts(step)}
        forward = phases <= {Do.F}
        self._units = [
            unit
            for chunk in lowered.chunks.values()
            for phase, units in chunk.units.items()
            for unit in units
            if phase is Phase.F or not forward
        ]
        for index, chunk in lowered.chunks.items():
            for unit in (u for us in chunk.units.values() for u in us):
                own = slots.get(index, {})
                modules[unit.label] = BoundUnit(unit, artefacts.get(unit), state, own, around=timed)
        modules |= self.meter.watch(self._channels())
        if not forward:
            modules |= {reduction(chunk): module for chunk, module in (reduces or {}).items()}
        if self.host is not None:
            modules |= self._copies(self.host)
        whole = artefacts.mode == "block"
        # Compiled pieces hold the group's name: one that all ranks and runs agree on lets them share artefacts.
        tp_group = mesh.tp_group_name
        if whole and mesh.tp_group is not None:
            tp_group = alias_group(mesh.tp_group)
        self._context = BlockContext(
            chunks=lowered.chunks,
            modules=modules,
            tp_group=tp_group,
            collectives=collectives,
            order=order,
        )
        self._compile = (lambda block: compile_block(block, artefacts, state, slots)) if whole else None
        self.blocks = Blocks(self._context, self.meter, self._compile)
        self.compiled = program(
            schedule,
            mesh.pp_rank,
            chunks=dict(lowered.chunks),
            block=self.blocks.get_block,
            modules=modules,
            offload=offload,
        )
        verify_offload(self.program)
        self.buffers.layouts = self.compiled.slots
        if self.host is not None:
            self.host.sizes = self.compiled.host_slots
        self.meter.read_program(self.program)
        self._run = bind(self.program)
        self.one = torch.ones((), device=mesh.device, dtype=self._loss_dtype())

    @property
    def program(self) -> fx.GraphModule:
        """The rank's program."""
        return self.compiled.graph_module

    @cached_property
    def quiet_blocks(self) -> Blocks:
        """The blocks of this rank without their sends, for another runtime than the program's: what would leave the
        rank is among their outputs."""
        modules = {
            name: module for name, module in self._context.modules.items() if not name.startswith("send_")
        }
        return Blocks(replace(self._context, modules=modules), self.meter, self._compile)

    @property
    def has_last(self) -> bool:
        """Does this rank hold the last chunk, and so the loss?"""
        return self.schedule.n_chunks - 1 in self.lowered.chunks

    def _loss_dtype(self) -> torch.dtype:
        """From the traced graph, which every rank has: ranks without the last chunk must agree on it."""
        chunk = self.lowered.partition.chunks[-1]
        values = chunk.graph_module.graph.output_node().args[0]
        index = chunk.outputs.index("loss") if "loss" in chunk.outputs else 0
        return values[index].meta["val"].dtype  # type: ignore[index, union-attr, no-any-return]

    def _channels(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {}
        place = self.schedule.placement
        for channel, group in self.mesh.channel_groups(self.schedule).items():
            phase = Phase(channel.phase)
            source, target = place.rank_of(channel.chunk), place.rank_of(channel.target)
            if self.mesh.pp_rank == source:
                peer = self.mesh.global_rank(target)
                modules[f"send_{phase}{channel.chunk}"] = Send(group, peer, self.outbox, channel)
            else:
                peer = self.mesh.global_rank(source)
                layouts = self.layouts(channel)
                modules[f"post_{phase}{channel.chunk}"] = Post(group, peer, layouts, self.buffers)
                modules[f"arrive_{phase}{channel.chunk}"] = Arrive(self.outbox)
        if os.environ.get("FXBRAID_POISON") == "1":
            modules["release"] = Release(self.buffers)
        return modules

    def _copies(self, memory: HostMemory) -> dict[str, nn.Module]:
        """To the host and back."""
        lanes = memory.lanes
        modules: dict[str, nn.Module] = {
            f"offload_{index}": Offload(stored(chunk), memory) for index, chunk in self.lowered.chunks.items()
        }
        return modules | {
            "away": Away(lanes),
            "reload": Reload(lanes, self.mesh.device),
            "back": Back(lanes),
        }

    def layouts(self, channel: Channel) -> list[Layout]:
        """What a message of ``channel`` holds, in order; for channels that end here."""
        joint = self.lowered.chunks[channel.target].joint
        nodes = joint.boundary if channel.phase == "F" else joint.tangents
        return [Layout.of(node.meta["val"]) for node in nodes]

    def drop(self) -> None:
        """A step has failed: messages and copies may still be on their way."""
        self.buffers.drop()
        if self.host is not None:
            self.host.drop()

    def check(self, inputs: Mapping[str, Sequence[Tensor]]) -> None:
        """Raise where a step can't run on ``inputs``."""
        missing = [n for n in self.compiled.inputs if n != ONE and n not in inputs]
        if missing:
            raise BraidError(f"inputs {', '.join(missing)} are missing")
        check_times(self._units)

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Sequence[Tensor]]) -> list[list[Tensor]]:
        """Run the program. ``inputs``: per name, one tensor per micro-batch. Returns the last chunk's outputs per
        micro-batch (empty on ranks without it); gradients are in the slots."""
        self.check(inputs)
        args = [self.one if name == ONE else inputs[name] for name in self.compiled.inputs]
        self.outbox.forget()
        self.meter.begin()
        try:
            with below_autograd():
                results = self._run(*args)
        except BaseException:
            self.drop()
            raise
        self.meter.end()
        self.outbox.flush()
        return list(results)
