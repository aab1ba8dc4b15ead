"""``python -m fxbraid.bench.compiletime``: how long compiling takes, and how many artefacts it makes, by depth.

Every measurement is a process of its own with an empty Inductor cache in a temporary folder, and one compiler at a
time. Depths take turns (4, 32, 4, 32, ...), medians with the spread are printed, of the wall clock and of processor
time (this process and the compilers that it starts), which a busy machine disturbs less. The model is a Qwen2 of small
width, cut for p = 2 ranks of two chunks each, all four compiled in one process.

``--mode unit`` (default) compiles all units of the model. ``--mode block`` compiles one block, F1&B2, whose graph holds
every layer of two chunks: what is compiled there grows with depth, and the table says by how much.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import typer
from tabulate import tabulate

CHUNKS = 4
MODES = ("unit", "block")


def compile_once(mode: str, layers: int) -> dict[str, Any]:
    """In a process of its own: seconds of compiling (without tracing), artefacts and units."""
    from fxbraid.passes.compile import Artefacts
    from fxbraid.passes.pipeline import lower_model

    model, micro = _model(layers)
    start = time.perf_counter()
    lowered = lower_model(model, micro, n_chunks=CHUNKS, tp_size=2)
    traced = time.perf_counter() - start
    units = [u for chunk in lowered.chunks.values() for us in chunk.units.values() for u in us]
    artefacts = Artefacts("unit")
    _warm_up()
    start, began = time.perf_counter(), _processor_s()
    if mode == "unit":
        for unit in units:
            artefacts.get(unit)
    else:
        _compile_block(lowered, artefacts)
    return {
        "seconds": time.perf_counter() - start,
        "processor": _processor_s() - began,
        "traced": traced,
        "artefacts": len(artefacts),
        "units": len(units),
    }


def _processor_s() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _model(layers: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    ids = torch.zeros((1, 32), dtype=torch.int64)
    return Qwen2ForCausalLM(config), {"input_ids": ids, "labels": ids}


def _warm_up() -> None:
    """What the first compilation of a process pays, whatever it compiles: imports, workers, a test of the compiler."""
    import torch
    from torch import fx

    from fxbraid.passes.compile import compile_graph

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 8)
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    compile_graph(fx.GraphModule({}, graph), "warm-up", name="warm-up")


def _compile_block(lowered: Any, artefacts: Any) -> None:
    import torch.distributed as dist
    from torch import nn

    from fxbraid.compat import alias_group
    from fxbraid.passes.block import BlockContext, braid
    from fxbraid.passes.compile_block import cut
    from fxbraid.schedule import Action

    with tempfile.TemporaryDirectory() as folder:
        # Inductor asks for the group's size; one rank is enough, since nothing runs.
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        labels = [u.label for chunk in lowered.chunks.values() for us in chunk.units.values() for u in us]
        context = BlockContext(lowered.chunks, dict.fromkeys(labels, nn.Identity()), alias_group(group))
        for piece in cut(braid([Action.parse("1F1"), Action.parse("2B0")], context)).pieces:
            artefacts.get_piece(piece)
        dist.destroy_process_group()


def measure(mode: str, layers: int) -> dict[str, Any]:
    """One run in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "fxbraid.bench.compiletime",
            "--mode",
            mode,
            "--layers",
            str(layers),
            "--once",
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"compiling {layers} layers failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: dict[int, list[dict[str, Any]]]) -> str:
    """Medians and spread by depth, and the ratio of the deepest to the shallowest."""
    rows = []
    for layers, runs in sorted(results.items()):
        seconds = [run["seconds"] for run in runs]
        rows.append(
            (
                layers,
                runs[0]["units"],
                runs[0]["artefacts"],
                statistics.median(seconds),
                f"{min(seconds):.1f} to {max(seconds):.1f}",
                statistics.median(run["processor"] for run in runs),
                statistics.median(run["traced"] for run in runs),
            )
        )
    headers = ("layers", "units", "artefacts", "compiling, s", "spread", "processor, s", "tracing, s")
    text = tabulate(rows, headers=headers, floatfmt=".1f")
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        text += f"\n{last[0]} layers over {first[0]}: "
        text += f"artefacts x {last[2] / first[2]:.2f}, "
        text += f"wall clock x {last[3] / first[3]:.2f}, processor x {last[5] / first[5]:.2f}"
    return text


def main(
    mode: Annotated[str, typer.Option(help="unit, or block")] = "unit",
    layers: Annotated[list[int] | None, typer.Option(help="Depths; give it several times.")] = None,
    repeat: Annotated[int, typer.Option(help="Runs of each depth.")] = 3,
    once: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """How long compiling takes, by depth."""
    if mode not in MODES:
        raise typer.BadParameter(f"--mode {mode}: use one of {', '.join(MODES)}")
    depths = layers or [4, 32]
    if any(depth < CHUNKS for depth in depths):
        raise typer.BadParameter(
            f"--layers {min(depths)}: the model is cut into {CHUNKS} chunks; give at least {CHUNKS}"
        )
    if once:
        print(json.dumps(compile_once(mode, depths[0])))
        return
    results: dict[int, list[dict[str, Any]]] = {depth: [] for depth in depths}
    for number in range(repeat):
        for depth in depths:
            results[depth].append(measure(mode, depth))
            print(
                f"run {number + 1} of {repeat}, {depth} layers: {results[depth][-1]['seconds']:.1f} s",
                flush=True,
            )
    print(
        f"compile={mode!r}, {CHUNKS} chunks, tp 2, empty caches, medians of {repeat} interleaved runs, wall clock"
    )
    print(table(results))


if __name__ == "__main__":
    typer.run(main)
