"""Pass ``products``: the weight gradients of a W unit that are one matrix product, taken out of its graph.

Contract: (W unit) -> :class:`Products`. Every gradient that is ``mm(a, b)``, possibly seen through transposes, and
whose product nothing else reads, leaves the graph; what is left returns the other outs, and those operands that it
computes itself::

    t = x0.t(); mm = t @ x1; grad = mm.t().t()      =>      grad(0) += x0.t() @ x1
    grad_bias = x1.sum(0)                                   rest:  grad_bias = x1.sum(0)

The product is then added into the gradient where it lies (``addmm``): neither it nor a second pass over the
gradient is made. What is left of an MLP's W unit is what pass ``saves`` makes again in it, or nothing at all, and then
nothing of it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .units import Unit, canonical_key

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product: input ``index`` of the unit, or (``computed``) result ``index`` of what is left."""

    index: int
    computed: bool
    transposed: bool


@dataclass(frozen=True, slots=True)
class Product:
    """Out ``out`` of the unit is ``left @ right``."""

    out: int
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class Products:
    """``rest`` takes inputs ``reads`` of the unit and returns outs ``kept`` of the unit, then computed operands; it is
    None where nothing is left. ``inputs`` and ``outs`` count those of the unit."""

    products: tuple[Product, ...]
    rest: fx.GraphModule | None
    key: str
    reads: tuple[int, ...]
    kept: tuple[int, ...]
    inputs: int
    outs: int


def products(unit: Unit) -> Products:
    """See the module's docstring."""
    source = unit.graph_module.graph
    outs: Sequence[fx.Node] = source.output_node().args[0]  # type: ignore[assignment]
    places = source.find_nodes(op="placeholder")
    position = {node: k for k, node in enumerate(places)}
    found: dict[int, tuple[tuple[fx.Node, bool], tuple[fx.Node, bool]]] = {}
    for k, (out, name) in enumerate(zip(outs, unit.grads, strict=True)):
        if name is not None and (pair := _factors(out)) is not None:
            found[k] = pair
    kept = [k for k in range(len(outs)) if k not in found]
    computed = list(dict.fromkeys(n for pair in found.values() for n, _ in pair if n not in position))

    def operand(node: fx.Node, transposed: bool) -> Operand:
        if node in position:
            return Operand(position[node], False, transposed)
        return Operand(len(kept) + computed.index(node), True, transposed)

    made = tuple(Product(k, operand(*left), operand(*right)) for k, (left, right) in found.items())
    rest, reads = _rest(source, [*(outs[k] for k in kept), *computed])
    return Products(
        products=made,
        rest=rest,
        key=unit.key if rest is None else canonical_key(rest.graph),
        reads=tuple(position[node] for node in reads),
        kept=tuple(kept),
        inputs=len(places),
        outs=len(outs),
    )


def _factors(out: fx.Node) -> tuple[tuple[fx.Node, bool], tuple[fx.Node, bool]] | None:
    """The operands of the product that ``out`` is, each with whether it is transposed."""
    product, flipped = _behind_transposes(out, alone=True)
    if product.target is not aten.mm.default or len(product.users) != 1:
        return None
    if product.meta["val"].dtype != out.meta["val"].dtype or not product.meta["val"].is_floating_point():
        return None
    a, b = (_behind_transposes(node, alone=False) for node in product.args)  # type: ignore[arg-type]
    if flipped:  # (a @ b).T = b.T @ a.T
        a, b = (b[0], not b[1]), (a[0], not a[1])
    return a, b


def _behind_transposes(node: fx.Node, *, alone: bool) -> tuple[fx.Node, bool]:
    """What ``node`` is a transposed view of, and whether it is one. ``alone``: only through what nothing else
    reads."""
    flipped = False
    while _is_transpose(node) and not (alone and len(node.users) != 1):
        node = node.args[0]  # type: ignore[assignment]
        flipped = not flipped
    return node, flipped


def _is_transpose(node: fx.Node) -> bool:
    if node.op != "call_function" or node.meta["val"].ndim != 2:
        return False
    if node.target is aten.t.default:
        return True
    if node.target is aten.transpose.int:
        return {int(dim) % 2 for dim in node.args[1:3]} == {0, 1}  # type: ignore[arg-type]
    return node.target is aten.permute.default and [int(d) % 2 for d in node.args[1]] == [1, 0]  # type: ignore[arg-type, union-attr]


def _rest(source: fx.Graph, results: Sequence[fx.Node]) -> tuple[fx.GraphModule | None, list[fx.Node]]:
    """The part of ``source`` that makes ``results``, and the placeholders that it reads."""
    if not results:
        return None, []
    needed: set[fx.Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    reads = []
    for node in source.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "placeholder":
                reads.append(node)
    graph.output(tuple(env[node] for node in results))
    return fx.GraphModule({}, graph, class_name="Rest"), reads


class SumArtefact:
    """The artefact of a W unit whose products are taken out: ``artefact(*inputs)`` returns all outs of the unit, as
    any artefact does; ``runtime.unit`` runs ``rest`` and adds the products into the gradients instead."""

    def __init__(self, plan: Products, rest: Callable[..., Sequence[Tensor]] | None) -> None:
        self.plan, self.rest = plan, rest

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        plan = self.plan
        done = self.rest(*(inputs[k] for k in plan.reads)) if self.rest is not None else ()
        outs: list[Tensor | None] = [None] * plan.outs
        for k, value in zip(plan.kept, done, strict=False):
            outs[k] = value
        for product in plan.products:
            left, right = (
                factor(side, (done if side.computed else inputs)[side.index])
                for side in (product.left, product.right)
            )
            outs[product.out] = torch.mm(left, right)
        return outs  # type: ignore[return-value]


def factor(side: Operand, value: Tensor) -> Tensor:
    """``value`` as it stands in the product."""
    return value.t() if side.transposed else value
