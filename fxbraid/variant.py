"""A braided model under another schedule: nothing is traced, sharded or compiled anew, and the weights are shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from . import schedule as schedules
from .decide import Asked, Decision, decide
from .inputs import first
from .model import BraidedModel
from .offloading import Offload
from .passes.block import Collectives
from .passes.cutting import Cut
from .passes.errors import BraidError
from .passes.pipeline import Lowered
from .schedule import Placement, Schedule


def variant(
    model: BraidedModel,
    schedule: Schedule,
    example_batch: Mapping[str, Any],
    *,
    collectives: Collectives = "overlap",
    braided: bool = True,
    decision: Decision | None = None,
    offload: Offload | None = None,
) -> BraidedModel:
    """``model`` under ``schedule``, which may have another m; ``example_batch`` says what it will train on.

    Parameters, gradients, graphs and compiled units are those of ``model``, so comparing many schedules costs one
    build: call ``zero_grad`` between steps of different variants, and replace no parameter. Every rank calls it with
    equal arguments (channels may need new process groups). ``collectives`` and ``braided`` as for
    :func:`fxbraid.braid`; ``decision``: whose order of units in blocks to take (see :func:`automatic`), None for the
    paper's; ``offload``: as for :func:`fxbraid.braid`.

    Raises ``BraidError`` where chunks would lie on other ranks or micro-batches have other shapes: those need a
    ``braid`` of their own.
    """
    if not braided:
        schedule = schedules.unbraid(schedule)
    schedules.check(schedule)
    if schedule.placement != model.schedule.placement:
        raise BraidError(
            f"{schedule.name} places chunks as {schedule.placement}, and the model was built for "
            f"{model.schedule.placement}; call braid() for it"
        )
    given, known = (_micro_shapes(model, *one) for one in ((example_batch, schedule.m), _example(model)))
    if given != known:
        raise BraidError(
            f"micro-batches of {given} are not those that the model was built for, {known}; call braid() for them"
        )
    options = replace(
        model._options,
        n_microbatches=schedule.m,
        collectives=collectives,
        braided=braided,
        offload=offload,
    )
    lowered = lowered_of(model)
    twin: BraidedModel = object.__new__(BraidedModel)
    twin.__dict__.update(model.__dict__)
    if decision is not None:
        decision = replace(decision, lowered=lowered)
    inputs = model._tracer.inputs
    example_batch = inputs.complete(example_batch)
    example = inputs.example(example_batch)
    twin.__dict__.update(_schedule=schedule, _options=options, _example=example, _decision=decision)
    twin.__dict__.update(_engines={}, _observed=None, _everything=model._everything)
    twin.__dict__.update(_tracer=model._tracer.under(options))
    twin.__dict__.update(_offloading=twin._offload(lowered))
    engine = twin._engine(lowered, training=True)
    twin._engines[twin._signature(example_batch), True] = engine
    twin._last = engine
    return twin


def automatic(
    model: BraidedModel, m: int, other: Callable[[Placement], BraidedModel], *, order: str = "costs"
) -> Decision:
    """What ``braid(schedule="auto")`` decides for ``model``'s kind: a schedule for ``m`` micro-batches and an order of
    units, at costs that are measured now (or modelled, on an emulated cluster). Collective.

    ``other``: gives the model built for another placement of chunks.
    """

    def built(schedule: Schedule) -> Lowered:
        return lowered_of(
            model if schedule.placement == model.schedule.placement else other(schedule.placement)
        )

    return decide(Asked(None, order, m), model._mesh, model._artefacts, _Built(built))


@dataclass(frozen=True, slots=True)
class _Built:
    """``decide.Trace`` of models that are built already, and cut as they are."""

    made: Callable[[Schedule], Lowered]
    free: bool = False

    def chunks(self, schedule: Schedule, cut: Cut | None = None) -> Lowered:
        return self.made(schedule)

    def layers(self, count: int) -> Lowered:
        raise BraidError("a model that is built is not cut again; call braid() for another cut")


def lowered_of(model: BraidedModel) -> Lowered:
    """The training graphs of this rank's chunks."""
    return next(engine for (_, training), engine in model._engines.items() if training).lowered


def _example(model: BraidedModel) -> tuple[Mapping[str, Any], int]:
    return model._example, model._options.n_microbatches


def _micro_shapes(model: BraidedModel, batch: Mapping[str, Any], m: int) -> dict[str, Any]:
    inputs = model._tracer.inputs
    values = first(inputs.split(inputs.complete(batch), m))
    return {k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for k, v in sorted(values.items())}
