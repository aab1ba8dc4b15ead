"""Losses and gradients are the same bits whatever the link, the clock, modelled compute and braiding.

    python -m fxbraid.bench.bitwise

2 x 2 ranks, a tiny Qwen2 with tied embeddings, ragged labels. Every engine runs two steps in every surrounding: gloo
on loopback, emulated clusters on each clock, and (as root) a real slow link. One digest covers the loss and every
gradient of all ranks. Exits with 1 unless all that add gradients up in one order hold one digest: a schedule in every
surrounding, and all schedules whose W's run in micro-batch order. (``auto`` takes another schedule where costs differ.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import typer
from torch.distributed.device_mesh import init_device_mesh

from fxbraid.bench import netlink
from fxbraid.bench.bitwise_pairs import accumulation, digest_of
from fxbraid.bench.config import BenchConfig
from fxbraid.bench.devices import equal_times
from fxbraid.bench.engines import BraidEngine, Workshop
from fxbraid.bench.entries import parse
from fxbraid.bench.lab import markdown
from fxbraid.bench.models import build_model, make_batch
from fxbraid.bench.ranks import group
from fxbraid.runtime.launch import launch

NAMES = ("stp", "stp:blocking", "auto", "zbv", "order:ZBVZeroBubble", "1f1b", "interleaved_1f1b", "gpipe")
BASE = BenchConfig(hidden=32, layers=4, microbatches=5, microbatch_size=2, seq=16, unit_ms=0.5)
SURROUNDINGS = {
    "gloo on loopback": BASE,
    "virtual clock, ratio 0.37": replace(BASE, compute="modelled", ratio=0.37, clock="virtual"),
    "virtual clock, ratio 1, slow PP link": replace(
        BASE, compute="modelled", ratio=1.0, clock="virtual", pp_link="1e-3,1e6"
    ),
    "paced clock, ratio 0.5": replace(BASE, compute="modelled", ratio=0.5, clock="paced"),
    "wall clock, real compute, slow links": replace(BASE, link="1e-3,1e8"),
}
REAL_LINK = "real slow link"

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one schedule in one surrounding. order: how it adds gradients up, see ``bitwise_pairs``."""

    name: str
    digest: str
    order: str


def run(config: BenchConfig) -> list[Outcome]:
    """In each rank: two steps of every schedule; the same on every rank."""
    torch.set_num_threads(1)
    times = equal_times(config.unit_ms * 1e-3) if config.modelled else None
    surrounding: AbstractContextManager[None] = group(config, times)
    with surrounding:
        hf = config.hf(tie_word_embeddings=True)
        mesh = init_device_mesh("cpu", (config.pp, config.tp), mesh_dim_names=("pp", "tp"))
        # One split of the layers everywhere, so that units are the same with and without modelled times.
        workshop = Workshop(config, mesh, partial(build_model, hf, 0), times=equal_times(1.0))
        return list(_outcomes(config, workshop, hf.vocab_size))


def _outcomes(config: BenchConfig, workshop: Workshop, vocab: int) -> Iterator[Outcome]:
    for name in NAMES:
        engine = None
        digests = []
        for step in range(2):
            batch = make_batch(vocab, config.batch, config.seq, seed=step, ragged=True)
            if engine is None:
                engine = workshop.make(parse(name), batch, config.microbatches)
                assert isinstance(engine, BraidEngine)
                order = accumulation(engine.model.schedule, config.compile)
            engine.zero_grad()
            digests.append(digest_of(engine.step(batch), list(engine.parts())))
        yield Outcome(name, hashlib.sha256("".join(digests).encode()).hexdigest(), order)


@app.command()
def main(
    compile_: Annotated[bool, typer.Option("--compile", help='compile="unit", not eager.')] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a surrounding's ranks are ended.")
    ] = 600.0,
) -> None:
    """Compare digests over surroundings and schedules."""
    found: dict[str, list[Outcome]] = {}
    for name, config in SURROUNDINGS.items():
        found[name] = launch(f"{NAME}:run", (replace(config, compile=compile_),), nproc=4, timeout_s=timeout)[
            0
        ]
        typer.echo(f"{name}: done", err=True)
    if why := netlink.reason():
        typer.echo(f"{REAL_LINK}: left out, {why}")
    else:
        with netlink.Network(4, "200mbit") as network:
            found[REAL_LINK] = network.launch(
                f"{NAME}:run", (replace(BASE, compile=compile_),), timeout_s=timeout
            )[0]
    rows = [[name, *(one.digest[:8] for one in outcomes)] for name, outcomes in found.items()]
    typer.echo(f"{'compiled units' if compile_ else 'eager'}; digests of loss and all gradients, two steps\n")
    typer.echo(markdown(("surrounding", *NAMES), rows))
    wrong = differences(found)
    typer.echo("\n".join(["", *wrong]) if wrong else "\nAll that must be equal is equal to the bit.")
    if wrong:
        raise typer.Exit(1)


def differences(found: dict[str, list[Outcome]]) -> list[str]:
    """What is not equal and must be."""
    wrong = []
    first: dict[str, tuple[str, str]] = {}
    for where, outcomes in found.items():
        for one in outcomes:
            told = f"{one.name}, {where}"
            known, other = first.setdefault(one.order, (one.digest, told))
            if known != one.digest:
                wrong.append(f"DIFFERENT: {told} and {other}")
    return wrong


#: How ranks import this file, also when it is run by ``python -m``.
NAME = __spec__.name if __spec__ else __name__

if __name__ == "__main__":
    app()
