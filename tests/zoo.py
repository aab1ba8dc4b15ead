"""The zoo: one tiny model of every family, against its unsplit self; ``python -m tests.zoo`` writes docs/zoo.md.

Every family runs in float64 with all ranks in one process (``tests.lockstep``): 2 decoder layers or more, ragged
labels, left padding, parameters moved away from their trivial values.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_collective
from fxbraid.passes.pipeline import Lowered
from fxbraid.passes.shard import has_plan
from fxbraid.passes.vocab import COLUMNS_STYLE, ROWS_STYLE

from . import lockstep
from .parity import KeepDouble, make_batches

AUX = 0.3
#: Sizes of every family; a config takes those that it has.
SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    # mixtures of experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # compressed keys and values
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # older spellings
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 48,
    "rotary_dim": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    # no dropout
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "residual_dropout": 0.0,
}


@dataclass(frozen=True)
class Family:
    """``collectives`` per decoder layer, forward and backward alike. ``aux``: with its auxiliary loss."""

    name: str
    collectives: int = 2
    aux: bool = False
    overrides: tuple[tuple[str, Any], ...] = ()
    #: shown in the table
    remark: str = ""


#: The families that every run of the test suite covers.
CORE = (
    Family("llama"),
    Family("qwen2"),
    Family("qwen3"),
    Family("mistral"),
    Family("gemma"),
    Family("gemma2", remark="sliding windows, soft-capped attention and logits"),
    Family("phi3"),
    Family("gpt_neox", collectives=1, remark="attention and MLP in parallel: one sum serves both"),
    Family("olmo2", collectives=4),
    Family("mixtral", aux=True),
    Family("qwen3_moe", aux=True),
    Family("gpt2"),
)
#: More of them: run when asked for, and for the table.
MORE = (
    Family("apertus"),
    Family("arcee"),
    Family("codegen", collectives=1),
    Family("cohere", collectives=1),
    Family("cohere2", collectives=1),
    Family("deepseek_v2", overrides=(("num_key_value_heads", 4), ("head_dim", 4))),
    Family(
        "deepseek_v3",
        collectives=1,
        overrides=(("num_key_value_heads", 4), ("head_dim", 4)),
        remark="the plan leaves attention whole",
    ),
    Family("dots1"),
    Family("ernie4_5"),
    Family("ernie4_5_moe"),
    Family("exaone4"),
    Family("gemma3_text"),
    Family("glm"),
    Family("glm4"),
    Family("glm4_moe"),
    Family("gptj", collectives=1),
    Family("granite"),
    Family("granitemoe", collectives=1, remark="the plan cuts the experts alone"),
    Family("helium"),
    Family("llama4_text"),
    Family("nanochat"),
    Family("nemotron"),
    Family("olmo"),
    Family("olmo3", collectives=4),
    Family("olmoe", collectives=4),
    Family("opt"),
    Family("persimmon"),
    Family("phi", collectives=1, remark="attention and MLP in parallel"),
    Family("qwen2_moe"),
    Family("seed_oss"),
    Family("smollm3"),
    Family("stablelm"),
    Family("starcoder2"),
    Family("gpt_oss"),
    Family("diffllama", collectives=1),
    Family("hunyuan_v1_dense"),
)
FAMILIES: dict[str, Family] = {family.name: family for family in (*CORE, *MORE)}


@dataclass
class Row:
    """What is known about one family after running it."""

    family: Family
    plan: str
    loss: float
    grad: float
    forward: float
    backward: float
    units: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def make(family: Family, **overrides: Any) -> nn.Module:
    """A tiny float64 model of the family, in training mode, its experts as the loop that can't be traced."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(family.name)
    config = getattr(config, "text_config", config)
    wanted = {**SIZES, **dict(family.overrides), **overrides}
    if family.aux:
        wanted |= {"output_router_logits": True, "router_aux_loss_coef": AUX}
    config = type(config)(**{k: v for k, v in wanted.items() if hasattr(config, k)})
    torch.manual_seed(3)
    model: nn.Module = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    if getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"
    return model.train()


