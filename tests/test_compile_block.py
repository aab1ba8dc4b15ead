"""compile="block": what was placed between a launch and its wait is there in the code that Inductor generates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxbraid import compat
from fxbraid.passes.block import Block, braid
from fxbraid.passes.compile import Artefacts
from fxbraid.passes.compile_block import Cut, cut
from fxbraid.passes.compile_pin import options
from fxbraid.passes.errors import UnsupportedError
from fxbraid.passes.joint import Phase
from fxbraid.passes.launches import ALL_REDUCE, WAIT
from fxbraid.passes.marks import is_matmul
from fxbraid.passes.pipeline import Lowered
from fxbraid.runtime.piece import BoundPiece
from fxbraid.runtime.unit import GradSlot
from fxbraid.schedule import Action

from .generated import Order, Window, generate, of_code, of_plan, plan_of, tp_group, two_strands
from .tiny import context, lower, qwen2

UNPINNED: dict[str, Any] = {}


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    with tp_group() as name:
        yield name


@pytest.fixture(scope="module")
def models() -> dict[int, Lowered]:
    """By depth: two chunks of one layer each, and of two."""
    return {layers: lower(qwen2(num_hidden_layers=layers), n_chunks=2) for layers in (2, 4)}


@pytest.fixture(scope="module")
def lowered(models: dict[int, Lowered]) -> Lowered:
    return models[4]


def block(
    lowered: Lowered, group: str, *texts: str, sends: tuple[str, ...] = (), collectives: Any = "overlap"
) -> Block:
    made = replace(context(lowered, sends=sends, collectives=collectives), tp_group=group)
    return braid([Action.parse(text) for text in texts], made)


def orders(cut_: Cut, opts: dict[str, Any]) -> tuple[list[Order], list[Order]]:
    """Planned and generated, piece by piece."""
    return [plan_of(p) for p in cut_.pieces], [of_code(generate(p.graph_module, opts)) for p in cut_.pieces]


def same_hiding(planned: Order, made: Order) -> bool:
    """The same matmuls, launches and waits in the same order, and a kernel wherever there was something to do."""
    assert len(planned.windows) == len(made.windows)
    return planned.text == made.text and all(
        (a.kernels > 0) <= (b.kernels + b.matmuls > 0)
        for a, b in zip(planned.windows, made.windows, strict=True)
    )


@pytest.mark.parametrize(
    ("layers", "texts"),
    [
        (4, ("0F1", "1B0")),
        (4, ("0F1", "0F2")),
        (2, ("0F1", "1W0")),
        (2, ("1B0",)),
        (2, ("0F2", "1I1", "1W0")),
    ],
    ids=["F&B", "F&F", "F&W", "B", "F&I&W"],
)
def test_the_generated_code_holds_what_was_placed(
    models: dict[int, Lowered], group: str, layers: int, texts: tuple[str, ...]
) -> None:
    lowered = models[layers]
    planned, made = orders(cut(block(lowered, group, *texts)), options())
    assert [o.text for o in made] == [o.text for o in planned]
    assert [[w.matmuls for w in o.windows] for o in made] == [[w.matmuls for w in o.windows] for o in planned]
    hidden = [w.matmuls for o in made for w in o.windows]
    assert sum(n > 0 for n in hidden) >= len(hidden) - 2  # the last launch of a strand has nothing behind it
    assert all(map(same_hiding, planned, made))


@pytest.mark.parametrize("filler", ["matmul", "pointwise"])
def test_filler_stays_though_it_shares_a_buffer_with_the_other_strand(group: str, filler: str) -> None:
    """Without the pins Inductor fuses the strands through ``table``, writes the filler down where it is read, or makes
    its product and the last addition one ``addmm``: all of it behind the wait."""
    module = two_strands(group, filler)
    planned, made = of_plan(module.graph), of_code(generate(module, options()))
    assert made.text == planned.text
    (window,) = made.windows
    assert window.matmuls == (filler == "matmul")
    assert window.kernels >= 1
    (loose,) = of_code(generate(module, UNPINNED)).windows
    assert loose == Window(0, 0)


@pytest.mark.slow
def test_without_the_pins_nothing_stays_between_a_launch_and_its_wait(
    models: dict[int, Lowered], group: str
) -> None:
    """What the tests above guard against: if this fails, Inductor has learned to keep an order by itself."""
    (piece,) = cut(block(models[2], group, "0F1", "0F2")).pieces
    made = of_code(generate(piece.graph_module, UNPINNED))
    assert made.text != plan_of(piece).text
    assert sum(w.matmuls for w in made.windows) < sum(w.matmuls for w in plan_of(piece).windows)


def test_an_input_is_freed_behind_the_kernel_that_reads_it_last(group: str) -> None:
    code = generate(two_strands(group, "matmul"), options())
    assert "args.clear()" in code
    assert code.index("del arg0_1") < code.index(
        "all_reduce_.default("
    )  # x, which only the first product reads


@pytest.mark.parametrize("index", [0, 1])
def test_I_and_W_blocks_redo_neither_the_forward_nor_each_other(
    models: dict[int, Lowered], group: str, index: int
) -> None:
    lowered = models[2]
    code = {
        phase: generate(cut(block(lowered, group, f"{index}{phase}0")).pieces[0].graph_module, options())
        for phase in "FIW"
    }
    products = {phase: of_code(text).text.split().count("m") for phase, text in code.items()}
    model = lowered.partition.chunks[index].graph_module.graph
    tables = sum(u.matmuls for u in lowered.chunks[index].units[Phase.F] if u.index < 0)  # of rotary angles
    wanted = sum(map(is_matmul, model.nodes)) - tables
    assert (
        wanted <= products["F"] <= wanted + tables
    )  # Inductor makes an outer product a plain multiplication
    assert products["I"] + products["W"] == 2 * wanted
    calls = {
        phase: set(re.findall(r"aten\.(_?scaled_dot_product\w+)\.default\(", text))
        for phase, text in code.items()
    }
    assert calls["F"] and all("backward" not in name for name in calls["F"])
    assert calls["I"] and all("backward" in name for name in calls["I"])
    assert not calls["W"]


# -- cutting: graphs only, nothing is compiled


def test_a_block_is_cut_at_its_sends_and_nowhere_else(lowered: Lowered) -> None:
    whole = cut(block(lowered, "tp", "0F1", "1B0"))
    assert len(whole.pieces) == 1 and not whole.modules
    made = cut(block(lowered, "tp", "0F1", "1B0", sends=("send_F0", "send_I1")))
    calls = [str(n.target) for n in made.graph.nodes if n.op == "call_module"]
    assert calls == ["piece_0", "send_F0", "piece_1", "send_I1", "piece_2"]
    units = [label for piece in made.pieces for label in piece.units]
    plan = block(lowered, "tp", "0F1", "1B0").graph_module.graph
    assert units == [n.meta["unit"].label for n in plan.nodes if "unit" in n.meta]
    assert set(made.modules) == {"send_F0", "send_I1"}


def test_a_result_leaves_before_the_units_that_trail_it(lowered: Lowered) -> None:
    made = cut(block(lowered, "tp", "0F1", "1B0", sends=("send_F0", "send_I1")))
    # The second tail of I: the first one is the norm's behind the head's all-reduce.
    assert "tail_c1_2_I" not in made.pieces[0].units and "tail_c0_F" in made.pieces[0].units
    assert made.pieces[2].units[-1] == "norm2_W"
    assert all(label.endswith("_W") for label in made.pieces[2].units)


def test_a_collective_may_be_waited_for_in_a_later_piece(models: dict[int, Lowered], group: str) -> None:
    """The cut falls between the I strand's launch and its wait: the wait is the next piece's first word."""
    made = cut(block(models[2], group, "0F1", "1B0", sends=("send_F0",)))
    planned, code = orders(made, options())
    assert [o.text for o in code] == [o.text for o in planned]
    assert sum("v0" in o.text for o in planned) == 1


@pytest.mark.parametrize("texts", [("0F0",), ("1B0",), ("0F1", "1B0"), ("0F2", "1I1", "1W0")])
def test_pieces_hold_every_operation_once_and_every_gradient(
    lowered: Lowered, texts: tuple[str, ...]
) -> None:
    made = block(lowered, "tp", *texts)
    wanted = [n.target for u in _units(made) for n in u.graph_module.graph.nodes if n.op == "call_function"]
    pieces = cut(made).pieces
    held = [n.target for p in pieces for n in p.graph_module.graph.nodes if n.op == "call_function"]
    fences = (ALL_REDUCE, WAIT)
    assert [t for t in held if t not in fences] == wanted
    assert sum(t in fences for t in held) == sum(n.target in fences for n in made.graph_module.graph.nodes)
    grads = [(u.chunk, g) for u in _units(made) for g in u.grads if g is not None]
    assert [slot for piece in pieces for slot in piece.grads] == grads


def _units(made: Block) -> list[Any]:
    return [n.meta["unit"] for n in made.graph_module.graph.nodes if "unit" in n.meta]


def test_equal_blocks_share_a_key_whatever_their_chunks() -> None:
    wide = lower(qwen2(num_hidden_layers=4), n_chunks=4)

    def keys(*texts: str) -> list[str]:
        return [piece.key for piece in cut(block(wide, "tp", *texts)).pieces]

    # Chunks 1 and 2 are alike; the first reads the embedding and the last the head.
    assert keys("1F1", "2B0") == keys("2F1", "1B0")
    assert keys("1F0") == keys("2F0")
    assert keys("0F0") != keys("1F0")
    assert keys("1F1", "2B0") != keys("1F1", "2I0")


def test_blocking_waits_at_once_and_free_has_no_collective(lowered: Lowered) -> None:
    (blocking,) = cut(block(lowered, "tp", "0F1", "1B0", collectives="blocking")).pieces
    assert all(w == Window(0, 0) for w in plan_of(blocking).windows)
    (free,) = cut(block(lowered, "tp", "0F1", "1B0", collectives="free")).pieces
    assert not plan_of(free).windows and "L" not in plan_of(free).text


def test_one_tp_rank_has_no_collective() -> None:
    alone = lower(qwen2(num_hidden_layers=2), n_chunks=2, tp_size=1)
    (piece,) = cut(block(alone, "", "0F1", "1B0")).pieces
    assert set(plan_of(piece).text.split()) == {"m"}


# -- on a rank


class Fails:
    """Artefacts whose pieces fail as they run."""

    def get_piece(self, piece: Any) -> Any:
        def run(*inputs: torch.Tensor) -> Any:
            raise RuntimeError("out of memory")

        return run


def bound(lowered: Lowered, artefacts: Any) -> BoundPiece:
    """The second piece of F0&B1, on parameters of its own."""
    piece = cut(block(lowered, "tp", "0F1", "1B0", sends=("send_F0",))).pieces[1]
    state = {name: torch.empty(0) for name in piece.state}
    slots = {c: {n: GradSlot(torch.nn.Parameter(torch.empty(0)), shared=False) for k, n in piece.grads if k == c}
             for c in (0, 1)}  # fmt: skip
    return BoundPiece(piece, artefacts, state, slots)


def test_an_error_inside_names_the_block_and_its_units(lowered: Lowered) -> None:
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        bound(lowered, Fails())([torch.empty(0)])
    (note,) = caught.value.__notes__
    assert "F0&B1[1]" in note and "norm2_W" in note


def test_a_failure_of_inductor_names_the_block(lowered: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("buf7")

    monkeypatch.setattr(compat, "standalone_compile", fail)
    with pytest.raises(UnsupportedError, match=r"F0&B1\[1\].*KeyError.*compile=False"):
        bound(lowered, Artefacts("block"))


def test_modelled_unit_times_are_refused(lowered: Lowered) -> None:
    made = bound(lowered, Fails())
    made._session = SimpleNamespace(units=object(), cluster=SimpleNamespace(clock="virtual"))  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r'virtual clock.*compile="unit"'):
        made([torch.empty(0)])
    made._session.cluster.clock = "wall"  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="out of memory"):
        made([torch.empty(0)])
