"""Modelled compute: give each unit of fxbraid, or any piece of a model, its time on the device.

fxbraid's units come through one line of ``runtime/engine.py``, where a unit is bound to its artefact::

    BoundUnit(unit, artefacts.get(unit), state, slots, around=timed)

Outside an emulated cluster ``timed`` returns what it is given, so nothing is added to a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .session import Session, active, current

if TYPE_CHECKING:
    from ...passes.units import Unit

Artefact = Callable[..., Sequence[Tensor]]
Seconds = Callable[["Unit"], float]


@dataclass(slots=True)
class UnitTimes:
    """``seconds`` of device time for each unit; ``skip``: its arithmetic is left out. ``known``: asked already."""

    seconds: Seconds
    skip: bool = False
    known: dict[str, float] = field(default_factory=dict)

    def of(self, unit: Unit) -> float:
        if unit.label not in self.known:
            seconds = float(self.seconds(unit))
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(
                    f"unit_times gives unit {unit.label} of chunk {unit.chunk} {seconds} s; give finite "
                    "seconds, 0 or more"
                )
            self.known[unit.label] = seconds
        return self.known[unit.label]


def unit_times(seconds: Seconds | None, *, arithmetic: bool = True) -> None:
    """From now on every fxbraid unit takes ``seconds(unit)`` of device time on this rank (None: no time).

    ``seconds`` is asked once for each label, reads what it likes of the unit (``name``, ``phase``, ``chunk``,
    ``matmuls``, ``flops``), and may be set again at any time, without building the model anew. arithmetic=False:
    units return zeros of the right shape, collectives move those zeros, and ``label()`` says "timing only"; losses
    then mean nothing, and gradients stay as they are. On the wall clock ``seconds`` has no effect.
    """
    if seconds is None and not arithmetic:
        raise ValueError("arithmetic=False without modelled times would measure nothing; give seconds")
    current().units = None if seconds is None else UnitTimes(seconds, skip=not arithmetic)


def check_times(units: Iterable[Unit]) -> None:
    """Ask for the times of ``units``, which run next: one that is none is refused on every rank that has such a unit,
    before it sends anything. Does nothing outside an emulated cluster."""
    session = active()
    if session is not None and session.units is not None:
        for unit in units:
            session.units.of(unit)


class Timed:
    """A unit's call that takes its modelled time."""

    def __init__(self, unit: Unit, artefact: Artefact, session: Session) -> None:
        self._unit, self._artefact, self._session = unit, artefact, session

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        times = self._session.units
        if times is None:
            return self._artefact(*args)
        outs = self._zeros() if times.skip else self._artefact(*args)
        self._session.spend(times.of(self._unit))
        return outs

    def _zeros(self) -> list[Tensor]:
        outs = zip(self._unit.outs, self._unit.grads, strict=True)
        values = [node.meta["val"] for node, name in outs if name is None]
        return [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).zero_() for v in values
        ]


def timed(unit: Unit, artefact: Artefact) -> Artefact:
    """``artefact``, the call of ``unit`` (without gradients among its results), with the time that ``unit_times``
    gives it; itself outside an emulated cluster."""
    session = active()
    if session is None or isinstance(artefact, Timed):
        return artefact
    return Timed(unit, artefact, session)


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        current().spend(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        current().spend(ctx.backward_s)
        return grads[0], None, None


def spend(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """``x``, behind ``forward_s`` seconds of device time; its gradient, behind ``backward_s``. Differentiable.

    For models that fxbraid does not build, e.g. stages of torch.distributed.pipelining: put it where the layer's
    work ends, before a collective that depends on it. Works on DTensors. Not for traced or compiled code, where the
    time would be spent while tracing; there, call ``device_time`` between compiled pieces.
    """
    return _Spend.apply(x, forward_s, backward_s)  # type: ignore[no-any-return, no-untyped-call]
