"""Published measurements beside what the device models predict.

``python -m fxbraid.plan.published`` prints the table of ``docs/predictions.md``.

Nothing here is fitted: each device has one model (``simulate.device``), made from data sheets and public
micro-benchmarks, and every row of that device uses it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxbraid.schedule import build
from fxbraid.simulate import ModelConfig, Result, Shape, analytic, device, load_model, simulate
from fxbraid.simulate.analytic import Checkpoint


@dataclass(frozen=True, slots=True)
class Setting:
    """What was run, twice: ``first`` is the baseline and ``second`` what it is compared with, as (schedule,
    chunks a rank, checkpointing). split: layers per chunk, None if balanced. unit: "samples/s" or "MFU %".
    """

    source: str
    model: ModelConfig
    device: str
    tp: int
    pp: int
    dp: int
    m: int
    seq: int
    first: tuple[str, int, Checkpoint]
    second: tuple[str, int, Checkpoint]
    split: tuple[int, ...] | None
    unit: str
    published: tuple[float, float]


_STP = "arXiv 2510.27257"
_QWEN = load_model("qwen2-12.1b")
_LOOP: tuple[str, int, Checkpoint] = ("interleaved_1f1b", 2, "none")
_BRAIDED: tuple[str, int, Checkpoint] = ("stp", 2, "none")

SETTINGS: tuple[Setting, ...] = (
    # "Uniformly, the last stage with two layers fewer": the head is worth about two layers.
    Setting(
        source=_STP,
        model=_QWEN,
        device="a800",
        tp=8,
        pp=2,
        dp=1,
        m=192,
        seq=6144,
        first=_LOOP,
        second=_BRAIDED,
        split=(12, 12, 12, 10),
        unit="samples/s",
        published=(3.11, 3.49),
    ),
    Setting(
        source=_STP,
        model=_QWEN,
        device="h20",
        tp=2,
        pp=8,
        dp=1,
        m=192,
        seq=6144,
        first=_LOOP,
        second=_BRAIDED,
        split=(*[3] * 15, 1),
        unit="samples/s",
        published=(3.77, 3.79),
    ),
    # The 530B model of Megatron-LM on 2,240 A100, with full and with selective recomputation (abstract).
    Setting(
        source="arXiv 2205.05198",
        model=ModelConfig("gpt-530b", 20480, 105, 128, 128, 160, 4 * 20480, 51200, gated=False, tied=True),
        device="a100",
        tp=8,
        pp=35,
        dp=8,
        m=280,
        seq=2048,
        first=("interleaved_1f1b", 3, "full"),
        second=("interleaved_1f1b", 3, "selective"),
        split=None,
        unit="MFU %",
        published=(42.1, 54.2),
    ),
)
"""The settings of the table."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted values of a setting, in its unit; gains are second over first, in percent."""

    setting: Setting
    predicted: tuple[float, float]

    @property
    def gain(self) -> float:
        """Predicted gain, percent."""
        return 100 * (self.predicted[1] / self.predicted[0] - 1)

    @property
    def published_gain(self) -> float:
        """Published gain, percent."""
        return 100 * (self.setting.published[1] / self.setting.published[0] - 1)


def compare_published(settings: Sequence[Setting] = SETTINGS) -> tuple[Comparison, ...]:
    """Simulate both runs of every setting."""
    return tuple(
        Comparison(setting, (_value(setting, setting.first), _value(setting, setting.second)))
        for setting in settings
    )


def _value(setting: Setting, run: tuple[str, int, Checkpoint]) -> float:
    name, v, checkpoint = run
    schedule = build(name, p=setting.pp, m=setting.m, v=v)
    shape = Shape(setting.seq, 1, setting.tp, setting.dp, checkpoint)
    workload = analytic(setting.model, device(setting.device), schedule.placement, shape, setting.split)
    result: Result = simulate(schedule, workload)
    if setting.unit == "samples/s":
        return setting.m * setting.dp / result.step_time
    return 100 * (result.mfu or 0.0)


def to_markdown(comparisons: Sequence[Comparison]) -> str:
    """The table of the docs."""
    lines = [
        "| source | setting | run | published | predicted | ratio |",
        "|---|---|---|--:|--:|--:|",
    ]
    for found in comparisons:
        s = found.setting
        what = f"{s.model.name}, {s.tp * s.pp * s.dp} {s.device.upper()}, TP {s.tp}, PP {s.pp}, seq {s.seq}"
        for run, published, predicted in zip((s.first, s.second), s.published, found.predicted, strict=True):
            name = run[0] if run[2] == "none" else f"{run[0]}, {run[2]} recomputation"
            ratio = predicted / published
            lines.append(
                f"| {s.source} | {what} | {name} | {published:g} {s.unit} | {predicted:.2f} | {ratio:.2f} |"
            )
        gap = found.gain - found.published_gain
        lines.append(
            f"| | | **gain** | **{found.published_gain:+.1f} %** | **{found.gain:+.1f} %** "
            f"| {gap:+.1f} points |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(to_markdown(compare_published()))
