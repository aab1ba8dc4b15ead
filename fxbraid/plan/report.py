"""A plan as a table and as JSON."""

from __future__ import annotations

import json

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxbraid.plan.calculators import bubble_fraction, tp_bytes_per_layer
from fxbraid.plan.search import Plan
from fxbraid.plan.space import Request


def to_json(plan: Plan) -> str:
    """Everything that the table shows, and the units: seconds, bytes, shares."""
    request = plan.request
    document = {
        "model": request.model.name,
        "device": request.device.name,
        "gpus": request.gpus,
        "seq": request.seq,
        "global_batch": request.global_batch,
        "efficiency": request.efficiency,
        **({"images": request.images, "patches": patches(request)} if request.images else {}),
        "considered": plan.considered,
        "simulated": plan.simulated,
        "ranking": [found.as_dict() for found in plan.ranking],
        "why_not_next": list(plan.why),
        "with_more_memory": plan.too_big.as_dict() if plan.too_big else None,
    }
    return json.dumps(document, indent=2)


def patches(request: Request) -> int:
    """Of an image."""
    tower = request.model.tower
    return 0 if tower is None else tower.sized(request.patches, request.model.name)


def seen(request: Request) -> str:
    """The images of a sequence, said."""
    if not request.images:
        return ""
    return f" with {request.images} image{'s' * (request.images > 1)} of {patches(request)} patches"


def to_table(plan: Plan) -> RenderableType:
    """The ranking for the terminal."""
    r = plan.request
    head = Text(
        f"{r.model.name}, {r.model.parameters / 1e9:.2f}B parameters, on {r.gpus} {r.device.name}\n"
        f"seq {r.seq}{seen(r)}, global batch {r.global_batch}, "
        f"{r.limit / 1e9:.1f} GB a device usable",
        style="bold",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("", "tp", "pp", "dp", "v", "m", "b"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("schedule", "recompute"):
        table.add_column(name, no_wrap=True)
    for name in ("step s", "samples/s", "MFU %", "bubble", "TP %", "P2P %", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for at, found in enumerate(plan.ranking):
        c = found.candidate
        shares = (found.mfu, found.bubble_share, found.exposed_tp_share, found.exposed_p2p_share)
        table.add_row(
            str(at + 1),
            *(str(n) for n in (c.tp, c.pp, c.dp, c.v, c.m, c.micro_batch)),
            c.schedule + ", offload" * c.offload,
            c.checkpoint + {"whole": "", "kept": ", sp", "gathered": ", sp again"}[c.sequence],
            f"{found.step_time:.3f}",
            f"{r.global_batch / found.step_time:.2f}",
            *(f"{100 * share:.1f}" for share in shares),
            f"{found.peak / 1e9:.1f}",
        )
    why = [Text(f"{at + 2} behind {at + 1}  {text}") for at, text in enumerate(plan.why)]
    return Group(head, Text(), table, Text(), *why, Text(), *_notes(plan))


def _notes(plan: Plan) -> list[Text]:
    r, c = plan.request, plan.ranking[0].candidate
    traffic = tp_bytes_per_layer(c.micro_batch, r.seq, r.model.hidden, c.tp)
    notes = [
        "TP traffic: 4 all-reduces x 2(t-1)/t of b x s x h = "
        f"{traffic / 1e6:.0f} MB per layer, micro-batch and device "
        "(sequence parallelism moves the same)",
        f"bubble by formula, (p-1)/(v m + p - 1) = {100 * bubble_fraction(c.pp, c.m, c.v):.1f} %",
        f"{plan.considered} configurations, {plan.simulated} simulated; shares are of the whole step",
    ]
    if plan.too_big:
        big = plan.too_big
        notes.append(
            f"with more memory: {big.candidate} would take {big.step_time:.3f} s and {big.peak / 1e9:.1f} GB"
        )
    return [Text(note, style="dim") for note in notes]
