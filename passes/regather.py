"""Pass ``regather``: W gathers its inputs again, so that only this rank's tokens of them live from F to W.

Contract: (split joint graph) -> the same graph, in which a node of W that reads what a ``tp_gather`` of F made reads a
``tp_gather`` of W of the same tokens (Korthikanti et al. 2022, section 4.2.2: each rank stores its part alone)::

    F:  g = tp_gather(h)   # [b, s, h], kept for W         F:  g = tp_gather(h)
    I:  dh = tp_scatter(dq @ Wq)                      =>   I:  dh = tp_scatter(dq @ Wq)
    W:  dW = dq.T @ g                                      W:  g1 = tp_gather(h); dW = dq.T @ g1       # h: [b, s/t, h]

It costs one all-gather in W for every region, which ``braid`` launches before the unit that runs ahead of the one that
reads it. What I reads as well is not gathered again: it is kept until then anyway.
"""

from __future__ import annotations

import torch
from torch import fx

from .joint import VIEWS, JointGraph, Phase
from .marks import TP_GATHER

aten = torch.ops.aten
#: What lies between an all-gather and the product that reads it.
_LAYOUT = VIEWS | {aten.clone.default, aten._unsafe_view.default, aten.reshape.default}


def regather(joint: JointGraph) -> None:
    """See the module's docstring; changes ``joint`` in place."""
    chains = {n: chain for n in joint.graph.nodes if (chain := _chain(joint, n)) is not None}
    kept = {
        chain[0]
        for node, chain in chains.items()
        if any(joint.phase.get(user) is Phase.I for user in node.users)
    }
    again: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if joint.phase.get(node) is not Phase.W:
            continue
        for source in node.all_input_nodes:
            if source in chains and chains[source][0] not in kept:
                node.replace_input_with(source, _again(joint, chains[source], node, again))


def _chain(joint: JointGraph, node: fx.Node) -> list[fx.Node] | None:
    """From a ``tp_gather`` of F over operators that arrange its elements to ``node``; None where it is no such."""
    chain = [node]
    while chain[-1].target in _LAYOUT and joint.phase.get(chain[-1]) is Phase.F:
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    if chain[-1].target is not TP_GATHER or joint.phase.get(chain[-1]) is not Phase.F:
        return None
    return chain[::-1]


def _again(
    joint: JointGraph, chain: list[fx.Node], reader: fx.Node, again: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A copy of ``chain`` in W, in front of ``reader``, its first one in the graph."""
    for node in chain:
        if node not in again:
            with joint.graph.inserting_before(reader):
                again[node] = joint.graph.node_copy(node, lambda n: again.get(n, n))
            again[node].meta["partitioner_tag"] = "is_backward"
            joint.phase[again[node]] = Phase.W
    return again[chain[-1]]
