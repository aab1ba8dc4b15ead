"""A schedule in the terminal: two half rows per rank, the strands of a braided block above each other."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from fxbraid.draw.layout import blocks, headline, number, size
from fxbraid.draw.palette import EXPOSED, INK, paint
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


def to_terminal(result: Result, width: int = 160) -> RenderableType:
    """A rich renderable of about ``width`` columns: the picture, the legend, one line of numbers per rank.

    Units that are narrower than a column share it; numbers show where they fit. ``▒`` is time in which a rank
    waits for a collective.
    """
    columns = max(20, width - 9)
    lines: list[RenderableType] = [Text(headline(result), style="bold"), Text()]
    for rank in range(result.schedule.p):
        canvas = _rank(result, rank, columns)
        lines.append(Text(f"rank {rank:<3} ", no_wrap=True) + canvas.text(0))
        lines.append(Text(" " * 9, no_wrap=True) + canvas.text(1))
        lines.append(Text())
    return Group(*lines, _axis(result, columns), Text(), _legend(result), Text(), _numbers(result))


def _rank(result: Result, rank: int, columns: int) -> _Canvas:
    canvas = _Canvas.blank(columns)
    scale = columns / result.step_time if result.step_time else 0.0
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


def _axis(result: Result, columns: int) -> Text:
    line = [" "] * (columns + 9)
    count = max(1, columns // 16)
    for k in range(count + 1):
        label = number(result.step_time * k / count)
        at = min(9 + round(columns * k / count), columns + 9 - len(label))
        line[at : at + len(label)] = label
    return Text("".join(line), style="dim", no_wrap=True)


def _legend(result: Result) -> Text:
    place = result.schedule.placement
    line = Text(" " * 9)
    for phase, label in (("F", "forward"), ("I", "input gradient"), ("W", "weight gradient")):
        for turn in range(place.v):
            line.append("  ", Style(bgcolor=paint(phase, turn * place.p, place).strong))
        line.append(f" {label}   ")
    line.append(WAIT * 2, Style(color=EXPOSED))
    line.append(" waits for an all-reduce   above each other: braided")
    return line


def _numbers(result: Result) -> Table:
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
    return table


__all__ = ["to_terminal"]
