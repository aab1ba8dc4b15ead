"""Units end at collectives, carry readable names, and share artefacts where their structure is equal."""

from __future__ import annotations

import pytest

from fxbraid.passes.errors import VerifyError
from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_mark
from fxbraid.passes.names import short_name
from fxbraid.passes.verify import verify_split, verify_units

from .tiny import lower, qwen2


def names(chunk, phase: Phase) -> list[str]:  # type: ignore[no-untyped-def]
    return [unit.name for unit in chunk.units[phase] if not unit.again]


def test_attention_and_mlp_are_units_of_their_own_in_every_phase() -> None:
    first, last = lower(n_chunks=2).chunks.values()
    assert names(first, Phase.F) == ["pre_c0", "embed", "attn0", "mlp0", "attn1", "mlp1", "tail_c0"]
    assert names(first, Phase.I) == ["mlp1", "attn1", "mlp0", "attn0"]
    assert names(first, Phase.W) == ["mlp1", "attn1", "mlp0", "attn0", "norm0", "embed"]
    # I makes masks and tables again, for the first unit that reads them.
    assert [unit.label for unit in first.units[Phase.I] if unit.again] == ["pre_c0_R"]
    # Behind the head's columns: the loss's sums once the maximum is known, then the loss.
    loss = ["tail_c1_2", "tail_c1_3"]
    assert names(last, Phase.F) == ["pre_c1", "attn2", "mlp2", "attn3", "mlp3", "tail_c1", "head", *loss]
    assert names(last, Phase.I) == ["head", "tail_c1", "mlp3", "attn3", "mlp2", "attn2", "tail_c1_2"]
    assert names(last, Phase.W) == ["head", "norm", "mlp3", "attn3", "mlp2", "attn2", "norm2"]


def test_equal_units_share_a_key_and_unequal_ones_do_not() -> None:
    (chunk,) = lower(qwen2(num_hidden_layers=6), n_chunks=1).chunks.values()
    key = {(u.name, p): u.key for p, us in chunk.units.items() for u in us if not u.again}
    for phase in Phase:
        # The first layer reads the embedding, the last one hands to the head: all others are alike.
        inner = range(1, 5)
        assert len({key[f"mlp{i}", phase] for i in inner}) == 1
        assert len({key[f"attn{i}", phase] for i in inner}) == 1
        assert key["mlp1", phase] != key["attn1", phase]
    assert key["mlp1", Phase.F] != key["mlp1", Phase.I]


@pytest.mark.slow  # test_compile.py counts artefacts by depth
def test_the_number_of_distinct_units_does_not_grow_with_depth() -> None:
    distinct = {
        depth: len({u.key for us in chunk.units.values() for u in us})
        for depth in (4, 12)
        for chunk in lower(qwen2(num_hidden_layers=depth), n_chunks=1).chunks.values()
    }
    assert distinct[4] == distinct[12]


def test_another_shape_is_another_key() -> None:
    small = lower(n_chunks=1).chunks[0].units[Phase.F][2].key
    large = lower(qwen2(intermediate_size=64), n_chunks=1).chunks[0].units[Phase.F][3].key
    assert small != large


def test_no_unit_holds_a_mark_and_each_collective_follows_one_unit() -> None:
    for chunk in lower(n_chunks=2).chunks.values():
        for units in chunk.units.values():
            for unit in units:
                assert not any(is_mark(n) for n in unit.graph_module.graph.nodes)
        for node in chunk.joint.phase:
            if chunk.is_collective(node):
                makers = [
                    u for us in chunk.units.values() for u in us if chunk.resolve(node.args[0]) in u.outs
                ]
                assert len(makers) == 1


def test_the_verifier_finds_a_node_in_the_wrong_phase_and_a_lost_node() -> None:
    (chunk,) = lower(n_chunks=1).chunks.values()
    joint = chunk.joint
    node = next(n for n, p in joint.phase.items() if p is Phase.I)
    joint.phase[node] = Phase.F
    with pytest.raises(VerifyError, match=node.name):
        verify_split(joint)
    joint.phase[node] = Phase.I
    verify_split(joint)
    dropped = chunk.units[Phase.W].pop()
    with pytest.raises(VerifyError, match="do not hold each node once"):
        verify_units(chunk)
    chunk.units[Phase.W].append(dropped)
    verify_units(chunk)


@pytest.mark.parametrize(
    ("parameter", "wanted"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "attn3"),
        ("model.layers.11.mlp.up_proj.weight", "mlp11"),
        ("model.layers.0.input_layernorm.weight", "norm0"),
        ("transformer.h.5.ln_1.weight", "norm5"),
        ("gpt_neox.layers.2.attention.dense.bias", "attn2"),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_names_follow_parameters(parameter: str, wanted: str | None) -> None:
    assert short_name(parameter) == wanted
