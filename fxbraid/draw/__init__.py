"""Pictures of a simulated schedule. Imports no torch.

``to_terminal`` gives a rich renderable; ``to_svg``, ``to_html`` and ``to_trace`` give the text of a file.
"""

from __future__ import annotations

from fxbraid.draw.html import to_html
from fxbraid.draw.svg import to_svg
from fxbraid.draw.terminal import to_terminal
from fxbraid.draw.tracefile import to_trace

__all__ = ["to_html", "to_svg", "to_terminal", "to_trace"]
