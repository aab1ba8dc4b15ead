"""One rank's share of a step that torch's runtime drives: its blocks, and the values that lie between them.

What pass ``program`` wires at trace time for fxbraid's own executor is looked up here while torch's actions come by::

    (0F4;1B2)OVERLAP_F_B    block F0&B1, inputs x0.. of (0, 4), for_I, for_W and dy0.. of (1, 2)
                            -> y0.. of (0, 4), for_I and for_W of (0, 4), dx0.. of (1, 2)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..compat import below_autograd
from ..passes.block import block_name
from ..passes.buffers import BOXES
from ..passes.errors import BraidError
from ..runtime.bind import bind
from ..runtime.engine import Engine
from ..schedule import Action, Phase

if TYPE_CHECKING:
    from ..model import BraidedModel

#: ``x``: inputs of a chunk's F; ``dy``: of its backward; ``y`` and ``dx``: what those return.
Kind = Literal["x", "dy", "y", "dx"]


class Share:
    """The chunks of one rank, between ``open`` and the end of a step.

    ``ran`` counts the blocks of the last step by name: ``{"F0": 2, "F0&B3": 5, ...}``.
    """

    def __init__(self, model: BraidedModel) -> None:
        self.model = model
        self.ran: Counter[str] = Counter()
        self._engine: Engine | None = None
        self._inputs: Mapping[str, Sequence[Tensor]] = {}
        self._values: dict[tuple[Kind, int, int], list[Tensor]] = {}
        self._boxes: dict[tuple[str, int, int], list[Tensor]] = {}
        self._results: dict[int, list[Tensor]] = {}
        self._reduced: set[int] = set()
        self._calls: dict[Engine, dict[str, Callable[..., Sequence[Any]]]] = {}

    @property
    def engine(self) -> Engine:
        """That of the step under way. Raises :class:`BraidError` where there is none."""
        if self._engine is None:
            raise BraidError(
                "these stages run inside of fxbraid.pippy.Runtime(model, schedule).step(**batch), which counts the "
                "batch's tokens for the loss and sums tied gradients; call that in place of schedule.step()"
            )
        return self._engine

    @contextmanager
    def open(self, engine: Engine, inputs: Mapping[str, Sequence[Tensor]]) -> Iterator[Share]:
        """A step with ``engine``'s blocks on ``inputs`` (per name, one tensor per micro-batch)."""
        self._drop()
        self.ran.clear()
        self._engine, self._inputs = engine, inputs
        try:
            yield self
        finally:
            self._engine, self._inputs = None, {}
            self._drop()

    def _drop(self) -> None:
        for values in (self._values, self._boxes, self._results, self._reduced):
            values.clear()

    def results(self) -> list[list[Tensor]]:
        """The last chunk's outputs by micro-batch, in order; empty on ranks without it."""
        return [self._results[microbatch] for microbatch in sorted(self._results)]

    def put(self, kind: Kind, chunk: int, microbatch: int, values: Sequence[Tensor]) -> None:
        """Values that come from another chunk."""
        self._values[kind, chunk, microbatch] = list(values)

    def take(self, kind: Kind, chunk: int, microbatch: int) -> list[Tensor]:
        """Values that go to another chunk; they are let go of here."""
        return self._values.pop((kind, chunk, microbatch))

    def run(self, parts: tuple[Action, ...]) -> None:
        """Run the block of ``parts``, in the order of a composite. Its inputs must be here."""
        engine = self.engine
        block = engine.quiet_blocks.get_block(parts)
        name = block_name(parts)
        calls = self._calls.setdefault(engine, {})
        if name not in calls:
            calls[name] = bind(block.graph_module)
        args = [
            value
            for action, names in zip(parts, block.inputs, strict=True)
            for value in self._read(engine, action, names)
        ]
        with torch.no_grad(), below_autograd():
            outs = iter(calls[name](*args))
        self.ran[name] += 1
        for action, names in zip(parts, block.outputs, strict=True):
            self._write(engine, action, {each: next(outs) for each in names})

    def reduce(self, chunk: int) -> None:
        """``chunk``'s last W is done: what the program does then, if anything (sums over replicas). Once a step."""
        if chunk not in self._reduced:
            self._reduced.add(chunk)
            module = getattr(self.engine.program, f"reduce_{chunk}", None)
            if module is not None:
                module()

    def _read(self, engine: Engine, action: Action, names: Sequence[str]) -> Iterator[Any]:
        """What the block reads for ``action``; what nobody else reads is taken out."""
        chunk, mb = action.chunk, action.microbatch
        last = chunk == engine.schedule.n_chunks - 1
        own = engine.lowered.chunks[chunk].joint.inputs if action.phase is Phase.F else {}
        come: Iterator[Tensor] = iter(())
        if action.phase is Phase.F and chunk > 0:
            come = iter(self.take("x", chunk, mb))
        elif action.phase in (Phase.I, Phase.B):
            come = repeat(engine.one) if last else iter(self.take("dy", chunk, mb))
        for name in names:
            if name in BOXES:
                yield self._boxes.pop((name, chunk, mb))
            else:
                yield self._inputs[name][mb] if name in own else next(come)

    def _write(self, engine: Engine, action: Action, made: Mapping[str, Any]) -> None:
        chunk, mb = action.chunk, action.microbatch
        for name in BOXES:
            if name in made:
                self._boxes[name, chunk, mb] = made[name]
        values = [value for name, value in made.items() if name not in BOXES]
        if action.phase is Phase.F:
            self._values["y", chunk, mb] = values
            if chunk == engine.schedule.n_chunks - 1:
                self._results[mb] = values
        elif action.phase is not Phase.W and chunk > 0:
            self._values["dx", chunk, mb] = values
