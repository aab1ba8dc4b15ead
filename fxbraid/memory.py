"""``fxbraid.predict_memory``: what every rank will hold, before there is a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import schedule as schedules
from .arguments import check_model
from .inputs import Inputs
from .options import Options
from .passes.errors import BraidError
from .passes.pipeline import Lowered
from .precision import accumulated_in
from .runtime.ghosts import Library
from .runtime.mesh import Mesh
from .runtime.predict import OPTIMIZERS, Setting
from .runtime.predict import predict_memory as predict
from .runtime.profile import order_from
from .schedule import Schedule
from .schedule.offload import OffloadPlan
from .simulate import Workload, load_model
from .simulate.memory import Memory
from .state import skeleton
from .tracing import Tracer

Optimizer = str | float


def predict_memory(
    model: nn.Module,
    example_batch: Mapping[str, Any],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    dp_size: int = 1,
    n_microbatches: int,
    schedule: str | Schedule = "stp",
    optimizer: Optimizer = "adamw",
    zero: bool = False,
    ranks: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Memory:
    """What :func:`braid` of these arguments will hold on every pipeline rank, over one step, by what it is for.

    In one process and without a process group, for any number of ranks: ``model`` may lie on the meta device, and
    nothing is allocated. What a step does is read off the ranks' own programs.

    Args:
        model, example_batch, tp_size, pp_size, dp_size, n_microbatches, schedule: as in :func:`braid`; ``schedule`` is
            a name or a Schedule, not "auto", which measures.
        optimizer: "adamw", "adam", "sgd", "sgd_momentum", or bytes of state for each element of a parameter.
        zero: is the optimizer's state shared out over the replicas (:func:`zero_optimizer`)?
        ranks: which pipeline ranks (default: all).
        device: what the model is traced for.
        options: what else of :func:`braid` decides about memory: ``tp_plan``, ``split``, ``compile``, ``braided``,
            ``sequence_parallel``, ``regather``, ``checkpoint``, ``vocab_parallel``, ``grad_dtype``,
            ``master_weights``, ...

    Raises BraidError for arguments that do not fit, and what tracing raises.
    """
    check_model(model)
    if options.get("offload") is not None:
        raise BraidError(
            f"predict_memory() can't say what offload={options['offload']!r} moves: as much as there is time for, "
            "which is measured; ask memory() of the model that braid(offload=...) makes"
        )
    known = {field.name for field in fields(Options)} - {"n_microbatches", "order", "max_live", "autocast"}
    if unknown := sorted(set(options) - known):
        raise BraidError(
            f"predict_memory() takes no {', '.join(unknown)}; of braid()'s options it takes {', '.join(sorted(known))}"
        )
    blank = skeleton(model)
    takes = Inputs.of(blank)
    example = takes.complete(example_batch)
    takes.split(example, n_microbatches)
    chosen = named(schedule, pp_size, n_microbatches)
    if not options.get("braided", True):
        chosen = schedules.unbraid(chosen)
        options.setdefault("collectives", "blocking")
    if options.get("reproducible", False):
        chosen = schedules.reproducible(chosen)
    asked = Options(**{"grad_dtype": torch.float32, **options, "n_microbatches": n_microbatches})
    mesh = Mesh(torch.device(device), pp_size=pp_size, tp_size=tp_size, dp_size=dp_size)
    lowered = Tracer(blank, mesh, asked).lower(example, chosen.placement, everything=True)
    label = f"{type(model).__name__}, tp {tp_size} x pp {pp_size}" + (
        f" x dp {dp_size}" if dp_size > 1 else ""
    )
    return memory_of(
        lowered, chosen, asked, dp_size, optimizer=optimizer, zero=zero, ranks=ranks, label=label
    )


def memory_of(
    lowered: Lowered,
    schedule: Schedule,
    options: Options,
    dp_size: int,
    *,
    optimizer: Optimizer = "adamw",
    zero: bool = False,
    ordered_by: Workload | None = None,
    ranks: Iterable[int] | None = None,
    library: Library | None = None,
    offload: OffloadPlan | None = None,
    label: str = "a traced model",
) -> Memory:
    """The prediction for a model that is traced (all chunks of ``ranks``). ordered_by: the costs that units in blocks
    are ordered by. library: of earlier predictions from the same trace. offload: the plan for what goes to the host,
    None where everything stays."""
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise BraidError(
            f"optimizer={optimizer!r}: use {', '.join(map(repr, OPTIMIZERS))}, or the bytes that it keeps for each "
            "element of a parameter"
        )
    setting = Setting(
        collectives=options.collectives,
        order=order_from(ordered_by, lowered) if ordered_by is not None else None,
        compile=options.compile,
        accumulated_in=lambda dtype: accumulated_in(dtype, options.grad_dtype),
        masters=options.master_weights,
        optimizer=optimizer,
        shared_by=dp_size if zero else 1,
        reduces=dp_size > 1,
        offload=offload,
    )
    return predict(lowered, schedule, setting, ranks=ranks, library=library, label=label)


def imagined(source: str, seq: int, rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of transformers on the meta device, in bfloat16, and a batch of ``rows`` sequences for it.

    ``source``: a config.json, a folder with one, or a name that the simulator knows. Raises ScheduleError for others.
    """
    import transformers

    known = load_model(source)
    path = Path(source)
    if path.exists():
        config = transformers.AutoConfig.from_pretrained(path if path.is_dir() else path.parent)
    else:
        kind = next((k for k in ("qwen3", "qwen2", "mistral") if k in known.name.lower()), "llama")
        config = transformers.AutoConfig.for_model(
            kind,
            vocab_size=known.vocab,
            hidden_size=known.hidden,
            intermediate_size=known.ffn,
            num_hidden_layers=known.layers,
            num_attention_heads=known.heads,
            num_key_value_heads=known.kv_heads,
            head_dim=known.head,
            tie_word_embeddings=known.tied,
            max_position_embeddings=max(seq, 4096),
        )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.empty(rows, seq, dtype=torch.int64)
    return model.train(), {"input_ids": ids, "labels": ids}


def named(schedule: str | Schedule, p: int, m: int) -> Schedule:
    """A schedule by its name, or one that is checked to fit."""
    if isinstance(schedule, str):
        if schedule.lower() == "auto":
            raise BraidError(
                'schedule="auto" measures before it chooses; name a schedule, or give memory_budget to braid()'
            )
        return schedules.build(schedule, p=p, m=m)
    if schedule.p != p or schedule.m != m:
        raise BraidError(
            f"the schedule {schedule.name} is for p={schedule.p} ranks and m={schedule.m} micro-batches, but "
            f"pp_size={p} and n_microbatches={m}"
        )
    return schedule
