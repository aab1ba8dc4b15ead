"""Traces of one model: for each signature of a batch the passes up to units, with what the first trace has settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .inputs import Inputs, first
from .options import Options
from .passes.cost import StretchCost
from .passes.cutting import Cut, row_of
from .passes.partition import Split, distinct
from .passes.pipeline import Lowered, Only, lower_model
from .passes.stretches import Stretches
from .plan.cut import ForPlacement
from .runtime.mesh import Mesh
from .schedule import Placement, Schedule
from .schedule.braid import TYPICAL


@dataclass(frozen=True, slots=True)
class ByFlops:
    """A cutter: the shortest step, FLOPs taken for time."""

    find: ForPlacement

    def __call__(self, costs: Sequence[StretchCost], row: Stretches, n_chunks: int) -> Cut:
        return Cut(self.find(costs, row_of(row), n_chunks))


@dataclass(frozen=True, slots=True)
class Traces:
    """What can be traced of a model at the shapes of ``batch``, before anything is settled."""

    tracer: Tracer
    batch: Mapping[str, Any]

    @property
    def free(self) -> bool:
        """May chunks begin where they want?"""
        return self.tracer.free

    def chunks(self, schedule: Schedule, cut: Cut | None = None) -> Lowered:
        """This rank's chunks under ``schedule``, cut for it or at ``cut``."""
        return self.tracer.lower(self.batch, schedule.placement, split=cut)

    def layers(self, count: int) -> Lowered:
        """See :meth:`Tracer.layers`."""
        return self.tracer.layers(self.batch, count)


class Tracer:
    """``model``: the user's, with tensors on the meta device. Once :meth:`settle` has been told of a trace, later ones
    cut layers and vocabulary as that one did, so that all of them fit the same shards."""

    def __init__(self, model: nn.Module, mesh: Mesh, options: Options) -> None:
        self.model = model
        self.inputs = Inputs.of(model)
        #: names of the inputs whose values are part of a program, as far as traces have shown
        self.static: set[str] = (
            set() if isinstance(options.static_inputs, str) else set(options.static_inputs)
        )
        self._mesh, self._options = mesh, options
        self._split: Split = options.split
        self._vocabulary: tuple[str, ...] | None = None
        self._inferred: Mapping[str, str] | None = None

    @property
    def free(self) -> bool:
        """May chunks begin where they want?"""
        return self._split == "auto"

    def settle(self, lowered: Lowered) -> None:
        """Where chunks begin, an inferred plan, and the parameters that are cut over the vocabulary, stay those of
        ``lowered``."""
        self._vocabulary = tuple(sorted(lowered.vocabulary))
        self._split = lowered.partition.cut
        self._inferred = lowered.plan.inferred

    def under(self, options: Options) -> Tracer:
        """The same for other ``options``, with what is settled."""
        other = Tracer(self.model, self._mesh, options)
        other._split, other._vocabulary = self._split, self._vocabulary
        other._inferred = self._inferred
        other.static = self.static
        return other

    def lower(
        self,
        batch: Mapping[str, Any],
        placement: Placement,
        *,
        training: bool = True,
        everything: bool = False,
        split: Split | None = None,
    ) -> Lowered:
        """The units of this rank's chunks (``everything``: of all) for a whole, completed ``batch``, of which only
        shapes, dtypes, constants and layouts of images are read. ``split``: another cut than was asked for."""
        split = self._split if split is None else split
        if split == "auto":
            split = ByFlops(ForPlacement(placement, TYPICAL.ar if self._mesh.tp_size > 1 else 0.0))
        only = None if everything else placement.chunks_of(self._mesh.pp_rank)
        return self._lower(batch, placement.n_chunks, only, split, training=training)

    def layers(self, batch: Mapping[str, Any], count: int) -> Lowered:
        """The model with each of its ``count`` layers as a chunk, of which those are made that differ from all before
        them: what any cut's costs can be put together from."""
        return self._lower(batch, count, distinct, [1] * count, training=True)

    def _lower(
        self, batch: Mapping[str, Any], n_chunks: int, only: Only, split: Split, *, training: bool
    ) -> Lowered:
        options = self._options
        parts, filled = self.inputs.cut(batch, options.n_microbatches)
        micro = first(parts)
        # Whatever the caller's mode is: a trace without gradients would have none for ever.
        with torch.inference_mode(False), torch.enable_grad():
            lowered = lower_model(
                self.model.train(training),
                micro,
                n_chunks=n_chunks,
                only=only,
                tp_size=self._mesh.tp_size,
                tp_plan=options.tp_plan,
                split_layers=split,
                loss_reduction=options.loss_reduction,
                vocab_parallel=options.vocab_parallel if self._vocabulary is None else self._vocabulary,
                training=training,
                sequence_parallel=options.sequence_parallel,
                regather=options.regather,
                checkpoint=options.checkpoint,
                device=self._mesh.device,
                autocast=options.autocast,
                static_inputs=options.static_inputs,
                inferred=self._inferred,
            )
        lowered.check_filled(filled)
        self.static |= lowered.static
        return lowered
