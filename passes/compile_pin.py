"""Keeping a block's order inside Inductor: launches and waits as fences that no computation crosses.

Contract: ``options()`` are Inductor options under which the generated code of a graph holds, between each launch
(``all_reduce``, ``all_gather_into_tensor`` or ``reduce_scatter_tensor``) and its wait (``wait_tensor``), what the graph
holds there::

    graph                              generated code
    mm_1; launch a; mm_2; add; wait a  extern mm_1; all_reduce_(a); extern mm_2; cpp_fused_add; wait_tensor(a)

By itself Inductor breaks such an order in five ways: it reorders the graph for locality, it reorders kernels for peak
memory, it fuses pointwise operations of two strands that read one buffer (and so pulls one strand behind the other's
wait), it writes down a pointwise operation only where its result is first read, and it merges a matrix product into
the addition that reads it, behind the wait (``addmm``). The first two are switched off. Against the others:

- :class:`Place`, on the graph before any pattern is matched: what lies before a fence and is read behind it is
  computed before the fence.
- :class:`Fence`, on the scheduler's nodes: everything between two fences depends on the first, and the second on all
  of it; then no fusion and no sorting can cross one.

Both change what is compiled, so they are part of the key under which Inductor caches it: as hashes of their code.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .. import compat
from ..compat import (
    CustomGraphPass,
    CustomSchedulerPass,
    compute_before,
    depend,
    hash_of_files,
    is_fence,
    recompute_ancestors,
    same_storage,
)
from .launches import LAUNCHES, WAIT

_FENCES = (*LAUNCHES, WAIT)
_CODE = (__file__, compat.__file__)


def options() -> dict[str, Any]:
    """Inductor options (``config_patches``) that keep the order of launches and waits."""
    return {
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
        "reorder_for_compute_comm_overlap": False,
        "post_grad_custom_pre_pass": Place(),
        "_pre_fusion_custom_pass": Fence(),
    }


class Place(CustomGraphPass):
    """Every value that lies before a fence and is read behind it, or returned, is computed before it."""

    def __call__(self, graph: fx.Graph) -> None:
        segment = _segments(graph)
        root: dict[fx.Node, fx.Node] = {}
        leaving: dict[int, dict[fx.Node, None]] = {}
        for node in graph.nodes:
            root[node] = _root(node, root)
            if _computes(root[node]):
                home = segment[root[node]]
                if any(segment[user] != home for user in node.users):
                    leaving.setdefault(home, {})[root[node]] = None
        fences = [node for node in graph.nodes if node.target in _FENCES]
        wanted = {
            fence: [n for n in leaving.get(segment[fence], {}) if n not in fence.all_input_nodes]
            for fence in fences
        }
        compute_before(graph, {fence: nodes for fence, nodes in wanted.items() if nodes})

    def uuid(self) -> Any:
        return hash_of_files(*_CODE)


class Fence(CustomSchedulerPass):
    """Chain the scheduler's nodes at the fences."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        fence: Any = None
        since: list[Any] = []
        for node in nodes:
            if fence is not None:
                depend(node, fence)
            if is_fence(node):
                for earlier in since:
                    depend(node, earlier)
                fence, since = node, []
            else:
                since.append(node)
        recompute_ancestors(nodes)
        return nodes

    def uuid(self) -> Any:
        return hash_of_files(*_CODE)


def _segments(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of fences before each node; the output lies behind everything."""
    segment: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        segment[node] = count if node.op != "output" else count + 1
        count += node.target in _FENCES
    return segment


def _root(node: fx.Node, root: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node whose memory ``node`` is, or is a view of."""
    val = node.meta.get("val")
    if node.op == "call_function" and node.target not in _FENCES and isinstance(val, Tensor):
        for source in node.all_input_nodes:
            if isinstance(source.meta.get("val"), Tensor) and same_storage(val, source.meta["val"]):
                return root[source]
    return node


def _computes(node: fx.Node) -> bool:
    """Does the node compute a tensor from others? Constants are made where they are read."""
    return (
        node.op == "call_function"
        and node.target not in _FENCES
        and bool(node.all_input_nodes)
        and isinstance(node.meta.get("val"), Tensor)
    )
