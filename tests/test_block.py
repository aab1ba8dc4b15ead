"""Block graphs: what stands between a launch and its wait, what is sent when, what goes in and out."""

from __future__ import annotations

import pytest
from torch import fx

from fxbraid.passes.block import Block, box, braid, unbox
from fxbraid.passes.errors import VerifyError
from fxbraid.passes.launches import ALL_REDUCE, WAIT
from fxbraid.passes.pipeline import Lowered
from fxbraid.passes.verify import verify_block
from fxbraid.schedule import Action

from .tiny import context, lower, qwen2

KINDS = {
    "F": ["0F0"],
    "B": ["1B0"],
    "I": ["1I0"],
    "W": ["1W0"],
    "F&B": ["0F1", "1B0"],
    "F&I": ["0F1", "1I0"],
    "F&W": ["0F1", "1W0"],
    "F&F": ["0F1", "0F2"],
    "I&W": ["1I1", "1W0"],
    "F&I&W": ["0F2", "1I1", "1W0"],
}


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    # The layers' collectives alone: those of the vocabulary have tests of their own.
    return lower(qwen2(num_hidden_layers=4), n_chunks=2, vocab_parallel=False)


def block(lowered: Lowered, *texts: str, sends: tuple[str, ...] = (), collectives: str = "overlap") -> Block:
    made = braid([Action.parse(t) for t in texts], context(lowered, sends=sends, collectives=collectives))
    verify_block(made)
    return made


def between(nodes: list[fx.Node], launch: fx.Node) -> int:
    """Matmuls of the units that stand between a launch and its wait."""
    (wait,) = launch.users
    inside = nodes[nodes.index(launch) : nodes.index(wait)]
    return sum(n.meta["unit"].matmuls for n in inside if "unit" in n.meta)


