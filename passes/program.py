"""Pass ``program``: the schedule of a rank and its blocks, as one FX graph.

Contract: (schedule, rank, blocks) -> :class:`Program`. One node per instruction of
:func:`fxbraid.schedule.lower.lower`; running the program is running its generated code::

    post_F1 = self.post_F1(0)                       # give the next receive its buffer, slot 0
    [F0_0_for_I, F0_0_for_W] = self.F0(ids_0)       # the send to the next rank is inside
    [F1_0_x0] = self.arrive_F1(post_F1)
    ...
    reduce_0 = self.reduce_0()                      # with replicas: chunk 0's last W is done, sum over them
    return [loss_0, loss_1, ...]

With an offload plan, what F saves goes to the host behind it and comes back ahead of its backward, storage by storage::

    [for_I_0_3, for_W_0_3] = self.F0(ids_3)
    offload_0_3 = self.offload_0(for_I_0_3, for_W_0_3, 1, (4, 2, 7))    # storages 4, 2 and 7 start to leave, to slot 1
    ...
    away_0_3 = self.away(offload_0_3, (0, 1))         # wait for the first two, and let go of them here
    reload_0_3 = self.reload(away_0_3, (1, 0))        # memory for them again; they start to come back
    ...
    [for_I_0_3_1, for_W_0_3_1] = self.back(reload_0_3)                  # wait for all
    [dx0_0_3] = self.B0(for_I_0_3_1, dx1_0_3, for_W_0_3_1)

Inputs are the user's tensors, each a list with one entry per micro-batch, and ``one``, the gradient of the loss.
A value is freed behind the last instruction that reads it (FX sets the name to None). Which slot a receive gets is
said by pass ``buffers``; slots on the host are taken from a parcel's start to its end, and used again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx, nn

from ..schedule import Action, Schedule, parts
from ..schedule import Phase as Do
from ..schedule.lower import Arrive, Away, Back, Message, Offload, Post, Reduce, Reload, Run, lower
from ..schedule.offload import OffloadPlan, Parcel
from .block import Block, block_name
from .boxes import unpack_tuples
from .buffers import Call, Layout, Received, assign
from .units import ChunkUnits

ONE = "one"
#: What a parcel is made of, in order.
PARKED = ("for_I", "for_W")
#: Bytes: each item starts at a multiple of this.
HOST_ALIGN = 512
Argument = fx.Node | int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """``graph_module(*inputs)`` returns one list: the outputs of the last chunk per micro-batch, in order (empty
    on ranks without it). ``inputs`` names the placeholders; ``slots`` are the layouts of the receive buffers,
    ``host_slots`` the bytes of each buffer on the host."""

    graph_module: fx.GraphModule
    inputs: tuple[str, ...]
    slots: tuple[Layout, ...] = ()
    host_slots: tuple[int, ...] = ()


def program(
    schedule: Schedule,
    rank: int,
    *,
    chunks: dict[int, ChunkUnits],
    block: Callable[[tuple[Action, ...]], Block],
    modules: dict[str, nn.Module],
    offload: OffloadPlan | None = None,
) -> Program:
    """``block(parts)`` gives the block of a step's actions; ``modules`` the receives, ``post_*`` and ``arrive_*``, and
    where there are replicas ``reduce_*`` of every chunk, which starts to sum its gradients over them; with ``offload``,
    its plan, ``offload_*`` of every chunk, ``away``, ``reload`` and ``back``.

    With a module ``release`` among them, the program says when nothing reads a slot any more: ``self.release(0)``,
    which fills it with NaN, so that a reader that was overlooked does not go unnoticed."""
    return _Builder(schedule, rank, chunks, block, modules, offload).build()


class _Builder:
    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        chunks: dict[int, ChunkUnits],
        block: Callable[[tuple[Action, ...]], Block],
        modules: dict[str, nn.Module],
        offload: OffloadPlan | None,
    ) -> None:
        self.offload, self.host = offload, _HostSlots()
        self.schedule, self.rank, self.chunks = schedule, rank, chunks
        self.block, self.modules = block, modules
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.env: dict[tuple[str, int, int, str], fx.Node] = {}
        self.posted: dict[Message, fx.Node] = {}
        self.inputs: dict[str, fx.Node] = {}
        self.received: list[Received] = []
        self.calls: dict[fx.Node, Call] = {}
        self.parked: dict[tuple[int, int], fx.Node] = {}

    def build(self) -> Program:
        names = [n for c in sorted(self.chunks) for n in self.chunks[c].joint.inputs]
        for name in dict.fromkeys([*names, ONE]):
            self.inputs[name] = self.graph.placeholder(name)
        reduce = any(reduction(chunk) in self.modules for chunk in self.chunks)
        for instruction in lower(self.schedule, self.rank, reduce=reduce, offload=self.offload):
            if isinstance(instruction, Post):
                node = self._module(f"post_{_channel(instruction.message)}", ())
                self.posted[instruction.message] = node
            elif isinstance(instruction, Arrive):
                node = self._arrive(instruction.message)
            elif isinstance(instruction, Reduce):
                node = self._module(reduction(instruction.chunk), ())
            elif isinstance(instruction, Offload | Away | Reload | Back):
                node = self._move(instruction)
            else:
                node = self._run(instruction)
            node.meta["instruction"] = instruction
        last = self.schedule.n_chunks - 1
        results: list[list[fx.Node]] = []
        if last in self.chunks:
            width = len(self.chunks[last].outputs)
            results = [
                [self.env["y", last, mb, f"y{k}"] for k in range(width)] for mb in range(self.schedule.m)
            ]
        self.graph.output(results)
        layouts = self._slots()
        self.graph.on_generate_code(lambda _: unpack_tuples)
        module = fx.GraphModule(self.root, self.graph, class_name="Program")
        return Program(module, tuple(self.inputs), layouts, tuple(self.host.sizes))

    def _slots(self) -> tuple[Layout, ...]:
        """Give every receive its slots."""
        slots = assign(self.graph, self.received, self.calls, self.chunks)
        for post, which in slots.of.items():
            post.args = tuple(which)
        if "release" in self.modules:
            self.root.add_module("release", self.modules["release"])
            for node, free in slots.free_behind.items():
                last = (
                    max((node, *node.users), key=list(self.graph.nodes).index) if node in self.calls else node
                )
                with self.graph.inserting_after(last):
                    self.graph.call_module("release", tuple(sorted(free)))
        return tuple(slots.layouts)

    def _module(self, target: str, args: Sequence[Argument], name: str | None = None) -> fx.Node:
        if not hasattr(self.root, target):
            self.root.add_module(target, self.modules[target])
        return self.graph.create_node("call_module", target, tuple(args), {}, name=name or target)

    def _item(self, source: fx.Node, index: int, name: str) -> fx.Node:
        return self.graph.create_node("call_function", operator.getitem, (source, index), {}, name=name)

    def _arrive(self, message: Message) -> fx.Node:
        channel = message.channel
        node = self._module(f"arrive_{_channel(message)}", (self.posted.pop(message),))
        joint = self.chunks[channel.target].joint
        kind = "y" if channel.phase == "F" else "dx"
        for k, inside in enumerate(joint.boundary if channel.phase == "F" else joint.tangents):
            item = self._item(node, k, f"{kind}{channel.chunk}_{message.microbatch}_{k}")
            self.env[kind, channel.chunk, message.microbatch, f"{kind}{k}"] = item
            self.received.append(Received(node.args[0], item, Layout.of(inside.meta["val"])))  # type: ignore[arg-type]
        return node

    def _move(self, instruction: Offload | Away | Reload | Back) -> fx.Node:
        """A parcel goes from node to node as one value; its boxes go in at Offload and come out at Back."""
        parcel = instruction.parcel
        chunk, mb = parcel.chunk, parcel.microbatch
        label = f"{chunk}_{mb}"
        if isinstance(instruction, Offload):
            boxes = [self.env.pop((name, chunk, mb, name)) for name in PARKED]
            numbers = tuple(item.number for item in parcel.items)
            node = self._module(
                f"offload_{chunk}", (*boxes, self.host.take(parcel), numbers), f"offload_{label}"
            )
        elif isinstance(instruction, Back):
            node = self._module("back", (self.parked.pop((chunk, mb)),), f"back_{label}")
            self.host.free(parcel)
            for k, name in enumerate(PARKED):
                self.env[name, chunk, mb, name] = self._item(node, k, f"{name}_{label}")
                self.env[name, chunk, mb, name].meta["parked"] = parcel
        else:
            name = "away" if isinstance(instruction, Away) else "reload"
            node = self._module(name, (self.parked[chunk, mb], instruction.items), f"{name}_{label}")
        if not isinstance(instruction, Back):
            self.parked[chunk, mb] = node
        node.meta["parked"] = parcel
        return node

    def _run(self, instruction: Run) -> fx.Node:
        actions = parts(instruction.step)
        block = self.block(actions)
        reads = tuple(
            tuple((name, self._input(action, name)) for name in names)
            for action, names in zip(actions, block.inputs, strict=True)
        )
        args = [value for row in reads for _, value in row]
        module = block.name.replace("&", "_")
        if not hasattr(self.root, module):
            self.root.add_module(module, block.graph_module)
        label = "_".join(f"{a.phase.value}{a.chunk}_{a.microbatch}" for a in actions)
        node = self.graph.create_node("call_module", module, tuple(args), {}, name=f"do_{label}")
        self.calls[node] = Call(block, actions, reads)
        index = 0
        for action, names in zip(actions, block.outputs, strict=True):
            for name in names:
                label = f"{name}_{action.chunk}_{action.microbatch}"
                value = self._item(node, index, label)
                self.env[_kind(name), action.chunk, action.microbatch, name] = value
                index += 1
        return node

    def _input(self, action: Action, name: str) -> fx.Node:
        chunk, mb = action.chunk, action.microbatch
        if name in ("for_I", "for_W", "handed"):
            return self.env.pop((name, chunk, mb, name))
        if action.phase is Do.F and name in self.inputs and name in self.chunks[chunk].joint.inputs:
            key = ("input", -1, mb, name)
            if key not in self.env:
                self.env[key] = self._item(self.inputs[name], mb, f"{name}_{mb}")
            return self.env[key]
        if action.phase is Do.F:
            return self.env["y", chunk - 1, mb, f"y{name.removeprefix('x')}"]
        if chunk == self.schedule.n_chunks - 1:
            return self.inputs[ONE]
        return self.env["dx", chunk + 1, mb, f"dx{name.removeprefix('dy')}"]


class _HostSlots:
    """Buffers on the host, the largest parcel that each ever holds."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._free: list[int] = []
        self._of: dict[tuple[int, int], int] = {}

    def take(self, parcel: Parcel) -> int:
        """The slot of a parcel that leaves: of the free ones the smallest that is large enough, else the largest."""
        size = sum(-(-math.ceil(item.size) // HOST_ALIGN) * HOST_ALIGN for item in parcel.items)
        if not self._free:
            self._free.append(len(self.sizes))
            self.sizes.append(0)
        fits = [slot for slot in self._free if self.sizes[slot] >= size]
        slot = (
            min(fits, key=lambda k: (self.sizes[k], k))
            if fits
            else max(self._free, key=lambda k: self.sizes[k])
        )
        self._free.remove(slot)
        self.sizes[slot] = max(self.sizes[slot], size)
        self._of[parcel.chunk, parcel.microbatch] = slot
        return slot

    def free(self, parcel: Parcel) -> None:
        """It is back."""
        self._free.append(self._of.pop((parcel.chunk, parcel.microbatch)))


def reduction(chunk: int) -> str:
    """The module that sums a chunk's gradients over replicas."""
    return f"reduce_{chunk}"


def _kind(name: str) -> str:
    return name if name in ("for_I", "for_W", "handed") else name.rstrip("0123456789")


def _channel(message: Message) -> str:
    return f"{message.channel.phase}{message.channel.chunk}"


__all__ = ["ONE", "Program", "block_name", "program", "reduction"]
