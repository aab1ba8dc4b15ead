"""The one exception of the schedule package."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule, or a request for one, that can't run. The message names the rank, the action and the way out."""
