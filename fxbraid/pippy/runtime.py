"""``Runtime``: a whole training step through torch's pipeline runtime, with the results of ``BraidedModel.step``."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import compat_pippy as torch_pippy
from ..compat_pippy import TorchRuntime
from ..passes.errors import BraidError
from ..runtime.engine import Engine
from ..schedule import Schedule, ScheduleError, check
from .overlap import Overlap, own_stages, register
from .share import Share
from .stage import loss, stages

if TYPE_CHECKING:
    from ..model import BraidedModel


def torch_schedule(model: BraidedModel) -> TorchRuntime:
    """``model.schedule`` in a ``_PipelineScheduleRuntime`` on new stages: written as CSV, read by ``_load_csv`` with
    ``format="compute_only"``, so that the order of messages is torch's."""
    made = TorchRuntime(stages(model), model.schedule.m, loss_fn=loss, scale_grads=False)
    with tempfile.TemporaryDirectory(prefix="fxbraid-pippy-") as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(model.schedule.to_csv(for_torch=True))
        made._load_csv(str(path), format="compute_only")
    return made


class Runtime:
    """``step(**batch)`` is :meth:`BraidedModel.step` executed by torch's runtime.

    ``schedule``: a ``_PipelineScheduleRuntime`` on :func:`stages`, with any order that fits the model's placement, made
    with ``loss_fn=fxbraid.pippy.loss``; None takes the model's own schedule. ``braided``: register the braided blocks
    for ``OVERLAP_F_B``; without them torch runs the parts of such an action one after the other on the same stages.

    Gradients and losses are those of ``BraidedModel.step``, to the bit where the W's of each chunk run in the same
    order and ``compile`` is "unit" or False. Raises :class:`BraidError` where schedule and model don't fit, before
    anything is sent.
    """

    def __init__(
        self, model: BraidedModel, schedule: TorchRuntime | None = None, *, braided: bool = True
    ) -> None:
        self.model = model
        self.schedule = torch_schedule(model) if schedule is None else schedule
        self._share: Share = next(iter(own_stages(self.schedule).values())).share
        _check(model, self.schedule, self._share)
        torch_pippy.unregister(self.schedule, Overlap)
        if braided:
            register(self.schedule)

    @property
    def ran(self) -> Counter[str]:
        """How often each block of this rank ran in the last step: ``{"F0": 2, "F0&B3": 5, ...}``."""
        return Counter(self._share.ran)

    def step(self, **batch: Any) -> Tensor:
        """Forward and backward of the whole batch; gradients add to ``.grad``. Returns the loss of the whole batch,
        0-d, detached, the same on every rank. ``model.last_step`` has no times of it."""
        return self.model._step(batch, recorded=False, run=self._run)

    def _run(self, engine: Engine, inputs: Mapping[str, Sequence[Tensor]]) -> list[list[Tensor]]:
        engine.check(inputs)
        targets = torch.arange(engine.schedule.m)  # nobody reads them, but without any torch computes no loss
        try:
            # torch asks for gradients to be on, though nothing here records them.
            with self._share.open(engine, inputs) as share, torch.enable_grad():
                self.schedule.step(target=targets, return_outputs=False)
                for chunk in engine.schedule.placement.chunks_of(engine.mesh.pp_rank):
                    share.reduce(chunk)  # a file with messages need not say REDUCE_GRAD
                return share.results()
        except BaseException:
            torch_pippy.drop_messages(self.schedule)
            raise


def _check(model: BraidedModel, schedule: TorchRuntime, share: Share) -> None:
    """Everything that is compared is the same on all ranks, so all of them raise, or none."""
    place, m = model.schedule.placement, model.schedule.m
    if model._options.offload is not None:
        raise BraidError(
            f"offload={model._options.offload!r} is part of fxbraid's own program, and torch's runtime would run "
            "without it; call braid() without offload for it"
        )
    if (found := torch_pippy.sizes(schedule)) != (wanted := (place.p, place.n_chunks, m)):
        raise BraidError(
            "the schedule has {} ranks, {} stages and {} micro-batches, but the model was ".format(*found)
            + "braided for {} ranks, {} chunks and n_microbatches={}; ".format(*wanted)
            + f"make the schedule on fxbraid.pippy.stages(model) with n_microbatches={m}"
        )
    if share.model is not model:
        raise BraidError(
            "the schedule's stages are those of another model; make them with fxbraid.pippy.stages(model)"
        )
    if torch_pippy.loss_function(schedule) is not loss:
        raise BraidError(
            "the loss is part of the model's last chunk; make the schedule with loss_fn=fxbraid.pippy.loss"
        )
    rows = torch_pippy.order(schedule)
    if rows is None:
        raise BraidError("the schedule has no actions yet; call its _load_csv first")
    owners = [torch_pippy.owners(schedule)[chunk] for chunk in range(place.n_chunks)]
    if owners != (expected := [place.rank_of(chunk) for chunk in range(place.n_chunks)]):
        raise BraidError(
            f"the schedule has its stages 0..{place.n_chunks - 1} on ranks {owners}, but the model's chunks lie on "
            f"ranks {expected}; braid() with a schedule of that placement (interleaved_1f1b: loop, dualpipev: V)"
        )
    try:
        check(Schedule.from_csv("".join(",".join(row) + "\n" for row in rows), place))
    except ScheduleError as error:
        raise BraidError(f"the schedule can't run: {error}") from None
