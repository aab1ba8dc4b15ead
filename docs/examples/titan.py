"""A loop in torchtitan's manner: a device mesh with named axes, a model on the meta device, parameters made shard by
shard, bfloat16 with float32 masters, optimizer states shared out over the replicas.

    torchrun --nproc-per-node 4 docs/examples/titan.py --dp 2 --tp 1 --pp 2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import fxbraid

ROWS, LENGTH = 8, 64


def main() -> None:
    options = argparse.ArgumentParser()
    for axis in ("dp", "tp", "pp"):
        options.add_argument(f"--{axis}", type=int, default=1)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--compile", default="unit", choices=["unit", "no"])
    given = options.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (given.dp, given.pp, given.tp), mesh_dim_names=("dp", "pp", "tp"))
    replica = mesh["dp"].get_local_rank()

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 256}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    example = {
        name: torch.empty(ROWS, LENGTH, dtype=torch.long, device="meta") for name in ("input_ids", "labels")
    }
    model = fxbraid.braid(
        plain,
        example,
        mesh,
        n_microbatches=4,
        schedule="zbv" if given.pp > 1 else "stp",
        master_weights=True,
        seed=7,
        compile=False if given.compile == "no" else given.compile,
    )
    optimizer = fxbraid.zero_optimizer(model, torch.optim.AdamW, lr=1e-3)
    numbers = torch.Generator().manual_seed(replica)  # every replica has data of its own
    with fxbraid.RunLog(model) as log:
        for _ in range(given.steps):
            ids = torch.randint(0, 256, (ROWS, LENGTH), generator=numbers)
            loss = model.step(input_ids=ids, labels=ids)
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            log(loss=loss, grad_norm=norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
