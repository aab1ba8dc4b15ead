"""One step, recorded: every unit, launch, wait, send and receive of this rank, with its times.

The program runs node by node in an interpreter (which costs the host some microseconds a node, so a recorded step of
small units is slower than the others), and blocks as well, as far as they are graphs. On a GPU each span is a pair of
events on the compute stream: a wait then is the time for which the stream waits, and a unit the time of its kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..metrics import RankLog
from ..passes.launches import LAUNCHES, WAIT
from ..passes.program import ONE
from ..schedule import Action, parts
from ..schedule.lower import Arrive, Away, Back, Offload, Reload, Run
from ..timeline import Kind, RankTimeline, Span, log_of
from .engine import Engine


class HostTape:
    """Times of the clock that the meter reads, in its ticks."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now: Callable[[], Any] = now

    def ticks(self, spans: Sequence[Span]) -> list[Span]:
        """The spans with their times in ticks."""
        return list(spans)


class CudaTape:
    """Times of the current stream of a GPU: events, read when the step is over. Ticks are ns of the host's clock, which
    is set against the device's once, behind a synchronisation."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._zero = self.now()
        torch.cuda.synchronize()
        self._origin = time.monotonic_ns()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # type: ignore[no-untyped-call]
        return event

    def ticks(self, spans: Sequence[Span]) -> list[Span]:
        torch.cuda.synchronize()

        def read(event: Any) -> int:
            return self._origin + round(self._zero.elapsed_time(event) * 1e6)  # ms -> ns

        return [replace(span, start=read(span.start), end=read(span.end)) for span in spans]


@dataclass(slots=True)
class Recording:
    """What a recorded run of the program gives: its results, and its spans in ticks."""

    results: list[list[Tensor]]
    spans: list[Span]


@torch.no_grad()
def record(engine: Engine, inputs: Mapping[str, Sequence[Tensor]]) -> Recording:
    """As ``engine.run(inputs)``, recorded; the engine's meter has the step as well."""
    args = [engine.one if name == ONE else inputs[name] for name in engine.compiled.inputs]
    meter = engine.meter
    tape = HostTape(meter.clock.now) if meter.host_times_count else CudaTape()
    recorder = _Recorder(tape)
    engine.outbox.forget()
    meter.begin()
    try:
        results = _Program(engine.program, recorder).run(*args)
    except BaseException:
        engine.drop()
        raise
    meter.end()
    engine.outbox.flush()
    return Recording(list(results), tape.ticks(recorder.spans))


def rank_timeline(engine: Engine, recording: Recording, log: RankLog) -> RankTimeline:
    """The spans with all that is needed to merge them. ``log``: of the recorded step."""
    meter, spans = engine.meter, recording.spans
    blocks = [span for span in spans if span.kind == "block"]
    if not meter.host_times_count:
        log = log_of(spans, meter.mine.outgoing, log)
        log.started, log.ended = round(blocks[0].start), round(blocks[-1].end)
    return RankTimeline(
        pp=engine.mesh.pp_rank,
        tp=engine.mesh.tp_rank,
        per_second=meter.clock.per_second,
        noise=meter.clock.noise,
        label=meter.label(),
        log=log,
        spans=tuple(spans),
    )


class _Recorder:
    """The tape, and where in the schedule the step is."""

    def __init__(self, tape: HostTape | CudaTape) -> None:
        self.tape = tape
        self.spans: list[Any] = []
        self.step = -1
        self.actions: tuple[Action, ...] = ()

    def note(
        self, kind: Kind, name: str, run: Callable[[], Any], step: int | None = None, **more: Any
    ) -> Any:
        """Run, with a span around it. Spans stand in the order in which they begin."""
        at = len(self.spans)
        self.spans.append(None)
        start = self.tape.now()
        value = run()
        self.spans[at] = Span(kind, name, start, self.tape.now(), self.step if step is None else step, **more)
        return value


class _Program(fx.Interpreter):
    """A rank's program, recorded."""

    def __init__(self, module: fx.GraphModule, recorder: _Recorder) -> None:
        super().__init__(module)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        instruction, recorder = n.meta.get("instruction"), self._recorder
        if isinstance(instruction, Arrive):
            message = instruction.message
            channel = message.channel
            action = f"{channel.chunk}{channel.phase}{message.microbatch}"
            name = f"{channel.phase}{channel.chunk}"
            # The step that waits is the next one to run.
            run = super().run_node
            return recorder.note(
                "receive", name, lambda: run(n), recorder.step + 1, action=action, phase=channel.phase
            )
        if isinstance(instruction, Offload | Away | Reload | Back):
            out, parcel = isinstance(instruction, Offload), instruction.parcel
            name = "out" if out else type(instruction).__name__.lower()
            action = f"{parcel.chunk}F{parcel.microbatch}"
            run = super().run_node
            return recorder.note("copy", name, lambda: run(n), recorder.step + (not out), action=action)
        if isinstance(instruction, Run):
            recorder.step += 1
            recorder.actions = parts(instruction.step)
            return recorder.note("block", str(n.target), lambda: self._block(n), action=str(instruction.step))
        return super().run_node(n)

    def _block(self, n: fx.Node) -> Any:
        module = self.fetch_attr(str(n.target))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if isinstance(module, fx.GraphModule):
            return _Block(module, self._recorder).run(*args, **kwargs)
        return module(*args, **kwargs)


class _Block(fx.Interpreter):
    """A block, recorded."""

    def __init__(self, module: fx.GraphModule, recorder: _Recorder) -> None:
        super().__init__(module)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        kind = _kind(n)
        if kind is None:
            return super().run_node(n)
        run = super().run_node
        node = n.args[0] if kind == "wait" else n
        assert isinstance(node, fx.Node)
        action = self._recorder.actions[node.meta.get("part", 0)]
        name, more = node.name.removeprefix("launch_"), {"phase": action.phase.value}
        if "piece" in n.meta:  # compiled units of all the block's actions: they go by the first one
            name, more["key"] = n.meta["piece"].name, n.meta["piece"].key
        elif kind == "unit":
            unit = n.meta["unit"]
            name, more = unit.name, {"phase": unit.kind, "key": unit.key}
        elif kind in ("launch", "wait"):
            launch = node.meta["launch"]
            more = {"phase": launch.unit.phase.value, "nbytes": launch.nbytes}
        elif kind == "send":
            name = str(n.target).removeprefix("send_")
            more = {"phase": name[0]}
        said = f"{action.chunk}{name[0]}{action.microbatch}" if kind == "send" else str(action)
        return self._recorder.note(kind, name, lambda: run(n), action=said, **more)


def _kind(n: fx.Node) -> Kind | None:
    if "unit" in n.meta or "piece" in n.meta:
        return "unit"
    if n.target in LAUNCHES:
        return "launch"
    if n.target is WAIT or n.target == "wait":
        return "wait"
    return "send" if n.op == "call_module" and str(n.target).startswith("send_") else None
