"""Discrete-event simulation of a schedule, unit by unit. Imports no torch, holds no state.

The order comes from ``fxbraid.schedule.weave`` (units inside a block) and ``fxbraid.schedule.lower`` (what a
rank posts, waits for and runs), as the executor's does. What it costs comes from a ``Workload``:
``constants``, ``from_profile`` or ``analytic``.

>>> from fxbraid.schedule import build
>>> from fxbraid.simulate import constants, simulate
>>> stp = build("stp", p=4, m=12)
>>> result = simulate(stp, constants(stp, 1, 1, 1, 0))
>>> result.step_time, round(result.bubble_share, 2)
(75.0, 0.04)
"""

from __future__ import annotations

from fxbraid.schedule import Schedule
from fxbraid.simulate.analytic import Shape, analytic
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
    "constants",
    "device",
    "from_profile",
    "load_model",
    "peaks",
    "simulate",
]


def simulate(schedule: Schedule, workload: Workload, *, braided: bool = True) -> Result:
    """One training step of ``schedule`` at the costs of ``workload``: forward and backward of all
    micro-batches.

    braided=False waits for every collective right behind its launch: the same order with nothing hidden.
    Raises ScheduleError if the workload does not fit the schedule, or if the schedule deadlocks.
    """
    return summarize(schedule, workload, braided, run(schedule, workload, braided))
