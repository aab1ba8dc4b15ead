"""Costs from a device and a configuration, and from a measured profile."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from fxbraid.schedule import Placement, ScheduleError, build
from fxbraid.simulate import (
    DEVICES,
    MODELS,
    ModelConfig,
    Shape,
    analytic,
    device,
    from_profile,
    load_model,
    simulate,
)
from fxbraid.simulate.analytic import CHECKPOINTS, POLICIES
from fxbraid.simulate.kernels import Kernels, pipeline_links

QWEN = load_model("qwen2-12.1b")


@pytest.mark.parametrize("name", list(DEVICES))
def test_every_figure_of_a_device_has_a_source(name: str) -> None:
    found = device(name)
    cited = {part.strip() for key in found.sources for part in key.split(",")}
    for figure in (
        "peak",
        "memory",
        "bandwidth",
        "nvlink",
        "network",
        "gemm",
        "attention",
        "contention",
        "wire",
        "host",
    ):
        assert figure in cited
    assert all(found.sources.values())
    assert 0 < found.gemm < 1 and 0 < found.attention_b <= found.attention_f < 1
    assert len(fields(found)) > 10


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ScheduleError, match="a800"):
        device("v1")
    with pytest.raises(ScheduleError, match=r"config\.json"):
        load_model("nothing/here")


def test_the_parameter_counts() -> None:
    assert QWEN.parameters == pytest.approx(12.1e9, rel=0.01)
    counts = {"meta-llama/Llama-2-7b-hf": 6.74e9, "meta-llama/Llama-3.1-70B": 70.6e9, "Qwen/Qwen2-7B": 7.6e9}
    for name, count in counts.items():
        assert MODELS[name.lower()].parameters == pytest.approx(count, rel=0.01)


def test_a_configuration_file(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = load_model(tmp_path)
    assert (found.hidden, found.layers, found.kv_heads, found.head) == (64, 4, 4, 16)
    with pytest.raises(ScheduleError, match="mixture of 8 experts"):
        ModelConfig.from_dict({**config, "num_local_experts": 8})
    with pytest.raises(ScheduleError, match="vocab_size"):
        ModelConfig.from_dict({"hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1})
    path.write_text("{")
    with pytest.raises(ScheduleError, match="no JSON"):
        load_model(path)


def test_kernels_stay_under_the_roofline() -> None:
    for found in DEVICES.values():
        kernels = Kernels(found)
        for shape in ((6144, 3584, 768), (6144, 512, 3584), (8192, 8192, 8192), (1, 4096, 4096)):
            seconds = kernels.matmul(*shape)
            rows, inner, columns = shape
            assert 2.0 * rows * inner * columns / seconds <= found.peak * found.gemm
            moved = 2 * (rows * inner + inner * columns + rows * columns)
            assert moved / seconds <= found.bandwidth
        # A large product is near its best, a thin one is not.
        rate = 2.0 * 8192**3 / kernels.matmul(8192, 8192, 8192)
        assert rate > 0.8 * found.peak * found.gemm


def test_all_reduce_is_a_ring() -> None:
    a800 = device("a800")
    kernels = Kernels(a800)
    elements = 6144 * 3584
    expected = 2 * 7 / 8 * 2 * elements / (200e9 * 0.8) + a800.latency
    assert kernels.all_reduce(elements, 8) == pytest.approx(expected)
    assert kernels.all_reduce(elements, 1) == 0
    assert kernels.all_reduce(elements, 16) > 5 * kernels.all_reduce(elements, 8)


def test_links_leave_the_node_where_the_ranks_do() -> None:
    h20 = device("h20")
    _, links = pipeline_links(h20, 8, 2, "v")
    inside = [pair for pair, link in links.items() if link.bandwidth > h20.network]
    assert (0, 1) in inside and (3, 4) not in inside and (4, 5) in inside
    _, links = pipeline_links(h20, 2, 8, "loop")
    assert all(link.bandwidth < h20.network for link in links.values())


@pytest.mark.parametrize("checkpoint", [*CHECKPOINTS, *POLICIES])
def test_what_is_saved_is_freed(checkpoint: str) -> None:
    place = Placement("v", 4, 2)
    workload = analytic(QWEN, device("h100"), place, Shape(4096, 1, 2, checkpoint=checkpoint))  # type: ignore[arg-type]
    for chunk in workload.chunks:
        units = (*chunk.f, *chunk.i, *chunk.w)
        assert sum(u.saves for u in units) == pytest.approx(sum(u.frees for u in units))
        assert all(u.saves >= 0 and u.frees >= 0 and u.seconds >= 0 for u in units)


def test_recomputation_trades_memory_for_time() -> None:
    schedule = build("1f1b", p=4, m=8)
    results = [
        simulate(
            schedule,
            analytic(QWEN, device("h100"), schedule.placement, Shape(4096, 1, 2, checkpoint=checkpoint)),
        )
        for checkpoint in CHECKPOINTS
    ]
    times, memory = [r.step_time for r in results], [max(r.peak) for r in results]
    assert times == sorted(times) and memory == sorted(memory, reverse=True)
    assert 1.2 < times[2] / times[0] < 1.4
    assert results[0].mfu is not None and 0.3 < results[0].mfu < 0.8


def test_policies_of_braid_trade_memory_for_time_too() -> None:
    schedule = build("1f1b", p=4, m=8)
    results = {
        policy: simulate(
            schedule, analytic(QWEN, device("h100"), schedule.placement, Shape(4096, 1, 2, checkpoint=policy))
        )
        for policy in ("selective", "full", *POLICIES)
    }
    order = ["selective", "mlp", "attention+mlp"]
    memory = [max(results[policy].peak) for policy in order]
    times = [results[policy].step_time for policy in order]
    assert times == sorted(times) and memory == sorted(memory, reverse=True)
    # Nothing that only the unit's own sum needs is made again, which running all of F once more does.
    assert results["all"].step_time < results["full"].step_time
    again = [unit for unit in results["mlp"].workload.chunks[0].i if unit.again]
    assert {unit.name.rstrip("0123456789") for unit in again} == {"mlp"}


def test_layers_are_balanced_with_embedding_and_head() -> None:
    place = Placement("v", 2, 2)
    workload = analytic(QWEN, device("a800"), place, Shape(6144, 1, 8))
    seconds = [chunk.seconds() for chunk in workload.chunks]
    layer = workload.chunks[1].seconds() / 12
    assert max(seconds) - min(seconds) <= 1.1 * layer
    with pytest.raises(ScheduleError, match="add up"):
        analytic(QWEN, device("a800"), place, Shape(6144, 1, 8), layers=[12, 12, 12, 12])
    with pytest.raises(ScheduleError, match="tp=3"):
        analytic(QWEN, device("a800"), place, Shape(6144, 1, 3))
    with pytest.raises(ScheduleError, match="46 layers"):
        analytic(QWEN, device("a800"), Placement("v", 32, 2), Shape(6144))


def test_a_profile_is_looked_up_by_unit_and_by_kind() -> None:
    schedule = build("1f1b", p=2, m=4)
    seconds = {
        "attn_F": 1.0,
        "attn_I": 1.0,
        "attn_W": 0.5,
        "mlp_F": 2.0,
        "mlp_I": 2.0,
        "mlp_W": 2.0,
        "mlp1_F": 3.0,
    }
    seconds |= {"head_F": 1.0, "head_I": 1.0, "head_W": 1.0}
    chunks = [["attn0", "mlp0"], ["attn1", "mlp1", "head"]]
    workload = from_profile(
        seconds, chunks, collective={"attn_F": 0.1, "attn_I": 0.2, "mlp_F": 0.3, "mlp_I": 0.4}
    )
    assert [unit.seconds for unit in workload.chunks[1].f] == [1.0, 3.0, 1.0, 0.0]
    assert [unit.name for unit in workload.chunks[1].i] == ["head", "mlp1", "attn1", "tail"]
    assert [unit.depth for unit in workload.chunks[1].w] == [0, 1, 2]
    assert workload.chunks[0].collective("F") == pytest.approx(0.4)
    assert simulate(schedule, workload).ranks[0].compute == pytest.approx(4 * 8.5)
    with pytest.raises(ScheduleError, match="nothing of unit 'moe3'"):
        from_profile(seconds, [["moe3"]])
    with pytest.raises(ScheduleError, match="collective behind mlp0_I"):
        from_profile(seconds, chunks, collective={"attn_F": 1.0, "attn_I": 1.0, "mlp_F": 1.0})
