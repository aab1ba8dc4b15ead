"""What a step was worth: hiding, exposed communication, bubble, contention. Formulas alone; imports no torch.

Times are seconds, shares lie between 0 and 1 (0.05 is 5 %). ``docs/metrics.md`` says how each is measured and read.
A rank's time is divided as the simulator divides it (``fxbraid.simulate.RankTimes``)::

    pipeline_seconds = compute + exposed_tp + exposed_p2p + bubble        of every rank

so that a measured share and a simulated one mean the same, and on the emulated cluster's virtual clock agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fxbraid.schedule import Schedule
from fxbraid.schedule.lower import Arrive, Channel, Run, channels, lower

HEADER = 7
"""Numbers of a row before the messages: the first fields of :class:`RankLog`."""


def eta(blocking_s: float, measured_s: float, free_s: float) -> float | None:
    """Share of the tensor-parallel communication's cost that is hidden (DESIGN section 8).

    blocking_s, measured_s, free_s: step times of one order of units with ``collectives="blocking"``, ``"overlap"``
    and ``"free"``. 1: as if communication were free; 0: as slow as waiting for each collective.

    None where blocking is no slower than free: there is nothing to hide. Not clipped. Below 0 overlap cost more than
    it hid (contention), or the difference blocking - free is of the size of the noise: with noise s in each time, eta
    is uncertain by about 2 s / (blocking - free). Above 1 for the same reason, or because waits that blocking moved
    took time of their own (launching right behind a unit also delays messages and queues).
    """
    cost = blocking_s - free_s
    return (blocking_s - measured_s) / cost if cost > 0 else None


def eta_max(p: int, m: int) -> float:
    """Bound on :func:`eta` for ``stp`` as published, on p ranks with m micro-batches: 1 - (2p + 1) / (4m).

    ``stp`` leaves (2p + 1) T_AR exposed of the 4m T_AR that a rank of two chunks runs (DESIGN section 5). 0 where m
    is so small that the formula would be negative.
    """
    if p < 1 or m < 1:
        raise ValueError(f"eta_max needs p >= 1 ranks and m >= 1 micro-batches, got p={p}, m={m}")
    return max(0.0, 1 - (2 * p + 1) / (4 * m))


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """Where one rank's step went, in seconds: compute + exposed_tp + exposed_p2p + bubble = pipeline_seconds.

    compute: neither of the others, so units and the Python between them. exposed_tp: it waits for a collective of
    its TP group. exposed_p2p: it waits for a message that has been sent. bubble: it waits for a message that has not,
    or has not begun, or is done. collective: all its TP collectives, hidden or not; None where nobody knows how long
    a hidden one takes. exposed_tp is None where waits lie inside compiled code; compute then includes it.
    """

    pp: int
    tp: int
    compute: float
    exposed_tp: float | None
    exposed_p2p: float
    bubble: float
    collective: float | None = None


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step over all ranks. ``print`` it; ``as_dict`` is for JSON.

    seconds: of ``step()``, the slowest rank's. pipeline_seconds: of the program alone, from the first rank's start to
    the last rank's end; what shares refer to. The difference is splitting the batch, tied gradients and the loss.
    tokens: of the batch (elements of ``input_ids``), None where it has none. peak_predicted, peak_measured: bytes of
    activations on this rank, None where not known (``measure_peak``). label: the clock; always print it beside the
    numbers. note: what is wrong about them, "" if nothing is.
    """

    seconds: float
    pipeline_seconds: float
    samples: int
    tokens: int | None
    label: str
    ranks: tuple[RankMetrics, ...] = ()
    note: str = ""
    peak_predicted: int | None = None
    peak_measured: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the batch over ``seconds``; padding counts."""
        return self.tokens / self.seconds if self.tokens is not None and self.seconds > 0 else None

    @property
    def samples_per_s(self) -> float | None:
        """Rows of the batch over ``seconds``."""
        return self.samples / self.seconds if self.seconds > 0 else None

    @property
    def compute_share(self) -> float | None:
        """Mean over ranks of compute / pipeline_seconds."""
        return self._share("compute")

    @property
    def exposed_tp_share(self) -> float | None:
        """Mean over ranks of exposed_tp / pipeline_seconds."""
        return self._share("exposed_tp")

    @property
    def exposed_p2p_share(self) -> float | None:
        """Mean over ranks of exposed_p2p / pipeline_seconds."""
        return self._share("exposed_p2p")

    @property
    def bubble_share(self) -> float | None:
        """Mean over ranks of bubble / pipeline_seconds."""
        return self._share("bubble")

    @property
    def hidden_share(self) -> float | None:
        """1 - exposed_tp / collective, summed over ranks: the share of collective time that compute covers. An
        estimate of eta from one run; eta itself also counts what hiding costs elsewhere."""
        pairs = [(r.exposed_tp, r.collective) for r in self.ranks]
        exposed = sum(e for e, _ in pairs if e is not None)
        total = sum(c for _, c in pairs if c is not None)
        if not total or any(e is None or c is None for e, c in pairs):
            return None
        return 1 - exposed / total

    def _share(self, name: str) -> float | None:
        values = [getattr(rank, name) for rank in self.ranks]
        if not values or self.pipeline_seconds <= 0 or any(value is None for value in values):
            return None
        return float(sum(values)) / (len(values) * self.pipeline_seconds)

    def as_dict(self) -> dict[str, float | int | str | None]:
        """The numbers, for JSON and tables."""
        names = (
            "seconds pipeline_seconds tokens_per_s samples_per_s compute_share exposed_tp_share exposed_p2p_share "
            "bubble_share hidden_share peak_predicted peak_measured label note"
        )
        return {name: getattr(self, name) for name in names.split()}

    def __str__(self) -> str:
        rate = (
            f"{self.tokens_per_s:,.0f} tokens/s"
            if self.tokens_per_s
            else f"{self.samples_per_s or 0:,.1f} samples/s"
        )
        shares = [
            ("compute", self.compute_share),
            ("exposed TP", self.exposed_tp_share),
            ("exposed P2P", self.exposed_p2p_share),
            ("bubble", self.bubble_share),
            ("of TP hidden", self.hidden_share),
        ]
        said = ", ".join(f"{name} {100 * value:.1f} %" for name, value in shares if value is not None)
        peaks = [("predicted", self.peak_predicted), ("measured", self.peak_measured)]
        peak = ", ".join(f"{name} {value:,}" for name, value in peaks if value is not None)
        lines = [
            f"step {self.seconds * 1e3:,.3f} ms, {rate} ({self.label})",
            said,
            f"peak activation bytes of this rank: {peak}" if peak else "",
            self.note,
        ]
        return "\n".join(line for line in lines if line)


# -- from times to shares


@dataclass(slots=True)
class RankLog:
    """What one rank wrote down in one step, in ticks of a clock (integers; ``per_second`` of them are a second).

    host: equal where clocks are one. began, left: entry and exit of ``step()``. started, ended: of its program.
    waited: the sum of its waits for TP collectives, -1 where they can't be seen. collective: their own time, hidden or
    not, -1 where unknown. sent: when each message of a channel
    was sent, in order of micro-batches. arrivals: begin and end of each wait for a message, in program order.
    """

    host: int = 0
    began: int = 0
    started: int = 0
    ended: int = 0
    left: int = 0
    waited: int = 0
    collective: int = -1
    sent: dict[Channel, list[int]] = field(default_factory=dict)
    arrivals: list[tuple[int, int]] = field(default_factory=list)

    def row(self, plan: Messages) -> list[int]:
        """As one list of ``plan.width`` integers, which :meth:`of` reads."""
        values = [self.host, self.began, self.started, self.ended, self.left, self.waited, self.collective]
        for channel in plan.outgoing:
            times = self.sent.get(channel, [])
            values += [*times, *([self.ended] * (plan.m - len(times)))]
        for pair in self.arrivals:
            values += pair
        return values + [0] * (plan.width - len(values))

    @staticmethod
    def of(row: Sequence[int], plan: Messages) -> RankLog:
        """The log of a row."""
        at, m = HEADER, plan.m
        sent = {}
        for channel in plan.outgoing:
            sent[channel] = list(row[at : at + m])
            at += m
        pairs = [(row[at + 2 * k], row[at + 2 * k + 1]) for k in range(len(plan.arrivals))]
        host, began, started, ended, left, waited, collective = row[:HEADER]
        return RankLog(host, began, started, ended, left, waited, collective, sent, pairs)


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of one pipeline rank under a schedule. outgoing: its channels. arrivals: (step that waits,
    channel, micro-batch) in program order. width: integers of a row, the same for all ranks."""

    m: int
    outgoing: tuple[Channel, ...]
    arrivals: tuple[tuple[int, Channel, int], ...]
    width: int = 0


