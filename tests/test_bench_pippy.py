"""The torch baseline is right: the loss and gradients of one process, on 2 x 2 ranks."""

from __future__ import annotations

import pytest
import torch

from fxbraid.bench.models import build_model, load_config, make_batch
from fxbraid.bench.parity import Difference, compare, dtensor_part, run_reference
from fxbraid.bench.pippy import SCHEDULES, TorchPipeline
from fxbraid.bench.stages import layer_styles, split_layers
from fxbraid.runtime.launch import launch, process_group


def run_schedules(
    model: str, tied: bool, schedules: list[str], pp: int, tp: int, m: int, dtype: torch.dtype
) -> list[tuple[str, Difference]]:
    from torch.distributed.device_mesh import init_device_mesh

    with process_group(timeout_s=60):
        mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
        config = load_config(
            model, hidden_size=32, intermediate_size=48, vocab_size=64, tie_word_embeddings=tied
        )
        batch = make_batch(64, 2 * m, 12, seed=3, ragged=True)
        reference = run_reference(build_model(config, 0, dtype), batch)
        found = []
        for name in schedules:
            pipeline = TorchPipeline(
                build_model(config, 0, dtype),
                name,
                mesh=mesh,
                n_microbatches=m,
                microbatch_size=2,
                seq_len=12,
            )
            pipeline.step(**batch)
            pipeline.zero_grad()
            loss = pipeline.step(**batch)
            parts = [dtensor_part(*item) for item in pipeline.named_parameters()]
            found.append((name, compare(loss, parts, reference)))
        return found


@pytest.mark.parametrize(
    ("model", "tied", "names"),
    [
        pytest.param("qwen2-tiny", False, list(SCHEDULES), marks=pytest.mark.slow),
        ("qwen2-tiny", True, list(SCHEDULES)),
        pytest.param(
            "llama-tiny",
            True,
            ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["qwen2-untied", "qwen2-tied", "llama-tied"],
)
def test_every_schedule_gives_the_unsplit_gradients(model: str, tied: bool, names: list[str]) -> None:
    results = launch(run_schedules, (model, tied, names, 2, 2, 4, torch.float32), nproc=4, timeout_s=240)
    for name, difference in results[0]:
        assert difference.within(1e-6, 1e-5), (name, difference)
    assert [name for name, _ in results[0]] == names
    assert all(result == results[0] for result in results)


@pytest.mark.slow
def test_in_double_precision_nothing_is_left_of_the_difference() -> None:
    names = ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"]
    results = launch(
        run_schedules, ("qwen2-tiny", True, names, 2, 2, 4, torch.float64), nproc=4, timeout_s=240
    )
    for name, difference in results[0]:
        assert difference.within(1e-12, 1e-12), (name, difference)


def test_one_process_and_pipeline_only() -> None:
    results = launch(
        run_schedules, ("qwen2-tiny", True, ["ScheduleGPipe"], 1, 1, 3, torch.float32), nproc=1, timeout_s=120
    )
    assert results[0][0][1].within(1e-6, 1e-5)


def test_layers_are_split_evenly() -> None:
    assert [list(part) for part in split_layers(5, 2)] == [[0, 1, 2], [3, 4]]
    assert [len(part) for part in split_layers(30, 4)] == [8, 8, 7, 7]
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages; use at most 3"):
        split_layers(3, 4)


def test_the_plan_is_the_models_own() -> None:
    model = build_model(load_config("llama-tiny", num_hidden_layers=1), 0)
    assert layer_styles(model) == {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
    }


@pytest.mark.parametrize(
    ("name", "p", "m", "reason"),
    [
        ("ScheduleGPipe", 4, 1, None),
        ("Schedule1F1B", 4, 3, "it needs m >= 4 stages, and m is 3"),
        ("ScheduleInterleaved1F1B", 2, 8, None),
        ("ScheduleInterleaved1F1B", 2, 5, "it needs m divisible by max(1, m // p) = 2, and m is 5"),
        ("ScheduleDualPipeV", 2, 3, "it needs m >= 2p = 4, and m is 3"),
        ("ScheduleZBVZeroBubble", 2, 1, None),
    ],
)
def test_what_a_schedule_cannot_run_is_said(name: str, p: int, m: int, reason: str | None) -> None:
    assert SCHEDULES[name].refuses(p, m) == reason
