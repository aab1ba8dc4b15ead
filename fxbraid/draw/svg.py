"""A schedule as SVG: one row per rank, compute above, tensor-parallel collectives below.

A step of one action is a box. A braided block is one outline around two ribbons, its forward on top: each is
strong where it computes and pale where the other one does, which is where its collective runs, in the lane
below; red is what nothing hides. With offload a last thin lane has the copies to the host and, below them, those back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

from fxbraid.draw.layout import Block, Picture, Strand, blocks, collective_name, duration, headline, number
from fxbraid.draw.measured import Measured, caption
from fxbraid.draw.memory import Strips, legend, strip
from fxbraid.draw.palette import BACK, EXPOSED, HIDDEN, INK, OUT, PHASES, paint
from fxbraid.simulate import Box, Result

FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

COPIES = 11.0
"""Pixels of the lane of copies, where there are any."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pixels. width: of the plot; left: room for the rank's name; lane: height of compute, wire: of
    collectives, host: of copies, strip: of memory.
    """

    width: float = 1480.0
    left: float = 64.0
    right: float = 14.0
    top: float = 40.0
    lane: float = 46.0
    wire: float = 7.0
    gap: float = 14.0
    bottom: float = 62.0
    host: float = 0.0
    strip: float = 44.0

    @property
    def row(self) -> float:
        """Height of one rank's lanes."""
        return self.lane + 3 + self.wire + self.host


def to_svg(
    result: Result,
    sizes: Sizes = Sizes(),
    *,
    measured: Measured | None = None,
    memory: Strips | None = None,
) -> str:
    """The picture of ``result`` as an SVG document with a transparent background; with a ``measured`` step, which gets
    a lane below each simulated one, on the same axis; with ``memory`` (``draw.memory``), a strip below each rank."""
    if measured is not None:
        sizes = replace(sizes, left=sizes.left + 12)  # room for the second name
    if result.offload is not None:
        sizes = replace(sizes, host=COPIES)
    total = max(result.step_time, measured.step_time if measured else 0.0)
    exact = measured is not None and result.workload.time_unit == "s"
    title = headline(result) if measured is None else caption(measured.timeline, result)
    plots = [_Drawing(one, sizes, total, exact) for one in (result, measured) if one is not None]
    p = result.schedule.p
    lanes = len(plots) * sizes.row + (len(plots) - 1) * sizes.gap / 2
    pitch = lanes + sizes.gap + (sizes.strip + 4 if memory is not None else 0)
    width = sizes.left + sizes.width + sizes.right
    height = sizes.top + p * pitch + sizes.bottom + (24 if memory is not None else 0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'font-family="{FONT}"><title>{escape(title)}</title>',
        _style(),
        f'<text class="t" x="{sizes.left:g}" y="24" font-size="{17 if measured is None else 15}" '
        f'font-weight="600">{escape(title)}</text>',
    ]
    for rank in range(p):
        for k, plot in enumerate(plots):
            y = sizes.top + rank * pitch + k * (sizes.row + sizes.gap / 2)
            name = f"rank {rank}" if k == 0 else "measured"
            lines += plot.row(rank, y, name, size=14 if k == 0 else 12)
        if memory is not None:
            y = sizes.top + rank * pitch + lanes + 4
            lines += strip(memory, rank, (sizes.left, y, sizes.width, sizes.strip), total)
    if memory is not None:
        lines += legend(memory, sizes.left, sizes.top + p * pitch + 68)
    lines += plots[0].axis(sizes.top + p * pitch - sizes.gap + 5)
    lines += plots[0].legend(sizes.top + p * pitch + 44)
    return "\n".join([*lines, "</svg>", ""])


def _style() -> str:
    return (
        "<style>"
        ".t{fill:#7d8590}.g{stroke:#8b949e;stroke-opacity:.35}.r{fill:#8b949e;fill-opacity:.16}"
        ".o{fill:none;stroke:#6e7781;stroke-width:1.3}"
        f".n{{fill:{INK};text-anchor:middle;font-weight:600}}"
        "@media(prefers-color-scheme:light){.t{fill:#57606a}}"
        "@media(prefers-color-scheme:dark){.t{fill:#c9d1d9}.o{stroke:#e6edf3}}"
        "</style>"
    )


