"""The order of a torch.distributed.pipelining class as a schedule of fxbraid, to compare schedules alone.

The order comes from torch's own class (``pipeline_order``, made without a process group), is read as the CSV that
both speak, and is proven by ``fxbraid.schedule.check``. Two classes have none that can be used (torch 2.13):

- ``Schedule1F1B``: its table is off by one micro-batch on the last rank.
- ``ScheduleLoopedBFS``: the backwards of a stage run last micro-batch first, which fxbraid refuses (a chunk's
  backwards run in micro-batch order).

They take fxbraid's family of the same name, and ``Order.source`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from fxbraid import schedule as schedules
from fxbraid.bench.pippy import SCHEDULES, TorchSchedule
from fxbraid.schedule import Schedule, ScheduleError


@dataclass(frozen=True, slots=True)
class Order:
    """``schedule`` has no composites. source: where it comes from, for the table."""

    schedule: Schedule
    source: str


def torch_order(name: str, p: int, m: int) -> Order:
    """The order of torch's class ``name`` on ``p`` ranks. Raises ``ScheduleError`` where the class refuses m."""
    kind = SCHEDULES[name]
    if reason := kind.refuses(p, m):
        raise ScheduleError(f"{name} cannot run: {reason}")
    try:
        made = Schedule.from_csv(torch_csv(kind, p, m), name=f"{name}'s order")
        order = schedules.unbraid(made)
        if order.m != m:
            raise ScheduleError(f"it runs {order.m} micro-batches instead of {m}")
        schedules.check(order)
    except (ScheduleError, AttributeError, TypeError) as error:
        ours = schedules.unbraid(schedules.build(name, p=p, m=m))
        return Order(ours, f"fxbraid's {ours.name}, since torch's own order is refused: {error}")
    return Order(order, "torch's pipeline_order")


def torch_csv(kind: TorchSchedule, p: int, m: int) -> str:
    """What the class plans for each rank, one line a rank, without its gaps."""
    n_stages = p * kind.chunks_per_rank
    stages: list[Any] = [_stage(index, n_stages, p) for index in range(kind.chunks_per_rank)]
    made = kind.cls(
        stages[0] if kind.chunks_per_rank == 1 else stages, m, loss_fn=_no_loss, scale_grads=False
    )
    order = made.pipeline_order
    return "".join(",".join(str(a) for a in order[rank] if a is not None) + "\n" for rank in range(p))


def _stage(index: int, n_stages: int, p: int) -> Any:
    """As much of a stage of rank 0 as a schedule's constructor reads."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=n_stages,
        group_size=p,
        group_rank=0,
        is_first=index == 0,
        is_last=index == n_stages - 1,
        has_backward=False,
        submod=nn.Identity(),
        stage_index_to_group_rank=None,
    )


def _no_loss(*_: Any) -> None:
    raise AssertionError("this schedule is only read")
