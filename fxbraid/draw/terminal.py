"""A schedule in the terminal: two half rows per rank, the strands of a braided block above each other."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fxbraid.draw.layout import Picture, blocks, duration, headline, number, size
from fxbraid.draw.measured import Measured, caption
from fxbraid.draw.palette import EXPOSED, INK, PHASES, paint
from fxbraid.simulate import Result

IDLE = " "
WAIT = "▒"


@dataclass(slots=True)
class _Canvas:
    """Two rows of characters with a colour behind each."""

    width: int
    letters: list[list[str]]
    colours: list[list[str | None]]

    @classmethod
    def blank(cls, width: int) -> _Canvas:
        return cls(width, [[IDLE] * width, [IDLE] * width], [[None] * width, [None] * width])

    def fill(self, row: int, start: int, end: int, colour: str) -> None:
        for at in range(max(0, start), min(end, self.width)):
            self.colours[row][at], self.letters[row][at] = colour, IDLE

    def write(self, row: int, start: int, end: int, label: str) -> None:
        """In the middle, if there is room for it."""
        room = end - start
        if len(label) > room:
            return
        at = start + (room - len(label)) // 2
        for k, letter in enumerate(label):
            if at + k < self.width:
                self.letters[row][at + k] = letter

    def text(self, row: int) -> Text:
        line = Text(no_wrap=True, overflow="crop")
        for letter, colour in zip(self.letters[row], self.colours[row], strict=True):
            line.append(letter, Style(color=EXPOSED if letter == WAIT else INK, bgcolor=colour))
        return line


def to_terminal(result: Result, width: int = 160, *, measured: Measured | None = None) -> RenderableType:
    """A rich renderable of about ``width`` columns: the picture, the legend, one line of numbers per rank.

    Units that are narrower than a column share it; numbers show where they fit. ``▒`` is time in which a rank
    waits for a collective. A ``measured`` step gets two half rows below each simulated rank, on the same axis.
    """
    columns = max(20, width - 9)
    total = max(result.step_time, measured.step_time if measured else 0.0)
    title = headline(result) if measured is None else caption(measured.timeline, result)
    lines: list[RenderableType] = [Text(title, style="bold"), Text()]
    for rank in range(result.schedule.p):
        for name, one in ((f"rank {rank}", result), ("measured", measured)):
            if one is not None:
                canvas = _rank(one, rank, columns, total)
                lines.append(Text(f"{name:<8} ", no_wrap=True) + canvas.text(0))
                lines.append(Text(" " * 9, no_wrap=True) + canvas.text(1))
        lines.append(Text())
    exact = measured is not None and result.workload.time_unit == "s"
    foot = (_axis(total, columns, exact), Text(), _legend(result), Text(), _numbers(result, measured))
    return Group(*lines, *foot)


def _rank(result: Picture, rank: int, columns: int, total: float) -> _Canvas:
    canvas = _Canvas.blank(columns)
    scale = columns / total if total else 0.0
    place = result.schedule.placement
    for block in blocks(result, rank):
        for strand in block.strands:
            rows = (0, 1) if strand.rows == 1 else (strand.row,)
            start, end = round(strand.start * scale), round(strand.end * scale)
            pale = paint(strand.action.phase.value, strand.action.chunk, place).pale
            for row in rows:
                canvas.fill(row, start, end, pale)
                for unit in strand.units:
                    fill = paint(unit.phase, strand.action.chunk, place).strong
                    canvas.fill(row, round(unit.start * scale), round(unit.end * scale), fill)
            canvas.write(rows[0], start, end, str(strand.action.microbatch))
        for box in block.collectives:
            if box.exposed > 0:
                first, last = round((box.end - box.exposed) * scale), round(box.end * scale)
                for at in range(first, min(last, columns)):
                    if canvas.letters[0][at] == IDLE:
                        canvas.letters[0][at] = WAIT
                    canvas.letters[1][at] = WAIT
    return canvas


def _axis(total: float, columns: int, exact: bool) -> Text:
    line = [" "] * (columns + 9)
    count = max(1, columns // 16)
    for k in range(count + 1):
        at_time = total * k / count
        label = duration(at_time, False) if exact else number(at_time)
        at = min(9 + round(columns * k / count), columns + 9 - len(label))
        line[at : at + len(label)] = label
    return Text("".join(line), style="dim", no_wrap=True)


def _legend(result: Result) -> Text:
    place = result.schedule.placement
    line = Text(" " * 9)
    again = any(unit.again for chunk in result.workload.chunks for unit in chunk.i)
    for phase, label in PHASES.items():
        if phase == "R" and not again:
            continue
        for turn in range(place.v):
            line.append("  ", Style(bgcolor=paint(phase, turn * place.p, place).strong))
        line.append(f" {label}   ")
    line.append(WAIT * 2, Style(color=EXPOSED))
    line.append(" waits for an all-reduce   above each other: braided")
    return line


def _numbers(result: Result, measured: Measured | None) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("rank", "compute", "exposed TP", "exposed P2P", "bubble", "peak memory"):
        table.add_column(name, justify="right")
    total = result.step_time or 1.0
    for rank, times in enumerate(result.ranks):
        shares = (times.compute, times.exposed_tp, times.exposed_p2p, times.bubble)
        table.add_row(
            str(rank),
            *(f"{100 * x / total:.1f} %" for x in shares),
            size(times.peak, result.workload.memory_unit),
        )
    if measured is not None:
        total = measured.step_time or 1.0
        for own in (one for one in measured.timeline.ranks if one.tp == measured.tp):
            parts = (own.compute, own.exposed_tp, own.exposed_p2p, own.bubble)
            said = ("?" if x is None else f"{100 * x / total:.1f} %" for x in parts)
            table.add_row(f"{own.pp} measured", *said, "")
    return table


__all__ = ["to_terminal"]
