"""What a bench run does, and the checks that need no process: every refusal comes before a rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxbraid import schedule
from fxbraid.bench.models import load_config
from fxbraid.bench.pippy import SCHEDULES

#: In this order: fxbraid's schedules, then torch's classes by their names. ``:blocking`` runs the same order
#: with collectives that are waited for where they are launched.
DEFAULT_SCHEDULES = (
    "stp",
    "stp:blocking",
    "1f1b",
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
)
BLOCKING = ":blocking"


class ConfigError(ValueError):
    """The options do not fit together or the model; says so with numbers and the way out."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One bench run. Travels to the ranks by pickle."""

    model: str = "qwen2-tiny"
    tp: int = 2
    pp: int = 2
    microbatches: int = 8
    microbatch_size: int = 2
    seq: int = 64
    schedules: tuple[str, ...] = DEFAULT_SCHEDULES
    steps: int = 10
    compile: bool = False
    seed: int = 0

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def batch(self) -> int:
        return self.microbatches * self.microbatch_size

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


def is_torch(name: str) -> bool:
    return name in SCHEDULES


def split_name(name: str) -> tuple[str, bool]:
    """fxbraid's schedule and whether it is braided: "stp:blocking" -> ("stp", False)."""
    return name.removesuffix(BLOCKING), not name.endswith(BLOCKING)


def skip_reason(config: BenchConfig, name: str) -> str | None:
    """Why torch's class ``name`` cannot run with this many micro-batches, or None."""
    return SCHEDULES[name].refuses(config.pp, config.microbatches) if is_torch(name) else None


def n_chunks(config: BenchConfig, name: str) -> int:
    if is_torch(name):
        return config.pp * SCHEDULES[name].chunks_per_rank
    return schedule.build(split_name(name)[0], p=config.pp, m=config.microbatches).n_chunks


def check_config(config: BenchConfig) -> None:
    """Raise ``ConfigError`` for whatever would fail in the ranks."""
    for option in ("tp", "pp", "microbatches", "microbatch_size", "steps"):
        if (value := getattr(config, option)) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} is {value}; give a number that is at least 1")
    if config.seq < 2:
        raise ConfigError(f"--seq is {config.seq}; give at least 2, since each token predicts the next one")
    if not config.schedules:
        raise ConfigError(f"--schedules names none; give some of {', '.join(DEFAULT_SCHEDULES)}")
    try:
        hf = load_config(config.model)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    check_tp(hf, config.tp)
    for key, value in hf.to_dict().items():
        if "dropout" in key and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"{key} is {value}, and random losses cannot be compared; set it to 0 in the config"
            )
    for name in config.schedules:
        _check_schedule(config, name, int(hf.num_hidden_layers))


def check_tp(hf: Any, tp: int) -> None:
    """Attention is cut by whole heads, the MLP by features."""
    names = {
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "key-value heads",
        "intermediate_size": "MLP features",
    }
    sizes = {what: size for name, what in names.items() if (size := getattr(hf, name, None)) is not None}
    for what, size in sizes.items():
        if size % tp:
            fits = [str(n) for n in range(1, 65) if all(other % n == 0 for other in sizes.values())]
            raise ConfigError(f"{size} {what} are not divisible by --tp {tp}; use --tp {' or '.join(fits)}")


def _check_schedule(config: BenchConfig, name: str, layers: int) -> None:
    try:
        chunks = n_chunks(config, name)
    except schedule.ScheduleError as error:
        raise ConfigError(
            f"--schedules: {error}; torch's classes go by their names: {', '.join(SCHEDULES)}"
        ) from error
    if chunks > layers:
        raise ConfigError(
            f"{name} on --pp {config.pp} wants {chunks} chunks, and {config.model} has {layers} layers; "
            f"use a smaller --pp, a deeper model, or --schedules without it"
        )
