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
regather              where it is asked for: W gathers its inputs again
saves                 what of F is kept for I and W, and what they compute again    (``passes.checkpoint``)
units                 F, I, W -> pieces between collectives
compile               unit -> artefact, shared by units of equal structure          (``passes.compile``)
braid                 units of one to three actions -> one block graph              (``passes.block``)
program               schedule + blocks -> one graph per rank                       (``passes.program``)
====================  =======================================================================================

The last three need a schedule and a rank; ``runtime.engine`` calls them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .. import compat
from .autocast import write_casts
from .capture import Captured, fake_inputs
from .checkpoint import Checkpointing, choose_units
from .errors import BraidError, UnsupportedError
from .joint import JointGraph, joint, split
from .loss import Normalised, loss_alone, normalise_loss
from .partition import Partition, Split, partition
from .regather import regather as regather_inputs
from .saves import choose_saves
from .sequence import shard_sequence
from .settle import settle
from .shard import Sharded, TpPlan, kept_whole
from .static import InputValues
from .stretches import keyed_layers
from .surplus import reads_surplus
from .towers import PIXELS, without_features
from .trace import trace
from .units import ChunkUnits, unique_names, units
from .values import Count
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
    #: inputs whose values are part of the program
    static: frozenset[str] = frozenset()
    #: how many entries masks of the inputs select in every micro-batch
    selected: tuple[Count, ...] = ()
    #: where the model reads features of images that belong to no token; "" where it does not (pass ``surplus``)
    surplus: str = ""
    #: forward and backward of the chunks, as they were before passes that have options changed them
    joints: Mapping[int, JointGraph] = field(default_factory=dict)

    def check_filled(self, filled: bool) -> None:
        """Raise :class:`UnsupportedError` where micro-batches were filled up with images of zeros, and the model reads
        their features."""
        if filled and self.surplus:
            raise UnsupportedError(
                "micro-batches have different numbers of images, and to fill them up with images of zeros is not exact "
                f"here: {self.surplus}; give every micro-batch as many images, or use n_microbatches=1"
            )

    def check_selected(self, micro: Mapping[str, Sequence[Any]], m: int) -> None:
        """Raise :class:`BraidError` for one of the ``m`` micro-batches in which a mask selects another number."""
        for i in range(m) if self.selected else ():
            values = {name: parts[i] for name, parts in micro.items()}
            for count in self.selected:
                found = count.of(values)
                if found != count.number:
                    raise BraidError(
                        f"in {count.where} a mask selects {found} entries in micro-batch {i}, and the program was "
                        f"traced for {count.number}: its shapes depend on that number; make it the same in all "
                        "micro-batches"
                    )


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
    checkpoint: Checkpointing = "none",
    least_saved: bool = True,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    static_inputs: str | Collection[str] = "auto",
    inferred: Mapping[str, str] | None = None,
    verify: bool | None = None,
) -> Lowered:
    """Run the passes up to ``units``.

    ``microbatch``: keyword arguments of the model at micro-batch shape (only shapes and dtypes of tensors are
    read; meta tensors are fine). ``only``: the chunks to differentiate and cut, or what says which (default: all).
    ``training``: with a backward, the last chunk returning the loss alone; else the forward alone, returning all
    outputs.
    ``sequence_parallel``: see pass ``sequence``; ``regather``: W gathers its inputs again (pass ``regather``).
    ``checkpoint``: whose activations are computed again in the backward (pass ``checkpoint``). ``least_saved=False``
    leaves out pass ``saves``: the backward keeps all that it reads, as a measure of what the pass is worth.
    ``vocab_parallel``: True, False, "auto", or the parameters that an earlier trace of this model cut. ``autocast``:
    trace as under ``torch.autocast`` to this type. ``static_inputs``: the integer inputs whose values are constants of
    the trace, or "auto" for those that it needs as numbers. ``inferred``: the plan that an earlier trace has inferred.
    The model is not modified.
    """
    device = torch.device(device)
    verify = os.environ.get("FXBRAID_VERIFY") == "1" if verify is None else verify
    fake_mode = compat.FakeTensorMode()
    inputs = fake_inputs(microbatch, fake_mode=fake_mode, device=device)
    values = InputValues.of(microbatch, static_inputs)
    forward = _forward(
        model,
        inputs,
        tp_size=tp_size,
        tp_plan=tp_plan,
        loss_reduction=loss_reduction,
        vocab_parallel=vocab_parallel,
        training=training,
        sequence_parallel=sequence_parallel,
        fake_mode=fake_mode,
        device=device,
        autocast=autocast,
        values=values,
        inferred=inferred,
    )
    captured = forward.captured
    parts = partition(captured, n_chunks, split=split_layers, keyed=keyed_layers(model), outputs=not training)
    outputs = ("loss",) if training else captured.outputs
    cut = Cut(tp_size, training, regather, checkpoint, least_saved, verify)
    joints = {
        index: joint(parts.chunks[index], outputs=outputs, fake_mode=fake_mode)
        for index in (range(n_chunks) if only is None else only(parts) if callable(only) else only)
    }
    chunks = {index: cut.chunk(graph.copy()) for index, graph in joints.items()}
    unique_names(chunks.values())
    return Lowered(
        plan=forward.plan,
        partition=parts,
        chunks=chunks,
        inputs=captured.inputs,
        count=forward.normalised.count,
        counts=forward.normalised.counts,
        outputs=outputs,
        canonical=forward.canonical,
        constants=captured.constants,
        vocabulary=forward.vocabulary,
        checks=forward.checks,
        joints=joints,
        static=frozenset(values.static),
        selected=captured.counts,
        surplus=forward.surplus,
    )