def messages(schedule: Schedule) -> list[Messages]:
    """By pipeline rank."""
    found: list[tuple[tuple[Channel, ...], tuple[tuple[int, Channel, int], ...]]] = []
    for rank in range(schedule.p):
        outgoing = tuple(channel for channel, source, _ in channels(schedule) if source == rank)
        arrivals = []
        step = 0
        for instruction in lower(schedule, rank):
            if isinstance(instruction, Arrive):
                arrivals.append((step, instruction.message.channel, instruction.message.microbatch))
            elif isinstance(instruction, Run):
                step += 1
        found.append((outgoing, tuple(arrivals)))
    width = max((HEADER + schedule.m * len(out) + 2 * len(got) for out, got in found), default=HEADER)
    return [Messages(schedule.m, out, got, width) for out, got in found]


def divide(
    schedule: Schedule,
    logs: Sequence[Sequence[RankLog]],
    *,
    per_second: int,
    noise: int = 0,
) -> tuple[float, float, tuple[RankMetrics, ...]]:
    """(seconds, pipeline_seconds, ranks) of ``logs[pp][tp]``; see :class:`RankMetrics` for what the parts mean.

    Between two blocks a rank may wait for several messages; the last one that it waited for longer than ``noise``
    ticks let it go. Its wait is exposed P2P from the moment at which that message was sent, and bubble before. So
    exposure includes queueing on the link, and waiting until the receive was posted, as in the simulator.
    """
    plan = messages(schedule)
    result: list[RankMetrics] = []
    frames = time_frames(plan, logs)
    for tp, frame in enumerate(frames):
        column = [row[tp] for row in logs]
        total = frame.end - frame.start
        sent = {channel: (log, s) for log, s in zip(column, frame.shift, strict=True) for channel in log.sent}
        for pp, log in enumerate(column):
            exposed = messages_waited = 0
            for begin, end, channel, microbatch in _groups(plan[pp], log, noise):
                messages_waited += end - begin
                if channel is not None:
                    sender, s = sent[channel]
                    left = sender.sent[channel][microbatch] - s + frame.shift[pp]
                    exposed += max(0, end - max(begin, left))
            waited = max(0, log.waited)
            compute = log.ended - log.started - waited - messages_waited
            result.append(
                RankMetrics(
                    pp=pp,
                    tp=tp,
                    compute=compute / per_second,
                    exposed_tp=waited / per_second if log.waited >= 0 else None,
                    exposed_p2p=exposed / per_second,
                    bubble=max(0, total - compute - waited - exposed) / per_second,
                    collective=log.collective / per_second if log.collective >= 0 else None,
                )
            )
    seconds = max(log.left - log.began for row in logs for log in row) / per_second
    result.sort(key=lambda rank: (rank.pp, rank.tp))
    return seconds, max(frame.end - frame.start for frame in frames) / per_second, tuple(result)


