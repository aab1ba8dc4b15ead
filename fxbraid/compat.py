"""Every private name of torch that fxbraid leans on, in one place.

Each is checked by ``tests/test_compat.py``, which fails loudly where a torch version moves one. Checked on torch
2.13. What replaces a name that went away belongs here, not at its use.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import standalone_compile
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup

__all__ = [
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
    "cache_dir",
    "fx_graph_cse",
    "standalone_compile",
    "timeout_of",
]


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """How long ``group`` waits for a silent peer; None where its backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def missing() -> list[str]:
    """Names above that this torch does not have (an import error would have said so already), or has with another
    signature than the passes call."""
    import inspect

    wanted: dict[Callable[..., Any], set[str]] = {
        aot_export_joint_with_descriptors: {"stack", "mod", "args", "decompositions"},
        standalone_compile: {"gm", "example_inputs"},
        fx_graph_cse: {"fx_g"},
    }
    found = []
    for function, names in wanted.items():
        parameters = set(inspect.signature(function).parameters)
        found += [f"{function.__name__}({name})" for name in sorted(names - parameters)]
    return found
