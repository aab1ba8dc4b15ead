"""The devices and links that a bench emulates: named links, modelled times, and what the simulator makes of them.

One model of time for every engine: fxbraid's units take ``Times.of`` (``emulate.unit_times``), torch's stages spend
the same seconds in their layers (``spend_in``), and the simulator reads the same numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fxbraid import simulate
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Link
from fxbraid.runtime.ranks import gather

KINDS = ("attn", "mlp")
PHASES = ("F", "I", "W")
INSTANT = Link(0.0)


@dataclass(frozen=True, slots=True)
class NamedLink:
    """A link of one real machine, in one direction; ``source`` says where the figures are from."""

    link: Link
    source: str


def _named(machine: str, kind: str) -> NamedLink:
    device = simulate.device(machine)
    field, alpha = ("network", device.network_latency) if kind == "network" else ("nvlink", device.latency)
    rate = getattr(device, field)
    told = next(text for name, text in device.sources.items() if field in name)
    return NamedLink(
        Link(alpha, rate * device.wire),
        f"{machine}: {alpha * 1e6:g} us + {rate / 1e9:g} GB/s x {device.wire:g} ({told}; {device.sources['wire']})",
    )


#: From the simulator's table of devices (``fxbraid.simulate.device``), which holds the sources.
LINKS: Mapping[str, NamedLink] = {
    "nvlink": _named("h100", "nvlink"),
    "pcie": _named("l40s", "nvlink"),
    "ib": _named("h100", "network"),
}


def parse_link(text: str) -> Link:
    """``nvlink``, ``pcie``, ``ib``, or ``alpha,beta`` in seconds and bytes per second (``5e-6,50e9``, ``1e-3,inf``).

    Raises ``ValueError`` with the way to write it.
    """
    if text in LINKS:
        return LINKS[text].link
    alpha, comma, beta = text.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        return Link(float(alpha), float(beta))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no link ({error}); give real, {', '.join(LINKS)}, or alpha,beta in seconds and bytes per "
            "second, such as 5e-6,50e9"
        ) from None


@dataclass(frozen=True, slots=True)
class Times:
    """Device seconds by (kind of unit, phase): kinds are "attn", "mlp", "head", "embed"; what is missing takes none.

    ``label`` says how they were chosen.
    """

    seconds: Mapping[tuple[str, str], float]
    label: str

    def of(self, unit: Any) -> float:
        """Of one of fxbraid's units; one that computes F again takes F's time."""
        return self.seconds.get((_kind(unit.name), "F" if unit.again else str(unit.phase.value)), 0.0)

    @property
    def forward(self) -> float:
        """Mean forward of an attention and an MLP unit: what T_AR / T_F is measured against."""
        return sum(self.seconds[kind, "F"] for kind in KINDS) / len(KINDS)

    def link(self, ratio: float) -> Link:
        """The TP link on which T_AR / T_F is ``ratio`` in every chunk: each unit ends with one all-reduce."""
        return Link(ratio * self.forward)


def equal_times(unit_s: float) -> Times:
    """Attention and MLP alike in F, I and W, so that T_F = T_I = T_W in every chunk; all else takes no time."""
    return Times(
        {(kind, phase): unit_s for kind in KINDS for phase in PHASES},
        f"T_F = T_I = T_W, {unit_s * 1e3:g} ms per attention or MLP unit",
    )


def flops_times(flops: Mapping[tuple[str, str], int], unit_s: float) -> Times:
    """In proportion to FLOPs, head included; the mean attention or MLP forward takes ``unit_s``."""
    mean = sum(flops[kind, "F"] for kind in KINDS) / len(KINDS)
    return Times(
        {key: unit_s * count / mean for key, count in flops.items()},
        f"in proportion to FLOPs, {unit_s * 1e3:g} ms per mean attention or MLP forward",
    )


def count_flops(model: nn.Module, micro: Mapping[str, Any], tp_size: int) -> dict[tuple[str, str], int]:
    """FLOPs by kind and phase on one TP rank, from fxbraid's trace of ``model`` (one or more equal layers)."""
    from fxbraid.passes.pipeline import lower_model

    lowered = lower_model(
        model, micro, n_chunks=1, tp_size=tp_size, training=True, device=torch.device("cpu")
    )
    found: dict[tuple[str, str], int] = {}
    for units in lowered.chunks[0].units.values():
        for unit in units:
            if unit.flops and not unit.again:
                found[_kind(unit.name), str(unit.phase.value)] = unit.flops
    return found


