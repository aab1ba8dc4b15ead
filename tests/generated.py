"""Reads what Inductor generates: which matmuls, kernels, launches and waits its code calls, in which order."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fxbraid import compat
from fxbraid.passes.compile import compile_graph
from fxbraid.passes.compile_block import Piece
from fxbraid.passes.launches import ALL_REDUCE, WAIT
from fxbraid.passes.marks import is_matmul

aten = torch.ops.aten
_LAUNCH = re.compile(r"_c10d_functional\.all_reduce_?\.default\((\w+)")
_WAIT = re.compile(r"_c10d_functional\.wait_tensor\.default\((\w+)")
_MATMUL = re.compile(r"(?:extern_kernels\.|torch\.ops\.aten\.)(?:mm|addmm|bmm|baddbmm)\b")
_KERNEL = re.compile(r"^\s*(?:cpp_fused\w+\(|triton_\w+\.run\(|(?:\w+ = )?torch\.ops\.)")


@dataclass(frozen=True)
class Window:
    """What stands between one launch and its wait; ``kernels`` does not count matmuls."""

    matmuls: int
    kernels: int


@dataclass(frozen=True)
class Order:
    """``text``: "m" matmul, "L3" launch, "w3" its wait (launches numbered in order; one that came from an earlier
    piece is named by the input), without kernels. ``windows``: by launch, for those that end in this code."""

    text: str
    windows: tuple[Window, ...]


def of_code(code: str) -> Order:
    """The order in generated code."""
    body = code[re.search(r"^ *def call\(", code, re.MULTILINE).start() :]  # type: ignore[union-attr]
    events: list[tuple[str, str]] = []
    for line in body.splitlines():
        if line.lstrip().startswith("#"):
            continue
        if match := _LAUNCH.search(line):
            events.append(("L", match[1]))
        elif match := _WAIT.search(line):
            events.append(("w", match[1]))
        elif _MATMUL.search(line):
            events.append(("m", ""))
        elif _KERNEL.search(line):
            events.append(("k", ""))
        elif line.strip().startswith("return ("):
            break
    return _order(events)


def of_plan(graph: fx.Graph) -> Order:
    """The order that a piece's graph asks for; pointwise operations count as one kernel each."""
    events: list[tuple[str, str]] = []
    for node in graph.nodes:
        if node.target is ALL_REDUCE:
            events.append(("L", node.name))
        elif node.target is WAIT:
            events.append(("w", node.args[0].name))
        elif is_matmul(node):
            events.append(("m", ""))
        elif node.op == "call_function":
            events.append(("k", ""))
    return _order(events)


def _order(events: list[tuple[str, str]]) -> Order:
    number: dict[str, int] = {}
    text: list[str] = []
    open_: dict[int, list[int]] = {}
    closed: dict[int, Window] = {}
    early = 0
    for kind, name in events:
        if kind in "mk":
            for counts in open_.values():
                counts[kind == "k"] += 1
            text += ["m"] if kind == "m" else []
        elif kind == "L":
            number[name] = len(number)
            open_[number[name]] = [0, 0]
            text.append(f"L{number[name]}")
        elif name in number:
            if number[name] in open_:  # without pins Inductor may wait for one twice
                closed[number[name]] = Window(*open_.pop(number[name]))
            text.append(f"w{number[name]}")
        else:
            text.append(f"v{early}")  # launched by an earlier piece
            early += 1
    return Order(" ".join(text), tuple(closed[k] for k in sorted(closed)))


@contextlib.contextmanager
def tp_group() -> Iterator[str]:
    """A process group of one rank, under the name that compiled code gives to a TP group."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield compat.alias_group(dist.group.WORLD)  # type: ignore[arg-type]
        finally:
            dist.destroy_process_group()


def generate(module: fx.GraphModule, options: dict[str, Any]) -> str:
    """Inductor's code for ``module``. No kernel is built, which is most of the time, and nothing is cached or run."""
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.utils import get_code

    with (
        config.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
        torch.no_grad(),
    ):
        code, *_ = get_code(lambda: compile_graph(module, "test", name="test", options=options))
    return code


def plan_of(piece: Piece) -> Order:
    return of_plan(piece.graph_module.graph)


def two_strands(group: str, filler: str) -> fx.GraphModule:
    """A launch and its wait, with ``filler`` of another strand between them; what it makes is read behind the wait::

    a = x @ u;  launch a;  <filler: f(y, table)>;  wait a;  (a * table) @ v + filler
    """
    graph = fx.Graph()
    shape = (16, 16)
    names = ("x", "y", "u", "v", "table")
    x, y, u, v, table = (graph.placeholder(name) for name in names)

    def call(op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    launch = call(ALL_REDUCE, call(aten.mm.default, x, u), "sum", group)
    other = call(aten.mul.Tensor, y, table)
    other = call(aten.mm.default, other, v) if filler == "matmul" else call(aten.sin.default, other)
    wait = call(WAIT, launch)
    behind = call(aten.mm.default, call(aten.mul.Tensor, wait, table), v)
    graph.output((call(aten.add.Tensor, behind, other),))
    with compat.FakeTensorMode() as mode:
        for node in graph.nodes:
            if node.op != "output":
                node.meta["val"] = mode.from_tensor(torch.empty(shape))
    return fx.GraphModule({}, graph)