class _Forward(NamedTuple):
    """One rank's forward as one graph, before it is cut into chunks; fields as those of :class:`Lowered`."""

    captured: Captured
    plan: TpPlan
    #: the graph as it was when losses were normalised, and the graph of their counts
    normalised: Normalised
    canonical: Mapping[str, str]
    vocabulary: frozenset[str]
    checks: Checks
    surplus: str


def _forward(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    tp_size: int,
    tp_plan: str | Mapping[str, str],
    loss_reduction: str,
    vocab_parallel: bool | str | Collection[str],
    training: bool,
    sequence_parallel: bool,
    fake_mode: compat.FakeTensorMode,
    device: torch.device,
    autocast: torch.dtype | None,
    values: InputValues,
    inferred: Mapping[str, str] | None,
) -> _Forward:
    """The passes from ``shard`` to ``autocast``. ``inputs``: those of a micro-batch, tensors as fake ones; everything
    else as in :func:`lower_model`."""
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        sharded, captured = trace(model, inputs, tp_size, tp_plan, fake_mode, device, values, inferred)
        surplus = reads_surplus(captured.graph_module.graph, PIXELS)
        captured = loss_alone(captured) if training else without_features(captured)
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
    return _Forward(captured, plan, normalised, sharded.canonical, vocabulary.names, checks, surplus)


@dataclass(frozen=True, slots=True)
class Cut:
    """The passes from a chunk's forward to its units, and their options (see :func:`lower_model`)."""

    tp_size: int
    training: bool = True
    regather: bool = False
    checkpoint: Checkpointing = "none"
    least_saved: bool = True
    verify: bool = False

    def chunk(self, graph: JointGraph) -> ChunkUnits:
        """The units of a chunk. Changes ``graph``."""
        graph = split(graph, training=self.training)
        if self.regather:
            regather_inputs(graph)
        if self.training and self.least_saved:
            choose_saves(graph, tp_size=self.tp_size, checkpointed=choose_units(graph, self.checkpoint))
        if self.verify:
            verify_split(graph)
        made = units(graph, tp_size=self.tp_size)
        if self.verify:
            verify_units(made)
        return made


def recut(lowered: Lowered, cut: Cut) -> Lowered:
    """``lowered`` with the same chunks cut into other units: another policy of checkpointing, without another trace.

    ``cut`` has the ``tp_size`` and ``training`` of the trace."""
    chunks = {index: cut.chunk(lowered.joints[index].copy()) for index in lowered.chunks}
    unique_names(chunks.values())
    return replace(lowered, chunks=chunks)


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
