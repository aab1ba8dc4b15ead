"""Colours: the hue says the phase, the lightness the chunk. All are opaque and light enough for dark text, so
a picture reads the same on a light and on a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxbraid.schedule import Placement

INK = "#10243e"
"""Text on a box."""

HIDDEN = "#98a2b3"
"""A collective that compute hides."""

EXPOSED = "#e5484d"
"""The part of a collective in which its rank computes nothing."""

OUT, BACK = "#7c6fd1", "#2fa89a"
"""Copies to the host, and from it."""

_STRONG = {
    "F": ("#4d9bf7", "#a5d4fb"),
    "R": ("#b48be4", "#dac8f3"),
    "I": ("#f58f2f", "#fbc779"),
    "W": ("#72c267", "#b9e2a3"),
}

PHASES = {"F": "forward", "R": "computed again", "I": "input gradient", "W": "weight gradient"}
"""What a unit does, in the order of legends; "computed again" is named only where there is such a unit."""

_PALE = 0.6


@dataclass(frozen=True, slots=True)
class Paint:
    """strong: where the action computes. pale: the ribbon that joins its units inside a braided block."""

    strong: str
    pale: str


def paint(phase: str, chunk: int, placement: Placement) -> Paint:
    """The colours of an action of ``chunk``: dark for a rank's first chunk, light for its last. B counts as
    I.
    """
    dark, light = _STRONG["I" if phase == "B" else phase]
    share = (chunk // placement.p) / max(1, placement.v - 1)
    strong = mix(dark, light, share)
    return Paint(strong, mix(strong, "#ffffff", _PALE))


def mix(one: str, two: str, share: float) -> str:
    """From ``one`` (share 0) to ``two`` (share 1)."""
    pairs = [(int(one[k : k + 2], 16), int(two[k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def rgb(colour: str) -> tuple[int, int, int]:
    """The three parts of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
