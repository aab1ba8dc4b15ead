"""What loading by shards costs a host: each rank's peak of memory, beside its shard and the whole model.

    python -m fxbraid.bench.loading        # 445 MB of Llama, four layouts, new processes; two minutes on 2 cores

The memory of a rank before it loads (interpreter, libraries, a tiny model braided the same way) is taken off. *Own* is
what the process has allocated (RssAnon, read every 2 ms); *with the files' pages* is everything in memory at the
highest (VmHWM), which counts what is mapped of the files, pages of the system's cache.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tabulate import tabulate
from transformers import AutoConfig

import fxbraid

from ..runtime.launch import launch, process_group
from ..weights import MAPPED
from .models import build_model, make_batch

#: Own memory at its highest, over the shard.
LIMIT = 1.2
#: What is mapped of the files at once; a slice of columns touches the pages of a whole tensor, twice its bytes here.
PAGES = 2 * MAPPED
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # tp, pp
MB = 1e6
BRAID: dict[str, Any] = {"n_microbatches": 2, "compile": False}


class Memory:
    """``with Memory() as m``: ``m.own`` and ``m.all``, bytes at the highest beyond what there was before."""

    def __init__(self) -> None:
        self.own = self.all = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._before, self._all_before = status("RssAnon"), status("VmRSS")
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.own = max(self.own, status("RssAnon") - self._before)
        self.all = status("VmHWM") - self._all_before

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.own = max(self.own, status("RssAnon") - self._before)


def status(name: str) -> int:
    """A line of this process's ``/proc/self/status``, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; this command wants Linux")


def sizes(hidden: int, layers: int) -> dict[str, Any]:
    """A Llama of that width: 8192 tokens, tied."""
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
    }


def rank_main(path: str, small: str, layout: dict[str, Any]) -> tuple[int, int, int, int]:
    """In each rank: bytes of its shard, bytes read, and memory at the highest, own and all."""
    torch.set_num_threads(1)
    with process_group(timeout_s=600, device_type="cpu"):
        batch = make_batch(8192, 2, 16, 0)
        fxbraid.from_pretrained(small, batch, **layout, **BRAID)  # imports, and what tracing keeps
        with Memory() as memory:
            model = fxbraid.from_pretrained(path, batch, **layout, **BRAID)
        shard = sum(p.numel() * p.element_size() for p in model.parameters())
        return shard, model.loaded.bytes_read, memory.own, memory.all


app = typer.Typer(add_completion=False)


@app.command()
def main(
    hidden: Annotated[int, typer.Option(help="width of the model")] = 1024,
    layers: Annotated[int, typer.Option(help="its layers")] = 8,
) -> None:
    """Load on each layout in new processes and print each rank's peak; ends with 1 where one is above the limit."""
    rows, ok = [], True
    with tempfile.TemporaryDirectory(prefix="fxbraid-loading-") as folder:
        paths = []
        for name, width, depth in (("large", hidden, layers), ("small", 64, 4)):
            paths.append(f"{folder}/{name}")
            build_model(AutoConfig.for_model("llama", **sizes(width, depth)), 0).save_pretrained(
                paths[-1], max_shard_size="100MB"
            )
        found = []
        for tp, pp in LAYOUTS:
            args = (*paths, {"tp_size": tp, "pp_size": pp})
            ranks = launch("fxbraid.bench.loading:rank_main", args, nproc=tp * pp, timeout_s=1800)
            found.append((f"tp {tp} x pp {pp}", ranks))
    for name, ranks in found:
        shard, read, own, every = max(ranks, key=lambda one: one[2] / one[0])  # furthest above its shard
        ok &= own <= LIMIT * shard and every <= own + PAGES
        told = [f"{value / MB:.0f}" for value in (shard, read, own, every)]
        rows.append([name, *told[:3], f"{own / shard:.2f}", told[3]])
    heads = ["MB", "its shard", "read", "own, highest", "over the shard", "with the files' pages"]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    app()
