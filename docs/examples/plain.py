"""A plain training loop: any optimizer and scheduler, a running log, checkpoints that another layout resumes.

    torchrun --nproc-per-node 4 docs/examples/plain.py --tp 2 --pp 2
    torchrun --nproc-per-node 2 docs/examples/plain.py --pp 2 --steps 40    # goes on where that stopped

Without torchrun it runs in one process. The model is tiny, the text is Python's own ``argparse``.
"""

from __future__ import annotations

import argparse
import inspect

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import fxbraid

ROWS, LENGTH = 8, 64


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The bytes of ``argparse`` from a place that depends on the step: the same on every rank."""
    source = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()
    start = step * ROWS * LENGTH % (len(source) - ROWS * LENGTH)
    ids = source[start : start + ROWS * LENGTH].view(ROWS, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--pp", type=int, default=1)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--folder", default="runs/plain")
    options.add_argument("--compile", default="unit", choices=["unit", "no"])
    given = options.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 256}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    model = fxbraid.braid(
        AutoModelForCausalLM.from_config(config),
        batch_of(0),
        tp_size=given.tp,
        pp_size=given.pp,
        n_microbatches=4,
        compile=False if given.compile == "no" else given.compile,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)

    with fxbraid.Checkpointer(given.folder, keep=2) as checkpoints:
        found = checkpoints.load(model, optimizer, scheduler)
        first = found.step if found else 0
        with fxbraid.RunLog(model, f"{given.folder}.jsonl", total=given.steps, first_step=first + 1) as log:
            for step in range(first, given.steps):
                loss = model.step(**batch_of(step))
                norm = model.clip_grad_norm_(1.0, skip_if_nonfinite=True)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                log(loss=loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                if (step + 1) % 10 == 0:
                    checkpoints.save(step + 1, model, optimizer, scheduler)
    model.save_pretrained(f"{given.folder}/final")


if __name__ == "__main__":
    main()
