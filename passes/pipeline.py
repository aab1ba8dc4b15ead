"""The list of passes, in order: from a model to the units of the chunks that one rank holds.

====================  =======================================================================================
shard                 plan -> local parameter shapes, marks around parallel linears
capture               torch.export -> one FX graph of the forward
settle                every mark where gradients need it, as few as there can be
normalise_loss        mean over a micro-batch -> share of the whole batch's mean
partition             graph -> S chunks
joint, split          chunk -> forward and backward, every node in F, I or W
units                 F, I, W -> pieces between collectives
compile               unit -> artefact, shared by units of equal structure          (``passes.compile``)
braid                 units of one to three actions -> one block graph              (``passes.block``)
program               schedule + blocks -> one graph per rank                       (``passes.program``)
====================  =======================================================================================

The last three need a schedule and a rank; ``runtime.engine`` calls them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from .. import compat
from .apart import taken_apart
from .capture import Captured, capture, fake_inputs
from .errors import BraidError, PlanError
from .infer import infer_plan
from .joint import joint, split
from .loss import loss_alone, normalise_loss
from .partition import Partition, partition
from .settle import settle
from .shard import Sharded, TpPlan, has_plan, shard
from .units import ChunkUnits, unique_names, units
from .verify import verify_split, verify_units


@dataclass(frozen=True, slots=True)
class Lowered:
    """A traced model, cut into chunks, with the units of some of them.

    ``count``: graph of the loss denominators (None where the loss needs none), ``counts`` their names among the
    inputs. ``outputs``: what the last chunk returns.
    """

    plan: TpPlan
    partition: Partition
    chunks: Mapping[int, ChunkUnits]
    inputs: tuple[str, ...]
    count: fx.GraphModule | None
    counts: tuple[str, ...]
    outputs: tuple[str, ...]
    #: every name of a parameter -> its first one (tied parameters have several)
    canonical: Mapping[str, str]
    #: tensors of the forward that are neither parameters nor buffers
    constants: Mapping[str, Any]


def _trace(
    model: nn.Module,
    inputs: Mapping[str, Any],
    tp_size: int,
    tp_plan: str | Mapping[str, str],
    fake_mode: compat.FakeTensorMode,
    device: torch.device,
) -> tuple[Sharded, Captured]:
    """Shard and capture; where the model has no plan and needs one, at full size first, to infer it."""

    def trace(size: int, plan: str | Mapping[str, str]) -> tuple[Sharded, Captured]:
        def once(packed: Mapping[str, int]) -> tuple[Sharded, Captured]:
            sharded = shard(
                model, tp_size=size, tp_plan=plan, fake_mode=fake_mode, device=device, packed=packed
            )
            return sharded, capture(sharded.module, inputs, fake_mode=fake_mode)

        return once({}) if size == 1 else _in_sections(once)

    if tp_size == 1 or tp_plan != "auto" or has_plan(model):
        return trace(tp_size, tp_plan)
    found = infer_plan(trace(1, {})[1].graph_module.graph)
    name = type(model).__name__
    if not found.patterns:
        raise PlanError(
            f"{name} has no tensor-parallel plan (model._tp_plan), and none follows from its graph "
            f"({'; '.join(found.left) or 'no linears in numbered layers'}); pass tp_plan={{...}}, or use tp_size=1"
        )
    try:
        sharded, captured = trace(tp_size, found.patterns)
    except BraidError as error:
        plan = ", ".join(f"{pattern}: {style}" for pattern, style in found.patterns.items())
        raise PlanError(
            f"{name} has no tensor-parallel plan (model._tp_plan), and the one that follows from its graph ({plan}) "
            f"does not run: {error}; pass tp_plan={{...}}, or use tp_size=1"
        ) from error
    notes = (*sharded.plan.notes, *found.notes, *found.left)
    return replace(sharded, plan=replace(sharded.plan, notes=notes)), captured


def _in_sections(
    once: Callable[[Mapping[str, int]], tuple[Sharded, Captured]],
) -> tuple[Sharded, Captured]:
    """``once(packed)`` traces with weights cut in as many sections as ``packed`` says; done anew where the graph shows
    that one needs more of them than the plan gives it."""
    packed: dict[str, int] = {}
    while True:
        sharded, captured = once(packed)
        found = taken_apart(captured.graph_module.graph, sharded.plan, sharded.canonical)
        if not found:
            break
        if found.keys() & packed.keys():
            raise PlanError(
                f"the model takes the features of {', '.join(found)} apart in a way that no equal sections fit; leave "
                "the module out of tp_plan, or use tp_size=1"
            )
        packed |= found
    if not packed:
        return sharded, captured
    kinds = {re.sub(r"\.\d+\.", ".*.", name): count for name, count in packed.items()}
    notes = tuple(f"{name} is cut in {count} sections, as the model reads it" for name, count in kinds.items())
    return replace(sharded, plan=replace(sharded.plan, notes=(*sharded.plan.notes, *notes))), captured


def lower_model(
    model: nn.Module,
    microbatch: Mapping[str, Any],
    *,
    n_chunks: int,
    only: Iterable[int] | None = None,
    tp_size: int = 1,
    tp_plan: str | Mapping[str, str] = "auto",
    split_layers: str | Sequence[int] = "auto",
    loss_reduction: str = "auto",
    training: bool = True,
    device: torch.device | str = "cpu",
    verify: bool | None = None,
) -> Lowered:
    """Run the passes up to ``units``.

    ``microbatch``: keyword arguments of the model at micro-batch shape (only shapes and dtypes of tensors are
    read; meta tensors are fine). ``only``: the chunks to differentiate and cut (all by default). ``training``:
    with a backward, the last chunk returning the loss alone; else the forward alone, returning all outputs.
    The model is not modified.
    """
    device = torch.device(device)
    verify = os.environ.get("FXBRAID_VERIFY") == "1" if verify is None else verify
    fake_mode = compat.FakeTensorMode()
    inputs = fake_inputs(microbatch, fake_mode=fake_mode, device=device)
    sharded, captured = _trace(model, inputs, tp_size, tp_plan, fake_mode, device)
    if training:
        captured = loss_alone(captured)
    captured, plan = settle(captured, sharded.plan, sharded.canonical)
    normalised = normalise_loss(captured, loss_reduction=loss_reduction)
    parts = partition(normalised.captured, n_chunks, split=split_layers)
    outputs = ("loss",) if training else normalised.captured.outputs
    chunks: dict[int, ChunkUnits] = {}
    for index in range(n_chunks) if only is None else only:
        graph = joint(parts.chunks[index], outputs=outputs, fake_mode=fake_mode)
        graph = split(graph, training=training)
        if verify:
            verify_split(graph)
        chunks[index] = units(graph, tp_size=tp_size)
        if verify:
            verify_units(chunks[index])
    unique_names(chunks.values())
    return Lowered(
        plan=plan,
        partition=parts,
        chunks=chunks,
        inputs=normalised.captured.inputs,
        count=normalised.count,
        counts=normalised.counts,
        outputs=outputs,
        canonical=sharded.canonical,
        constants=captured.constants,
    )
