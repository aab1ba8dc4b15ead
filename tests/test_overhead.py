"""What keeps the host's share small and changes no result: boxed calls, bound code, products added in place."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxbraid
from fxbraid import compat
from fxbraid.bench.overhead import EmptyArtefacts, Overhead, empty_model, fake_ranks, measure, table
from fxbraid.passes.boxes import box_calls
from fxbraid.passes.compile import Artefacts, compile_graph
from fxbraid.passes.joint import Phase
from fxbraid.passes.pipeline import Lowered
from fxbraid.passes.products import SumArtefact, products
from fxbraid.passes.units import Unit
from fxbraid.runtime.bind import bind
from fxbraid.runtime.boxed import boxed
from fxbraid.runtime.costs import _random
from fxbraid.runtime.unit import BoundUnit, GradSlot

from .tiny import batch, lower, qwen2

aten = torch.ops.aten


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    return lower(qwen2(num_hidden_layers=2), n_chunks=1, tp_size=1)


def weight_units(lowered: Lowered) -> list[Unit]:
    return [unit for chunk in lowered.chunks.values() for unit in chunk.units[Phase.W]]


def values_of(unit: Unit) -> list[Tensor]:
    return [_random(n.meta["val"]) for n in unit.graph_module.graph.find_nodes(op="placeholder")]


# -- boxed calls


def test_a_call_of_a_unit_hands_its_last_references_over() -> None:
    lines = [
        "[a, b] = self.mlp3_I(x, y, z);  x = z = None\n",
        "mlp3_W = self.mlp3_W(a);  a = mlp3_W = None\n",
        "[c] = self.pre_F()\n",
        "[d] = self.tail_F(b)\n",
        "wait = self.wait(launch);  launch = None\n",
    ]
    assert box_calls({"mlp3_I", "mlp3_W", "pre_F", "tail_F"})(lines) == [
        "args = [x, y, z];  x = z = None\n",
        "[a, b] = self.mlp3_I(args)\n",
        "args = [a];  a = None\n",
        "mlp3_W = self.mlp3_W(args);  mlp3_W = None\n",
        "[c] = self.pre_F([])\n",
        "[d] = self.tail_F([b])\n",
        "wait = self.wait(launch);  launch = None\n",
    ]


def graph_of(body: Any, count: int) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(body(graph, *(graph.placeholder(f"x{k}") for k in range(count))))
    return fx.GraphModule({}, graph)


def test_an_input_dies_inside_the_unit_behind_its_last_reader() -> None:
    alive: list[bool] = []
    held: list[Any] = []

    def look(value: Tensor) -> Tensor:
        alive.append(held[0]() is not None)
        return value

    def body(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        first = graph.call_function(look, (graph.call_function(torch.neg, (x,)),))
        return (graph.call_function(look, (graph.call_function(torch.add, (first, y)),)),)

    call = boxed(graph_of(body, 2).forward)
    inputs = [torch.ones(3), torch.ones(3)]
    held.append(weakref.ref(inputs[0]))
    (out,) = call(inputs)
    assert inputs == [] and alive == [False, False]
    assert torch.equal(out, torch.zeros(3))
    kept = torch.ones(3)
    held[:] = [weakref.ref(kept)]
    call([kept, torch.ones(3)])
    assert alive[2:] == [True, True]  # the caller still has it


@pytest.mark.parametrize("fresh", [True, False])
def test_a_compiled_unit_without_its_wrappers_returns_the_same(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled now, and taken from the cache; also where an output is an input, or a view of it or another output."""

    def body(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        total = graph.call_function(aten.add.Tensor, (x, y))
        turned = graph.call_function(aten.t.default, (x,))
        return (
            total,
            x,
            turned,
            graph.call_function(aten.t.default, (total,)),
            graph.call_function(aten.clone.default, (y,)),
        )

    module = graph_of(body, 2)
    if fresh:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        torch.compiler.reset()
    with torch._subclasses.FakeTensorMode():
        for node, shape in zip(module.graph.find_nodes(op="placeholder"), ((3, 4), (3, 4)), strict=True):
            node.meta["val"] = torch.empty(shape)
    artefact = compile_graph(module, "test_boxed", name="a test")
    assert compat.inductor_code(artefact) is not None
    call = boxed(artefact)
    with torch.no_grad():
        for _ in range(3):  # the first call is another one than the rest
            x, y = torch.randn(3, 4), torch.randn(3, 4)
            wanted = artefact(x, y)
            inputs = [x, y]
            got = call(inputs)
            assert inputs == []
            for a, b in zip(got, wanted, strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
            assert got[2].data_ptr() == x.data_ptr() and got[4].data_ptr() != y.data_ptr()


# -- bound code


def test_bound_code_is_the_modules_own_without_its_calls() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    def outer(graph: fx.Graph, x: fx.Node) -> Any:
        return graph.call_module(
            "inner",
            (graph.call_module("twice", (graph.call_function(torch.add, (x, graph.get_attr("c"))),)),),
        )

    inner = fx.symbolic_trace(nn.Sequential(nn.Tanh()))
    root = nn.Module()
    root.inner, root.twice, root.c = inner, Twice(), torch.ones(2)
    graph = fx.Graph()
    graph.output(outer(graph, graph.placeholder("x")))
    module = fx.GraphModule(root, graph)
    run = bind(module)
    assert run.__func__ is type(module).forward  # type: ignore[attr-defined]
    calls: Counter[str] = Counter()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda m, _: calls.update([type(m).__name__])
    )
    try:
        assert torch.equal(run(torch.zeros(2)), torch.tanh(torch.full((2,), 2.0)))
        assert calls == {"Tanh": 1} or not calls  # a leaf of a traced module may be a module; ours never are
        calls.clear()
        module(torch.zeros(2))
        assert calls["Twice"] == 1
    finally:
        hook.remove()


def test_a_step_calls_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is what runs, and nn.Module.__call__ is nowhere between two units."""
    model = fxbraid.braid(qwen2(num_hidden_layers=2), batch(4), n_microbatches=2, compile=False)
    model.train()
    engine = model._last
    inputs = model._prepare(batch(4), training=True)[1]
    seen: list[str] = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda m, _: seen.append(type(m).__name__)
    )
    try:
        engine.run(inputs)
    finally:
        hook.remove()
    assert seen == []
    assert engine._run.__func__ is type(model.program).forward  # type: ignore[attr-defined]


# -- weight gradients


def test_products_leave_the_graph_and_come_out_the_same(lowered: Lowered) -> None:
    fused = 0
    for unit in weight_units(lowered):
        plan = products(unit)
        inputs = values_of(unit)
        wanted = unit.graph_module(*inputs)
        artefact = Artefacts(False).get(unit)
        assert isinstance(artefact, SumArtefact) == bool(plan.products)
        for got, right in zip(artefact(*inputs), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-5)
        left = [] if plan.rest is None else [n.target for n in plan.rest.graph.nodes]
        assert left.count(aten.mm.default) == unit.matmuls - len(plan.products) == 0
        fused += len(plan.products)
    assert fused == 2 * 7 + 1  # every linear of two layers, and the head


FORMS: dict[str, Any] = {
    "mm": lambda g, a, b: g.call_function(aten.mm.default, (a, b)),
    "transposed": lambda g, a, b: g.call_function(aten.t.default, (FORMS["mm"](g, a, b),)),
    "transpose.int": lambda g, a, b: g.call_function(aten.transpose.int, (FORMS["mm"](g, a, b), -1, 0)),
    "permuted twice": lambda g, a, b: g.call_function(
        aten.permute.default, (g.call_function(aten.permute.default, (FORMS["mm"](g, a, b), [1, 0])), [1, 0])
    ),
    "of a transpose": lambda g, a, b: FORMS["mm"](g, g.call_function(aten.t.default, (a,)), b),
    "of a sum": lambda g, a, b: FORMS["mm"](g, g.call_function(aten.add.Tensor, (a, a)), b),
    "sum of two": lambda g, a, b: g.call_function(
        aten.add.Tensor, (FORMS["mm"](g, a, b), FORMS["mm"](g, b, a))
    ),
    "not a product": lambda g, a, b: g.call_function(aten.mul.Tensor, (a, b)),
}


def unit_of(form: str, *, used_twice: bool = False) -> Unit:
    """A W unit on two 4 x 4 inputs whose gradient has this form, with a value beside it."""

    def body(graph: fx.Graph, a: fx.Node, b: fx.Node) -> Any:
        grad = FORMS[form](graph, a, b)
        other = graph.call_function(aten.neg.default, (grad if used_twice else b,))
        return (other, grad)

    module = graph_of(body, 2)
    for node in module.graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(4, 4)
    outs = tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]
    return Unit(
        "u",
        Phase.W,
        0,
        0,
        module,
        form,
        (),
        tuple(module.graph.find_nodes(op="placeholder")),
        outs,
        (None, "w"),
        1,
        0,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("used_twice", [False, True])
def test_a_bound_unit_adds_what_its_graph_says(form: str, used_twice: bool) -> None:
    unit = unit_of(form, used_twice=used_twice)
    is_product = form not in ("sum of two", "not a product") and not used_twice
    assert bool(products(unit).products) == is_product
    parameter = nn.Parameter(torch.zeros(4, 4))
    made = BoundUnit(unit, Artefacts(False).get(unit), {}, {"w": GradSlot(parameter, shared=False)})
    total = torch.zeros(4, 4)
    with torch.no_grad():
        for step in range(3):
            inputs = [torch.randn(4, 4), torch.randn(4, 4)]
            other, grad = unit.graph_module(*inputs)
            total += grad
            place = parameter.grad.data_ptr() if parameter.grad is not None else 0
            (value,) = made(*inputs) if step == 1 else made(inputs)  # both ways of calling
            assert torch.equal(value, other)
            torch.testing.assert_close(parameter.grad, total, rtol=1e-6, atol=1e-5)
            assert step == 0 or parameter.grad.data_ptr() == place  # type: ignore[union-attr]


def test_where_a_product_goes() -> None:
    left, right = torch.randn(4, 3), torch.randn(3, 4)
    parameter = nn.Parameter(torch.zeros(4, 4))
    slot = GradSlot(parameter, shared=True)
    slot.add_product(left, right)
    assert parameter.grad is None and slot.total is not None
    slot.add_product(left, right)
    torch.testing.assert_close(slot.total, 2 * left @ right)
    slot = GradSlot(parameter, shared=False)
    slot.add_product(left, right)
    assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
    low = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    low.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    GradSlot(low, shared=False).add_product(left, right)  # of another type than the product: rounded once
    torch.testing.assert_close(low.grad, torch.ones(4, 4, dtype=torch.bfloat16).add_(left @ right))


class Matmuls(TorchDispatchMode):
    """Counts operators, and bytes that matrix products allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compile", [False, pytest.param("unit", marks=pytest.mark.slow)])
def test_a_step_makes_each_weight_gradient_with_one_product_in_place(compile: Any) -> None:
    """The first micro-batch writes it, every other one adds to it: no product is ever made to be added."""
    m, layers = 3, 2
    model = fxbraid.braid(qwen2(num_hidden_layers=layers), batch(2 * m), n_microbatches=m, compile=compile)
    model.train()
    for first in (True, False):
        with Matmuls() as count:
            model.step(**batch(2 * m))
        weights = 7 * layers + 1
        assert count.seen["aten.addmm_.default"] == weights * (m - 1 if first else m)
        if not compile:
            # F and I have one each per linear, W one more in the first micro-batch of the first step.
            assert count.seen["aten.mm.out"] == (weights if first else 0)


def test_matmuls_of_a_unit_are_still_counted(lowered: Lowered) -> None:
    named = {unit.name: unit.matmuls for unit in weight_units(lowered)}
    assert named["mlp1"] == 3 and named["attn1"] == 4 and named["head"] == 1


# -- the benchmark's own parts


@pytest.fixture
def four_ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


def test_empty_units_leave_everything_else_in_place(four_ranks: None) -> None:
    model, data = empty_model(2, 2, layers=4, m=3)
    model.step(**data)
    with Matmuls() as count:
        model.step(**data)
    assert not any("mm" in name.split(".")[1] for name in count.seen), count.seen
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(model._artefacts, EmptyArtefacts)
    assert "all_reduce" in "".join(block.code for block in model.blocks.values())
    assert "self.post_F0(" in model.program.code or "self.post_I1(" in model.program.code


def test_the_benchmark_counts_what_it_ran() -> None:
    row = measure(2, 1, 2, 2, 3)
    # F: pre, embed, 2 x 2, tail, head, loss; I: head, 2 x 2; W: head, 2 x 2, norms, embed; two micro-batches.
    per_kind = lower(qwen2(num_hidden_layers=2), n_chunks=2, tp_size=2)
    units = sum(len(us) for chunk in per_kind.chunks.values() for us in chunk.units.values())
    launches = sum(4 for _ in range(2))  # per layer: two forward, two backward
    launches += 3 + 1  # of the vocabulary: embedding, the loss's maximum and sums; the head's gradient
    assert (row.units, row.launches, row.messages) == (2 * units, 2 * launches, 0)
    assert row.low_us <= row.unit_us <= row.high_us and row.unit_us > 0
    assert "2 x 1" in table([row])
    made = Overhead(1, 1, 100, 50, 0, 0, 10.0, 9.0, 11.0, 20.0, 1000.0)
    assert made.share == pytest.approx(2000 / (2000 + 100_000))
    assert made.python_share == pytest.approx(1000 / (2000 + 100_000))
