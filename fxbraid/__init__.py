"""fxbraid: tensor and pipeline parallelism braided into one program per rank.

>>> import fxbraid
>>> model = fxbraid.braid(model, example_batch, tp_size=2, pp_size=2, n_microbatches=8)  # doctest: +SKIP

``fxbraid.schedule`` alone imports no torch; everything else is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import braid, from_pretrained, profile
    from .checkpoint.checkpointer import Checkpointer
    from .compiled import braided, clip_grad_norm_
    from .memory import predict_memory
    from .model import BraidedModel
    from .passes.errors import BraidError, CaptureError, PartitionError, PlanError, UnsupportedError
    from .runlog import RunLog
    from .runtime.profile import Profile
    from .trainer import BraidTrainer
    from .zero import zero_optimizer

__version__ = "0.1.0"

__all__ = [
    "BraidError",
    "BraidTrainer",
    "BraidedModel",
    "CaptureError",
    "Checkpointer",
    "PartitionError",
    "PlanError",
    "Profile",
    "RunLog",
    "UnsupportedError",
    "braid",
    "braided",
    "clip_grad_norm_",
    "from_pretrained",
    "predict_memory",
    "profile",
    "zero_optimizer",
]

_HOME = {
    **dict.fromkeys(("braid", "from_pretrained", "profile"), "api"),
    **dict.fromkeys(("braided", "clip_grad_norm_"), "compiled"),
    "Profile": "runtime.profile",
    "BraidedModel": "model",
    "predict_memory": "memory",
    "Checkpointer": "checkpoint.checkpointer",
    "zero_optimizer": "zero",
    "BraidTrainer": "trainer",
    "RunLog": "runlog",
    **dict.fromkeys(
        ("BraidError", "CaptureError", "PartitionError", "PlanError", "UnsupportedError"), "passes.errors"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
