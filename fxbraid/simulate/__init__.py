"""Discrete-event simulation of a schedule, unit by unit. Imports no torch, holds no state.

The order comes from ``fxbraid.schedule.weave`` or, from costs, ``listorder`` (units inside a block) and from
``fxbraid.schedule.lower`` (what a rank posts, waits for and runs), as the executor's does. What it costs comes from a
``Workload``: ``constants``, ``from_profile`` or ``analytic``.

>>> from fxbraid.schedule import build
>>> from fxbraid.simulate import constants, simulate
>>> stp = build("stp", p=4, m=12)
>>> result = simulate(stp, constants(stp, 1, 1, 1, 0))
>>> result.step_time, round(result.bubble_share, 2)
(75.0, 0.04)
"""

from __future__ import annotations

from fxbraid.schedule import Schedule
from fxbraid.schedule.offload import OffloadPlan
from fxbraid.simulate.analytic import Shape, analytic
from fxbraid.simulate.block import BlockClock
from fxbraid.simulate.constants import constants
from fxbraid.simulate.device import DEVICES, Device, device
from fxbraid.simulate.engine import run
from fxbraid.simulate.model import MODELS, ModelConfig, load_model
from fxbraid.simulate.profile import from_profile
from fxbraid.simulate.result import Box, MessageBox, PathItem, RankTimes, Result, StepBox, peaks, summarize
from fxbraid.simulate.workload import INSTANT, ChunkCost, Link, UnitCost, Workload

__all__ = [
    "DEVICES",
    "INSTANT",
    "MODELS",
    "BlockClock",
    "Box",
    "ChunkCost",
    "Device",
    "Link",
    "MessageBox",
    "ModelConfig",
    "PathItem",
    "RankTimes",
    "Result",
    "Shape",
    "StepBox",
    "UnitCost",
    "Workload",
    "analytic",
    "at_clock",
    "constants",
    "device",
    "from_profile",
    "load_model",
    "peaks",
    "simulate",
]


def simulate(
    schedule: Schedule,
    workload: Workload,
    *,
    braided: bool = True,
    ordered_by: Workload | None = None,
    offload: OffloadPlan | None = None,
) -> Result:
    """One training step of ``schedule`` at the costs of ``workload``: forward and backward of all
    micro-batches.

    braided=False waits for every collective right behind its launch: the same order with nothing hidden.
    ordered_by: the costs that units inside blocks are ordered by (``schedule.listorder``), usually ``workload``
    itself; None is the paper's order. offload: what goes to the host over ``workload.host`` and comes back
    (``plan_offload``). Raises ScheduleError if a workload does not fit the schedule, or if the
    schedule deadlocks.
    """
    return at_clock(schedule, BlockClock(workload, braided, ordered_by), offload)


def at_clock(schedule: Schedule, clock: BlockClock, offload: OffloadPlan | None = None) -> Result:
    """``simulate`` on a clock that is there already: many schedules at the same costs time their blocks once."""
    return summarize(schedule, clock, run(schedule, clock, offload), offload)
