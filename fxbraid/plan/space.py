"""Every way to use a number of devices for a model: tensor, pipeline and data parallel sizes, schedule,
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fxbraid.schedule import ScheduleError
from fxbraid.simulate.analytic import Checkpoint
from fxbraid.simulate.device import Device
from fxbraid.simulate.model import ModelConfig
from fxbraid.simulate.workload import Link

Sequence = Literal["whole", "kept", "gathered"]
"""What norms and residuals work on: all tokens; with sequence parallelism, seq / tp of them, the inputs of W kept as F
gathered them, or gathered again.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned. The tuples narrow the search; an empty one means all that makes sense.

    global_batch: sequences of a step. memory: share of the device's memory that may be used; the rest is for
    the driver, communicators and fragmentation. efficiency: see ``simulate.kernels.Kernels``. imbalance:
    factors on the compute of pipeline ranks. sequence: which kinds of sequence parallelism are considered.
    images: of every sequence, for a model with a vision tower, and patches: of each, 0 for what the tower is made for.
    offload: where a configuration does not fit, look whether it does with activations of every rank's first chunk on
    the host, as far as there is time; host: the link to it, None for the device's. budget: bytes that may be used, in
    place of the share.
    """

    model: ModelConfig
    device: Device
    gpus: int
    seq: int
    global_batch: int
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = (1, 2, 4)
    schedules: tuple[str, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ("none", "selective", "full")
    memory: float = 0.92
    efficiency: float = 1.0
    imbalance: tuple[tuple[int, float], ...] = field(default=())
    sequence: tuple[Sequence, ...] = ("whole",)
    offload: bool = False
    host: Link | None = None
    budget: int | None = None
    images: int = 0
    patches: int = 0

    @property
    def layers(self) -> int:
        """That can be cut apart, of both towers."""
        tower = self.model.tower if self.images else None
        return self.model.layers + (tower.layers if tower is not None else 0)

    @property
    def limit(self) -> float:
        """Bytes of a device that may be used."""
        return self.budget if self.budget is not None else self.device.memory * self.memory

    def __post_init__(self) -> None:
        if min(self.gpus, self.seq, self.global_batch) < 1:
            raise ScheduleError(
                "a plan needs gpus, seq and global batch >= 1, "
                f"got {self.gpus}, {self.seq}, {self.global_batch}"
            )
        if not 0 < self.memory <= 1 or not 0 < self.efficiency <= 1:
            raise ScheduleError(
                f"memory and efficiency are shares between 0 and 1, got {self.memory} and {self.efficiency}"
            )


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One configuration. schedule: a name, with ``braid:`` in front if its neighbours are braided."""

    tp: int
    pp: int
    dp: int
    micro_batch: int
    m: int
    v: int
    schedule: str
    checkpoint: Checkpoint
    sequence: Sequence = "whole"
    offload: bool = False

    def __str__(self) -> str:
        told = {"whole": "", "kept": " sequence-parallel", "gathered": " sequence-parallel regather"}
        return (
            f"tp={self.tp} pp={self.pp} dp={self.dp} v={self.v} m={self.m} b={self.micro_batch} "
            f"{self.schedule} checkpoint={self.checkpoint}{told[self.sequence]}{' offload' * self.offload}"
        )


FAMILIES: tuple[tuple[str, int], ...] = (
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("zbv", 2),
    ("braid:dualpipev", 2),
    ("v_half", 2),
    ("stp_low_memory", 2),
    ("stp", 2),
)
"""Schedules that a plan considers, with their chunks a rank."""


def candidates(request: Request) -> Iterator[Candidate]:
    """Every configuration that divides: tp the heads, the ffn and the node, tp x pp the devices, dp x b the
    batch.
    """
    model = request.model
    for tp in request.tp or _powers(request.device.node):
        if request.gpus % tp or model.heads % tp or model.ffn % tp:
            continue
        for pp in request.pp or _divisors(request.gpus // tp):
            if (request.gpus // tp) % pp or pp > request.layers:
                continue
            dp = request.gpus // tp // pp
            for micro_batch in request.micro_batch:
                if request.global_batch % (dp * micro_batch):
                    continue
                m = request.global_batch // (dp * micro_batch)
                for schedule, v in _families(request, pp):
                    if pp * v > request.layers:
                        continue
                    for checkpoint in request.checkpoints:
                        for sequence in _sequences(request, tp):
                            yield Candidate(tp, pp, dp, micro_batch, m, v, schedule, checkpoint, sequence)


def _sequences(request: Request, tp: int) -> tuple[Sequence, ...]:
    """With one rank there is nothing to cut, and tokens are cut into equal parts."""
    return request.sequence if tp > 1 and request.seq % tp == 0 else ("whole",)


def explain_none(request: Request) -> str:
    """Why ``candidates`` gives nothing, with the numbers and the way out."""
    tp, pp = request.tp or _powers(request.device.node), request.pp
    return (
        f"no configuration divides: {request.gpus} devices into tp in {list(tp)} and "
        f"pp in {list(pp) or 'any'}, tp into the {request.model.heads} heads and "
        f"{request.model.ffn} ffn columns of {request.model.name}, and "
        f"dp x micro-batch (of {list(request.micro_batch)}) into the global batch of {request.global_batch}; "
        "change one of them"
    )


def _families(request: Request, pp: int) -> list[tuple[str, int]]:
    if pp == 1:
        return (
            [("1f1b", 1)]
            if not request.schedules
            else [(name, v) for name, v in FAMILIES if name in request.schedules]
        )
    if not request.schedules:
        return list(FAMILIES)
    known = dict(FAMILIES)
    found: list[tuple[str, int]] = []
    for name in request.schedules:
        if name not in known:
            raise ScheduleError(f"a plan knows {', '.join(dict(FAMILIES))}, not {name!r}")
        found += [(one, v) for one, v in FAMILIES if one == name]
    return found


def _powers(limit: int) -> tuple[int, ...]:
    return tuple(2**k for k in range(limit.bit_length()) if 2**k <= limit)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)
