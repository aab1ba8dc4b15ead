"""A picture of a bench's JSON: a bar per engine, with its spread and the simulator's prediction. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxbraid.bench.config import ConfigError

COLORS = {"fxbraid": "#2a6f97", "order": "#a9a9a9", "torch": "#c1666b"}


def check_plot(path: Path) -> None:
    """Raise ``ConfigError`` where no picture could be written, before anything runs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'fxbraid[plot]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"--plot {path} has no known ending; use one of {', '.join(sorted(known))}")


def plot(content: Mapping[str, Any], path: Path) -> None:
    """Write the picture of ``content`` (``record.as_json``) to ``path``; the ending says which format."""
    from matplotlib.figure import Figure

    rows = [row for row in content["rows"] if row.get("median_s")]
    figure = Figure(figsize=(8, 1.2 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    medians = [row["median_s"] * 1e3 for row in rows]
    spread = [
        [m - row["min_s"] * 1e3 for m, row in zip(medians, rows, strict=True)],
        [row["max_s"] * 1e3 - m for m, row in zip(medians, rows, strict=True)],
    ]
    colors = [COLORS.get(row["label"].split()[0], "#000000") for row in rows]
    hatches = ["" if row["valid"] else "//" for row in rows]
    axes.barh(places, medians, xerr=spread, color=colors, hatch=hatches, height=0.7, error_kw={"lw": 0.8})
    predicted = [
        (at, row["prediction"]["step_s"] * 1e3)
        for at, row in zip(places, rows, strict=True)
        if row["prediction"]
    ]
    if predicted:
        axes.plot([ms for _, ms in predicted], [at for at, _ in predicted], "k|", ms=14, label="simulator")
        figure.legend(loc="outside lower center", frameon=False)
    axes.set_yticks(list(places), [row["name"] + ("" if row["valid"] else " (invalid)") for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    config = content["config"]
    axes.set_title(
        f"{config['model']}, tp {config['tp']} x pp {config['pp']}, m {config['microbatches']}\n{content['clock']}",
        fontsize=9,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
