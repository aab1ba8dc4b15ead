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


_RESULTS = re.compile(r"^(\w+) = (.+)$")
_ITEM = re.compile(r"^(\w+) = (\w+)\[(\d+)\](?:;  (?:\w+ = )+None)?$")


def unpack_tuples(body: list[str]) -> list[str]:
    """Print ``[a, b] = self.unit(x)`` for a call that is followed by one line per result.

    A transformer for ``fx.Graph.on_generate_code``: it changes how the code reads, not what it does.
    """
    text = "".join(line for line in body if not line.startswith("# COUNTER"))
    lines = [line for line in text.splitlines() if line.strip()]
    result: list[str] = []
    i = 0
    while i < len(lines):
        head = _RESULTS.match(lines[i])
        items: list[str] = []
        while head and (item := _ITEM.match(lines[i + 1 + len(items)])) and item[2] == head[1]:
            if int(item[3]) != len(items):
                break
            items.append(item[1])
            if _frees(lines[i + len(items)], head[1]):
                break
        if head and items and _frees(lines[i + len(items)], head[1]):
            result.append(f"[{', '.join(items)}] = {head[2]}\n")
            i += 1 + len(items)
        else:
            result.append(lines[i] + "\n")
            i += 1
    return result


def _frees(line: str, name: str) -> bool:
    return name in re.findall(r"(\w+) = ", line.partition(";")[2])
