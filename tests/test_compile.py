"""Artefacts: what makes two units one, how many there are, the cache on disk, and who redoes what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from fxbraid.passes.compile import Artefacts, compile_graph
from fxbraid.passes.errors import UnsupportedError
from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_matmul
from fxbraid.passes.pipeline import Lowered
from fxbraid.passes.units import Unit, canonical_key
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link
from fxbraid.runtime.launch import launch, process_group
from fxbraid.schedule import Placement, Schedule, parse_step

from .parity import Case, Outcome, merge, run_case, run_cases, share_traces
from .tiny import lower, qwen2

aten = torch.ops.aten


# -- the key


def small(
    op: Any = aten.mul.Tensor,
    shape: tuple[int, ...] = (4, 6),
    stride: tuple[int, ...] = (6, 1),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scalar: float = 2.0,
    names: str = "ab",
    swap: bool = False,
    outs: int = 2,
) -> fx.Graph:
    """sin(a op b) + scalar, returning the first ``outs`` of its results."""
    graph = fx.Graph()
    holders = [graph.placeholder(name) for name in names]
    for holder in holders:
        holder.meta["val"] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    first = graph.call_function(op, tuple(reversed(holders)) if swap else tuple(holders))
    second = graph.call_function(aten.add.Scalar, (graph.call_function(aten.sin.default, (first,)), scalar))
    graph.output((second, first)[:outs])
    return graph


@pytest.mark.parametrize(
    "change",
    [
        {"op": aten.sub.Tensor},
        {"shape": (6, 4), "stride": (4, 1)},
        {"stride": (1, 4)},
        {"dtype": torch.float64},
        {"device": "meta"},
        {"scalar": 2.5},
        {"swap": True},
        {"outs": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_covers(change: dict[str, Any]) -> None:
    assert canonical_key(small(**change)) != canonical_key(small())


def test_the_key_does_not_cover_names() -> None:
    assert canonical_key(small(names="xy")) == canonical_key(small())


def test_a_graph_with_a_tensor_of_its_own_has_no_key() -> None:
    graph = small()
    with graph.inserting_before():
        graph.get_attr("weight")
    with pytest.raises(ValueError, match="get_attr weight"):
        canonical_key(graph)


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    return lower(n_chunks=2)


def test_no_unit_holds_a_tensor_of_its_own(lowered: Lowered) -> None:
    for unit in units_of(lowered):
        assert not unit.graph_module.graph.find_nodes(op="get_attr")


# -- how many


def units_of(lowered: Lowered) -> list[Unit]:
    return [u for chunk in lowered.chunks.values() for us in chunk.units.values() for u in us]


def count_artefacts(layers: int) -> int:
    """Of all four chunks of p = 2 ranks; nothing is compiled."""
    artefacts = Artefacts(False)
    for unit in units_of(lower(qwen2(num_hidden_layers=layers), n_chunks=4)):
        artefacts.get(unit)
    return len(artefacts)


@pytest.mark.parametrize("layers", [12, pytest.param(32, marks=pytest.mark.slow)])
def test_artefacts_do_not_grow_with_depth(layers: int) -> None:
    """From one layer a chunk to three and to eight."""
    assert count_artefacts(layers) < 1.3 * count_artefacts(4)


# -- the cache on disk


def compile_two() -> dict[str, int]:
    """In a rank: compile as a unit is, and as a piece of a block is; Inductor's count of what it found and made."""
    from torch._dynamo.utils import counters

    from fxbraid.passes.compile_pin import options

    from .generated import tp_group, two_strands

    unit = fx.GraphModule({}, small())
    compile_graph(unit, canonical_key(unit.graph), name="unit")
    with tp_group() as name:
        piece = two_strands(name, "pointwise")
        compile_graph(piece, canonical_key(piece.graph), name="piece", options=options())
    found = counters["aot_autograd"]
    return {
        "made": found["autograd_cache_miss"],
        "found": found["autograd_cache_hit"],
        "asked": found["total"],
    }


