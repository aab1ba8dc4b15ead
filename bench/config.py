"""What a bench run does, and the checks that need no process: every refusal comes before a rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import PretrainedConfig

from fxbraid import schedule
from fxbraid.bench.devices import LINKS, parse_link
from fxbraid.bench.entries import GROUPS, Entry, expand, parse
from fxbraid.bench.models import load_config
from fxbraid.bench.pippy import SCHEDULES
from fxbraid.offloading import check_offload
from fxbraid.passes.errors import BraidError

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
REAL = "real"
Compute = Literal["real", "modelled"]
Shape = Literal["equal", "flops"]
UNIT_MS = 2.0
#: Tokens are drawn with the seed behind that of the weights, so it has to fit as well.
MOST_SEED = 2**63 - 1


class ConfigError(ValueError):
    """The options do not fit together or the model; says so with numbers and the way out."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One bench run. Travels to the ranks by pickle.

    layers, hidden: None leaves the model's depth and width (the MLP's width follows). link, pp_link: "real" is gloo on
    loopback; else emulated (``devices.parse_link``), pp_link like link where None. compute: "modelled" gives every
    unit its time on the device clock, by ``times``; unit_ms: of the mean attention or MLP forward. ratio: T_AR / T_F
    of every chunk, sets the TP link (``link`` is then for messages alone). clock: of the emulation (None: virtual
    where compute is modelled, else wall). arithmetic: False leaves the numbers out (timing only). steps: timed rounds,
    one step of every schedule in each. sequence_parallel: of fxbraid's engines.
    offload: "chunk0" or a fraction, of fxbraid's engines; host_link: emulated, None takes no time (or is the real one).
    """

    model: str = "qwen2-tiny"
    tp: int = 2
    pp: int = 2
    microbatches: int = 8
    microbatch_size: int = 2
    seq: int = 64
    layers: int | None = None
    hidden: int | None = None
    schedules: tuple[str, ...] = DEFAULT_SCHEDULES
    steps: int = 10
    compile: bool = False
    seed: int = 0
    link: str = REAL
    pp_link: str | None = None
    compute: Compute = "real"
    times: Shape = "equal"
    unit_ms: float = UNIT_MS
    ratio: float | None = None
    clock: str | None = None
    arithmetic: bool = True
    sequence_parallel: bool = False
    offload: str | float | None = None
    host_link: str | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def batch(self) -> int:
        return self.microbatches * self.microbatch_size

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def emulated(self) -> bool:
        """Is anything about time modelled?"""
        return self.link != REAL or self.ratio is not None or self.compute == "modelled"

    @property
    def modelled(self) -> bool:
        return self.compute == "modelled"

    @property
    def clock_name(self) -> str:
        """ "loopback" where nothing is emulated, or the emulation's clock."""
        if not self.emulated:
            return "loopback"
        return self.clock or ("virtual" if self.modelled else "wall")

    def entries(self) -> tuple[Entry, ...]:
        """Raises ``ScheduleError`` for a name that stands for nothing."""
        return tuple(parse(name) for name in expand(self.schedules))

    def hf(self, **more: Any) -> PretrainedConfig:
        """The model's configuration in these sizes, with ``more`` changed. Raises ``ValueError`` or ``OSError``."""
        if self.layers is not None:
            more = {"num_hidden_layers": self.layers, **more}
        if self.hidden is not None:
            plain = load_config(self.model)
            more["hidden_size"] = self.hidden
            more["intermediate_size"] = (
                round(plain.intermediate_size * self.hidden / plain.hidden_size / 8) * 8
            )
        return load_config(self.model, **more)


def skip_reason(config: BenchConfig, entry: Entry) -> str | None:
    """Why ``entry`` cannot run with this many micro-batches, or None."""
    if entry.engine == "fxbraid":
        return None
    return SCHEDULES[entry.schedule].refuses(config.pp, config.microbatches)


def n_chunks(config: BenchConfig, entry: Entry) -> int:
    if entry.engine != "fxbraid":
        return config.pp * SCHEDULES[entry.schedule].chunks_per_rank
    return schedule.build(entry.schedule, p=config.pp, m=config.microbatches).n_chunks


def check_config(config: BenchConfig) -> None:
    """Raise ``ConfigError`` for whatever would fail in the ranks."""
    for field in ("tp", "pp", "microbatches", "microbatch_size", "steps", "layers", "hidden"):
        if (value := getattr(config, field)) is not None and value < 1:
            option = {"steps": "repeat"}.get(field, field).replace("_", "-")
            raise ConfigError(f"--{option} is {value}; give a number that is at least 1")
    if not -(2**63) <= config.seed < MOST_SEED:
        raise ConfigError(
            f"--seed is {config.seed}; give a whole number from -2^63 to 2^63 - 2, which torch's generators take"
        )
    if config.seq < 2:
        raise ConfigError(f"--seq is {config.seq}; give at least 2, since each token predicts the next one")
    if not config.schedules:
        raise ConfigError(f"--schedules names none; give some of {', '.join(DEFAULT_SCHEDULES)}")
    _check_emulation(config)
    _check_sequence(config)
    try:
        hf = config.hf()
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    check_tp(hf, config.tp)
    for key, value in hf.to_dict().items():
        if "dropout" in key and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"{key} is {value}, and random losses cannot be compared; set it to 0 in the config"
            )
    try:
        entries = config.entries()
    except schedule.ScheduleError as error:
        raise ConfigError(f"--schedules: {error}") from error
    for entry in entries:
        _check_entry(config, entry, int(hf.num_hidden_layers))


