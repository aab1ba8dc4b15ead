"""What goes wrong in ranks: the same error on all of them before any collective, and no process left behind."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

import fxbraid
from fxbraid.runtime.launch import RankError, launch, process_group
from fxbraid.runtime.unit import BoundUnit

from .tiny import batch, qwen2

#: sizes, model and batch of each refusal, with what its message must say
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "batch": (
        {"n_microbatches": 4},
        {},
        6,
        "n_microbatches=4 does not divide the batch of 6; use 1, 2, 3 or 6",
    ),
    "world": (
        {"tp_size": 3, "pp_size": 1},
        {},
        4,
        "tp_size=3 x pp_size=1 needs 3 processes, but there are 2",
    ),
    "layers": ({"pp_size": 2}, {"num_hidden_layers": 3}, 4, "3 layers, fewer than the 4 chunks"),
    "heads": (
        {"tp_size": 2},
        {"num_attention_heads": 9, "num_key_value_heads": 9, "hidden_size": 36},
        4,
        "num_attention_heads=9 of model.layers.0.self_attn is not divisible by tp_size=2; use tp_size 1, 3 or 9",
    ),
    "dropout": ({"pp_size": 2}, {"attention_dropout": 0.5}, 4, "dropout p=0.5"),
    "both": ({"device_mesh": True, "tp_size": 2}, {}, 4, "give device_mesh or the sizes"),
    "axes": ({"device_mesh": "xy"}, {}, 4, 'name them "pp" and "tp"'),
    "order": ({"device_mesh": "tp,pp"}, {}, 4, 'put the "pp" axis of device_mesh before "tp"'),
}

#: what the first and the second rank ask for: without a word they would wait for each other
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "schedule": ("stp", "1f1b"),
    "order": ("paper", "costs"),
    "n_microbatches": (2, 4),
}


def refuse_all() -> dict[str, str]:
    """In a rank: the message of every refusal. None of them may leave the other rank waiting."""
    from torch.distributed.device_mesh import init_device_mesh

    said = {}
    with process_group(timeout_s=20):
        for name, (options, config, rows, _) in REFUSALS.items():
            options = {"n_microbatches": 2, "compile": False, **options}
            kind = options.pop("device_mesh", None)
            if kind is not None:
                names = {True: ("pp", "tp"), "xy": ("x", "y")}.get(kind) or tuple(str(kind).split(","))
                shape = (2, 1) if kind is True else (1, 2)
                options["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
            try:
                fxbraid.braid(qwen2(**config).train(), batch(rows), **options)
            except fxbraid.BraidError as error:
                said[name] = str(error)
        rank = int(os.environ["RANK"])
        for name, values in DIFFERENT.items():
            options = {"n_microbatches": 2, "compile": False, "pp_size": 2, name: values[rank]}
            try:
                fxbraid.braid(qwen2().train(), batch(4), **options)
            except fxbraid.BraidError as error:
                said[f"different {name}"] = str(error)
        # After all these the ranks still work together.
        good = fxbraid.braid(qwen2(), batch(4), pp_size=2, n_microbatches=2, compile=False)
        said["loss"] = str(good.step(**batch(4)).item())
    return said


def test_refusals_are_the_same_on_all_ranks_and_stop_nothing() -> None:
    one, two = launch(refuse_all, (), nproc=2, timeout_s=240)
    assert one == two
    for name, (*_, wanted) in REFUSALS.items():
        assert wanted in one[name], name
    for name, (first, second) in DIFFERENT.items():
        assert (
            f"{name} differs between ranks ({first!r} on rank 0; {second!r} on rank 1)"
            in one[f"different {name}"]
        )
    assert abs(float(one["loss"]) - qwen2()(**batch(4)).loss.item()) < 1e-5


def raise_in_a_unit(pid_file: str) -> None:
    """In a rank: rank 1 fails in the middle of a step while the others wait for its collectives."""
    with open(f"{pid_file}-{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    with process_group(timeout_s=120):
        model = fxbraid.braid(qwen2(), batch(4), tp_size=2, pp_size=2, n_microbatches=2, compile=False)
        if os.environ["RANK"] == "1":

            def fail(*_: Any) -> None:
                raise ValueError("a unit of rank 1 broke")

            block = next(iter(model.blocks.values())).graph_module
            # The program holds its units' functions already; what they call can still be another.
            next(m for m in block.children() if isinstance(m, BoundUnit))._call = fail
        started = time.monotonic()
        try:
            model.step(**batch(4))
        finally:
            print("step ended after", time.monotonic() - started)


def test_a_rank_that_raises_stops_the_others_with_its_message(tmp_path: Any) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="a unit of rank 1 broke") as error:
        launch(raise_in_a_unit, (str(tmp_path / "pid"),), nproc=4, timeout_s=240)
    assert error.value.rank == 1
    # Far below the 120 s that the process group would have waited.
    assert time.monotonic() - started < 110
    for rank in range(4):
        pid = int((tmp_path / f"pid-{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def layouts_of_a_tied_model() -> dict[str, Any]:
    """In a rank: what each rank holds of a tied model, on the loop and on the V placement."""
    with process_group(timeout_s=60):
        found: dict[str, Any] = {}
        for schedule in ("1f1b", "stp"):
            plain = qwen2(tie_word_embeddings=True)
            model = fxbraid.braid(
                plain, batch(4), pp_size=2, n_microbatches=2, schedule=schedule, compile=False
            )
            loss = model.step(**batch(4))
            names = [name for name, _ in model.named_parameters()]
            norm = model.clip_grad_norm_(1e9)
            grad = dict(model.named_parameters()).get("model.embed_tokens.weight")
            model.eval()
            out = model(**batch(4))
            found[schedule] = {
                "loss": loss.item(),
                "names": names,
                "state": sorted(model.state_dict()),
                "norm": norm.item(),
                "grad": None if grad is None or grad.grad is None else grad.grad.double().sum().item(),
                "logits": None if out.logits is None else tuple(out.logits.shape),
                "eval": out.loss.item(),
            }
        return found


def test_tied_embeddings_lie_on_one_rank_of_a_V_and_on_both_ends_of_a_loop() -> None:
    plain = qwen2(tie_word_embeddings=True)
    loss = plain(**batch(4)).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    first, last = launch(layouts_of_a_tied_model, (), nproc=2, timeout_s=120)
    shared = "model.embed_tokens.weight"
    assert shared in first["1f1b"]["names"] and shared in last["1f1b"]["names"]
    assert first["1f1b"]["grad"] == last["1f1b"]["grad"]
    assert shared in first["stp"]["names"] and shared not in last["stp"]["names"]
    for rank in (first, last):
        for schedule in ("1f1b", "stp"):
            assert rank[schedule]["loss"] == pytest.approx(loss.item(), rel=1e-6)
            assert rank[schedule]["eval"] == pytest.approx(loss.item(), rel=1e-6)
            assert rank[schedule]["norm"] == pytest.approx(norm, rel=1e-5)
    # Every parameter is somewhere, under its own name; only the tied one is on two ranks of the loop.
    everything = set(plain.state_dict())
    for schedule in ("1f1b", "stp"):
        one, two = set(first[schedule]["state"]), set(last[schedule]["state"])
        assert one | two == everything
        assert one & two == ({shared, "lm_head.weight"} if schedule == "1f1b" else set())
    assert last["1f1b"]["logits"] == (4, 16, 96) and first["1f1b"]["logits"] is None
    assert first["stp"]["logits"] == (4, 16, 96) and last["stp"]["logits"] is None
