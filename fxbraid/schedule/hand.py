"""A rank's hand of actions, for schedules written as numbered steps on the V."""

from __future__ import annotations

from collections import deque

from fxbraid.schedule.action import Action, Phase


class Hand:
    """Deals one rank's actions on the two-chunk V: each phase of each chunk in micro-batch order, W's as
    their I's ran.

    ``local`` is 0 for the chunk on the way down (``rank``) and 1 for the one on the way back (chunk
    2p - 1 - ``rank``).
    """

    def __init__(self, p: int, rank: int) -> None:
        self.chunks = (rank, 2 * p - 1 - rank)
        self._forwards = [0, 0]
        self._gradients = [0, 0]
        self.owed: deque[Action] = deque()

    def f(self, local: int) -> Action:
        """The next forward of a chunk."""
        self._forwards[local] += 1
        return Action(Phase.F, self.chunks[local], self._forwards[local] - 1)

    def b(self, local: int) -> Action:
        """The next backward of a chunk, in full."""
        self._gradients[local] += 1
        return Action(Phase.B, self.chunks[local], self._gradients[local] - 1)

    def i(self, local: int) -> Action:
        """The next backward of a chunk, its W queued."""
        action = Action(Phase.I, self.chunks[local], self.b(local).microbatch)
        self.owed.append(Action(Phase.W, action.chunk, action.microbatch))
        return action

    def w(self) -> Action:
        """The oldest queued W."""
        return self.owed.popleft()
