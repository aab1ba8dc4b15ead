"""The modules of a rank's program as they run for its memory alone: units, messages and gradients without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..passes.buffers import Layout
from ..passes.cost import nbytes
from ..passes.joint import Phase
from ..passes.launches import launched
from ..passes.products import Product, Products, products
from ..passes.storages import Held, held
from ..passes.units import ChunkUnits, Unit
from ..schedule.lower import Channel
from .ledger import Ghost, Ledger, Room


class Library:
    """What the units of a model hold, each distinct one looked at once. fused: as Inductor compiles them."""

    def __init__(self, *, fused: bool) -> None:
        self._fused = fused
        self._known: dict[tuple[str, int], Held] = {}
        self._products: dict[str, Products] = {}

    def held(self, unit: Unit) -> Held:
        """Of the unit's whole graph."""
        key = unit.key, len(unit.state)
        if key not in self._known:
            self._known[key] = held(unit.graph_module, state=len(unit.state), fused=self._fused)
        return self._known[key]

    def sums(self, unit: Unit) -> tuple[Products, Held | None]:
        """Of a W unit: its products, and what is held by the graph that is left (over all that it reads)."""
        key = unit.key + "".join("01"[name is not None] for name in unit.grads)
        if key not in self._products:
            self._products[key] = products(unit)
        plan = self._products[key]
        if plan.rest is None:
            return plan, None
        state = sum(place < len(unit.state) for place in plan.reads)
        place = plan.key, state
        if place not in self._known:
            self._known[place] = held(plan.rest, state=state, fused=self._fused)
        return plan, self._known[place]


class GhostSlot:
    """Where a gradient adds up. itemsize: of what it adds up in."""

    def __init__(self, ledger: Ledger, value: Tensor, dtype: torch.dtype) -> None:
        self._ledger, self._dtype = ledger, dtype
        self._size = value.numel() * dtype.itemsize
        self._there = False

    def product(self, dtype: torch.dtype, size: int) -> int:
        """A product of ``size`` elements of ``dtype`` is added: bytes that it takes for a moment."""
        self.add()
        return 0 if dtype is self._dtype else size * dtype.itemsize

    def add(self) -> None:
        """Something is added."""
        if not self._there:
            self._there = True
            self._ledger.add("gradients", self._size)


class GhostUnit(nn.Module):
    """``forward([ghosts])``, as :class:`runtime.unit.BoundUnit`: takes them out of the list, returns the values."""

    def __init__(
        self,
        chunk: ChunkUnits,
        unit: Unit,
        library: Library,
        ledger: Ledger,
        nothing: Room,
        slots: Mapping[str, GhostSlot],
    ) -> None:
        super().__init__()
        self._ledger, self._nothing, self.unit = ledger, nothing, unit
        saved, handed = {*chunk.for_I, *chunk.for_W}, set(chunk.handed)

        def kind(node: object) -> str:
            return "activations" if node in saved else "hand-over" if node in handed else "temporaries"

        self._kinds = [kind(out) for out in unit.outs]
        self._then = [
            next((kind(user) for user in launched(chunk, unit, out)), "temporaries") for out in unit.outs
        ]
        self._slots = [slots[name] if name is not None else None for name in unit.grads]
        self._plan, self._held = None, None
        if unit.phase is Phase.W:
            self._plan, self._held = library.sums(unit)
        if self._plan is None or not self._plan.products:
            self._plan, self._held = None, library.held(unit)
        self._vals = [node.meta["val"] for node in unit.graph_module.graph.find_nodes(op="placeholder")]

    def forward(self, *args: Ghost | list[Ghost]) -> list[Ghost]:
        first: Any = args[0] if args else None
        given: list[Ghost | None] = first if isinstance(first, list) else list(args)  # type: ignore[arg-type]
        if self._plan is not None:
            return self._sum(self._plan, given)
        outs = self._call(self._held, given, range(len(self._kinds)))  # type: ignore[arg-type]
        for slot in self._slots:
            if slot is not None:
                slot.add()
        return [out for out, slot in zip(outs, self._slots, strict=True) if slot is None]

    def _call(self, about: Held, given: list[Ghost | None], which: Sequence[int | None]) -> list[Ghost]:
        """Run a graph. which: the unit's out that each result is."""
        ledger = self._ledger
        taken = list(given)
        given.clear()
        seen = [taken[out.arg] if out.arg is not None else None for out in about.outs]
        level = 0
        for moment in about.moments:
            ledger.add("temporaries", moment.high - level)
            ledger.add("temporaries", moment.level - moment.high)
            level = moment.level
            for k in moment.drops:
                taken[k] = None
        kinds = ["temporaries"] * len(about.made)
        for at, out in zip(which, about.outs, strict=True):
            if at is not None and out.made is not None and self._kinds[at] != "temporaries":
                kinds[out.made] = self._kinds[at]
        # They were counted as the unit's own up to here.
        ledger.add("temporaries", -level)
        rooms = [Room(ledger, kind, size) for kind, size in zip(kinds, about.made, strict=True)]
        outs = []
        for at, out, source in zip(which, about.outs, seen, strict=True):
            room = rooms[out.made] if out.made is not None else source.room if source else self._nothing
            if at is not None and self._kinds[at] != "temporaries" and room.kind == "temporaries":
                room.become(self._kinds[at])
            then = self._then[at] if at is not None else "temporaries"
            outs.append(Ghost(room, out.nbytes, dense=out.dense, then=then))
        return outs

    def _sum(self, plan: Products, given: list[Ghost | None]) -> list[Ghost]:
        """As ``runtime.unit._Sums``: what is left of the graph, then the products one by one."""
        state = len(self.unit.state)
        inputs: list[Ghost | None] = [*(None for _ in range(state)), *given]
        given.clear()
        sides = [side for product in plan.products for side in (product.left, product.right)]
        operands: dict[tuple[bool, int], Ghost | None] = {
            (False, side.index): inputs[side.index] for side in sides if not side.computed
        }
        values: list[Ghost] = []
        if self._held is not None:
            reads = [inputs[k] for k in plan.reads if k >= state]
            inputs.clear()
            computed = len(self._held.outs) - len(plan.kept)
            outs = self._call(self._held, reads, [*plan.kept, *[None] * computed])
            for k, out in zip(plan.kept, outs, strict=False):
                slot = self._slots[k]
                if slot is None:
                    values.append(out)
                else:
                    slot.add()
            operands |= {(True, len(plan.kept) + k): out for k, out in enumerate(outs[len(plan.kept) :])}
            outs.clear()
        inputs.clear()
        for n, product in enumerate(plan.products):
            self._add(product)
            later = {(s.computed, s.index) for p in plan.products[n + 1 :] for s in (p.left, p.right)}
            for side in (product.left, product.right):
                if (side.computed, side.index) not in later:
                    operands[side.computed, side.index] = None
        return values

    def _add(self, product: Product) -> None:
        slot = self._slots[product.out]
        assert slot is not None
        val = self.unit.outs[product.out].meta["val"]
        passing = slot.product(val.dtype, val.numel())
        self._ledger.add("temporaries", passing)
        self._ledger.add("temporaries", -passing)


