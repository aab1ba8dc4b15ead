"""The one exception of the schedule package."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule that can't run or be built. The message names the rank, the action and the way out."""
