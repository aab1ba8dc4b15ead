"""Every private name of torch that the emulated cluster leans on, in one place. Checked on torch 2.13 (CPU).

``missing()`` says what another version lacks; a test calls it. Beside these names, the package counts on three
habits of ``torch.distributed``: a backend whose creator returns a ``ProcessGroup`` *is* the group
(``_new_process_group_helper``), C++ callers (functional collectives, compiled code) find the methods of a Python
``ProcessGroup`` through the trampoline ``PyProcessGroup``, and Python callers find them by name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Work
from torch.distributed.rendezvous import rendezvous

__all__ = [
    "NAMES",
    "AnyProcessGroup",
    "AnyWork",
    "PrefixStore",
    "ProcessGroup",
    "Work",
    "adopt",
    "call",
    "make_gloo",
    "missing",
    "plain_group",
    "rendezvous",
]

#: To derive from: the stubs know only some of the overloads, and no subclass could agree with all of them.
AnyProcessGroup: Any = ProcessGroup
AnyWork: Any = Work

#: method of the emulated group -> names under which torch 2.11 to 2.13 call it, newest first
NAMES = {
    "all_gather_single": ("all_gather_single", "_allgather_base"),
    "all_gather_single_coalesced": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "reduce_scatter_single": ("reduce_scatter_single", "_reduce_scatter_base"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    "all_to_all_single": ("all_to_all_single", "alltoall_base"),
}


def call(group: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """``group.name(...)`` under the name that this torch has for it."""
    for candidate in NAMES.get(name, (name,)):
        if (method := getattr(group, candidate, None)) is not None:
            return method(*args, **kwargs)
    raise AttributeError(f"this torch's process groups have no {name}, under none of its names")


def make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend that moves the data; here and not above, since fxbraid must import where torch has no gloo."""
    if not dist.is_gloo_available():
        raise RuntimeError(
            "the emulated cluster moves its data with gloo, and this torch was built without it"
        )
    from torch._C._distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout)


def plain_group(store: Any, rank: int, size: int, gloo: Any) -> ProcessGroup:
    """A plain group on ``gloo``: the real one, with every collective that torch can do on it."""
    group = ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def adopt(group: ProcessGroup, gloo: Any) -> None:
    """Give a Python group a backend: without one it has no name, and a call that it does not override fails."""
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, gloo)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)


def missing() -> list[str]:
    """Names that this torch does not have."""
    wanted = {
        ProcessGroup: ("_register_backend", "_set_default_backend", "group_desc", "group_name"),
        Work: ("wait", "is_completed", "get_future", "result", "exception"),
        dist.Backend: ("register_backend",),
    }
    found = [
        f"{owner.__name__}.{name}"
        for owner, names in wanted.items()
        for name in names
        if not hasattr(owner, name)
    ]
    for names in NAMES.values():
        if not any(hasattr(ProcessGroup, name) for name in names):
            found.append(f"ProcessGroup.{names[0]}")
    return found
