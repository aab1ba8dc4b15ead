"""Schedules as CSV: one row per rank, one cell per step, as torch's ``_load_csv`` has it.

Both of torch's formats are read. In a file with communication, ``2SEND_F5`` stands on the sender of chunk 2's
output for micro-batch 5 and ``3RECV_F5`` on its receiver (``SEND_B``/``RECV_B`` for gradients). These are
checked against the compute actions and against each other, then dropped: fxbraid derives its own.
``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD`` (FSDP's) and empty cells are dropped unread.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fxbraid.schedule.action import Composite, Phase, Step, parse_step, parts
from fxbraid.schedule.errors import ScheduleError
from fxbraid.schedule.placement import Placement

Rows = tuple[tuple[Step, ...], ...]


class _Comm(NamedTuple):
    """A send or receive; ``kind`` is F or B, ``chunk`` the chunk on whose rank it stands."""

    direction: str
    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.direction}_{self.kind}{self.microbatch}"


_COMM = re.compile(r"(\d+)(SEND|RECV)_(F|B)(\d+)")
_IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def write(actions: Iterable[Iterable[Step]], *, for_torch: bool = False) -> str:
    """The CSV text of per-rank lists; no cell ever needs quotes. ``for_torch``: every composite with the suffix that
    torch's parser knows."""

    def cell(step: Step) -> str:
        return step.for_torch() if for_torch and isinstance(step, Composite) else str(step)

    return "".join(",".join(map(cell, row)) + "\n" for row in actions)


def read(source: str | os.PathLike[str], placement: Placement | None = None) -> tuple[Placement, int, Rows]:
    """Placement, micro-batch count and lists of a CSV.

    ``source`` is a path, or the text itself if it is a str that holds a comma or a line break. Without a
    ``placement`` it is found from the rows: the loop or V on which every action stands on its chunk's rank.
    """
    if isinstance(source, str) and ("," in source or "\n" in source):
        lines: list[str] = source.splitlines()
    else:
        lines = Path(source).read_text().splitlines()
    cells = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(lines)]
    mixed = [[_entry(cell, rank) for cell in row] for rank, row in enumerate(cells)]
    rows: Rows = tuple(
        tuple(entry for entry in row if entry is not None and not isinstance(entry, _Comm)) for row in mixed
    )
    found = [action for row in rows for step in row for action in parts(step)]
    if not found:
        raise ScheduleError(
            "the CSV holds no compute action; write one row of actions per rank, such as 0F0,0B0"
        )
    placement = placement or _placement(rows, max(action.chunk for action in found) + 1)
    if any(isinstance(entry, _Comm) for row in mixed for entry in row):
        _check_comms(mixed, placement)
    return placement, max(action.microbatch for action in found) + 1, rows


def _entry(cell: str, rank: int) -> Step | _Comm | None:
    match = _COMM.fullmatch(cell)
    if match is not None:
        return _Comm(match[2], match[3], int(match[1]), int(match[4]))
    if _IGNORED.fullmatch(cell):
        return None
    try:
        return parse_step(cell)
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}: {error}") from None


def _placement(rows: Rows, n_chunks: int) -> Placement:
    p = len(rows)
    if n_chunks % p:
        raise ScheduleError(f"{p} rows but {n_chunks} chunks: give the placement if a row is empty")
    held = [{action.chunk for step in row for action in parts(step)} for row in rows]
    for kind in ("loop", "v"):
        placement = Placement(kind, p, n_chunks // p)
        if all(chunks <= set(placement.chunks_of(rank)) for rank, chunks in enumerate(held)):
            return placement
    shown = "; ".join(f"rank {rank}: {sorted(chunks)}" for rank, chunks in enumerate(held))
    raise ScheduleError(f"the chunks per rank are neither a loop nor a V: {shown}")


def _check_comms(mixed: Sequence[Sequence[Step | _Comm | None]], placement: Placement) -> None:
    """Each value that crosses ranks is sent once after its producer and received once before its consumer,
    and the receives of each channel (sender, receiver) stand in the order of the sends.
    """
    sends: dict[tuple[int, int], list[_Comm]] = {}
    receives: dict[tuple[int, int], list[_Comm]] = {}
    needed: set[_Comm] = set()
    for rank, row in enumerate(mixed):
        done: set[tuple[str, int, int]] = set()
        seen: set[_Comm] = set()
        for entry in row:
            if isinstance(entry, _Comm):
                if entry in seen:
                    raise ScheduleError(f"rank {rank} has {entry} twice; drop one")
                seen.add(entry)
                far = _peer(entry, rank, placement)
                if entry.direction == "RECV":
                    receives.setdefault((far, rank), []).append(entry)
                    continue
                if (entry.kind, entry.chunk, entry.microbatch) not in done:
                    raise ScheduleError(f"rank {rank} has {entry} before the action that makes what it sends")
                sends.setdefault((rank, far), []).append(
                    _Comm("RECV", entry.kind, _far_chunk(entry), entry.microbatch)
                )
            elif entry is not None:
                for action in parts(entry):
                    if action.phase is Phase.W:
                        continue
                    kind = "F" if action.phase is Phase.F else "B"
                    source = _Comm("RECV", kind, action.chunk, action.microbatch)
                    done.add((kind, action.chunk, action.microbatch))
                    if _crosses(source, placement):
                        needed.add(source)
                        if source not in seen:
                            raise ScheduleError(f"rank {rank} runs {action} without {source} before it")
    for channel in sends.keys() | receives.keys():
        sent, received = sends.get(channel, []), receives.get(channel, [])
        if sent != received:
            at = next(
                (i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b),
                min(len(sent), len(received)),
            )
            a = f"sends for {sent[at]}" if at < len(sent) else "sends nothing"
            b = f"has {received[at]}" if at < len(received) else "receives nothing"
            raise ScheduleError(
                f"message {at} from rank {channel[0]} to rank {channel[1]}: the sender {a}, "
                f"the receiver {b}; both ends must have the same order"
            )
        unused = [comm for comm in received if comm not in needed]
        if unused:
            raise ScheduleError(f"rank {channel[1]} has {unused[0]} but no action that uses it")


def _far_chunk(comm: _Comm) -> int:
    forward = (comm.kind == "F") == (comm.direction == "SEND")
    return comm.chunk + 1 if forward else comm.chunk - 1


def _crosses(comm: _Comm, placement: Placement) -> bool:
    far = _far_chunk(comm)
    return 0 <= far < placement.n_chunks and placement.rank_of(far) != placement.rank_of(comm.chunk)


def _peer(comm: _Comm, rank: int, placement: Placement) -> int:
    if placement.rank_of(comm.chunk) != rank:
        raise ScheduleError(
            f"rank {rank} has {comm}, but chunk {comm.chunk} is on rank {placement.rank_of(comm.chunk)}"
        )
    if not _crosses(comm, placement):
        raise ScheduleError(f"rank {rank} has {comm}, but that value never leaves the rank; drop it")
    return placement.rank_of(_far_chunk(comm))
