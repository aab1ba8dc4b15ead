"""transformers' Trainer on a braided model.

pip install -e '.[trainer]'
torchrun --nproc-per-node 4 docs/examples/trainer.py --tp 2 --pp 2
"""

from __future__ import annotations

import argparse
import inspect

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import fxbraid

LENGTH = 64


def rows() -> list[dict[str, torch.Tensor]]:
    """The bytes of ``argparse``, 64 to a row."""
    source = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()
    cut = source[: len(source) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": ids, "labels": ids.clone()} for ids in cut]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--pp", type=int, default=1)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--folder", default="runs/trainer")
    options.add_argument("--compile", default="unit", choices=["unit", "no"])
    given = options.parse_args()

    arguments = TrainingArguments(
        output_dir=given.folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=given.steps,
        learning_rate=3e-3,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 256}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    data = rows()
    example = {name: torch.stack([row[name] for row in data[:8]]) for name in data[0]}
    model = fxbraid.braid(
        AutoModelForCausalLM.from_config(config),
        example,
        tp_size=given.tp,
        pp_size=given.pp,
        n_microbatches=4,
        compile=False if given.compile == "no" else given.compile,
    )
    trainer = fxbraid.BraidTrainer(
        model=model, args=arguments, train_dataset=data[:-16], eval_dataset=data[-16:]
    )
    trainer.train()
    trainer.save_model(f"{given.folder}/final")


if __name__ == "__main__":
    main()
