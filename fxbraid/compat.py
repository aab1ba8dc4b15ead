"""Every private name of torch that fxbraid leans on, in one place.

Each is checked by ``tests/test_compat.py``, which fails loudly where a torch version moves one. Checked on torch
2.13. What replaces a name that went away belongs here, not at its use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, fx
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
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomSchedulerPass, get_hash_for_files
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "BufferAOTInput",
    "CompiledFxGraph",
    "CustomGraphPass",
    "CustomSchedulerPass",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "alias_group",
    "aot_export_joint_with_descriptors",
    "below_autograd",
    "cache_dir",
    "compute_before",
    "depend",
    "fx_graph_cse",
    "generated_code",
    "hash_of_files",
    "holders",
    "inductor_code",
    "is_fence",
    "plain_index",
    "recompute_ancestors",
    "same_storage",
    "serves",
    "standalone_compile",
    "storage_key",
    "timeout_of",
    "without_modes",
]


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """How long ``group`` waits for a silent peer; None where its backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def inductor_code(artefact: Any) -> CompiledFxGraph | None:
    """The code that Inductor generated for what ``standalone_compile`` returned; None for anything else.

    It takes its inputs as a list that it empties. What lies around it replays mutations of inputs and views of
    inputs that require gradients, and converts calling conventions: nothing that a functional graph on tensors
    without gradients needs.
    """
    function = getattr(artefact, "_compiled_fn", None)
    for _ in range(8):  # torch's own search for what can be saved follows the same chain
        # Freshly compiled, the code ends the chain; out of the cache, it hangs on what was saved.
        for inner in (function, getattr(function, "compiled_fn", None)):
            if isinstance(inner, CompiledFxGraph):
                return inner
        function = getattr(function, "__wrapped__", None)
    return None


def hash_of_files(*paths: str) -> bytes:
    """What a pass of ours adds to the key under which Inductor caches an artefact."""
    return get_hash_for_files(paths)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Are the two (fake) tensors views of one storage?"""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def storage_key(tensor: Tensor) -> int:
    """What two (fake) tensors have in common if they are views of one storage, while it lives."""
    return tensor.untyped_storage()._cdata


def compute_before(graph: fx.Graph, wanted: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
    """Make Inductor write down each of ``wanted[node]`` before ``node`` (its control dependencies)."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(nodes) for node, nodes in wanted.items()})


def is_fence(node: Any) -> bool:
    """Is this node of Inductor's scheduler a collective or a wait?"""
    from torch._inductor.utils import is_collective, is_wait

    return is_collective(node.node) or is_wait(node.node)


def depend(node: Any, earlier: Any) -> None:
    """Make one node of Inductor's scheduler run behind another; no buffer lives longer for it."""
    from torch._inductor.dependencies import WeakDep

    name = next(iter(earlier.get_buffer_names()))
    # The name of an operation where a mutated buffer's is expected, as Inductor does for control dependencies: it
    # then never takes the dependency for one between a read and a write of the same buffer, which fusion satisfies.
    node.add_fake_dep(WeakDep(name, mutating_buf=node.get_name(), is_fake=True))


def recompute_ancestors(nodes: Sequence[Any]) -> None:
    """What Inductor's fusion looks at, after :func:`depend`."""
    if nodes:
        scheduler = nodes[0].scheduler
        scheduler.nodes = list(nodes)
        scheduler.compute_ancestors()


def generated_code(artefact: Any) -> str | None:
    """The Python that Inductor wrote for what ``standalone_compile`` returned; None for anything else."""
    code = inductor_code(artefact)
    return None if code is None else code.source_code


def alias_group(group: ProcessGroup) -> str:
    """A name for ``group`` that is the same on every rank and in every run: ``fxbraid.tp0``, or the next number
    where that is another group's. Torch's own names count all groups of a process, and compiled code, which holds
    the name, could not be shared between ranks."""
    from torch._C._distributed_c10d import (
        _register_process_group,
        _resolve_process_group,
        _unregister_process_group,
    )

    number = 0
    while True:
        name = f"fxbraid.tp{number}"
        try:
            known = _resolve_process_group(name)  # type: ignore[arg-type]
        except RuntimeError:  # free, or of a group that is gone
            _unregister_process_group(name)  # type: ignore[arg-type]
            _register_process_group(name, group)  # type: ignore[arg-type]
            return name
        if known is group or known.group_name == group.group_name:
            return name
        number += 1


def FakeStore() -> Any:
    """The store of torch's "fake" backend, which is registered thereby: its process groups communicate nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore as Store

    return Store()


def below_autograd() -> AbstractContextManager[Any]:
    """Operators skip autograd's dispatch keys, for code whose tensors all live under ``torch.no_grad()`` anyway: an
    all-reduce and its wait, whose autograd kernels are slow fallbacks, then take 5 microseconds of the host and not
    20. Views that are made inside do not know their base, and version counters stand still."""
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-any-return]


@contextmanager
def plain_index() -> Iterator[None]:
    """Export takes ``x[i]`` in masks that transformers makes with vmap as the operator that it is, and not as a call of
    an autograd function with a backward of its own (masks have none)."""
    from torch._dynamo import _trace_wrapped_higher_order_op as wrapped

    kept = wrapped.mod_index
    wrapped.mod_index = lambda x, indices: torch.ops.aten.index(x, indices)  # type: ignore[assignment]
    try:
        yield
    finally:
        wrapped.mod_index = kept


@contextmanager
def without_modes() -> Iterator[None]:
    """Operators run for real, outside of the trace that is being made."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def holders(tensor: Tensor) -> int:
    """How many tensors share the storage of ``tensor``, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # one reference is the Python object's, made here


def serves(group: ProcessGroup, device: torch.device) -> bool:
    """Does ``group`` have a backend for tensors of ``device``?"""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def missing() -> list[str]:
    """Names above that this torch does not have (an import error would have said so already), or has with another
    signature than the passes call."""
    wanted: dict[Callable[..., Any], set[str]] = {
        aot_export_joint_with_descriptors: {"stack", "mod", "args", "decompositions"},
        standalone_compile: {"gm", "example_inputs"},
        fx_graph_cse: {"fx_g"},
        get_hash_for_files: {"paths"},
    }
    found = []
    for function, names in wanted.items():
        parameters = set(inspect.signature(function).parameters)
        found += [f"{function.__name__}({name})" for name in sorted(names - parameters)]
    return found
