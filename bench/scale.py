"""``python -m fxbraid.bench.scale``: how long the planning tools take at the sizes that they are made for.

Builds, checks, simulates and plans for thousands of devices on one core of this machine, and prints seconds. No torch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from tabulate import tabulate

from fxbraid import schedule as schedules
from fxbraid.plan import Request, plan
from fxbraid.simulate import Link, ModelConfig, constants, device, simulate

#: The size of the issue: 64 pipeline ranks, 1,024 micro-batches, two chunks a rank.
P, M = 64, 1024


def build_and_check(name: str) -> str:
    """One large schedule."""
    schedules.check(schedules.build(name, p=P, m=M))
    return f"p={P}, m={M}"


def check_many() -> str:
    """Every schedule on the grid p in 1..8, m in 1..24, as it is and under every transformation."""
    count = 0
    for name, p, m in itertools.product(schedules.FAMILIES, range(1, 9), range(1, 25)):
        made = schedules.build(name, p=p, m=m)
        made_of = (
            made,
            schedules.unbraid(made),
            schedules.reproducible(made),
            schedules.split_backward(made),
            schedules.merge_backward(made),
        )
        for one in made_of:
            schedules.check(one)
            count += 1
    return f"{count:,} schedules built, transformed and checked"


def simulate_large() -> str:
    """One large schedule, unit by unit."""
    made = schedules.build("stp", p=P, m=M)
    result = simulate(made, constants(made, 1, 1, 1, 0.25, message=1.0, link=Link(0.01, 100.0)))
    return f"p={P}, m={M}, {sum(1 for _ in result.critical_path()):,} items on the critical path"


def plan_large(**given: tuple[int, ...]) -> str:
    """4,096 devices."""
    big = ModelConfig("big", 16384, 128, 128, 8, 128, 53248, 128256)
    best = plan(Request(big, device("h200"), 4096, 8192, 2048, **given)).ranking[0]  # type: ignore[arg-type]
    return f"best: {best.candidate}"


def jobs() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and job of every row."""
    for name in schedules.FAMILIES:
        yield f"build and check {name}", lambda name=name: build_and_check(name)  # type: ignore[misc]
    yield "build and check a grid", check_many
    yield "simulate stp", simulate_large
    yield "plan 4,096 GPUs, tp 8, pp 64", lambda: plan_large(tp=(8,), pp=(64,))
    yield "plan 4,096 GPUs, everything", plan_large


def main() -> None:
    """Run every job once and print what it took."""
    rows = []
    for name, job in jobs():
        start = time.perf_counter()
        said = job()
        rows.append((name, time.perf_counter() - start, said))
        print(f"{rows[-1][1]:8.2f} s  {name}", flush=True)
    print(tabulate(rows, headers=("job", "seconds", ""), floatfmt=".2f"))


if __name__ == "__main__":
    main()
