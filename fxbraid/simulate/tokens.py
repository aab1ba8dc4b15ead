"""Units under sequence parallelism (Korthikanti et al. 2022, section 4.2.2): where an all-reduce was, a reduce-scatter
ends one unit, the norm on this rank's tokens is a unit of its own, and the all-gather behind it begins the next::

    F   attn: norm, qkv, ..., out | all-reduce     =>   norm | all-gather    attn: qkv, ...   out | reduce-scatter
    I   attn: norm', out', ..., qkv' | all-reduce  =>   norm' | all-gather   out'   attn: ..., qkv' | reduce-scatter
    W   attn                                       =>   out   attn, its input gathered again ahead of it (regather)

The row-parallel product is a unit of its own, as pass ``sequence`` cuts it (see ``fxbraid.schedule.weave``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxbraid.simulate.workload import UnitCost


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-gather or a reduce-scatter of the residual stream: seconds, and bytes of the whole."""

    seconds: float
    size: float


def apart(
    forward: UnitCost,
    back: UnitCost,
    weight: UnitCost,
    norms: tuple[float, float],
    rows: tuple[float, float, float],
    gather: Collective,
    *,
    again: bool,
    regather: bool,
) -> tuple[list[UnitCost], list[UnitCost], list[UnitCost]]:
    """F, I and W of one region from its units without sequence parallelism.

    norms: seconds of the norm and residual in F and of their gradients in I. rows: of the row-parallel product in F, I
    and W. again: I recomputes the region's input,
    so it is gathered again there; regather: it is gathered again in W.
    """
    norm, out = f"norm_{forward.name}", f"{forward.name}_out"
    first, second = (UnitCost(norm, seconds, 0, True, gather.seconds, heavy=False) for seconds in norms)
    f = [
        first,
        replace(forward, seconds=forward.seconds - norms[0] - rows[0], launches=False, collective=0.0),
        UnitCost(out, rows[0], 0, True, gather.seconds),
    ]
    columns = replace(back, seconds=back.seconds - norms[1] - rows[1], collective=gather.seconds)
    i = [second, UnitCost(out, rows[1], 0), columns]
    w = [UnitCost(out, rows[2], 0), replace(weight, seconds=weight.seconds - rows[2])]
    if again:  # the row-parallel product's input is what is recomputed
        i[1] = replace(i[1], fetch=gather.seconds, fetched=gather.size)
    if regather:
        w[1] = replace(w[1], fetch=gather.seconds, fetched=gather.size)
    return f, i, w
