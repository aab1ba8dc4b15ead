"""What a message from a peer proves: that the peer has received what it used before it sent that message.

A transport need not say when a send is over (gloo does only to those who wait), and a tensor on its way has to be
held. The schedule knows: if rank 1 runs ``1F3`` before the step whose result has just come from it, the ``0F3`` that it
needed has arrived there, and waiting for that send can't block.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxbraid.schedule.action import parts
from fxbraid.schedule.lower import Arrive, Channel, Message, channels, lower, needs
from fxbraid.schedule.schedule import Schedule


def received(schedule: Schedule, rank: int) -> tuple[Mapping[Channel, int], ...]:
    """For each receive of ``rank``, in its order: how many messages of each of its channels have arrived at the other
    end once it is over; channels of which no more are known than before are left out."""
    ends = {channel: (source, target) for channel, source, target in channels(schedule)}
    outgoing = [channel for channel, (source, _) in ends.items() if source == rank]
    sent_at = {peer: _sends(schedule, peer) for peer in {ends[channel][1] for channel in outgoing}}
    used_at = {channel: _uses(schedule, channel, ends[channel][1]) for channel in outgoing}
    known = dict.fromkeys(outgoing, 0)
    found: list[Mapping[Channel, int]] = []
    for message in (one.message for one in lower(schedule, rank) if isinstance(one, Arrive)):
        peer = ends[message.channel][0]
        more: dict[Channel, int] = {}
        for channel in outgoing:
            if ends[channel][1] == peer:
                steps, step = used_at[channel], sent_at[peer][message]
                count = known[channel]
                while count < len(steps) and steps[count] <= step:
                    count += 1
                if count > known[channel]:
                    known[channel] = more[channel] = count
        found.append(more)
    return tuple(found)


def _sends(schedule: Schedule, rank: int) -> dict[Message, int]:
    """The step of ``rank`` in which it sends each message."""
    made = {(c.phase, c.chunk): c for c, source, _ in channels(schedule) if source == rank}
    found: dict[Message, int] = {}
    for step, actions in enumerate(map(parts, schedule.actions[rank])):
        for action in actions:
            phase = "I" if action.phase.value == "B" else action.phase.value
            channel = made.get((phase, action.chunk))  # type: ignore[arg-type]
            if channel is not None:
                found[Message(channel, action.microbatch)] = step
    return found


def _uses(schedule: Schedule, channel: Channel, rank: int) -> list[int]:
    """The step of ``rank`` that needs each message of ``channel``, in the order of messages."""
    return [
        step
        for step, actions in enumerate(map(parts, schedule.actions[rank]))
        for action in actions
        if (message := needs(schedule, action)) is not None and message.channel == channel
    ]


__all__ = ["received"]
