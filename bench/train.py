"""A whole run against one process: tiny Llama on the source of Python's standard library, byte by byte.

    python -m fxbraid.bench.train                    # 200 steps, float32 and bfloat16, stp and 1f1b on 2 x 2 ranks
    python -m fxbraid.bench.train --steps 40 --stop 20   # and resumed at step 20 on other layouts

AdamW, warm-up and cosine, clipping at 1.0. Every loss of a braided run is compared with that of the plain model.
"""

from __future__ import annotations

import importlib
import inspect
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from tabulate import tabulate
from torch import Tensor, nn

import fxbraid

from ..runtime.launch import launch, process_group

#: Modules whose source is the text.
TEXT = ("argparse", "tarfile", "typing", "inspect", "subprocess", "zipfile", "difflib", "statistics")
ROWS, LENGTH, WARM_UP = 8, 64, 20
#: Three times as much is past the edge of stability: after 50 steps float32 is 1 % from float64, in one process too.
PEAK_LR = 1e-3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2 x pp 2": {"tp_size": 2, "pp_size": 2},
    "tp 1 x pp 4": {"tp_size": 1, "pp_size": 4, "schedule": "1f1b"},
    "tp 4 x pp 1": {"tp_size": 4, "pp_size": 1},
    "tp 2 x pp 1": {"tp_size": 2, "pp_size": 1},
    "one process": {"tp_size": 1, "pp_size": 1},
    "dp 2 x pp 2": {"dp_size": 2, "tp_size": 1, "pp_size": 2},
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run: of ``steps`` steps; ``layout``: of :data:`LAYOUTS`, with the schedule if it is not stp."""

    steps: int
    options: dict[str, Any]
    dtype: str = "float32"
    #: save there behind step ``stop``, or go on from there
    folder: str = ""
    stop: int = 0


def tiny(dtype: str) -> nn.Module:
    """Four layers, 64 wide, a vocabulary of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).train().to(getattr(torch, dtype))