def _check_sequence(config: BenchConfig) -> None:
    if not config.sequence_parallel:
        return
    if config.seq % config.tp:
        raise ConfigError(
            f"--sequence-parallel cuts the {config.seq} tokens of --seq into --tp {config.tp} equal parts; use --seq "
            f"{config.seq + config.tp - config.seq % config.tp}"
        )
    if config.modelled:
        raise ConfigError(
            "--sequence-parallel has units of its own (norms, and regions in two halves), whose times --compute "
            "modelled does not know; use --compute real, or `fxbraid simulate --sequence-parallel`"
        )


def _check_emulation(config: BenchConfig) -> None:
    """Do link, compute, ratio and clock make sense together?"""
    for option, known in (("compute", get_args(Compute)), ("times", get_args(Shape))):
        if (value := getattr(config, option)) not in known:
            raise ConfigError(f"--{option} {value} is not one of {', '.join(known)}")
    for option in ("link", "pp_link", "host_link"):
        text = getattr(config, option)
        if text not in (None, REAL):
            try:
                parse_link(text)
            except ValueError as error:
                raise ConfigError(f"--{option.replace('_', '-')}: {error}") from error
    _check_links(config)
    _check_offload(config)
    if not 0 < config.unit_ms < float("inf"):
        raise ConfigError(f"--unit-ms is {config.unit_ms:g}; give milliseconds above 0")
    if not config.emulated:
        for option, value in (("--clock", config.clock), ("--pp-link", config.pp_link)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value} is for emulated links and modelled compute, and here both are real; add "
                    f"--link {', '.join(LINKS)} or alpha,beta, --ratio, or --compute modelled"
                )
    if config.modelled and config.clock == "wall":
        raise ConfigError(
            "--clock wall runs units for as long as they really take; use --clock virtual or paced with --compute "
            "modelled"
        )
    if config.emulated and not config.modelled and config.clock in ("virtual", "paced"):
        raise ConfigError(
            f"--clock {config.clock} counts modelled times, and --compute real has none; use --clock wall, or "
            "--compute modelled"
        )
    if config.clock not in (None, "virtual", "paced", "wall"):
        raise ConfigError(f"--clock {config.clock} is not one of virtual, paced, wall")
    if not config.arithmetic and not config.modelled:
        raise ConfigError("--timing-only leaves nothing to time with real compute; add --compute modelled")
    if config.modelled and config.link == REAL and config.ratio is None:
        ratio = "--ratio 0.37, or " if config.tp > 1 else ""
        raise ConfigError(
            f"--compute modelled needs a link that is modelled as well: give {ratio}--link "
            f"{', '.join(LINKS)} or alpha,beta"
        )


def _check_links(config: BenchConfig) -> None:
    """Is each link given once, and has the ratio something to set?"""
    if config.ratio is not None and not 0 <= config.ratio < float("inf"):
        raise ConfigError(f"--ratio is {config.ratio:g}; give T_AR / T_F, 0 or more, such as 0.37")
    if config.ratio is not None and config.tp == 1:
        raise ConfigError(
            f"--ratio {config.ratio:g} sets the TP link, and with --tp 1 there are no all-reduces; leave it out and "
            "give --link for the messages, or take --tp 2"
        )
    if config.ratio is not None and config.link != REAL and config.pp_link is not None:
        raise ConfigError(
            f"--link {config.link} has nothing to set: --ratio {config.ratio:g} sets the TP link and --pp-link "
            f"{config.pp_link} the other; leave one of the three out"
        )
    if config.emulated and config.pp_link == REAL:
        raise ConfigError(
            "--pp-link real does not go with a TP link or compute that is modelled: one clock counts both links; give "
            f"{', '.join(LINKS)} or alpha,beta, such as 0,inf for messages that take no time"
        )


def _check_offload(config: BenchConfig) -> None:
    try:
        check_offload(config.offload)
    except BraidError as error:
        raise ConfigError(f"--offload: {error}") from error
    if config.host_link is None:
        return
    if config.offload is None:
        raise ConfigError(
            f"--host-link {config.host_link} is what --offload moves activations over; add --offload chunk0"
        )
    if not config.emulated or config.host_link == REAL:
        raise ConfigError(
            f"--host-link {config.host_link} is emulated, and here links and compute are real; leave it out (copies "
            "of this machine are measured), or add --link or --compute modelled"
        )


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


def _check_entry(config: BenchConfig, entry: Entry, layers: int) -> None:
    try:
        chunks = n_chunks(config, entry)
    except schedule.ScheduleError as error:
        raise ConfigError(
            f"--schedules: {error}; torch's classes go by their names: {', '.join(SCHEDULES)}; "
            f"{', '.join(GROUPS)} stand for many"
        ) from error
    if chunks > layers:
        raise ConfigError(
            f"{entry.name} on --pp {config.pp} wants {chunks} chunks, and {config.model} has {layers} layers; "
            f"use a smaller --pp, more --layers, or --schedules without it"
        )
    if entry.engine == "torch" and not config.arithmetic:
        raise ConfigError(
            f"{entry.name} is torch's own class, which cannot leave its arithmetic out; drop --timing-only, or take "
            f"order:{entry.name.removeprefix('Schedule')}"
        )
