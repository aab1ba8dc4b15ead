"""fxbraid's chunks, schedules and braids in the runtime of torch.distributed.pipelining.

>>> model = fxbraid.braid(model, example_batch, tp_size=2, pp_size=2, n_microbatches=8)  # doctest: +SKIP
>>> runtime = fxbraid.pippy.Runtime(model)  # doctest: +SKIP
>>> loss = runtime.step(**batch)  # doctest: +SKIP

``stages(model)`` are this rank's chunks as torch's stages, ``torch_schedule(model)`` is the model's schedule in torch's
``_PipelineScheduleRuntime``, ``register(schedule)`` makes its ``OVERLAP_F_B`` actions braids, and ``Runtime`` puts
around a step what torch leaves to the user: the loss of the whole batch, and tied and partial gradients.
"""

from __future__ import annotations

from .overlap import Overlap, register
from .runtime import Runtime, torch_schedule
from .stage import BraidedStage, loss, stages

__all__ = ["BraidedStage", "Overlap", "Runtime", "loss", "register", "stages", "torch_schedule"]
