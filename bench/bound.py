"""How much TP communication stays exposed, against the published (2p+1) T_AR: ``python -m fxbraid.bench.bound``.

Simulated, unit by unit: two chunks a rank of four layers, T_F = T_I = T_W = 1, messages in no time. Two figures for
each schedule, in units of T_AR: ``exposed`` is the step time less that of the same order at T_AR = 0; ``over`` is the
step time less 6m + p - 1, the least there is without collectives, so it counts what hiding costs in bubble as well.
Published for ``stp``: 2p+1 exposed and p-1 in the bubble, 3p over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fxbraid.schedule import Costs, Schedule, build, check, peak_live
from fxbraid.schedule.stp_plus import stp_plus
from fxbraid.simulate import BlockClock, Workload, at_clock, constants

LAYERS = 4
RATIOS = (0.2, 0.37, 0.5, 1.0)
SIZES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule at one size and ratio. step: simulated; exposed, over: in T_AR; live: chunk activations."""

    p: int
    m: int
    ratio: float
    schedule: str
    step: float
    exposed: float
    over: float
    live: int


def measure(name: str, schedule: Schedule, ratio: float, *, by_costs: bool) -> Row:
    """``by_costs``: units ordered by costs, else as in the paper."""
    p, m = schedule.p, schedule.m
    costs, free = (constants(schedule, 1, 1, 1, ar, layers=LAYERS) for ar in (ratio, 0.0))

    def time(workload: Workload) -> float:
        return at_clock(schedule, BlockClock(workload, ordered_by=costs if by_costs else None)).step_time

    step = time(costs)
    return Row(
        p,
        m,
        ratio,
        name,
        step,
        exposed=(step - time(free)) / ratio,
        over=(step - (6 * m + p - 1)) / ratio,
        live=max(peak_live(schedule)),
    )


def rows(sizes: Sequence[int] = SIZES, ratios: Sequence[float] = RATIOS) -> list[Row]:
    """``stp``, ``stp_plus`` as it is named, and ``stp_plus`` made for the ratio with its units ordered by costs."""
    found = []
    for p in sizes:
        for m in (3 * p - 1, 4 * p):
            published, named = build("stp", p=p, m=m), build("stp_plus", p=p, m=m)
            for ratio in ratios:
                made = stp_plus(p, m, Costs(1, 1, 1, ratio), order="costs")
                check(made)
                found += [
                    measure("stp", published, ratio, by_costs=False),
                    measure("stp_plus", named, ratio, by_costs=False),
                    measure("stp_plus, made for it", made, ratio, by_costs=True),
                ]
    return found


def table(found: Sequence[Row]) -> str:
    """Markdown: a line per size and ratio, and for each schedule its step, exposed, over and live."""
    lines: dict[tuple[int, int, float], list[Row]] = {}
    for row in found:
        lines.setdefault((row.p, row.m, row.ratio), []).append(row)
    body = [
        [p, m, ratio, 2 * p + 1] + [f"{r.step:.2f}: {r.exposed:.2f}, {r.over:.2f}, {r.live}" for r in some]
        for (p, m, ratio), some in lines.items()
    ]
    names = [row.schedule for row in next(iter(lines.values()))]
    headers = ["p", "m", "T_AR / T_F", "2p+1", *(f"{name}: step: exposed, over, live" for name in names)]
    return tabulate(body, headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    print(table(rows()))
