"""What ``braid`` was asked for, and what came of it: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .offloading import Offload
from .order import Order
from .passes.block import Collectives
from .passes.checkpoint import Checkpointing
from .passes.compile import Compile
from .passes.partition import Partition
from .passes.shard import TpPlan
from .runtime.buckets import DEFAULT_MB


@dataclass(frozen=True, slots=True)
class Options:
    """What ``braid`` was asked for, beyond sizes."""

    n_microbatches: int
    tp_plan: str | Mapping[str, str] = "auto"
    split: str | Sequence[int] = "auto"
    compile: Compile = "unit"
    braided: bool = True
    collectives: Collectives = "overlap"
    loss_reduction: str = "auto"
    max_programs: int = 8
    order: Order = "paper"
    reproducible: bool = False
    max_live: int | None = None
    #: bytes that a rank may hold
    memory_budget: int | None = None
    sequence_parallel: bool = False
    regather: bool = False
    checkpoint: Checkpointing = "none"
    vocab_parallel: bool | Literal["auto"] = "auto"
    grad_dtype: torch.dtype | None = torch.float32
    master_weights: bool = False
    #: the type that ``torch.autocast`` was on with when ``braid`` was called
    autocast: torch.dtype | None = None
    bucket_mb: float = DEFAULT_MB
    offload: Offload | None = None
    static_inputs: str | Sequence[str] = "auto"


@dataclass(frozen=True, slots=True)
class Plan:
    """How the model lies over the ranks: ``tp`` styles and shards, ``partition`` chunks and layers."""

    tp: TpPlan
    partition: Partition
