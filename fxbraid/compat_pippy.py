"""What fxbraid takes from inside torch.distributed.pipelining: the base of stages, the runtime, and what a custom
function has to do in the runtime's place.

Checked on torch 2.11, 2.12 and 2.13, between which the signatures of ``_prepare_forward_infra``,
``_prepare_backward_infra`` and ``_maybe_compute_loss`` grew; ``tests/test_pippy.py`` fails loudly where a name moves.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    _Action,
    _PipelineContext,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

TorchAction = _Action
TorchContext = _PipelineContext
TorchRuntime = _PipelineScheduleRuntime
TorchStage = _PipelineStageBase

__all__ = ["OVERLAP_F_B", "TorchAction", "TorchContext", "TorchRuntime", "TorchStage", "missing_pippy"]


def wait_for_input(schedule: TorchRuntime, chunk: int, microbatch: int, *, backward: bool) -> None:
    """Wait for the message that F (or the backward) of ``chunk`` needs, as the runtime does before the action."""
    pending = schedule.bwd_recv_ops if backward else schedule.fwd_recv_ops
    _wait_batch_p2p(pending.pop((chunk, microbatch)))


def count_backward(schedule: TorchRuntime, chunk: int) -> None:
    """A weight gradient of ``chunk`` is done."""
    schedule.backward_counter[chunk] += 1


def keep_loss(schedule: TorchRuntime, stage: TorchStage, output: Any, targets: Any, microbatch: int) -> None:
    """Let the runtime compute and keep the loss, if ``stage`` is the last."""
    schedule._maybe_compute_loss(stage, output, targets, microbatch)


def stages_of(schedule: TorchRuntime) -> list[TorchStage]:
    """This rank's stages."""
    return list(schedule._stages)


def loss_function(schedule: TorchRuntime) -> Callable[..., Any] | None:
    """What it was made with; None: it runs forwards alone."""
    return schedule._loss_fn


def sizes(schedule: TorchRuntime) -> tuple[int, int, int]:
    """Pipeline ranks, stages, micro-batches."""
    return schedule.pp_group_size, schedule._num_stages, schedule._n_microbatches


def owners(schedule: TorchRuntime) -> dict[int, int]:
    """Stage -> pipeline rank."""
    return dict(schedule.stage_index_to_group_rank)


def order(schedule: TorchRuntime) -> list[list[str]] | None:
    """The text of every rank's actions: compute alone where torch has put the messages in itself, with messages where
    those were given. None where nothing has been loaded."""
    rows: Mapping[int, Any] = schedule.pipeline_order or getattr(schedule, "pipeline_order_with_comms", {})
    return [[str(a) for a in rows[rank] if a is not None] for rank in sorted(rows)] or None


def unregister(schedule: TorchRuntime, kind: type) -> None:
    """Take back a custom function of ``kind`` for ``OVERLAP_F_B``."""
    if isinstance(schedule._comp_type_to_function_map.get(OVERLAP_F_B), kind):
        del schedule._comp_type_to_function_map[OVERLAP_F_B]


def drop_messages(schedule: TorchRuntime) -> None:
    """Forget what a step that failed has left."""
    schedule.fwd_recv_ops.clear()
    schedule.bwd_recv_ops.clear()
    schedule._internal_losses.clear()


#: Arguments that are given, by method.
_CALLED: Mapping[tuple[type, str], set[str]] = {
    (TorchRuntime, "step"): {"target", "return_outputs"},
    (TorchRuntime, "_load_csv"): {"filename", "format"},
    (TorchRuntime, "_maybe_compute_loss"): {"stage", "output", "target_mbs", "mb_index"},
    (TorchRuntime, "register_custom_function"): {"computation_type", "custom_function"},
    (TorchStage, "__init__"): {"submodule", "stage_index", "num_stages", "device", "group"},
}
#: Attributes that are read.
_READ = {
    "_comp_type_to_function_map",
    "_internal_losses",
    "_loss_fn",
    "_n_microbatches",
    "_num_stages",
    "_stages",
    "backward_counter",
    "bwd_recv_ops",
    "fwd_recv_ops",
    "pipeline_order",
    "pipeline_order_with_comms",
    "pp_group_size",
    "stage_index_to_group_rank",
}
#: What the runtime calls or reads of a stage (``scale_grads`` is an option of its own): all of it must work on ours.
STAGE_CALLS = frozenset(
    {
        "_get_init_p2p_neighbors_ops",
        "_prepare_backward_infra",
        "_prepare_forward_infra",
        "act_send_info",
        "args_recv_info",
        "backward_one_chunk",
        "backward_weight_one_chunk",
        "clear_runtime_states",
        "device",
        "forward_one_chunk",
        "get_bwd_recv_ops",
        "get_bwd_send_ops",
        "get_fwd_recv_ops",
        "get_fwd_send_ops",
        "get_local_bwd_output",
        "group_rank",
        "group_size",
        "has_backward",
        "is_first",
        "is_last",
        "num_stages",
        "output_chunks",
        "perform_reduce_grad",
        "scale_grads",
        "set_local_bwd_input",
        "set_local_fwd_input",
        "stage_index",
        "stage_index_to_group_rank",
        "submod",
    }
)


def missing_pippy(runtime: type = TorchRuntime) -> list[str]:
    """Names above that this torch does not have or has with other arguments; and what its runtime reads of a stage that
    fxbraid does not know of, as ``+name``."""
    found = []
    for (owner, name), wanted in _CALLED.items():
        parameters = set(inspect.signature(getattr(owner, name)).parameters)
        found += [f"{owner.__name__}.{name}({argument})" for argument in sorted(wanted - parameters)]
    used = {name for code in _codes(runtime) for name in code.co_names}
    found += [f"{runtime.__name__}.{name}" for name in sorted(_READ - used)]
    set_at_first = {i.argval for i in dis.get_instructions(TorchStage.__init__) if i.opname == "STORE_ATTR"}
    of_stages = set_at_first | {name for name in vars(TorchStage) if not name.startswith("__")}
    return found + [f"+{name}" for name in sorted((used & of_stages) - STAGE_CALLS)]


def _codes(owner: type) -> Iterator[CodeType]:
    """The code of all methods of a class and its bases, and of the functions within."""
    todo: list[Any] = [
        getattr(member, "__code__", None) for base in owner.__mro__ for member in vars(base).values()
    ]
    while todo:
        code = todo.pop()
        if isinstance(code, CodeType):
            yield code
            todo += code.co_consts
