"""The figures of docs/sequence_parallel.md: what is moved and kept, counted from the graphs of a small Qwen2, and a
step with and without sequence parallelism, simulated.

    python -m docs.sequence_example        # writes docs/sequence_parallel.svg, prints the page's two tables

Nothing is measured, so it prints the same everywhere. It takes half a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxbraid.draw import to_svg
from fxbraid.schedule import Schedule, build
from fxbraid.simulate import Result, Shape, analytic, device, load_model, simulate
from fxbraid.simulate.result import static_bytes

CHOICES: dict[str, dict[str, bool]] = {
    "all-reduce": {},
    "sequence parallel, kept": {"sequence_parallel": True},
    "sequence parallel, gathered again": {"sequence_parallel": True, "regather": True},
}
#: Of the simulated step: Qwen2-12.1B on 16 A800, tensor-parallel within a node.
TP, PP, M, SEQ = 8, 2, 24, 6144
ROWS, TOKENS, WIDTH = 1, 64, 64


def counted(options: dict[str, bool], tp: int) -> tuple[dict[str, int], int, int]:
    """Bytes that a ring moves by phase, bytes that live from F to the backward, and from I to W: on one of ``tp`` ranks
    with all four layers of a Qwen2, for one micro-batch."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from fxbraid.passes.cost import nbytes, reduce_bytes
    from fxbraid.passes.pipeline import lower_model

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 96}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False))
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    lowered = lower_model(model, {"input_ids": ids, "labels": ids}, n_chunks=1, tp_size=tp, **options)  # type: ignore[arg-type]
    chunk = lowered.chunks[0]
    moved = dict.fromkeys("FIW", 0)
    for node, phase in chunk.joint.phase.items():
        if chunk.is_collective(node):
            moved[phase.value] += reduce_bytes(node) * 2 * (tp - 1) // tp
    kept = {*chunk.for_I, *chunk.for_W} - set(chunk.joint.inputs.values())
    return moved, *(sum(nbytes(n.meta["val"]) for n in found) for found in (kept, set(chunk.handed)))


def simulated(schedule: Schedule, sequence: bool, regather: bool, tp: int = TP, seq: int = SEQ) -> Result:
    """One step of Qwen2-12.1B."""
    shape = Shape(seq, 1, tp, sequence=sequence, regather=regather)
    return simulate(schedule, analytic(load_model("qwen2-12.1b"), device("a800"), schedule.placement, shape))


def main() -> None:
    """Print the tables, write the picture."""
    print(
        "| tp = 4 | moved in F | in I | in W | kept from F | handed from I to W |\n|---|--:|--:|--:|--:|--:|"
    )
    for name, options in CHOICES.items():
        moved, kept, handed = counted(options, 4)
        cells = [*moved.values(), kept, handed]
        print(f"| {name} | " + " | ".join(f"{cell / 1024:.1f} KB" for cell in cells) + " |")
    stp = build("stp", p=PP, m=M)
    print("\n| stp | step | compute | exposed TP | peak activations |\n|---|--:|--:|--:|--:|")
    for name, options in CHOICES.items():
        result = simulated(stp, bool(options), "regather" in options)
        ranks = result.ranks
        compute, exposed = (sum(getattr(r, k) for r in ranks) / PP for k in ("compute", "exposed_tp"))
        peak = max(rank.peak - static_bytes(stp, result.workload, k) for k, rank in enumerate(ranks))
        print(
            f"| {name} | {result.step_time:.3f} s | {compute:.3f} s | {exposed:.3f} s | {peak / 1e9:.1f} GB |"
        )
    short = build("stp", p=2, m=5)
    out = Path(__file__).parent / "sequence_parallel.svg"
    out.write_text(to_svg(simulated(short, True, True)))
    print(f"\nwrote {out.name}")


if __name__ == "__main__":
    main()