@dataclass(frozen=True, slots=True)
class Frame:
    """The clock of one TP column. shift: by pipeline rank, how far its clock is ahead of this one. start, end: of the
    program."""

    shift: list[int]
    start: int
    end: int


def time_frames(plan: Sequence[Messages], logs: Sequence[Sequence[RankLog]]) -> list[Frame]:
    """By TP rank. One start and one end for all, where the first pipeline ranks share a machine and so a clock (TP
    ranks nearly always do); else each column has its own."""
    frames = []
    for tp in range(len(logs[0])):
        column = [row[tp] for row in logs]
        shift = clock_offsets(plan, column)
        start = min(log.started - s for log, s in zip(column, shift, strict=True))
        frames.append(Frame(shift, start, max(log.ended - s for log, s in zip(column, shift, strict=True))))
    if len({log.host for log in logs[0]}) > 1:
        return frames
    start, end = min(frame.start for frame in frames), max(frame.end for frame in frames)
    return [Frame(frame.shift, start, end) for frame in frames]


def _groups(plan: Messages, log: RankLog, noise: int) -> Iterator[tuple[int, int, Channel | None, int]]:
    """The waits for messages, those before one step together: (begin, end, channel and micro-batch of the message
    that let the rank go; None where none was waited for)."""
    at = 0
    while at < len(plan.arrivals):
        step, begin = plan.arrivals[at][0], log.arrivals[at][0]
        cause: Channel | None = None
        microbatch, end = -1, begin
        while at < len(plan.arrivals) and plan.arrivals[at][0] == step:
            start, end = log.arrivals[at]
            if end - start > noise:
                _, cause, microbatch = plan.arrivals[at]
            at += 1
        yield begin, end, cause, microbatch


def clock_offsets(plan: Sequence[Messages], column: Sequence[RankLog]) -> list[int]:
    """How far each pipeline rank's clock is ahead of the first one's; 0 where they share a machine.

    Two ranks on different machines have different clocks. The shortest time from sending to taking a message a -> b
    is the transfer plus the offset of b's clock, that of b -> a the transfer minus it, so half their difference is the
    offset, wrong by at most half the difference of the two transfers.
    """
    if len({log.host for log in column}) == 1:
        return [0] * len(column)
    ends: dict[Channel, int] = {}
    shortest: dict[tuple[int, int], int] = {}
    for rank, own in enumerate(plan):
        for channel in own.outgoing:
            ends[channel] = rank
    for rank, (own, log) in enumerate(zip(plan, column, strict=True)):
        for (_, channel, microbatch), (_, end) in zip(own.arrivals, log.arrivals, strict=True):
            source = ends[channel]
            took = end - column[source].sent[channel][microbatch]
            shortest[source, rank] = min(took, shortest.get((source, rank), took))
    offsets: dict[int, int] = {0: 0}
    waiting = [0]
    while waiting:
        a = waiting.pop()
        for b in range(len(column)):
            if b in offsets or (a, b) not in shortest or (b, a) not in shortest:
                continue
            same = column[a].host == column[b].host
            offsets[b] = offsets[a] + (0 if same else (shortest[a, b] - shortest[b, a]) // 2)
            waiting.append(b)
    return [offsets.get(rank, 0) for rank in range(len(column))]
