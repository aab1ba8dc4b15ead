"""Workloads from four numbers per chunk: T_F, T_I, T_W and T_AR."""

from __future__ import annotations

from collections.abc import Sequence

from fxbraid.schedule import Placement, Schedule, ScheduleError
from fxbraid.simulate.workload import INSTANT, ChunkCost, Link, UnitCost, Workload


def constants(
    schedule: Schedule | Placement | int,
    t_f: float = 1.0,
    t_i: float = 1.0,
    t_w: float = 1.0,
    t_ar: float = 0.0,
    *,
    layers: int = 1,
    factors: Sequence[float] | None = None,
    handed: float = 0.0,
    activation: float = 1.0,
    message: float = 0.0,
    link: Link = INSTANT,
) -> Workload:
    """Every chunk alike: ``layers`` layers of two units each, attention and MLP, which share the times
    equally.

    t_f, t_i, t_w: compute of one chunk and micro-batch. t_ar: its tensor-parallel all-reduces in F, and again
    in I: the sum over 2 x ``layers`` collectives, one behind each unit. factors: one per chunk, for its
    compute. activation: what F of a chunk saves; ``handed`` of it lives on from I to W, the rest goes unit by
    unit in I. message: the size of a boundary. Peaks come out in the unit of ``activation``: by default, in
    chunk activations.
    """
    n_chunks = schedule if isinstance(schedule, int) else schedule.n_chunks
    if layers < 1 or min(t_f, t_i, t_w, t_ar) < 0 or not 0 <= handed <= 1:
        raise ScheduleError(
            f"constants need layers >= 1, times >= 0 and 0 <= handed <= 1, got layers={layers}, "
            f"times {t_f}, {t_i}, {t_w}, {t_ar} and handed={handed}"
        )
    one = _chunk(layers, t_f, t_i, t_w, t_ar, handed, activation, message)
    scale = [1.0] * n_chunks if factors is None else list(factors)
    if len(scale) != n_chunks:
        raise ScheduleError(f"factors holds {len(scale)} numbers for {n_chunks} chunks; give one per chunk")
    chunks = tuple(one if factor == 1.0 else one.scaled(factor) for factor in scale)
    label = f"T_F={t_f:g}, T_I={t_i:g}, T_W={t_w:g}, T_AR={t_ar:g}"
    return Workload(chunks, link=link, label=label, memory_unit="chunk activations", time_unit="")


def _chunk(
    layers: int,
    t_f: float,
    t_i: float,
    t_w: float,
    t_ar: float,
    handed: float,
    activation: float,
    message: float,
) -> ChunkCost:
    count = 2 * layers
    names = [f"{kind}{layer}" for layer in range(layers) for kind in ("attn", "mlp")]
    back = names[::-1]
    share, ar = activation / count, t_ar / count
    # The tail stands for what reads the last all-reduce: the boundary is complete only behind it.
    f = [UnitCost(name, t_f / count, d, True, ar, saves=share) for d, name in enumerate(names)]
    i = [UnitCost(name, t_i / count, d, True, ar, frees=share * (1 - handed)) for d, name in enumerate(back)]
    w = [UnitCost(name, t_w / count, d, frees=share * handed) for d, name in enumerate(back)]
    tail = UnitCost("tail", 0.0, count, heavy=False)
    return ChunkCost((*f, tail), (*i, tail), tuple(w), message, message)
