"""Code of a block in which every unit gets its arguments in a list that it empties::

    [a, b] = self.mlp3_I(x, y, z);  x = z = None     =>      args = [x, y, z];  x = z = None
                                                             [a, b] = self.mlp3_I(args)

FX sets a name to None behind the last call that reads it; then the value lives until that call returns. With the list
the unit is the last to hold it, and frees it where it reads it last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

Lines = Callable[[list[str]], list[str]]

_CALL = re.compile(
    r"^(?P<result>.+?) = self\.(?P<unit>\w+)\((?P<args>[^()]*)\)(?:;  (?P<freed>(?:\w+ = )+)None)?$"
)


def box_calls(units: Collection[str]) -> Lines:
    """A transformer for ``fx.Graph.on_generate_code``: calls of the modules ``units`` pass a list."""

    def transform(body: list[str]) -> list[str]:
        return [new for line in body for new in _boxed(line.rstrip("\n"), units)]

    return transform


def _boxed(line: str, units: Collection[str]) -> list[str]:
    match = _CALL.match(line)
    if match is None or match["unit"] not in units:
        return [line + "\n"]
    args = [name for name in match["args"].split(", ") if name]
    freed = (match["freed"] or "").split(" = ")[:-1]
    before, behind = ([n for n in freed if (n in args) is taken] for taken in (True, False))
    call = f"{match['result']} = self.{match['unit']}"
    if not before:
        return [f"{call}([{', '.join(args)}]){_free(behind)}\n"]
    return [f"args = [{', '.join(args)}]{_free(before)}\n", f"{call}(args){_free(behind)}\n"]


def _free(names: list[str]) -> str:
    return f";  {' = '.join(names)} = None" if names else ""
