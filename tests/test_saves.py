"""What F saves, what the backward computes again: counted in the graphs, and equal to the bit whatever is chosen."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxbraid.passes.aliases import storage
from fxbraid.passes.checkpoint import NAMES, Checkpointing, ForwardUnit
from fxbraid.passes.cost import nbytes
from fxbraid.passes.errors import UnsupportedError
from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_collective, is_matmul
from fxbraid.passes.mincut import Network
from fxbraid.passes.pipeline import Cut, Lowered, recut
from fxbraid.passes.units import ChunkUnits

from . import lockstep
from .tiny import batch, lower, qwen2

aten = torch.ops.aten


LAYERS = 2


@lru_cache
def model() -> nn.Module:
    return qwen2(num_hidden_layers=LAYERS)


@lru_cache
def plain(tp: int) -> Lowered:
    """Without pass ``saves``."""
    return lower(model(), tp_size=tp, least_saved=False)


@lru_cache
def under(policy: Checkpointing, tp: int = 2) -> Lowered:
    """The same trace, cut for ``policy``."""
    return relowered(plain(tp), policy, tp)


def relowered(lowered: Lowered, policy: Checkpointing, tp: int) -> Lowered:
    return recut(lowered, Cut(tp, checkpoint=policy, verify=True))


def saved(chunk: ChunkUnits) -> int:
    """Bytes between F and the backward, each storage once."""
    given = set(chunk.joint.inputs.values())
    return sum(nbytes(n.meta["val"]) for n in {storage(n) for n in (*chunk.for_I, *chunk.for_W)} - given)


def is_attention(node: fx.Node) -> bool:
    return "_scaled_dot_product" in str(node.target) and "backward" not in str(node.target)


def products(lowered: Lowered) -> dict[str, int]:
    """Matrix products and attention kernels by kind of unit."""
    found: Counter[str] = Counter()
    for chunk in lowered.chunks.values():
        for unit in (u for us in chunk.units.values() for u in us):
            for node in unit.graph_module.graph.nodes:
                found[unit.kind] += is_matmul(node) or is_attention(node)
    return dict(found)


# -- bits


@pytest.mark.parametrize(("tp", "policies"), [(1, ("attention+mlp",)), (2, NAMES)])
def test_no_policy_changes_a_bit(tp: int, policies: tuple[Checkpointing, ...]) -> None:
    expected = lockstep.step(model(), batch(4), tp=tp, lowered=plain(tp))
    for policy in policies:
        found = lockstep.step(model(), batch(4), tp=tp, lowered=under(policy, tp))
        assert torch.equal(found.loss, expected.loss), policy
        for rank, grads in enumerate(expected.grads):
            assert found.grads[rank].keys() == grads.keys()
            for name, grad in grads.items():
                assert torch.equal(found.grads[rank][name], grad), (policy, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sequence", [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "regather": True}]
)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mixtral", "gpt_neox", "gemma2", "qwen3_moe", "phi3", "qwen3"]
)
def test_no_policy_changes_a_bit_of_other_families(name: str, sequence: dict[str, Any]) -> None:
    from . import families

    made = families.make(families.FAMILIES[name], num_hidden_layers=2, n_layer=2)
    if name == "gpt2" and sequence:
        pytest.skip("see test_sequence.py")
    data = batch(4)
    expected = lockstep.step(made, data, tp=2, least_saved=False, **sequence)
    wanted = families.whole_loss(made, data, 2)
    wanted.backward()
    grads = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
    for policy in NAMES:
        found = lockstep.step(made, data, tp=2, checkpoint=policy, verify=True, **sequence)
        assert torch.equal(found.loss, expected.loss), policy
        for mine, theirs in zip(found.grads, expected.grads, strict=True):
            assert all(torch.equal(mine[n], theirs[n]) for n in theirs), policy
        loss, grad = lockstep.errors(made, found, wanted.detach(), grads)  # type: ignore[arg-type]
        assert loss <= 1e-6 and grad <= 1e-5, policy


# -- what is computed again


def test_what_is_computed_again_is_what_the_backward_reads_and_once() -> None:
    forward = products(under("none"))
    assert "R" not in forward or forward["R"] == 0
    # Of attention q, k, v and the kernel, of an MLP gate and up: their last products only make the sum, which is
    # saved. "all" adds the head.
    wanted = {"mlp": 2, "attention": 4, "attention+mlp": 6, "all": 6}
    for policy, count in wanted.items():
        found, count = products(under(policy)), LAYERS * count + (policy == "all")
        assert found["R"] == count <= forward["F"], policy
        # Nothing else is done twice: F, I and W have as many as without.
        assert {**found, "R": 0} == {**forward, "R": 0}, policy


def test_collectives_are_not_repeated() -> None:
    def collectives(lowered: Lowered) -> dict[Phase, int]:
        return Counter(
            phase
            for chunk in lowered.chunks.values()
            for node, phase in chunk.joint.phase.items()
            if is_collective(node)
        )

    assert collectives(under("all")) == collectives(plain(2))


def test_units_that_compute_again_stand_before_their_readers_and_share_artefacts() -> None:
    (chunk,) = lower(qwen2(), n_chunks=1, checkpoint="attention+mlp").chunks.values()
    names = [unit.label for unit in chunk.units[Phase.I] if not unit.name.startswith("pre")]
    for name in (f"{kind}{layer}" for kind in ("mlp", "attn") for layer in range(4)):
        assert names[names.index(f"{name}_R") + 1] == f"{name}_I"
    keys = {unit.label: unit.key for unit in chunk.units[Phase.I]}
    assert keys["mlp1_R"] == keys["mlp2_R"] and keys["attn1_R"] == keys["attn2_R"]
    assert keys["mlp1_I"] == keys["mlp2_I"] and keys["attn1_I"] == keys["attn2_I"]


def test_a_function_chooses_units() -> None:
    seen: list[ForwardUnit] = []

    def last_mlp(unit: ForwardUnit) -> bool:
        seen.append(unit)
        return unit.kind == "mlp" and unit.layer == 1

    found = relowered(plain(2), last_mlp, 2)
    again = [u.name for c in found.chunks.values() for u in c.units[Phase.I] if u.again and u.matmuls]
    assert again == ["mlp1"]
    assert {unit.kind for unit in seen} >= {"attention", "mlp", "head", "embedding", "pre"}
    assert {unit.name: unit.matmuls for unit in seen}["attn0"] == 4
    with pytest.raises(UnsupportedError, match="answers True or False"):
        relowered(plain(2), lambda unit: 1, 2)  # type: ignore[arg-type, return-value]


# -- what is saved


def test_less_is_saved_the_more_is_computed_again() -> None:
    for k in range(2):
        sizes = [saved(under(policy).chunks[k]) for policy in ("none", "mlp", "attention+mlp", "all")]
        assert sizes == sorted(sizes, reverse=True)
        assert saved(plain(2).chunks[k]) > 1.7 * sizes[0] > 2 * sizes[2]


def test_no_storage_is_saved_twice_and_none_that_parameters_give() -> None:
    for policy in ("none", "all"):
        for chunk in under(policy).chunks.values():
            for values in (chunk.for_I, chunk.for_W, chunk.handed):
                assert len({storage(n) for n in values}) == len(values)
            free = chunk.joint.free | set(chunk.joint.state)
            assert not free & {storage(n) for n in (*chunk.for_I, *chunk.for_W)}


def test_a_layer_keeps_the_inputs_of_what_is_not_cheap() -> None:
    """Of an MLP gate and up alone, and of the rest no product that costs nothing: the residual stream once for its norm
    and what the norm leads to."""
    chunk = under("none").chunks[0]
    kept = {storage(n) for n in (*chunk.for_I, *chunk.for_W)}
    tokens, ffn = 2 * 16, 48 // 2
    assert Counter(n.meta["val"].numel() for n in kept)[tokens * ffn] == 2
    assert not {n.target for n in kept} & {aten.silu.default, aten.mul.Tensor}


# -- the cut


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(1, 9)), max_size=30))
def test_the_cut_is_a_least_one(arcs: list[tuple[int, int, int]]) -> None:
    net, graph = Network(), networkx.DiGraph()
    graph.add_nodes_from(range(8))
    for _ in range(6):
        net.add()
    for tail, head, capacity in arcs:
        net.join(tail, head, capacity)
        if tail != head:
            known = graph.get_edge_data(tail, head, {"capacity": 0})["capacity"]
            graph.add_edge(tail, head, capacity=known + capacity)
    side = net.sink_side()
    assert net.SINK in side and net.SOURCE not in side
    cut = sum(capacity for tail, head, capacity in arcs if tail not in side and head in side)
    assert cut == networkx.minimum_cut_value(graph, net.SOURCE, net.SINK)
