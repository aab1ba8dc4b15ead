"""The list of passes, in order: from a model to the units of the chunks that one rank holds.

====================  =======================================================================================
shard                 plan -> local parameter shapes, marks around parallel linears
capture               torch.export -> one FX graph of the forward
follow                do ranks compute the model's values, or parts of them?             (``passes.trace``)
normalise_loss        mean over a micro-batch -> share of the whole batch's mean
vocab                 embedding and head on a rank's part of the vocabulary, the loss without whole logits
check_whole           nothing takes a rank's part of a parameter for all of it
settle                every mark where gradients need it, as few as there can be
sequence              where it is asked for: norms and residuals on this rank's tokens
autocast              under torch.autocast: its casts as nodes of the graph
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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from .. import compat
from .autocast import write_casts
from .capture import fake_inputs
from .joint import joint, split
from .loss import loss_alone, normalise_loss
from .partition import Partition, Split, partition
from .regather import regather as regather_inputs
from .sequence import shard_sequence
from .settle import settle
from .shard import Sharded, TpPlan, kept_whole
from .stretches import keyed_layers
from .trace import trace
from .units import ChunkUnits, unique_names, units
from .verify import verify_split, verify_units
from .vocab import Wanted, input_weights, shard_vocabulary
from .vocab_check import Checks, read_checks
from .whole import check_whole


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
    #: first names of the parameters that are cut over the vocabulary
    vocabulary: frozenset[str] = frozenset()
    #: what token ids and labels of a batch must satisfy
    checks: Checks = field(default_factory=Checks)


Only = Iterable[int] | Callable[[Partition], Iterable[int]] | None
"""Which chunks :func:`lower_model` makes units of."""


def lower_model(
    model: nn.Module,
    microbatch: Mapping[str, Any],
    *,
    n_chunks: int,
    only: Only = None,
    tp_size: int = 1,
    tp_plan: str | Mapping[str, str] = "auto",
    split_layers: Split = "auto",
    loss_reduction: str = "auto",
    vocab_parallel: bool | str | Collection[str] = "auto",
    training: bool = True,
    sequence_parallel: bool = False,
    regather: bool = False,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    verify: bool | None = None,
) -> Lowered:
    """Run the passes up to ``units``.

    ``microbatch``: keyword arguments of the model at micro-batch shape (only shapes and dtypes of tensors are
    read; meta tensors are fine). ``only``: the chunks to differentiate and cut, or what says which (default: all).
    ``training``: with a backward, the last chunk returning the loss alone; else the forward alone, returning all
    outputs.
    ``sequence_parallel``: see pass ``sequence``; ``regather``: W gathers its inputs again (pass ``regather``).
    ``vocab_parallel``: True, False, "auto", or the parameters that an earlier trace of this model cut. ``autocast``:
    trace as under ``torch.autocast`` to this type.
    The model is not modified.
    """
    device = torch.device(device)
    verify = os.environ.get("FXBRAID_VERIFY") == "1" if verify is None else verify
    fake_mode = compat.FakeTensorMode()
    inputs = fake_inputs(microbatch, fake_mode=fake_mode, device=device)
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        sharded, captured = trace(model, inputs, tp_size, tp_plan, fake_mode, device)
        if training:
            captured = loss_alone(captured)
        normalised = normalise_loss(captured, loss_reduction=loss_reduction)
        checks = read_checks(normalised.captured)
        vocabulary = shard_vocabulary(
            normalised.captured,
            sharded.plan,
            sharded.canonical,
            _wanted(model, sharded, tp_plan, vocab_parallel),
            training=training,
            fake_mode=fake_mode,
        )
        check_whole(vocabulary.captured, vocabulary.plan, sharded.canonical)
        captured, plan = settle(vocabulary.captured, vocabulary.plan, sharded.canonical)
        if sequence_parallel and tp_size > 1:
            captured, plan = shard_sequence(captured, plan, sharded.canonical)
    if autocast is not None:
        captured = write_casts(captured, autocast, device)
    parts = partition(captured, n_chunks, split=split_layers, keyed=keyed_layers(model), outputs=not training)
    outputs = ("loss",) if training else captured.outputs
    chunks: dict[int, ChunkUnits] = {}
    for index in range(n_chunks) if only is None else only(parts) if callable(only) else only:
        graph = joint(parts.chunks[index], outputs=outputs, fake_mode=fake_mode)
        graph = split(graph, training=training)
        if regather:
            regather_inputs(graph)
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
        inputs=captured.inputs,
        count=normalised.count,
        counts=normalised.counts,
        outputs=outputs,
        canonical=sharded.canonical,
        constants=captured.constants,
        vocabulary=vocabulary.names,
        checks=checks,
    )


def _wanted(
    model: nn.Module,
    sharded: Sharded,
    tp_plan: str | Mapping[str, str],
    asked: bool | str | Collection[str],
) -> Wanted:
    wanted = Wanted(
        inputs=input_weights(model, sharded.canonical), whole=kept_whole(model, tp_plan, sharded.canonical)
    )
    if isinstance(asked, bool | str):
        return replace(wanted, parallel=asked)
    return replace(wanted, names=frozenset(asked))
