"""What is emulated: links, the clock, and how long a collective or a message takes on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

Clock = Literal["virtual", "paced", "wall"]
CLOCKS: tuple[str, ...] = get_args(Clock)

#: How far (seconds) a paced rank's host may fall behind its device clock before the device has to wait for it.
RUN_AHEAD_S = 0.02


#: Times inside the package are integers of this unit: sums do not depend on their order or on the origin, so that
#: two equal steps take equal times, to the bit.
PER_SECOND = 10**12


def to_ps(seconds: float) -> int:
    """Picoseconds."""
    return round(seconds * PER_SECOND)


def to_s(ps: int) -> float:
    """Seconds."""
    return ps / PER_SECOND


class Op(IntEnum):
    """Kinds of collective, as numbers that fit into a stamp."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9


def factor(op: Op, ranks: int) -> float:
    """Bytes that the busiest rank moves, per byte of ``op``'s whole buffer, as NCCL's rings and chains do.

    The whole buffer: the tensor of an all-reduce, broadcast or reduce; all ranks' parts together of a gather or
    scatter of any kind; what one rank hands in for an all-to-all. A barrier moves nothing.
    """
    if ranks < 2 or op is Op.BARRIER:
        return 0.0
    if op is Op.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if op in (Op.BROADCAST, Op.REDUCE):
        return 1.0
    return (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Link:
    """A link in one direction: ``alpha_s`` seconds before the first byte, ``beta_bytes_per_s`` (may be infinite).

    rendezvous: a message starts when it has been sent *and* its receive posted (NCCL); False: when it has been
    sent. Means nothing for collectives.
    """

    alpha_s: float
    beta_bytes_per_s: float = math.inf
    rendezvous: bool = True

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and math.isfinite(self.alpha_s)):
            raise ValueError(f"alpha_s={self.alpha_s} is no latency; give seconds, 0 or more")
        if not self.beta_bytes_per_s > 0:
            raise ValueError(
                f"beta_bytes_per_s={self.beta_bytes_per_s} is no bandwidth; give bytes per second above 0"
            )

    def __str__(self) -> str:
        return f"{self.alpha_s * 1e6:g} us + {self.beta_bytes_per_s / 1e9:g} GB/s"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The emulated machine. The same on every rank.

    tp_link, pp_link: without ``tp_size``, collectives take ``tp_link`` and messages ``pp_link``, except that the
    collectives of a mesh axis named "pp" or "dp", and all that fxbraid does along it, take ``pp_link``. With
    ``tp_size``, global ranks r and s share a node if r // tp_size == s // tp_size, and whatever stays in one node
    takes ``tp_link``, anything else ``pp_link``.
    clock: see ``fxbraid.runtime.emulate``. slowdown: factor (1 or more) on the modelled time of a unit for as long
    as a collective of its rank is in flight; it stands for shared processors and memory. run_ahead_s: how far a
    paced host may lag behind its device clock before the lag becomes device time. host_link: each way between a
    rank's device and its host (activation offload); None: copies take no time.
    """

    tp_link: Link
    pp_link: Link
    clock: Clock = "virtual"
    slowdown: float = 1.0
    tp_size: int | None = None
    run_ahead_s: float = RUN_AHEAD_S
    host_link: Link | None = None

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise ValueError(f"clock={self.clock!r} is no clock; use one of {', '.join(map(repr, CLOCKS))}")
        if not (self.slowdown >= 1 and math.isfinite(self.slowdown)):
            raise ValueError(f"slowdown={self.slowdown} would speed units up; give a factor of 1 or more")
        if self.slowdown > 1 and self.clock == "wall":
            raise ValueError(
                f"slowdown={self.slowdown} acts on modelled times, and the wall clock has none; use the virtual or "
                "paced clock"
            )
        if self.tp_size is not None and self.tp_size < 1:
            raise ValueError(f"tp_size={self.tp_size} is no number of ranks; give 1 or more, or None")
        if not self.run_ahead_s >= 0:
            raise ValueError(f"run_ahead_s={self.run_ahead_s} is negative; give seconds, 0 or more")

    def link(self, ranks: Sequence[int], *, message: bool, description: str = "") -> Link:
        """The link of a collective over global ``ranks`` of the group ``description``, or of a message."""
        if self.tp_size is not None:
            one_node = len({rank // self.tp_size for rank in ranks}) == 1
            return self.tp_link if one_node else self.pp_link
        between = ("pp", "mesh_pp", "dp", "mesh_dp")
        return self.pp_link if message or description in between else self.tp_link

    def __str__(self) -> str:
        """Always names the clock; put it into every output."""
        extra = f", host {self.host_link}" if self.host_link is not None else ""
        extra += f", units x {self.slowdown:g} beside a collective" if self.slowdown > 1 else ""
        return f"emulated, {self.clock} clock, tp {self.tp_link}, pp {self.pp_link}{extra}"


def collective_seconds(link: Link, op: Op, nbytes: int, ranks: int) -> float:
    """Seconds that ``op`` over ``nbytes`` (its whole buffer, see :func:`factor`) occupies its group."""
    return 0.0 if ranks < 2 else link.alpha_s + nbytes * factor(op, ranks) / link.beta_bytes_per_s