def test_ranks_and_later_runs_find_what_one_process_compiled(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first = launch(compile_two, nproc=2, timeout_s=300, env=env)
    second = launch(compile_two, nproc=1, timeout_s=300, env=env)
    assert [counts["asked"] for counts in (*first, *second)] == [2, 2, 2]
    assert sum(counts["made"] for counts in first) == 2  # by one of the two ranks, or one by each
    assert sum(counts["found"] for counts in first) == 2
    assert second == [{"made": 0, "found": 2, "asked": 2}]


# -- nobody redoes anything


def model_matmuls(lowered: Lowered, index: int) -> int:
    """Products in the model's own graph of a chunk, before anything is differentiated."""
    return sum(is_matmul(n) for n in lowered.partition.chunks[index].graph_module.graph.nodes)


def per_phase(lowered: Lowered, index: int) -> dict[Phase, int]:
    return {
        phase: sum(is_matmul(n) for u in us for n in u.graph_module.graph.nodes)
        for phase, us in lowered.chunks[index].units.items()
    }


@pytest.mark.parametrize("index", [0, 1])
def test_I_and_W_redo_neither_the_forward_nor_each_other(lowered: Lowered, index: int) -> None:
    counts = per_phase(lowered, index)
    assert counts[Phase.F] == model_matmuls(lowered, index)
    assert counts[Phase.I] + counts[Phase.W] == 2 * counts[Phase.F] - tables(lowered, index) * 2
    for unit in units_of(lowered):
        for node in unit.graph_module.graph.nodes:
            forward = "scaled_dot_product" in str(node.target) and "backward" not in str(node.target)
            assert not forward or unit.phase is Phase.F, unit.label


def tables(lowered: Lowered, index: int) -> int:
    """Products that make the rotary table, which nothing differentiates."""
    return sum(u.matmuls for u in lowered.chunks[index].units[Phase.F] if u.index < 0)


def test_nothing_asks_for_an_input_gradient_that_nobody_needs() -> None:
    """With the embedding and the first norm frozen, the first layer's q, k and v have no input gradient."""
    model = qwen2()
    for name, parameter in model.named_parameters():
        if "embed" in name or name == "model.layers.0.input_layernorm.weight":
            parameter.requires_grad_(False)
    lowered = lower(model, n_chunks=2)
    counts = per_phase(lowered, 0)
    products = counts[Phase.F] - tables(lowered, 0)
    assert counts[Phase.I] + counts[Phase.W] == 2 * products - 3
    # No collective and no input gradient waits for the first layer's attention: all of it can wait in W.
    assert counts[Phase.W] > products


# -- the modes


def test_a_mode_that_is_not_one_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r'"unit".*"block".*False'):
        Artefacts("everything")  # type: ignore[arg-type]


def braided_1f1b(m: int = 3) -> Schedule:
    """Two ranks of one chunk each, every F but the first ones braided with a B: few blocks, all kinds of cut."""
    rows = (
        ["0F0", "0F1", *(f"(0F{j};0B{j - 2})OVERLAP_F_B" for j in range(2, m)), f"0B{m - 2}", f"0B{m - 1}"],
        ["1F0", *(f"(1F{j};1B{j - 1})OVERLAP_F_B" for j in range(1, m)), f"1B{m - 1}"],
    )
    actions = tuple(tuple(map(parse_step, row)) for row in rows)
    return Schedule("braided 1f1b", Placement("loop", 2, 1), m, actions)


def run_on_both(case: Case) -> list[Outcome]:
    """In a rank: on gloo, then on an emulated cluster with slow links."""
    torch.set_num_threads(1)
    share_traces()
    with process_group(timeout_s=120):
        outcomes = [run_case(case)]
    with emulate.process_group(Cluster(Link(1e-3), Link(1e-3)), timeout_s=120):
        return [*outcomes, run_case(case)]


@pytest.mark.slow
def test_2x2_compiled_in_blocks_agrees_with_the_plain_model() -> None:
    case = Case(tp=2, pp=2, layers=2, m=3, steps=2, compile="block", schedule=braided_1f1b())  # type: ignore[arg-type]
    per_rank = launch(run_on_both, (case,), nproc=4, timeout_s=500)
    gloo, emulated = (merge([outcomes[k] for outcomes in per_rank]) for k in range(2))
    for outcome in (gloo, emulated):
        assert_parity(outcome)
    assert gloo.digests == emulated.digests


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["stp", "zbv"])
def test_2x2_on_the_v_compiled_in_blocks(schedule: str) -> None:
    check(Case(tp=2, pp=2, layers=4, m=5, steps=2, compile="block", schedule=schedule))


def check(case: Case) -> None:
    assert_parity(merge([outcomes[0] for outcomes in launch(run_cases, ([case],), nproc=4, timeout_s=900)]))


def assert_parity(outcome: Outcome) -> None:
    assert outcome.loss <= 1e-6, outcome
    assert outcome.grad <= 1e-5, outcome
    assert outcome.norm <= 1e-5, outcome
