"""The example of docs/metrics.md, measured on the emulated cluster: four ranks, the second pipeline rank slow.

    python -m docs.metrics_example             # writes docs/metrics.svg, prints the step's metrics
    python -m docs.metrics_example step.json   # and keeps the timeline of all ranks

Device times and links are modelled and the clock is virtual, so it prints the same everywhere.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import fxbraid
from fxbraid.runtime import emulate
from fxbraid.runtime.launch import launch

M, UNIT_S, SLOW = 8, 2e-3, 1.25
CLUSTER = emulate.Cluster(emulate.Link(1e-3), emulate.Link(0.5e-3, 4e6))
#: What the schedule was planned for: T_F, T_I, T_W, T_AR of a chunk of two units, and the time of a message.
PLAN, MESSAGE_S = "0.004,0.004,0.004,0.002", 0.5e-3 + 16 * 32 * 4 / 4e6


def rank_main(path: str) -> str:
    """In each of 2 x 2 ranks: one recorded step."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "vocab_size": 96,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    plain = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
    ids = torch.randint(0, 96, (M, 16))
    batch = {"input_ids": ids, "labels": ids.clone()}
    with emulate.process_group(CLUSTER):
        model = fxbraid.braid(
            plain, batch, tp_size=2, pp_size=2, n_microbatches=M, split=[1, 1, 1, 1], compile=False
        )
        # Ranks 0 and 1 are the first pipeline rank, 2 and 3 the second.
        slow = SLOW if torch.distributed.get_rank() >= 2 else 1.0
        emulate.unit_times(lambda unit: slow * UNIT_S if unit.name.startswith(("attn", "mlp")) else 0.0)
        with emulate.stopwatch():
            model.record(**batch)
        model.write_timeline(path)
        return str(model.last_step)


def main() -> None:
    """Run it, draw it over the plan."""
    from fxbraid.draw.cli import Ask, read_measured
    from fxbraid.draw.svg import to_svg

    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/step.json")
        print(launch("docs.metrics_example:rank_main", (str(path.absolute()),), nproc=4, timeout_s=300)[0])
        measured = read_measured(path, 0)
    planned = Ask(None, 2, M, None, PLAN, 1, MESSAGE_S, False, False, "").beside(measured)
    Path(__file__).with_name("metrics.svg").write_text(to_svg(planned, measured=measured), "utf-8")


if __name__ == "__main__":
    main()
