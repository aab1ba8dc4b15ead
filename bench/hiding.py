"""How much of the tensor-parallel communication is hidden, on emulated devices.

    python -m fxbraid.bench.hiding --pp 2
    python -m fxbraid.bench.hiding --pp 4

For every T_AR / T_F and m: eta of stp against its bound, every schedule's step time against the simulator's, and
fxbraid's best against the best order of torch.distributed.pipelining. ``--arithmetic`` computes the numbers too (and
takes longer): the times are the same. Exits with 1 where a target is missed: eta >= 0.95 eta_max, simulator within
3 %, ``auto`` at most 1 % slower than torch's best order.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from fxbraid.bench.lab import ORDERS, OURS, TRIO, Cell, Found, Plan, emulated_config, markdown, measure
from fxbraid.metrics import eta, eta_max
from fxbraid.runtime.launch import launch

RATIOS = (0.0, 0.2, 0.37, 0.5, 1.0)
OF_BOUND, OF_SIMULATOR, OF_BEST = 0.95, 0.03, 0.01

app = typer.Typer(add_completion=False)


@app.command()
def main(
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 2,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers per chunk, two chunks a rank.")] = 4,
    ratios: Annotated[str, typer.Option(help="T_AR / T_F, comma list.")] = ",".join(f"{r:g}" for r in RATIOS),
    pp_link: Annotated[str, typer.Option(help="PP link: alpha,beta.")] = "0,inf",
    unit_ms: Annotated[float, typer.Option(help="Milliseconds of an attention or MLP unit.")] = 2.0,
    arithmetic: Annotated[bool, typer.Option("--arithmetic/--timing-only")] = False,
    few: Annotated[
        bool, typer.Option(help="Leave out the schedules that neither eta nor gains need.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 3600.0,
) -> None:
    """Measure hiding on the virtual clock."""
    config = emulated_config(
        tp, pp, layers, unit_ms=unit_ms, clock="virtual", arithmetic=arithmetic, pp_link=pp_link
    )
    names = (*(TRIO if few else OURS), *(("auto",) if few else ()), *ORDERS)
    plan = Plan(config, names, (3 * pp - 1, 4 * pp), tuple(float(r) for r in ratios.split(",")))
    start = time.monotonic()

    def on_line(rank: int, line: str) -> None:
        typer.echo(f"{time.monotonic() - start:5.0f} s  {line}", err=True)

    found = launch(measure, (plan,), nproc=tp * pp, timeout_s=timeout, on_line=on_line)[0]
    typer.echo(f"tp {tp} x pp {pp}, {layers} layers per chunk, {unit_ms:g} ms per unit: {found.label}\n")
    hiding, best = hiding_rows(found, plan), best_rows(found, plan)
    typer.echo(
        markdown(("m", "T_AR / T_F", "blocking ms", "stp ms", "free ms", "eta", "eta_max", "share"), hiding)
        + "\n\n"
        + markdown(("m", "T_AR / T_F", "auto ms", "best of torch's orders", "ms", "auto is"), best)
        + "\n\n"
        + simulator_text(found)
    )
    missed = problems(found, plan)
    typer.echo("\n".join(["", *missed]) if missed else "\nEvery target is met.")
    if missed:
        raise typer.Exit(1)


def share_of_bound(cells: dict[str, Cell], pp: int, m: int) -> tuple[float, float] | None:
    """(eta, eta / eta_max) of stp, or None where there is nothing to hide, or nothing to hide it behind."""
    stp, blocking, free = (cells[name].seconds for name in TRIO)
    value, best = eta(blocking, stp, free), eta_max(pp, m)
    return None if value is None or best == 0 else (value, value / best)


def hiding_rows(found: Found, plan: Plan) -> list[list[str]]:
    """One for each m and ratio."""
    rows = []
    for m, ratio in ((m, ratio) for m in plan.ms for ratio in plan.ratios):
        cells = found.at(m, ratio)
        stp, blocking, free = (f"{cells[name].seconds * 1e3:.2f}" for name in TRIO)
        hidden = share_of_bound(cells, plan.config.pp, m)
        eta_text, share = ("-", "-") if hidden is None else (f"{hidden[0]:.3f}", f"{hidden[1]:.3f}")
        bound = f"{eta_max(plan.config.pp, m):.3f}"
        rows.append([str(m), f"{ratio:g}", blocking, stp, free, eta_text, bound, share])
    return rows


def best_order(cells: dict[str, Cell]) -> Cell:
    """The fastest of torch's orders."""
    return min((cells[name] for name in ORDERS if name in cells), key=lambda cell: cell.seconds)


def best_rows(found: Found, plan: Plan) -> list[list[str]]:
    """One for each m and ratio."""
    rows = []
    for m, ratio in ((m, ratio) for m in plan.ms for ratio in plan.ratios):
        cells = found.at(m, ratio)
        best, auto = best_order(cells), cells["auto"].seconds
        change = f"{100 * (best.seconds / auto - 1):.1f} % faster"
        if auto > best.seconds:
            change = f"{100 * (auto / best.seconds - 1):.2f} % slower"
        rows.append(
            [str(m), f"{ratio:g}", f"{auto * 1e3:.2f}", best.name, f"{best.seconds * 1e3:.2f}", change]
        )
    return rows


def simulator_text(found: Found) -> str:
    """The largest difference to the simulator."""
    worst = max(
        (cell for cell in found.cells if cell.apart is not None), key=lambda cell: abs(cell.apart or 0.0)
    )
    return (
        f"Largest difference to the simulator over {len(found.cells)} steps of "
        f"{len({cell.name for cell in found.cells})} schedules: {100 * abs(worst.apart or 0.0):.2g} % "
        f"({worst.name}, m {worst.m}, ratio {worst.ratio:g})."
    )


def problems(found: Found, plan: Plan) -> list[str]:
    """The targets that are missed."""
    missed = []
    for m, ratio in ((m, ratio) for m in plan.ms for ratio in plan.ratios):
        cells = found.at(m, ratio)
        where = f"m {m}, ratio {ratio:g}"
        hidden = share_of_bound(cells, plan.config.pp, m)
        if hidden is not None and hidden[1] < OF_BOUND:
            missed.append(f"MISSED {where}: eta is {hidden[1]:.3f} eta_max, wanted {OF_BOUND}")
        best, auto = best_order(cells), cells["auto"].seconds
        if auto > best.seconds * (1 + OF_BEST):
            missed.append(
                f"MISSED {where}: auto is {100 * (auto / best.seconds - 1):.1f} % slower than {best.name}"
            )
        missed += [
            f"MISSED {where}: {cell.name} is {100 * cell.apart:+.1f} % from the simulator"
            for cell in cells.values()
            if cell.apart is not None and abs(cell.apart) > OF_SIMULATOR
        ]
    return missed


if __name__ == "__main__":
    app()