def reference(model: nn.Module, batch: Mapping[str, Tensor], m: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model. An auxiliary loss counts as its mean over micro-batches."""
    if not getattr(model.config, "output_router_logits", False):
        loss = model(**batch).loss
    else:
        loss = torch.zeros((), dtype=torch.float64)
        total = (batch["labels"][:, 1:] != -100).sum().double()
        rows = len(batch["labels"]) // m
        for i in range(m):
            micro = {k: v[i * rows : (i + 1) * rows] for k, v in batch.items()}
            out = model(**micro)
            share = (micro["labels"][:, 1:] != -100).sum() / total
            loss = loss + (out.loss - AUX * out.aux_loss) * share + AUX * out.aux_loss / m
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def run(family: Family, *, tp: int = 2, n_chunks: int = 2, m: int = 2, **overrides: Any) -> Row:
    """One step of the family on tp x n_chunks ranks against the unsplit model."""
    model = make(family, **overrides)
    batch = make_batches(2, m, mask=True, steps=1)[0]
    with KeepDouble():
        loss, grads = reference(model, batch, m)
        ranks = lockstep.step(model, batch, tp=tp, n_chunks=n_chunks, m=m, verify=True)
    errors = lockstep.errors(model, ranks, loss, grads)
    return describe(family, model, ranks.lowered, *errors)


def describe(family: Family, model: nn.Module, lowered: Lowered, loss: float, grad: float) -> Row:
    """Count units and collectives in the graphs."""
    marks: Counter[Phase] = Counter()
    units: Counter[str] = Counter()
    for chunk in lowered.chunks.values():
        marks.update(q for n, q in chunk.joint.phase.items() if is_collective(n))
        units.update(
            re.sub(r"\d+$|_c\d+.*$|\d+_.*$", "", u.name) for u in chunk.units[Phase.F] if u.index >= 0
        )
    layers = lowered.partition.layers
    forward, backward = of_vocabulary(lowered)
    return Row(
        family=family,
        plan="its own" if has_plan(model) else "inferred",
        loss=loss,
        grad=grad,
        forward=(marks[Phase.F] - forward) / layers,
        backward=(marks[Phase.I] - backward) / layers,
        units=dict(units),
        notes=tuple(
            n for n in lowered.plan.notes if "rows of the vocabulary" not in n and "inferred" not in n
        ),
    )


def of_vocabulary(lowered: Lowered) -> tuple[int, int]:
    """All-reduces, forward and backward, of embedding, head and loss where they are cut: the embedding's sum; the
    loss's maximum and sums, and the sum of the gradient that the head's columns give."""
    styles = set(lowered.plan.styles.values())
    rows, columns = ROWS_STYLE in styles, COLUMNS_STYLE in styles
    return rows + 2 * columns, int(columns)


def table(rows: list[Row | tuple[str, str]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| family | TP plan | all-reduces per layer, forward + backward | units of the forward | largest error of a "
        "gradient | notes |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if isinstance(row, tuple):
            lines.append(f"| {row[0]} | | | | | does not run: {row[1]} |")
            continue
        units = ", ".join(f"{count} {name}" for name, count in row.units.items())
        notes = "; ".join(filter(None, [row.family.remark, "auxiliary loss" * row.family.aux, *row.notes]))
        lines.append(
            f"| {row.family.name} | {row.plan} | {row.forward:g} + {row.backward:g} | {units} | {row.grad:.0e} | "
            f"{notes} |"
        )
    return "\n".join(lines) + "\n"


HEAD = """# The zoo

Tiny models of the families below ({layers} decoder layers, float64), split over 2 tensor-parallel ranks and 2 chunks
and compared with the unsplit model: loss and every gradient. Ragged labels, padding, every parameter away from its
initial value. This page is written by `python -m tests.zoo`, which runs all of it.

"""


def main() -> int:
    """Run the families named on the command line (all by default); write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=None, help="default: docs/zoo.md; - prints the table")
    options = parser.parse_args()
    rows: list[Row | tuple[str, str]] = []
    for name in options.families:
        try:
            rows.append(run(FAMILIES.get(name, Family(name))))
        except (ValueError, AssertionError, RuntimeError) as error:
            rows.append((name, str(error).splitlines()[0][:200]))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if str(options.out) == "-":
        print(table(rows))
    else:
        out = options.out or Path(__file__).parents[1] / "docs" / "zoo.md"
        out.write_text(HEAD.format(layers=SIZES["num_hidden_layers"]) + table(rows))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise SystemExit(main())