def text(steps: int) -> list[dict[str, Tensor]]:
    """A batch for each step: [8, 64] bytes of source, the same for everyone."""
    source = "\n".join(inspect.getsource(importlib.import_module(name)) for name in TEXT).encode()
    every = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    rows = every[: len(every) // LENGTH * LENGTH].view(-1, LENGTH)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    chosen = rows[order.repeat(math.ceil(steps * ROWS / len(rows)))[: steps * ROWS]]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in chosen.view(steps, ROWS, LENGTH)]


def optimizer_of(
    parameters: Any, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and a rate that warms up and then follows a cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, weight_decay=0.1)

    def rate(step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def plain(run: Run) -> list[float]:
    """Losses of the plain model in one process; of a bfloat16 one with float32 masters kept beside it."""
    model = tiny(run.dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer, scheduler = optimizer_of(masters, run.steps)
    losses = []
    for batch in text(run.steps):
        loss = model(**batch).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(float(loss.detach()))
    return losses


def braided(run: Run) -> list[float]:
    """The same in this rank of a world that is there already."""
    replicas = run.options.get("dp_size", 1)
    batches = text(run.steps)
    example = {name: rows[: ROWS // replicas] for name, rows in batches[0].items()}
    model = fxbraid.braid(
        tiny(run.dtype),
        example,
        n_microbatches=4,
        reproducible=True,
        master_weights=run.dtype != "float32",
        **run.options,
    )
    optimizer, scheduler = optimizer_of(model.parameters(), run.steps)
    first, losses = 0, []
    checkpoints = fxbraid.Checkpointer(run.folder) if run.folder else None
    if checkpoints is not None and not run.stop:
        found = checkpoints.load(model, optimizer, scheduler)
        first = found.step if found is not None else 0
    for step in range(first, run.steps):
        here = {name: rows.chunk(replicas)[model.mesh.dp_rank] for name, rows in batches[step].items()}
        loss = model.step(**here)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if checkpoints is not None and step + 1 == run.stop:
            checkpoints.save(step + 1, model, optimizer, scheduler)
    if checkpoints is not None:
        checkpoints.wait()
    return losses


def rank_main(runs: Sequence[dict[str, Any]]) -> list[list[float]]:
    """In each rank: all runs (a :class:`Run` each, as a dict), one after the other."""
    torch.set_num_threads(1)
    with process_group(timeout_s=120, device_type="cpu"):
        return [braided(Run(**run)) for run in runs]


def in_ranks(runs: Sequence[Run], nproc: int) -> list[list[float]]:
    """The losses of ``runs`` in ``nproc`` processes: of the first, which all must have."""
    if nproc == 1:
        return [braided(run) for run in runs]
    found = launch(
        "fxbraid.bench.train:rank_main", ([asdict(run) for run in runs],), nproc=nproc, timeout_s=3000
    )
    if any(other != found[0] for other in found[1:]):
        raise RuntimeError("ranks returned different losses")
    return found[0]


def furthest(got: Sequence[float], want: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))


app = typer.Typer(add_completion=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="steps of each run")] = 200,
    stop: Annotated[int, typer.Option(help="save behind this step, and resume from there (0: half way)")] = 0,
    bf16: Annotated[bool, typer.Option(help="the bfloat16 runs too")] = True,
) -> None:
    """Train, compare, stop, resume elsewhere; ends with 1 where a curve is not the plain model's."""
    stop = stop or steps // 2
    ok = True
    rows: list[list[str]] = []

    def told(
        name: str, got: Sequence[float], want: Sequence[float], limit: float, *, end: bool = False
    ) -> None:
        nonlocal ok
        error = abs(got[-1] - want[-1]) / want[-1] if end else furthest(got, want)
        ok &= error <= limit
        cells = (
            f"{got[0]:.5f}",
            f"{got[-1]:.5f}",
            f"{error:.1e}",
            f"{limit:.0e}",
            "ok" if error <= limit else "NO",
        )
        rows.append([name, *cells])

    with tempfile.TemporaryDirectory(prefix="fxbraid-train-") as folder:
        want = plain(Run(steps, {}))
        two = LAYOUTS["tp 2 x pp 2"]
        runs = [Run(steps, {**two, "schedule": "stp"}, folder=folder, stop=stop)]
        runs += [Run(steps, {**two, "schedule": "1f1b"})]
        runs += [Run(steps, {**two, "schedule": "stp"}, "bfloat16")] if bf16 else []
        stp, f1b, *low = in_ranks(runs, 4)
        told("float32, tp 2 x pp 2, stp", stp, want, 1e-5)
        told("float32, tp 2 x pp 2, 1f1b", f1b, want, 1e-5)
        told("stp and 1f1b, to the bit", stp, f1b, 0.0)
        if low:
            told(
                "bfloat16, masters, stp: the last loss",
                low[0],
                plain(Run(steps, {}, "bfloat16")),
                5e-3,
                end=True,
            )
            told("bfloat16 against float32: the last loss", low[0], want, 5e-3, end=True)
        four = ["tp 2 x pp 2", "tp 1 x pp 4", "tp 4 x pp 1", "dp 2 x pp 2"]
        resumed = dict(
            zip(four, in_ranks([Run(steps, LAYOUTS[n], folder=folder) for n in four], 4), strict=True)
        )
        for name, nproc in (("tp 2 x pp 1", 2), ("one process", 1)):
            resumed[name] = in_ranks([Run(steps, LAYOUTS[name], folder=folder)], nproc)[0]
        for name, losses in resumed.items():
            told(f"resumed at {stop} on {name}", losses, stp[stop:], 0.0 if name == "tp 2 x pp 2" else 1e-5)
    print(tabulate(rows, ["run", "first loss", "last loss", "difference", "limit", ""], tablefmt="github"))
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    app()
