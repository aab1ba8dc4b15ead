"""``fxbraid bench --model smollm2``: AdamW steps on real weights and text, beside the plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging

from fxbraid import schedule
from fxbraid.bench import smollm2
from fxbraid.bench.config import ConfigError, check_tp
from fxbraid.bench.ranks import Progress, tell
from fxbraid.bench.record import machine, versions
from fxbraid.bench.run import check_world, progress_bar, run_local, write_json
from fxbraid.bench.table import cores
from fxbraid.bench.timing import LOOPBACK
from fxbraid.runtime.launch import process_group, under_torchrun

FIRST_TOL = 1e-6  # relative, the forward and the loss alone
LATER_TOL = 1e-4  # AdamW's first steps are signs of the gradients: rounding in tiny ones is magnified
GROUP_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class SmolConfig:
    """``tps`` are run one after the other, each on ``pp`` x tp ranks."""

    pp: int = 2
    tps: tuple[int, ...] = (1, 3)
    microbatches: int = 4
    steps: int = 3
    lr: float = 1e-4
    schedule: str = "stp"


def run(config: SmolConfig, console: Console, json_path: Path | None, timeout_s: float) -> bool:
    """Prepare the weights, train plain and braided, print and write; whether the losses agree."""
    logging.disable_progress_bar()
    try:
        smollm2.find_gguf()
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    with console.status("SmolLM2-135M: reading the weights (the first time from GGUF)"):
        folder = smollm2.prepare()
    check(config, AutoConfig.from_pretrained(folder))
    if under_torchrun():
        (alone, *plain), losses = _as_rank(config, folder, console)
    else:
        (alone, *plain), losses = _as_parent(config, folder, console, timeout_s)
    console.print(make_table(config, plain, losses))
    console.print(
        f"The first {smollm2.SEQ_LEN} tokens of {smollm2.TEXT_MODULES[0]}.py alone, untrained, one process: "
        f"loss {alone:.4f}."
    )
    good = all(agree(plain, found) for found in losses.values())
    console.print("The losses agree." if good else "THE LOSSES DIFFER.", style=None if good else "bold red")
    if json_path is not None and not console.quiet:
        content = {"config": asdict(config), "clock": LOOPBACK, "machine": machine(), "versions": versions()}
        losses_json = {
            "first_sequence_alone": alone,
            "one_process": plain,
            **{f"pp{config.pp}_tp{tp}": found for tp, found in losses.items()},
        }
        write_json(json_path, content | {"losses": losses_json, "ok": good})
    return good


def check(config: SmolConfig, hf: Any) -> None:
    """Refuse before any rank starts what the ranks would refuse."""
    if config.pp < 1 or config.microbatches < 1:
        raise ConfigError(f"--pp {config.pp} and -m {config.microbatches} have to be at least 1")
    chunks = schedule.build(config.schedule, p=config.pp, m=config.microbatches).n_chunks
    if chunks > hf.num_hidden_layers:
        raise ConfigError(
            f"--pp {config.pp} wants {chunks} chunks, and the model has {hf.num_hidden_layers} layers; "
            "use a smaller --pp"
        )
    for tp in config.tps:
        check_tp(hf, tp)
    if under_torchrun():
        if len(config.tps) > 1:
            raise ConfigError(
                f"under a launcher only one size can run; give --tp {' or --tp '.join(map(str, config.tps))}"
            )
        check_world(config.pp * config.tps[0], f"--tp {config.tps[0]} x --pp {config.pp}")


def agree(plain: Sequence[float], losses: Sequence[float]) -> bool:
    differences = [abs(a - b) / abs(a) for a, b in zip(plain, losses, strict=True)]
    return differences[0] <= FIRST_TOL and all(d <= LATER_TOL for d in differences)


def make_table(config: SmolConfig, plain: Sequence[float], losses: dict[int, list[float]]) -> Table:
    table = Table(
        title=f"SmolLM2-135M, {config.steps} AdamW steps on the standard library's text",
        caption=f"{LOOPBACK}, {cores()} cores; {config.microbatches} x {smollm2.SEQ_LEN} tokens a step, "
        f"schedule {config.schedule}; diff: relative, to one process",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("step", "one process"):
        table.add_column(heading, justify="right")
    for tp in losses:
        table.add_column(f"pp {config.pp} x tp {tp}", justify="right")
        table.add_column("diff", justify="right")
    for step, expected in enumerate(plain):
        cells = [str(step + 1), f"{expected:.6f}"]
        for found in losses.values():
            cells += [f"{found[step]:.6f}", f"{abs(found[step] - expected) / expected:.0e}"]
        table.add_row(*cells)
    return table


def _as_parent(
    config: SmolConfig, folder: Path, console: Console, timeout_s: float
) -> tuple[list[float], dict[int, list[float]]]:
    with progress_bar(console) as show:
        plain = run_local(train_plain, (config, str(folder)), 1, show, console, timeout_s)[0]
        losses = {}
        for tp in config.tps:
            args = (config, str(folder), tp)
            losses[tp] = run_local(train_braided, args, config.pp * tp, show, console, timeout_s)[0]
    return plain, losses


def _as_rank(
    config: SmolConfig, folder: Path, console: Console
) -> tuple[list[float], dict[int, list[float]]]:
    tp = config.tps[0]
    with progress_bar(console) as show, process_group(GROUP_TIMEOUT_S, "cpu"):
        found = [train_plain(config, str(folder), show) if dist.get_rank() == 0 else []]
        dist.broadcast_object_list(found, src=0)
        return found[0], {tp: _train_braided(config, folder, tp, show)}


def train_plain(config: SmolConfig, folder: str, progress: Progress = tell) -> list[float]:
    """The losses of the unsplit model in this process, and before them that of the first sequence alone."""
    logging.disable_progress_bar()
    model: Any = smollm2.load_model(Path(folder))

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch, use_cache=False).loss
        loss.backward()
        return loss

    first = {key: value[:1] for key, value in smollm2.load_batches(Path(folder), 1, 1)[0].items()}
    with torch.no_grad():
        alone = float(model(**first, use_cache=False).loss)
    return [alone, *_train(step, model, config, Path(folder), progress, "one process")]


def train_braided(config: SmolConfig, folder: str, tp: int) -> list[float]:
    """The losses that ``fxbraid`` gives, in this rank of ``config.pp`` x ``tp``."""
    logging.disable_progress_bar()
    with process_group(GROUP_TIMEOUT_S, "cpu"):
        return _train_braided(config, Path(folder), tp, tell if dist.get_rank() == 0 else _silent)


def _silent(done: int, total: int, text: str) -> None:
    pass


def _train_braided(config: SmolConfig, folder: Path, tp: int, progress: Progress) -> list[float]:
    import fxbraid

    progress(0, config.steps + 1, f"pp {config.pp} x tp {tp}: build")
    example = smollm2.load_batches(folder, 1, config.microbatches)[0]
    model: Any = fxbraid.braid(
        smollm2.load_model(folder),
        example,
        tp_size=tp,
        pp_size=config.pp,
        n_microbatches=config.microbatches,
        schedule=config.schedule,
        compile=False,
    )
    return _train(
        lambda batch: model.step(**batch), model, config, folder, progress, f"pp {config.pp} x tp {tp}"
    )


def _train(
    step: Callable[[dict[str, Tensor]], Tensor],
    model: Any,
    config: SmolConfig,
    folder: Path,
    progress: Progress,
    name: str,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    losses = []
    for number, batch in enumerate(smollm2.load_batches(folder, config.steps, config.microbatches)):
        progress(number + 1, config.steps + 1, f"{name}: step {number + 1} of {config.steps}")
        losses.append(float(step(batch).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses
