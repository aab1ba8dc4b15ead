"""What a unit holds, storage by storage."""

from __future__ import annotations

import torch
from torch import fx

from fxbraid.passes.storages import held

aten = torch.ops.aten


def unit(*sizes: int) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    places = []
    for k, size in enumerate(sizes):
        places.append(graph.placeholder(f"x{k}"))
        places[-1].meta["val"] = torch.empty(size, size, device="meta")
    return graph, places


def done(graph: fx.Graph, *outs: fx.Node) -> fx.GraphModule:
    graph.output(outs)
    return fx.GraphModule({}, graph)


def test_views_count_once_and_live_as_long_as_the_last_of_them() -> None:
    graph, (p, x) = unit(4, 4)
    a = graph.call_function(aten.mm.default, (x, p))
    b = graph.call_function(aten.t.default, (a,))
    c = graph.call_function(aten.relu.default, (a,))
    d = graph.call_function(aten.exp.default, (c,))
    about = held(done(graph, b, d), state=1)
    assert about.made == (64, 64)  # a, which b is a view of, and d
    assert [(out.arg, out.made, out.dense) for out in about.outs] == [(None, 0, False), (None, 1, True)]
    # x is read last by mm, when a is there; c and d then live beside a.
    assert [(m.high, m.level, m.drops) for m in about.moments] == [(64, 64, (0,)), (192, 128, ())]


def test_results_that_are_views_of_arguments_or_state() -> None:
    graph, (p, _x, y) = unit(4, 4, 4)
    about = held(
        done(
            graph,
            graph.call_function(aten.t.default, (p,)),
            graph.call_function(aten.view.default, (y, [16])),
        ),
        state=1,
    )
    assert about.made == () and [(out.arg, out.made) for out in about.outs] == [(None, None), (1, None)]
    # x is read by nobody; y lives on.
    assert [m.drops for m in about.moments if m.drops] == [(0,)]


def test_fusion_leaves_what_kernels_read() -> None:
    graph, (x,) = unit(4)
    a = graph.call_function(aten.exp.default, (x,))
    b = graph.call_function(aten.relu.default, (a,))  # a kernel of its own reads it
    c = graph.call_function(aten.mm.default, (b, b))
    d = graph.call_function(aten.neg.default, (c,))
    module = done(graph, d)
    assert max(m.high for m in held(module).moments) == 128
    fused = held(module, fused=True)
    assert fused.made == (64,) and max(m.high for m in fused.moments) == 128
    graph, (x,) = unit(4)
    e = graph.call_function(aten.exp.default, (x,))
    f = graph.call_function(aten.relu.default, (e,))
    g = graph.call_function(aten.neg.default, (f,))
    module = done(graph, g)
    assert max(m.high for m in held(module).moments) == 128
    assert max(m.high for m in held(module, fused=True).moments) == 64