def measure_times(model: nn.Module, micro: Mapping[str, Any], tp_size: int, *, compile: bool) -> Times:
    """Real seconds of the units of one layer of ``model`` here and now: the median over ranks. Collective."""
    from fxbraid.passes.compile import Artefacts
    from fxbraid.passes.pipeline import lower_model
    from fxbraid.runtime.costs import profile

    lowered = lower_model(
        model, micro, n_chunks=1, tp_size=tp_size, training=True, device=torch.device("cpu")
    )
    dist.barrier()
    found = profile(lowered, Artefacts("unit" if compile else False))
    mine = {
        (_kind(unit.name), str(unit.phase.value)): found[unit.key]
        for units in lowered.chunks[0].units.values()
        for unit in units
        if unit.matmuls
    }
    everyone: list[dict[tuple[str, str], float]] = gather(mine)
    return Times(
        {key: statistics.median(one[key] for one in everyone) for key in mine}, "measured on this machine"
    )


def _kind(name: str) -> str:
    """attn12 -> attn."""
    return name.rstrip("0123456789")


# -- torch's stages


@dataclass(frozen=True, slots=True)
class SpendingLinear:
    """Stands in a linear's ``forward``: F and I are spent on what it returns, W on its weight.

    So that a split backward spends I and W where it runs them: autograd reaches the weight's part only on the way to
    the weight. The last linear of a unit carries the whole unit's time, in front of its all-reduce.
    """

    linear: nn.Linear
    f: float
    i: float
    w: float

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, emulate.spend(self.linear.weight, 0.0, self.w), self.linear.bias)
        return emulate.spend(y, self.f, self.i)


def spend_in(stage: Any, times: Times) -> None:
    """Give the layers (and head) of a :class:`~fxbraid.bench.stages.StageModule` their modelled time, in place."""
    last = [(linear, kind) for layer in stage.body.layers for linear, kind in _last_linears(layer)]
    if stage.head is not None:
        last.append((stage.head, "head"))
    for linear, kind in last:
        f, i, w = (times.seconds.get((kind, phase), 0.0) for phase in PHASES)
        linear.__dict__["forward"] = SpendingLinear(linear, f, i, w).forward


def _last_linears(layer: Any) -> tuple[tuple[nn.Linear, str], ...]:
    return (layer.self_attn.o_proj, "attn"), (layer.mlp.down_proj, "mlp")


# -- what the simulator says


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one step: seconds, the mean shares of it over ranks, and the fullest rank's activation bytes."""

    step_s: float
    bubble: float
    exposed_tp: float
    exposed_p2p: float
    peak: float


def predict(model: Any, times: Times, cluster: emulate.Cluster) -> Prediction:
    """What :meth:`BraidedModel.simulate` says of ``model`` at these times and links, and what
    :meth:`BraidedModel.memory` does of its memory. Local."""
    tp = model._mesh.tp_size
    seconds = {
        unit.key: times.of(unit)
        for chunk in model._everything().chunks.values()
        for units in chunk.units.values()
        for unit in units
    }

    def collective(nbytes: int) -> float:
        return emulate.collective_seconds(cluster.tp_link, emulate.Op.ALL_REDUCE, nbytes, tp)

    pp = cluster.pp_link
    link = simulate.Link(pp.alpha_s, pp.beta_bytes_per_s, pp.rendezvous)
    found = model.simulate(seconds, collective=collective, link=link)
    peak = max(rank.activations for rank in model.memory().ranks)
    return Prediction(
        found.step_time, found.bubble_share, found.exposed_tp_share, found.exposed_p2p_share, peak
    )
