"""A schedule as one HTML file: zoom, drag, and hover for every unit, collective and the memory. It loads
nothing.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from fxbraid.draw.layout import Block, Picture, blocks, collective_name, headline
from fxbraid.draw.measured import Measured, caption
from fxbraid.draw.palette import EXPOSED, HIDDEN, INK, PHASES, paint
from fxbraid.schedule import Action
from fxbraid.simulate import Box, Result


def to_html(result: Result, *, measured: Measured | None = None) -> str:
    """The page as text; open it in any browser. Its data is part of it. A ``measured`` step gets a row below each
    simulated rank, on the same axis."""
    title = headline(result) if measured is None else caption(measured.timeline, result)
    page = (files("fxbraid.draw") / "page.html").read_text("utf-8")
    # "</" would end the script in the middle of its data.
    data = json.dumps(_data(result, measured), separators=(",", ":"), ensure_ascii=False).replace(
        "</", "<\\/"
    )
    return page.replace("/*TITLE*/", escape(title)).replace("/*DATA*/", data)


def _data(result: Result, measured: Measured | None) -> dict[str, Any]:
    place = result.schedule.placement
    actions: dict[Action, int] = {}
    ranks: list[dict[str, Any]] = []
    for rank in range(place.p):
        more = {"memory": result.memory(rank), "peak": result.peak[rank]}
        ranks.append(_rank(result, rank, actions) | more)
        if measured is not None:
            ranks.append(_rank(measured, rank, actions) | {"name": "measured", "memory": [], "peak": 0})
    legend = [
        [[paint(phase, turn * place.p, place).strong for turn in range(place.v)], name]
        for phase, name in PHASES.items()
        if phase != "R" or any(unit.again for chunk in result.workload.chunks for unit in chunk.i)
    ]
    legend += [[[HIDDEN], f"{collective_name(result)}, hidden"], [[EXPOSED], "exposed"]]
    return {
        "total": max(result.step_time, measured.step_time if measured else 0.0),
        "constants": result.workload.time_unit != "s",
        "unit": result.workload.memory_unit,
        "peak": max(result.peak),
        "ink": INK,
        "hidden": HIDDEN,
        "exposed": EXPOSED,
        "legend": legend,
        "actions": [{"chunk": a.chunk, "phase": a.phase.value, "microbatch": a.microbatch} for a in actions],
        "colours": {
            f"{phase}{chunk}": paint(phase, chunk, place).strong
            for phase in PHASES
            for chunk in range(place.n_chunks)
        },
        "ranks": ranks,
    }


def _plain(step: str) -> str:
    """``(0F4;1B3)OVERLAP_F_B`` -> ``0F4 & 1B3``."""
    return step.partition(")")[0].lstrip("(").replace(";", " & ")


def _rank(result: Picture, rank: int, actions: dict[Action, int]) -> dict[str, Any]:
    boxes: list[list[Any]] = []
    ribbons: list[list[Any]] = []
    braids: list[list[float]] = []
    base = 0
    grouped: dict[int, list[Box]] = {}
    for box in result.boxes(rank):
        grouped.setdefault(box.step, []).append(box)
    for block in blocks(result, rank):
        ribbons += _ribbons(result, block)
        if block.braided:
            braids.append([block.step.start, max(strand.end for strand in block.strands)])
        rows = {strand.action: (strand.row, strand.rows) for strand in block.strands}
        members = grouped.get(block.step.step, [])
        for box in members:
            boxes.append(_box(box, actions, rows[box.action], base))
        base += len(members)
    return {
        "boxes": boxes,
        "ribbons": ribbons,
        "braids": braids,
        "name": f"rank {rank}",
        "rank": rank,
        "steps": [_plain(str(step)) for step in result.schedule.actions[rank]],
    }


def _box(box: Box, actions: dict[Action, int], row: tuple[int, int], base: int) -> list[Any]:
    """In the order of the constants in the page's script."""
    return [
        int(box.lane == "collective"),
        box.step,
        actions.setdefault(box.action, len(actions)),
        box.phase,
        box.unit,
        box.start,
        box.end,
        *row,
        box.exposed,
        [base + other for other in box.others],
    ]


def _ribbons(result: Picture, block: Block) -> list[list[Any]]:
    place = result.schedule.placement
    return [
        [
            strand.start,
            strand.end,
            strand.row,
            strand.rows,
            paint(strand.action.phase.value, strand.action.chunk, place).pale,
            str(strand.action.microbatch),
        ]
        for strand in block.strands
    ]