class _Drawing:
    """One step on the axis from 0 to ``total``. exact: times are seconds, and the axis says so."""

    def __init__(self, result: Picture, sizes: Sizes, total: float, exact: bool) -> None:
        self.result, self.sizes, self.total, self.exact = result, sizes, total, exact
        self.scale = sizes.width / total if total else 0.0

    def x(self, time: float) -> float:
        return self.sizes.left + time * self.scale

    def row(self, rank: int, y: float, name: str, size: int) -> Iterator[str]:
        s = self.sizes
        at = f'x="{s.left - 9:g}" y="{y + s.lane / 2 + 5:g}" font-size="{size}" text-anchor="end"'
        yield f'<text class="t" {at}>{name}</text>'
        yield _rect(s.left, y, s.width, s.lane, 'class="r" rx="3"')
        yield _rect(s.left, y + s.lane + 3, s.width, s.wire, 'class="r" rx="2"')
        for block in blocks(self.result, rank):
            yield from self.block(block, y)
        if isinstance(self.result, Result) and s.host:
            for copy in self.result.copies(rank):
                top = y + s.lane + 5 + s.wire + (0 if copy.way == "out" else s.host / 2 - 1)
                width = (copy.end - copy.start) * self.scale
                fill = f'rx="1" fill="{OUT if copy.way == "out" else BACK}"'
                yield _rect(self.x(copy.start), top, max(0.5, width - 0.5), s.host / 2 - 1.5, fill)

    def block(self, block: Block, y: float) -> Iterator[str]:
        s = self.sizes
        for strand in block.strands:
            yield from self.strand(strand, y, joined=block.braided)
        if block.braided:
            x = self.x(block.step.start)
            last = max(strand.end for strand in block.strands)
            outline = _rect(x + 0.6, y - 1.2, self.x(last) - x - 1.2, s.lane + 2.4, 'class="o" rx="4"')
            yield outline
        for box in block.collectives:
            yield from self.collective(box, y + s.lane + 3)

    def strand(self, strand: Strand, y: float, joined: bool) -> Iterator[str]:
        s = self.sizes
        inset = 1.4 if joined else 0.0
        height = (s.lane - 2 * inset) / strand.rows
        top = y + inset + strand.row * height
        place = self.result.schedule.placement
        colours = paint(strand.action.phase.value, strand.action.chunk, place)
        x, end = self.x(strand.start), self.x(strand.end)
        yield _rect(x + 0.8, top, end - x - 1.6, height, f'rx="2.5" fill="{colours.pale}"')
        for start, stop, phase in _runs(strand):
            fill = paint(phase, strand.action.chunk, place).strong
            left, right = self.x(start), self.x(stop)
            yield _rect(left + 0.8, top, max(0.6, right - left - 1.6), height, f'rx="2.5" fill="{fill}"')
        label = str(strand.action.microbatch)
        font = min(0.7 * height, (end - x - 2) / (0.58 * len(label)), 15.0)
        if font >= 3:
            middle = top + height / 2 + 0.36 * font
            halo = f' style="paint-order:stroke;stroke:{colours.pale};stroke-width:2.5"' if joined else ""
            yield (
                f'<text class="n" x="{(x + end) / 2:.1f}" y="{middle:.1f}" font-size="{font:.1f}"{halo}>'
                f"{label}</text>"
            )

    def collective(self, box: Box, y: float) -> Iterator[str]:
        x, width = self.x(box.start), (box.end - box.start) * self.scale
        bare = box.exposed * self.scale
        height = self.sizes.wire
        if width - bare > 0.05:
            yield _rect(x, y, max(0.5, width - bare - 0.5), height, f'rx="1.5" fill="{HIDDEN}"')
        if bare > 0.05:
            # What is hidden is hidden from the start: the rest of a collective is the exposed part.
            yield _rect(x + width - bare, y, max(0.5, bare - 0.5), height, f'rx="1.5" fill="{EXPOSED}"')

    def axis(self, y: float) -> Iterator[str]:
        s = self.sizes
        step = _tick(self.total)
        yield f'<path class="g" d="M{s.left:g} {y:g}H{s.left + s.width:g}"/>'
        at = 0.0
        while at <= self.total:
            x = self.x(at)
            yield f'<path class="g" d="M{x:.1f} {y:g}v5"/>'
            yield (
                f'<text class="t" x="{x:.1f}" y="{y + 18:g}" font-size="12" text-anchor="middle">'
                f"{duration(at, False) if self.exact else number(at)}</text>"
            )
            at += step

    def legend(self, y: float) -> Iterator[str]:
        place = self.result.schedule.placement
        x = self.sizes.left
        used = {box.phase for rank in range(place.p) for box in self.result.boxes(rank)}
        for phase in [name for name in PHASES if name in used]:
            for turn in range(place.v):
                yield _rect(
                    x + 17 * turn, y, 15, 13, f'rx="2.5" fill="{paint(phase, turn * place.p, place).strong}"'
                )
            x += 17 * place.v + 5
            label = PHASES[phase] + (
                f" (chunk {' / '.join(str(c + 1) for c in range(place.v))} of the rank)"
                if phase == "F" and place.v > 1
                else ""
            )
            yield f'<text class="t" x="{x:g}" y="{y + 11:g}" font-size="13">{label}</text>'
            x += 6.5 * len(label) + 22
        yield _rect(x, y - 1, 30, 15, 'class="o" rx="4"')
        yield f'<text class="t" x="{x + 37:g}" y="{y + 11:g}" font-size="13">braided block</text>'
        x += 37 + 110
        more = ((OUT, "to the host"), (BACK, "and back")) if self.sizes.host else ()
        known = (HIDDEN, f"{collective_name(self.result)}, hidden"), (EXPOSED, "exposed")
        for colour, label in (*known, *more):
            yield _rect(x, y + 3, 26, 7, f'rx="1.5" fill="{colour}"')
            yield f'<text class="t" x="{x + 33:g}" y="{y + 11:g}" font-size="13">{label}</text>'
            x += 33 + 6.5 * len(label) + 22


def _runs(strand: Strand) -> Iterator[tuple[float, float, str]]:
    """Units of one phase that follow each other at once, as one box."""
    run: tuple[float, float, str] | None = None
    for unit in strand.units:
        if run is not None and abs(unit.start - run[1]) < 1e-9 * max(1.0, run[1]) and unit.phase == run[2]:
            run = (run[0], unit.end, unit.phase)
            continue
        if run is not None:
            yield run
        run = (unit.start, unit.end, unit.phase)
    if run is not None:
        yield run


def _rect(x: float, y: float, width: float, height: float, rest: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" {rest}/>'


def _tick(total: float) -> float:
    """A round distance that gives about ten ticks."""
    if total <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(total / 12))
    return next((power * factor for factor in (1, 2, 2.5, 5) if total / (power * factor) <= 12), power * 10)


__all__ = ["Sizes", "to_svg"]