def strands(nodes: list[fx.Node]) -> dict[str, list[fx.Node]]:
    """Launches by the strand that made them."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.target is ALL_REDUCE:
            maker = node.args[0].args[0].meta["unit"]  # launch <- getitem <- unit
            # The second strand of F&F repeats the first one's units under numbered names.
            twin = "" if node.args[0].args[0].name == maker.label else "'"
            found.setdefault(f"{maker.phase}{twin}", []).append(node)
    return found


@pytest.mark.parametrize("kind", ["F&B", "F&I", "F&W", "F&F", "I&W", "F&I&W"])
def test_every_launch_but_the_last_of_a_strand_hides_behind_a_matmul(lowered: Lowered, kind: str) -> None:
    nodes = list(block(lowered, *KINDS[kind]).graph_module.graph.nodes)
    found = strands(nodes)
    assert sum(len(launches) for launches in found.values()) == {"F&W": 4, "I&W": 4}.get(kind, 8)
    for launches in found.values():
        for launch in launches[:-1]:
            assert between(nodes, launch) >= 1, launch.name


def test_a_full_backward_hides_every_collective_behind_its_own_weight_gradients(lowered: Lowered) -> None:
    nodes = list(block(lowered, "1B0").graph_module.graph.nodes)
    launches = strands(nodes)["I"]
    assert len(launches) == 4
    assert all(between(nodes, launch) >= 3 for launch in launches)


@pytest.mark.parametrize("kind", KINDS)
def test_blocking_hides_nothing(lowered: Lowered, kind: str) -> None:
    nodes = list(block(lowered, *KINDS[kind], collectives="blocking").graph_module.graph.nodes)
    for node in nodes:
        if node.target is ALL_REDUCE:
            assert nodes[nodes.index(node) + 1].target is WAIT


@pytest.mark.parametrize("kind", KINDS)
def test_all_modes_of_collectives_run_the_same_units(lowered: Lowered, kind: str) -> None:
    def labels(collectives: str) -> list[str]:
        graph = block(lowered, *KINDS[kind], collectives=collectives).graph_module.graph
        return [n.meta["unit"].label for n in graph.nodes if "unit" in n.meta]

    assert labels("overlap") == labels("blocking") == labels("free")


@pytest.mark.parametrize("kind", KINDS)
def test_free_leaves_the_collectives_out_and_nothing_else(lowered: Lowered, kind: str) -> None:
    """Each unit that read a sum reads the local part of it."""
    free = block(lowered, *KINDS[kind], collectives="free").graph_module.graph
    assert not any(n.target in (ALL_REDUCE, WAIT) for n in free.nodes)

    def reads(collectives: str) -> list[list[str]]:
        graph = block(lowered, *KINDS[kind], collectives=collectives).graph_module.graph
        found = []
        for node in graph.nodes:
            if "unit" in node.meta:
                args = [a.args[0].args[0] if a.target is WAIT else a for a in node.args]
                found.append([a.name for a in args])
        return found

    assert reads("free") == reads("overlap")


def test_the_code_of_a_braid_reads_like_the_table(lowered: Lowered) -> None:
    lines = block(lowered, "0F1", "1B0").code.splitlines()
    said = []
    for line in lines:
        for word in ("self.", "all_reduce", "wait_tensor"):
            if word in line:
                name = (
                    line.split("self.")[1].split("(")[0] if word == "self." else line.split(" = ")[0].strip()
                )
                said.append(name)
    start = said.index("attn0_F")
    assert said[start : start + 15] == [
        "attn0_F", "launch_attn0_F",
        "head_I", "mlp3_I", "launch_mlp3_I", "head_W", "mlp3_W",
        "wait_attn0_F", "mlp0_F", "launch_mlp0_F",
        "pre_c1_R", "wait_mlp3_I", "attn3_I", "launch_attn3_I", "attn3_W",
    ]  # fmt: skip
    assert not any("[0]" in line for line in lines)


def test_a_result_is_sent_before_the_trailing_units_of_the_other_strand(lowered: Lowered) -> None:
    made = block(lowered, "0F1", "1B0", sends=("send_F0", "send_I1"))
    names = [n.name for n in made.graph_module.graph.nodes]
    assert names.index("send_F0") < names.index("tail_c1_I")
    assert names.index("send_F0") < names.index("norm2_W")
    assert names.index("send_I1") < names.index("norm2_W")
    assert made.outputs == [["for_I", "for_W"], []]


def test_what_leaves_and_what_stays(lowered: Lowered) -> None:
    first = block(lowered, "0F0")
    assert first.inputs == [["input_ids", "attention_mask"]]
    assert first.outputs == [["y0", "for_I", "for_W"]]
    assert block(lowered, "1I0").inputs == [["for_I", "dy0"]]
    assert block(lowered, "1I0").outputs == [["dx0", "handed"]]
    assert block(lowered, "1W0").inputs == [["for_W", "handed"]]
    assert block(lowered, "1W0").outputs == [[]]


def test_inputs_and_outputs_of_I_and_W_match_what_F_and_I_pass(lowered: Lowered) -> None:
    for index, chunk in lowered.chunks.items():
        forward, backward, weights = (block(lowered, f"{index}{p}0") for p in "FIW")
        sizes = [
            len(n.args)
            for made in (forward, backward)
            for n in made.graph_module.graph.nodes
            if n.target is box
        ]
        assert sizes == [len(chunk.for_I), len(chunk.for_W), len(chunk.handed)]
        read = {
            n.args[0].name: len(n.users)
            for made in (backward, weights)
            for n in made.graph_module.graph.nodes
            if n.target is unbox
        }
        assert read == {
            "i_for_i": len(chunk.for_I),
            "w_for_w": len(chunk.for_W),
            "w_handed": len(chunk.handed),
        }


def test_no_collective_in_W(lowered: Lowered) -> None:
    graph = block(lowered, "0W0").graph_module.graph
    assert not any(n.target in (ALL_REDUCE, WAIT) for n in graph.nodes)


def test_tp_1_has_no_collective_and_the_same_order() -> None:
    def labels(tp_size: int) -> list[str]:
        graph = block(
            lower(n_chunks=2, tp_size=tp_size, vocab_parallel=False), "0F1", "1B0"
        ).graph_module.graph
        assert (tp_size > 1) == any(n.target is ALL_REDUCE for n in graph.nodes)
        return [n.meta["unit"].label for n in graph.nodes if "unit" in n.meta]

    assert labels(1) == labels(2)


def test_the_verifier_finds_a_launch_without_a_wait(lowered: Lowered) -> None:
    made = block(lowered, "0F0")
    graph = made.graph_module.graph
    wait = next(n for n in graph.nodes if n.target is WAIT)
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    with pytest.raises(VerifyError, match="0 waits"):
        verify_block(made)


def test_unbox_leaves_nothing_behind() -> None:
    import torch

    held = box(torch.ones(1), torch.zeros(1))
    assert len(unbox(held)) == 2
    assert held == []
