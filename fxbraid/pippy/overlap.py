"""The custom function for ``OVERLAP_F_B``: the braided block of exactly the sub-actions, in one piece.

Without it torch's runtime runs them one after the other. In its place this one has to do what the runtime does around
each: wait for what it receives, keep the loss, count the backward, hand over on the turn of a V. What is to be sent
lies in the stage, where the SEND action behind finds it.
"""

from __future__ import annotations

from typing import cast

from .. import compat_pippy as torch_pippy
from ..compat_pippy import OVERLAP_F_B, TorchAction, TorchContext, TorchRuntime
from ..passes.errors import BraidError
from ..schedule import Action, Phase, ScheduleError, parse_step, parts
from .share import Share
from .stage import BraidedStage


def register(schedule: TorchRuntime) -> Overlap:
    """Let ``schedule``, made on :func:`fxbraid.pippy.stages`, run its ``OVERLAP_F_B`` actions braided. Returns the
    function that was registered. Raises :class:`BraidError` where it has other stages."""
    overlap = Overlap(own_stages(schedule))
    schedule.register_custom_function(OVERLAP_F_B, overlap)
    return overlap


def own_stages(schedule: TorchRuntime) -> dict[int, BraidedStage]:
    """The stages of ``schedule`` by index. Raises :class:`BraidError` where they are not those of one ``stages()``."""
    if not isinstance(schedule, TorchRuntime):
        raise BraidError(
            f"{type(schedule).__name__} does not run lists of actions; give a _PipelineScheduleRuntime, or one of "
            "torch's schedules that is one (ScheduleInterleaved1F1B, ScheduleZBVZeroBubble, ScheduleDualPipeV, ...)"
        )
    found = {stage.stage_index: stage for stage in torch_pippy.stages_of(schedule)}
    own = {index: stage for index, stage in found.items() if isinstance(stage, BraidedStage)}
    if own != found or len({id(stage.share) for stage in own.values()}) != 1:
        other = sorted(found.keys() - own.keys()) or sorted(found)
        raise BraidError(
            f"stages {other} of the schedule do not come from one call of fxbraid.pippy.stages(model); make the "
            "schedule on what that returns"
        )
    return own


class Overlap:
    """``overlap(action, context)``, as the runtime calls it."""

    def __init__(self, stages: dict[int, BraidedStage]) -> None:
        self._stages = stages
        self._parts: dict[TorchAction, tuple[Action, ...]] = {}

    @property
    def share(self) -> Share:
        """What the stages have in common."""
        return next(iter(self._stages.values())).share

    def __call__(self, action: TorchAction, ctx: TorchContext) -> None:
        schedule = cast(TorchRuntime, ctx.schedule_ref)
        if action not in self._parts:
            self._parts[action] = _parts(action)
        actions = self._parts[action]
        for each in actions:
            self._wait(schedule, each)
        self.share.run(actions)
        for each in actions:
            self._finish(schedule, ctx, each)

    def _wait(self, schedule: TorchRuntime, action: Action) -> None:
        chunk, mb = action.chunk, action.microbatch
        if action.phase is Phase.W:
            return
        backward = action.phase is not Phase.F
        stage, source = self._stages[chunk], chunk + 1 if backward else chunk - 1
        if not (stage.is_last if backward else stage.is_first) and source not in self._stages:
            torch_pippy.wait_for_input(schedule, chunk, mb, backward=backward)

    def _finish(self, schedule: TorchRuntime, ctx: TorchContext, action: Action) -> None:
        chunk, mb = action.chunk, action.microbatch
        stage = self._stages[chunk]
        if action.phase is Phase.F:
            output = stage.hand_over(mb)
            torch_pippy.keep_loss(schedule, stage, output, ctx.target_mbs, mb)
            if chunk + 1 in self._stages:
                self._stages[chunk + 1].set_local_fwd_input(output, mb)
        elif action.phase in (Phase.I, Phase.B) and chunk - 1 in self._stages:
            self._stages[chunk - 1].set_local_bwd_input(stage.get_local_bwd_output(mb), mb)
        if action.phase in (Phase.W, Phase.B):
            torch_pippy.count_backward(schedule, chunk)


def _parts(action: TorchAction) -> tuple[Action, ...]:
    """The sub-actions in the order of a composite."""
    try:
        return parts(parse_step(str(action)))
    except ScheduleError as error:
        raise BraidError(f"{action} has no braided block: {error}") from None
