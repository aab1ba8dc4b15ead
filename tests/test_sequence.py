"""Sequence parallelism: all ranks in one process against the unsplit model, and what the graphs move and keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxbraid.passes.block import braid
from fxbraid.passes.compile_block import cut
from fxbraid.passes.cost import nbytes, reduce_bytes
from fxbraid.passes.errors import PlanError
from fxbraid.passes.joint import Phase
from fxbraid.passes.launches import ALL_GATHER, LAUNCHES, REDUCE_SCATTER
from fxbraid.passes.marks import TP_GATHER, TP_MAX, TP_REDUCE, TP_SCATTER
from fxbraid.passes.pipeline import Cut, Lowered, recut
from fxbraid.passes.verify import verify_block
from fxbraid.runtime.emulate import Link, Op, collective_seconds
from fxbraid.schedule import Action, Placement
from fxbraid.schedule import Phase as Do
from fxbraid.schedule.weave import Strand, fetch_points, weave
from fxbraid.simulate import Shape, analytic, device, load_model
from fxbraid.simulate.block import time_block
from fxbraid.simulate.workload import ChunkCost, UnitCost, Workload

from . import lockstep, zoo
from .families import FAMILIES, make
from .parity import KeepDouble, make_batches
from .test_zoo import PLAN, Blocks
from .tiny import batch, context, lower, qwen2

LAYERS = 2


def step(model: nn.Module, *, tp: int = 2, n_chunks: int = 2, **options: Any) -> lockstep.Ranks:
    """One step in lockstep, compared with the unsplit model to 1e-12."""
    rows = make_batches(2, 2, mask=True, steps=1)[0]
    with KeepDouble():
        loss, grads = zoo.reference(model, rows, 2)
        options = {"verify": True, "sequence_parallel": True} | options
        ranks = lockstep.step(model, rows, tp=tp, n_chunks=n_chunks, **options)
    errors = lockstep.errors(model, ranks, loss, grads)
    assert max(errors) <= 1e-12, errors
    return ranks


def collectives(lowered: Lowered) -> list[tuple[Phase, fx.Node]]:
    return [
        (phase, node)
        for chunk in lowered.chunks.values()
        for node, phase in chunk.joint.phase.items()
        if chunk.is_collective(node)
    ]


def count(lowered: Lowered) -> Mapping[tuple[str, Any], int]:
    return Counter((phase.value, node.target) for phase, node in collectives(lowered))


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "phi3", "gpt_neox"])
def test_a_gather_and_a_scatter_in_place_of_each_all_reduce(name: str) -> None:
    family = FAMILIES[name]
    found = count(step(make(family), vocab_parallel=False).lowered)
    regions = family.collectives * LAYERS
    # The embedding and the head are whole on every rank: all tokens come together once more, before the head.
    assert found == {
        ("F", TP_GATHER): regions + 1,
        ("F", TP_SCATTER): regions,
        ("I", TP_GATHER): regions,
        ("I", TP_SCATTER): regions,
    }


def test_a_cut_vocabulary_scatters_its_embedding_and_gathers_for_its_head() -> None:
    found = count(step(make(FAMILIES["llama"]), vocab_parallel=True).lowered)
    loss = {("F", TP_REDUCE): 1, ("F", TP_MAX): 1}
    halves = {(phase, mark): 2 * LAYERS + 1 for phase in "FI" for mark in (TP_GATHER, TP_SCATTER)}
    assert found == halves | loss


def test_four_ranks_gather_again_what_w_reads() -> None:
    found = count(step(make(FAMILIES["qwen3"]), tp=4, n_chunks=1, regather=True).lowered)
    assert found["W", TP_GATHER] == 2 * LAYERS + 1  # a layer's two regions, and the head


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "phi3", "gpt_neox", "olmo2", "qwen3_moe", "gpt2", "cohere", "phi"]
)
@pytest.mark.parametrize(("tp", "n_chunks"), [(2, 2), (4, 1)])
def test_families(name: str, tp: int, n_chunks: int) -> None:
    for again in (False, True):
        step(make(FAMILIES[name]), tp=tp, n_chunks=n_chunks, regather=again)


def test_a_plan_that_leaves_attention_whole() -> None:
    """It needs all tokens on every rank, and the residual this rank's part of what it gives."""
    found = count(step(make(FAMILIES["deepseek_v3"]), vocab_parallel=False).lowered)
    assert found["F", TP_GATHER] > found["F", TP_SCATTER] and not found.get(("F", TP_REDUCE))