class GhostOutbox:
    """Messages on their way, as :class:`runtime.p2p.Outbox` holds them where only a peer's messages prove that they
    have arrived."""

    def __init__(self, known: Sequence[Mapping[Channel, int]]) -> None:
        self._known = known
        self._sent: dict[Channel, list[list[Ghost] | None]] = {}
        self._received = 0

    def put(self, message: list[Ghost], channel: Channel) -> None:
        """Hold it."""
        self._sent.setdefault(channel, []).append(message)

    def received(self) -> None:
        """The next receive of the step is over."""
        for channel, count in self._known[self._received].items():
            messages = self._sent[channel]
            messages[:count] = [None] * count
        self._received += 1

    def flush(self) -> None:
        """All have arrived."""
        self._sent.clear()


class GhostSend(nn.Module):
    """``forward(*values)``: they are on their way."""

    def __init__(self, ledger: Ledger, outbox: GhostOutbox, channel: Channel) -> None:
        super().__init__()
        self._ledger, self._outbox, self._channel = ledger, outbox, channel

    def forward(self, *values: Ghost) -> None:
        message = []
        for value in values:
            if not value.dense:
                value = Ghost(Room(self._ledger, "communication", value.nbytes), value.nbytes)
            elif value.room.kind == "temporaries":
                value.room.become("communication")
            message.append(value)
        self._outbox.put(message, self._channel)


class GhostPost(nn.Module):
    """``forward(*slots)``: the buffers of a receive, new ones where the slot is None."""

    def __init__(self, ledger: Ledger, layouts: Sequence[Layout], slots: dict[int, Room]) -> None:
        super().__init__()
        self._ledger, self._slots = ledger, slots
        self._sizes = [size_of(layout) for layout in layouts]

    def forward(self, *slots: int | None) -> list[Ghost]:
        return [
            Ghost(Room(self._ledger, "communication", size) if slot is None else self._slots[slot], size)
            for size, slot in zip(self._sizes, slots, strict=True)
        ]


class GhostArrive(nn.Module):
    """``forward(posted)``: its values."""

    def __init__(self, outbox: GhostOutbox) -> None:
        super().__init__()
        self._outbox = outbox

    def forward(self, posted: list[Ghost]) -> list[Ghost]:
        self._outbox.received()
        return list(posted)


class GhostReduce(nn.Module):
    """``forward()``: gradients go over the replicas where they lie."""

    def forward(self) -> None:
        pass


def size_of(layout: Layout) -> int:
    """Bytes of a receive buffer."""
    return nbytes(torch.empty(layout.shape, dtype=layout.dtype, device="meta"))
