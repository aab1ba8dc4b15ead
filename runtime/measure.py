"""Live activation bytes of a step that really runs, and what was predicted of them.

Every storage that an operator makes is entered when it is made and crossed out when it dies (a weak reference to it),
while the rank's own generated code runs; samples are taken before and behind each node of the program and of its
blocks, and behind every operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat
from ..passes.buffers import BOXES
from ..passes.program import ONE
from ..schedule import Action, Phase, parts
from .bind import Call, bind
from .engine import Engine
from .offload import Parked
from .predict import Setting, predict_memory
from .unit import gradient


@dataclass(eq=False, slots=True)
class _Storage:
    nbytes: int
    alive: bool = True


@dataclass(slots=True)
class Measured:
    """peak: the most bytes of a step's own values (no parameters, gradients or batch) between two nodes of the program;
    inside: the most behind any operator, so with what lives only inside units (of eager units; what compiled code
    makes for itself is not seen). at: the node of the peak. live: the most chunk activations at once, from F to the end
    of W, counted by what of them is still there; kept: the same from F to the end of I. after: bytes that are left
    when the step is over, receive buffers included.
    """

    peak: int = 0
    inside: int = 0
    at: str = ""
    live: int = 0
    kept: int = 0
    after: int = 0


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages that operators have made since it was entered and that are still there, without those of
    ``held`` tensors and of what ``apart`` gives now."""

    def __init__(self, held: Iterable[Tensor], apart: Callable[[], Iterable[Tensor]] = lambda: ()) -> None:
        super().__init__()
        self._held = {compat.storage_key(tensor) for tensor in held}
        self._apart = apart
        self._known: dict[int, _Storage] = {}
        self.live = 0
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.see(result) and self.live > self.most:
            self.most = max(self.most, self.bytes())
        return result

    def see(self, value: Any) -> bool:
        """Enter the storages of ``value`` that are new; were there any?"""
        before = len(self._known)
        for tensor in tensors(value):
            self.find(tensor)
        return len(self._known) > before

    def find(self, tensor: Tensor) -> _Storage | None:
        """The entry of a tensor's storage; None if it is held."""
        storage = tensor.untyped_storage()
        key = compat.storage_key(tensor)
        if key in self._held:
            return None
        if key not in self._known:
            self._known[key] = entry = _Storage(storage.nbytes())
            self.live += entry.nbytes
            weakref.finalize(storage, self._gone, key).atexit = False
        return self._known[key]

    def _gone(self, key: int) -> None:
        entry = self._known.pop(key)
        entry.alive = False
        self.live -= entry.nbytes

    def bytes(self) -> int:
        """What is there now."""
        keys = {compat.storage_key(tensor) for tensor in self._apart()}
        return self.live - sum(self._known[key].nbytes for key in keys if key in self._known)


@dataclass(slots=True)
class _Log:
    """Samples at the nodes of a program. steps: those that are still to run. saved, whole: by (chunk, micro-batch), the
    storages that F keeps for I alone, and all that lives until W."""

    engine: Engine
    mode: LiveStorages
    steps: Iterator[tuple[Action, ...]]
    found: Measured = field(default_factory=Measured)
    saved: dict[tuple[int, int], list[_Storage]] = field(default_factory=dict)
    whole: dict[tuple[int, int], list[_Storage]] = field(default_factory=dict)

    def sample(self, node: str) -> None:
        if self.mode.live > self.found.peak and (now := self.mode.bytes()) > self.found.peak:
            self.found.peak, self.found.at = now, node
        for name, groups in (("kept", self.saved), ("live", self.whole)):
            for key in [key for key, held in groups.items() if not any(one.alive for one in held)]:
                del groups[key]
            setattr(self.found, name, max(getattr(self.found, name), len(groups)))

    def around(self, name: str, module: nn.Module, call: Call) -> Call:
        blocks = self.engine.blocks
        block = next((b for b in blocks.values() if b.graph_module is module), None)

        def run(*args: Any) -> Any:
            self.sample(f"before {name}")
            result = call(*args)
            self.mode.see(result)  # compiled code makes its results past the operators
            if block is not None:
                self._keep(block.outputs, next(self.steps), result)
            self.sample(name)
            return result

        return run

    def _keep(
        self, outputs: Sequence[Sequence[str]], actions: tuple[Action, ...], results: Sequence[Any]
    ) -> None:
        # A boundary that is saved in its receive buffer is there for ever.
        slots = {compat.storage_key(buffer) for buffer in self.engine.buffers.tensors()}
        values = iter(results)
        for action, names in zip(actions, outputs, strict=True):
            key = action.chunk, action.microbatch
            held: dict[str, list[_Storage]] = {}
            for name in names:
                mine = [t for t in tensors(next(values)) if compat.storage_key(t) not in slots]
                held[name] = [one for t in mine if (one := self.mode.find(t)) is not None]
            later = held.get("for_W", [])
            if action.phase is Phase.F:
                self.saved[key] = [one for one in held.get("for_I", []) if one not in later]
            boxes = (one for name in BOXES for one in held.get(name, []))
            self.whole.setdefault(key, []).extend(boxes)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Parked):
        yield from value.tensors()


@torch.no_grad()
def measure(engine: Engine, inputs: Mapping[str, Sequence[Tensor]], *, held: Iterable[Tensor]) -> Measured:
    """Run one step of ``engine`` under measurement. ``held``: what else does not count (parameters)."""
    slots = [slot for own in engine.slots.values() for slot in own.values()]

    def apart() -> Iterator[Tensor]:
        if engine.host is not None:  # memory of the host, also where that is the device
            yield from engine.host.tensors()
        for slot in slots:
            for total in (gradient(slot.parameter, slot.dtype), slot.total):
                if total is not None:
                    yield total

    args = [engine.one if name == ONE else inputs[name] for name in engine.compiled.inputs]
    mode = LiveStorages([*held, engine.one, *tensors(list(inputs.values()))], apart)
    log = _Log(engine, mode, map(parts, engine.schedule.actions[engine.mesh.pp_rank]))
    mode.see(engine.buffers.tensors())
    run = bind(engine.program, log.around)
    engine.outbox.forget()
    with mode, compat.below_autograd():
        results = run(*args)
    engine.outbox.flush()
    del results
    log.found.after = mode.bytes()
    log.found.inside = max(mode.most, log.found.peak)
    engine.meter.peak_measured = log.found.peak
    return log.found


def predict_peak(engine: Engine) -> int:
    """What ``measure`` will find as the peak on this rank, from its program and the graphs of its units."""
    meter = engine.meter
    if meter.peak_predicted is None:
        setting = Setting(collectives=engine.collectives, order=engine.order, offload=engine.offload)
        found = predict_memory(engine.lowered, engine.schedule, setting, ranks=[engine.mesh.pp_rank])
        meter.peak_predicted = found.ranks[0].activations
    return meter.peak_predicted


__all__ = ["LiveStorages", "Measured", "measure", "predict_peak", "tensors"]
