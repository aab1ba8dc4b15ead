"""F, I and W hold every node once, and the closure puts each where it belongs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_collective, is_matmul
from fxbraid.passes.units import ChunkUnits

from .tiny import batch, lower, qwen2


@pytest.fixture(scope="module")
def chunks() -> list[ChunkUnits]:
    return list(lower(n_chunks=2).chunks.values())


def test_every_matmul_is_in_exactly_one_phase_and_none_is_lost(chunks: list[ChunkUnits]) -> None:
    for chunk in chunks:
        in_joint = [n for n in chunk.joint.graph.nodes if is_matmul(n)]
        per_phase = Counter(chunk.joint.phase[n] for n in in_joint)
        in_units = {p: sum(u.matmuls for u in us) for p, us in chunk.units.items()}
        assert sum(per_phase.values()) == len(in_joint)
        assert in_units == per_phase
        counted = Counter(
            node.target
            for units in chunk.units.values()
            for unit in units
            for node in unit.graph_module.graph.nodes
            if is_matmul(node)
        )
        assert counted == Counter(n.target for n in in_joint)


def test_four_layers_have_29_matmuls_in_each_phase_and_two_collectives_a_layer_each_way() -> None:
    (chunk,) = lower(n_chunks=1).chunks.values()
    # Some versions of transformers make the rotary table with a product of its own, in ``pre``.
    matmuls = {p: sum(u.matmuls for u in us if u.index >= 0) for p, us in chunk.units.items()}
    assert matmuls == {Phase.F: 29, Phase.I: 29, Phase.W: 29}
    collectives = Counter(p for n, p in chunk.joint.phase.items() if is_collective(n))
    # The vocabulary adds the embedding's sum and the loss's maximum and sums; its head's sum in I.
    assert collectives == {Phase.F: 8 + 3, Phase.I: 8 + 1}


def test_the_first_chunk_has_an_I_though_nothing_asks_for_its_input_gradient(
    chunks: list[ChunkUnits],
) -> None:
    first = chunks[0]
    assert not first.input_grads
    assert sum(u.matmuls for u in first.units[Phase.I]) == 14
    assert sum(is_collective(n) and p is Phase.I for n, p in first.joint.phase.items()) == 4


def test_no_parameter_and_no_view_of_one_is_saved(chunks: list[ChunkUnits]) -> None:
    for chunk in chunks:
        passed = {*chunk.for_I, *chunk.for_W, *chunk.handed}
        assert not passed & {*chunk.joint.state, *chunk.joint.free}
        assert chunk.joint.free


def test_phases_run_one_after_the_other_give_the_gradients_of_the_plain_model() -> None:
    """The graphs of F, I and W alone, without any executor, against autograd."""
    model = qwen2()
    lowered = lower(model, n_chunks=1, tp_size=1)
    (chunk,) = lowered.chunks.values()
    micro = batch(2)
    loss = model(**micro).loss
    loss.backward()
    assert lowered.count is not None
    (count,) = lowered.count(*(micro[n] for n in lowered.inputs if n not in lowered.counts))
    given = {**micro, lowered.counts[0]: count.float()}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    env = {node: given[name] for name, node in chunk.joint.inputs.items()}
    env[chunk.joint.tangents[0]] = torch.ones(())
    grads: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for phase in Phase:
            for unit in chunk.units[phase]:
                outs = unit.graph_module(
                    *(state[n] for n in unit.state), *(env[chunk.resolve(a)] for a in unit.args)
                )
                env.update(zip(unit.outs, outs, strict=True))
                grads.update({g: o for g, o in zip(unit.grads, outs, strict=True) if g is not None})
    assert torch.allclose(env[chunk.outputs[0]], loss, rtol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (grads[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5, (name, error)
    assert set(grads) == {name for name, _ in model.named_parameters()}