class Positions(Blocks):
    """With learned positions, and a parameter that is read on parts of the tokens, in regions and on whole ones."""

    def __init__(self, block: Callable[[Any, Tensor, nn.Module], Tensor], **options: Any) -> None:
        super().__init__(block, **options)
        self.positions = nn.Parameter(torch.randn(16, 16, dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.embed(input_ids) + self.positions
        for layer in self.layers:
            x = x + layer(lambda x=x, layer=layer: self.block(self, x, layer))
        logits = self.head(self.shared(x)) * self.scale.sum()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


ODD: list[Any] = [
    lambda m, x, la: la["down"](la["up"](m.shared(x)).tanh() * la["gate"](x)),
    lambda m, x, la: la["down"](la["up"](x).relu()) * m.scale + m.shared(x),
    lambda m, x, la: la["down"](la["up"](x) + m.scale.sum()) * m.scale.mean(),
    lambda m, x, la: la["down"](la["up"](x)) + x.cumsum(1),  # mixes tokens outside of a region
    lambda m, x, la: la["down"](la["up"](x)) * x.amax((1, 2), keepdim=True),
    lambda m, x, la: la["down"](la["up"](x.transpose(0, 1)).transpose(0, 1).sin()),
    lambda m, x, la: la["down"](la["up"](torch.cat(x.chunk(2, -1)[::-1], -1) * (x.detach() > 0))),
]


@pytest.mark.parametrize(
    ("number", "n_chunks"),
    [
        # Each in one of the two ways in every run, the other one with -m slow.
        pytest.param(k, n_chunks, marks=[pytest.mark.slow] * ((k + n_chunks) % 2))
        for k in range(len(ODD))
        for n_chunks in (1, 2)
    ],
)
def test_odd_paths_have_right_gradients(number: int, n_chunks: int) -> None:
    """In one chunk, W gathering its inputs again, and in two."""
    block = ODD[number]
    rows = make_batches(2, 2, mask=False, steps=1)[0]
    model = Positions(block)
    loss = model(**rows)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ranks = lockstep.step(
        model,
        rows,
        tp=2,
        n_chunks=n_chunks,
        tp_plan=PLAN,
        verify=True,
        sequence_parallel=True,
        regather=n_chunks == 1,
    )
    assert max(lockstep.errors(model, ranks, loss.detach(), grads)) <= 1e-12


def test_a_region_whose_tokens_are_one_dimension_with_the_batch() -> None:
    def block(model: Any, x: Tensor, layer: Any) -> Tensor:
        return layer["down"](layer["up"](x.flatten(0, 1))).view_as(x)  # type: ignore[no-any-return]

    rows = make_batches(2, 2, mask=False, steps=1)[0]
    model = Positions(block)
    for layer in model.layers:
        layer["down"].bias = None  # type: ignore[index]
    loss = model(**rows)["loss"]
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    ranks = lockstep.step(
        model, rows, tp=2, tp_plan=PLAN, verify=True, sequence_parallel=True, vocab_parallel=False
    )
    assert max(lockstep.errors(model, ranks, loss.detach(), grads)) <= 1e-12
    assert count(ranks.lowered)["F", TP_SCATTER] == LAYERS


# -- what is moved and kept


@pytest.fixture(scope="module")
def graphs() -> dict[str, Lowered]:
    """A Qwen2 of four layers in two chunks: whole, on parts of the tokens, and gathered again in W."""
    on = {"sequence_parallel": True, "vocab_parallel": False}
    found = {"whole": lower(vocab_parallel=False), "kept": lower(**on), "again": lower(**on, regather=True)}
    return found | {"cut": lower(vocab_parallel=True), "both": lower(**on | {"vocab_parallel": True})}


def test_as_many_bytes_are_moved(graphs: dict[str, Lowered]) -> None:
    def moved(name: str, *phases: str) -> int:
        return sum(reduce_bytes(n) for phase, n in collectives(graphs[name]) if phase.value in phases)

    stream = 2 * 16 * 32 * 4  # bytes of a micro-batch of 2 x 16 tokens, 32 wide, float32
    assert moved("kept", "I") == moved("whole", "I") == 8 * stream
    # With a cut vocabulary too: the embedding's sum and the head's gradients are halved like the others.
    assert moved("both", "F") == moved("cut", "F") and moved("both", "I") == moved("cut", "I") == 9 * stream
    # With a whole one a gather more: all tokens come together before the head.
    assert moved("kept", "F") == moved("whole", "F") + stream // 2
    assert moved("whole", "W") == moved("kept", "W") == 0 and moved("again", "W") == 9 * stream // 2
    scattered = next(n for _, n in collectives(graphs["kept"]) if n.target is TP_SCATTER)
    link = Link(1e-3, 1e6)
    for op, node, size in (
        (Op.REDUCE_SCATTER, scattered, nbytes(scattered.args[0].meta["val"])),  # type: ignore[union-attr]
        (
            Op.ALL_GATHER,
            *next(
                (n, nbytes(n.meta["val"])) for _, n in collectives(graphs["kept"]) if n.target is TP_GATHER
            ),
        ),
    ):
        seconds = collective_seconds(link, op, size, 2)
        assert seconds == collective_seconds(link, Op.ALL_REDUCE, reduce_bytes(node), 2)


def saved(lowered: Lowered, tokens: int) -> int:
    """Bytes that F keeps of values on ``tokens`` tokens a row that are as wide as the residual stream, or a number
    per token: what lies between the parallel regions, and their inputs."""
    values = {
        n for c in lowered.chunks.values() for n in (*c.for_I, *c.for_W) if n not in c.joint.inputs.values()
    }
    shapes = {n: tuple(n.meta["val"].shape) for n in values}
    return sum(
        nbytes(n.meta["val"])
        for n, shape in shapes.items()
        if shape in {(2, tokens, 32), (2, tokens, 1), (2 * tokens, 32)} and n.meta["val"].is_floating_point()
    )


def test_activations_between_the_regions_are_divided(graphs: dict[str, Lowered]) -> None:
    def everything(name: str) -> Lowered:
        """All that the backward reads is kept: a least cut makes other choices for parts than for the whole."""
        return recut(graphs[name], Cut(2, regather=name == "again", least_saved=False))

    whole = saved(everything("whole"), 16)
    inputs = saved(everything("kept"), 16)  # of the regions and of the head, as F gathered them
    assert inputs == 9 * 2 * 16 * 32 * 4
    assert saved(everything("kept"), 8) == (whole - inputs) / 2
    assert saved(everything("again"), 16) == 0 and saved(everything("again"), 8) == whole / 2
    assert saved(graphs["again"], 16) == 0 and saved(graphs["again"], 8) <= whole / 2


def test_messages_carry_parts_of_the_tokens(graphs: dict[str, Lowered]) -> None:
    first, second = (graphs["kept"].chunks[c] for c in (0, 1))
    shapes = {
        tuple(n.meta["val"].shape) for n in (*first.outputs, *second.joint.boundary, *second.input_grads)
    }
    assert shapes == {(2, 8, 32)}


def test_gradients_of_norms_are_parts(graphs: dict[str, Lowered]) -> None:
    partial = graphs["kept"].plan.partial
    assert "model.layers.3.input_layernorm.weight" in partial and "model.embed_tokens.weight" in partial
    assert not partial & {"lm_head.weight", "model.layers.0.self_attn.q_proj.weight"}
    assert not graphs["whole"].plan.partial


def test_eval_returns_whole_logits() -> None:
    model, rows = qwen2().double().eval(), batch(4)
    with KeepDouble(), torch.no_grad():
        wanted = model(**rows)
        for vocabulary in (False, True):
            options = {"sequence_parallel": True, "vocab_parallel": vocabulary}
            with torch.enable_grad():
                found = lockstep.forward(model, rows, tp=2, **options)
            for loss, logits in zip(found["loss"], found["logits"], strict=True):
                assert (loss - wanted.loss).abs() <= 1e-12 * wanted.loss
                assert (logits - wanted.logits).abs().max() <= 1e-12 * wanted.logits.abs().max()


# -- blocks


@pytest.mark.parametrize("texts", [("0F1", "1B0"), ("0F1", "0F2"), ("1W0",)], ids=["F&B", "F&F", "W"])
@pytest.mark.parametrize("collectives", ["overlap", "blocking", "free"])
def test_blocks_launch_and_wait_for_each(graphs: dict[str, Lowered], texts: Any, collectives: Any) -> None:
    actions = [Action.parse(text) for text in texts]
    made = braid(actions, context(graphs["again"], sends=("send_F0", "send_I1"), collectives=collectives))
    verify_block(made)
    phases = {(a.chunk, p) for a in actions for p in ({"B": "IW"}.get(a.phase.value, a.phase.value))}
    chunks = graphs["again"].chunks
    marks = [
        node.target
        for index, name in phases
        for node, phase in chunks[index].joint.phase.items()
        if phase.value == name and chunks[index].is_collective(node)
    ] * (2 if len(phases) < len(actions) else 1)
    launches = Counter(n.target for n in made.graph_module.graph.nodes if "launch" in n.meta)
    free = collectives == "free"
    assert launches[ALL_GATHER] == (not free) * marks.count(TP_GATHER)
    assert launches[REDUCE_SCATTER] == (not free) * marks.count(TP_SCATTER)
    pieces = cut(made).pieces  # what is compiled as a whole
    inside = Counter(n.target for piece in pieces for n in piece.graph_module.graph.nodes)
    assert all(inside[target] == launches[target] for target in LAUNCHES)


# -- what is refused


def test_tokens_that_do_not_divide() -> None:
    with pytest.raises(
        PlanError, match=r"16 tokens are not divisible by tp_size=3; pad the batch to 18 tokens"
    ):
        lower(
            qwen2(hidden_size=24, num_attention_heads=3, num_key_value_heads=3),
            tp_size=3,
            sequence_parallel=True,
        )


def test_nothing_to_cut() -> None:
    rows = make_batches(2, 2, mask=False, steps=1)[0]
    model = Blocks(lambda m, x, la: x)
    with pytest.raises(PlanError, match="finds nothing to cut"):
        lockstep.step(model, rows, tp=2, tp_plan=PLAN, sequence_parallel=True, vocab_parallel=False)


# -- the braid


def strand(phase: str, layers: int = 3) -> Strand:
    """Norm, then a region in two halves."""
    kinds = [("norm", True, False), ("half", False, True), ("rows", True, True)] * layers
    return Strand(
        phase,
        launches=tuple(launch for _, launch, _ in kinds),
        heavy=tuple(heavy for *_, heavy in kinds),
        depth=tuple(range(len(kinds))),
    )


@pytest.mark.parametrize("phases", ["FF", "FI"])
@pytest.mark.parametrize("head", [False, True], ids=["middle", "head"])
def test_a_half_of_the_other_strand_lies_behind_every_launch(phases: str, head: bool) -> None:
    strands = [strand(phase) for phase in phases]
    if head:  # the backward of the last chunk begins with the head's, which ends with a scatter
        one = strands[1]
        strands[1] = Strand(one.phase, (True, *one.launches), (True, *one.heavy), tuple(range(10)))
    order = weave(strands)
    assert sorted(order) == [(s, u) for s in range(2) for u in range(len(strands[s]))]
    bare = []
    for place, (s, unit) in enumerate(order):
        if strands[s].launches[unit] and (s, unit + 1) in order:
            between = order[place + 1 : order.index((s, unit + 1))]
            if not any(a != s and strands[a].heavy[u] for a, u in between):
                bare.append(place)
    assert bare in ([], [0]), (
        order
    )  # nothing can run beside the first gather where both strands begin with one


def test_what_w_gathers_again_is_launched_ahead() -> None:
    w = Strand("W", (False,) * 3, (True,) * 3, (0, 1, 2), fetches=(True, False, True))
    order = weave([w])
    assert fetch_points([w], order) == {0: [(0, 0)], 1: [(0, 2)]}
    units = tuple(UnitCost(f"w{k}", 1.0, k, fetch=f, fetched=f) for k, f in enumerate((0.5, 0.0, 1.5)))
    times = time_block([Action(Do.W, 0, 0)], Workload((ChunkCost((), (), units),)))
    # w0 waits for its own gather, which nothing hides; w2's runs beside w1 and is waited for half a unit longer.
    assert times.length == 0.5 + 3 * 1.0 + 0.5 and times.exposed == 1.0
    assert sum(change for _, change in times.memory) == 0
    blocking = time_block([Action(Do.W, 0, 0)], Workload((ChunkCost((), (), units),)), braided=False)
    assert blocking.length == 5.0


def test_the_analytic_model_keeps_less_and_moves_as_much() -> None:
    model, on, place = load_model("qwen2-12.1b"), device("a800"), Placement("v", 2, 2)
    whole, kept, again = (
        analytic(model, on, place, Shape(4096, tp=4, sequence=sequence, regather=gathered)).chunks[1]
        for sequence, gathered in ((False, False), (True, False), (True, True))
    )
    assert again.saved < kept.saved < whole.saved and kept.sends_f == whole.sends_f / 4
    # Two latencies where one was.
    alpha = on.latency * sum(unit.launches for unit in whole.f)
    assert kept.collective("F") == pytest.approx(whole.collective("F") + alpha)
    assert kept.collective("W") == 0 < again.collective("W")
    for phase in "FIW":  # less by what norms and residuals take of the other tokens
        assert 0.9 * whole.seconds(phase) < kept.seconds(phase) <= whole.seconds(phase) * (1 + 1e-9)
