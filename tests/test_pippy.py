"""fxbraid's chunks, schedules and braids in torch's pipeline runtime, against ``BraidedModel.step`` to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxbraid.tracing
from fxbraid import compat_pippy, pippy
from fxbraid import schedule as S
from fxbraid.compat_pippy import TorchAction, TorchRuntime
from fxbraid.runtime import emulate
from fxbraid.runtime.emulate import Cluster, Link
from fxbraid.runtime.launch import launch, process_group
from fxbraid.runtime.mesh import Mesh
from fxbraid.schedule import Schedule

from .parity import make_batches, make_model, share_traces

#: A user's own order on two ranks: W's late, braided with forwards and with I's in torch's words.
USERS = (
    "0F0,0F1,0F2,0I0,(0F3;0I1;0W0)OVERLAP_F_B,(0I2;0W1)OVERLAP_F_B,0W2,0B3\n"
    "1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,(1F3;1I2)OVERLAP_F_B,(1I3;1W2)OVERLAP_F_B,1W3\n"
)


def braid(schedule: str | Schedule, batch: dict[str, Any], m: int, layers: int = 4, **options: Any) -> Any:
    options = {"tp_size": 1, "pp_size": 1, "compile": False, **options}
    plain = make_model("qwen2", tied=True, layers=layers, dtype=torch.float32)
    return fxbraid.braid(plain, batch, n_microbatches=m, schedule=schedule, **options)


def with_messages(model: Any) -> TorchRuntime:
    """The order of ``model`` as torch writes it with messages, read back as that."""
    made = TorchRuntime(pippy.stages(model), model.schedule.m, loss_fn=pippy.loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        pippy.torch_schedule(model)._dump_csv(file.name, format="compute_comms")
        made._load_csv(file.name, format="compute_comms")
    return made


def compare(schedule: str | Schedule, m: int, **options: Any) -> dict[str, Any]:
    """In a rank: three AdamW steps of ``BraidedModel.step``, of torch's runtime with braids, and of it without (and
    with the messages in the file); what differs, and the blocks that ran."""
    batches = make_batches(2, m, mask=True, steps=3)
    models = [braid(schedule, batches[0], m, **options) for _ in range(3)]
    one = pippy.Runtime(models[1])
    two = pippy.Runtime(models[2], with_messages(models[2]), braided=False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3) for model in models]
    differ = []
    for k, batch in enumerate(batches):
        losses = [step(**batch) for step in (models[0].step, one.step, two.step)]
        differ += [f"loss {k}: {losses}" for loss in losses if not torch.equal(loss, losses[0])]
        wanted = {name: parameter.grad for name, parameter in models[0].named_parameters()}
        for which, model in (("braided", models[1]), ("one by one", models[2])):
            for name, parameter in model.named_parameters():
                if not torch.equal(parameter.grad, wanted[name]):
                    differ.append(f"step {k}, {which}: {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    row = models[0].schedule.actions[models[0]._mesh.pp_rank]
    return {
        "differ": differ,
        "steps": len(row),
        "actions": sum(len(S.parts(step)) for step in row),
        "braids": sum(len(S.parts(step)) > 1 for step in row),
        "braided": one.ran,
        "one by one": two.ran,
        "losses": [float(loss) for loss in losses],
    }


def check(found: dict[str, Any]) -> None:
    """Nothing differs, and as many braids ran as there are."""
    assert found["differ"] == []
    assert found["braided"].total() == found["steps"]
    assert sum(n for name, n in found["braided"].items() if "&" in name) == found["braids"]
    assert found["one by one"].total() == found["actions"]
    assert not any("&" in name for name in found["one by one"])


# -- what is taken from inside torch


def test_every_private_name_is_there_with_the_arguments_that_are_used() -> None:
    assert compat_pippy.missing_pippy() == []


def test_a_name_that_moved_is_reported() -> None:
    class Bare:
        def step(self: Any) -> None:
            self.backward_counter = self.dw_builder()

    gone = compat_pippy.missing_pippy(Bare)
    assert "Bare.fwd_recv_ops" in gone and "Bare.backward_counter" not in gone
    assert gone[-1] == "+dw_builder"  # something new that it asks of a stage


@pytest.mark.parametrize("name", list(S.FAMILIES))
def test_torch_reads_every_composite_and_says_it_back(name: str) -> None:
    for one in (S.build(name, p=2, m=7), S.reproducible(S.braid(S.build(name, p=2, m=7)))):
        text = one.to_csv(for_torch=True)
        for cell in text.replace("\n", ",").split(","):
            assert not cell or str(TorchAction.from_str(cell)) == cell
        assert Schedule.from_csv(text, one.placement, name=one.name) == one


# -- one rank: both turns are local, nothing is sent


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, shared_traces: None) -> Iterator[None]:
    """A group of this process alone, in which equal models are traced once."""
    store = tmp_path_factory.mktemp("pippy") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group_the_way_out_is_said() -> None:
    model: Any = SimpleNamespace(_mesh=Mesh(torch.device("cpu")))
    with pytest.raises(fxbraid.BraidError, match=r"need a process group .* start it with"):
        pippy.Runtime(model)


def test_one_rank_with_all_chunks(alone: None) -> None:
    found = compare("stp", 4, layers=2, reproducible=True)
    check(found)
    assert found["braids"] > 0


def test_what_does_not_fit_is_refused_with_numbers(alone: None, tmp_path: Path) -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    m = 2
    batch = make_batches(2, m, mask=True, steps=1)[0]
    model, other = (braid("zbv", batch, m, layers=2) for _ in range(2))
    stages = pippy.stages(model)
    known = dict(model.named_parameters())
    assert stages[0].submod.get_parameter("model.embed_tokens.weight") is known["model.embed_tokens.weight"]
    assert {id(p) for stage in stages for p in stage.submod.parameters()} == {
        id(p) for p in model.parameters()
    }

    def loaded(text: str, **options: Any) -> TorchRuntime:
        made = TorchRuntime(stages, m, **{"loss_fn": pippy.loss, **options})
        (tmp_path / "order.csv").write_text(text)
        made._load_csv(str(tmp_path / "order.csv"))
        return made

    right = "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n"
    for said, make in {
        r"has 1 ranks, 2 stages and 3 micro-batches, but .* for 1 ranks, 2 chunks and n_microbatches=2": (
            lambda: TorchRuntime(stages, 3, loss_fn=pippy.loss)
        ),
        r"stages are those of another model": lambda: pippy.torch_schedule(other),
        r"make the schedule with loss_fn=fxbraid.pippy.loss": lambda: loaded(right, loss_fn=max),
        r"no actions yet; call its _load_csv": lambda: TorchRuntime(stages, m, loss_fn=pippy.loss),
        r"ScheduleGPipe does not run lists": lambda: ScheduleGPipe(stages[0], m, loss_fn=pippy.loss),
        r"stages \[0, 1\] of the schedule do not come from one call": (
            lambda: TorchRuntime([stages[0], pippy.stages(model)[1]], m, loss_fn=pippy.loss)
        ),
        r"can't run: .*can't run braided": (lambda: loaded("0F0,1F0,1B0,0F1,1F1,(1B1;0B0)OVERLAP_F_B,0B1\n")),
    }.items():
        with pytest.raises(fxbraid.BraidError, match=said):
            pippy.Runtime(model, make())  # type: ignore[no-untyped-call]
    schedule = loaded(right)
    runtime = pippy.Runtime(model, schedule)
    with pytest.raises(fxbraid.BraidError, match=r"run inside of fxbraid.pippy.Runtime"):
        schedule.step(target=torch.arange(m), **batch)
    # An order of its own, and scale_grads as torch has it by default: the sums are the same.
    assert torch.equal(runtime.step(**batch), other.step(**batch))
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    with pytest.raises(fxbraid.BraidError, match="torch's runtime ran it"):
        _ = model.last_step


# -- more ranks


def placement_is_refused() -> str:
    """In a rank: torch's loop on the stages of a V."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    model = braid("stp", make_batches(2, 4, mask=True, steps=1)[0], 4, tp_size=2, pp_size=2)
    try:
        loop = ScheduleInterleaved1F1B(pippy.stages(model), 4, loss_fn=pippy.loss)
        pippy.Runtime(model, loop)
    except fxbraid.BraidError as error:
        return str(error)
    return ""


def dual_pipe_v(model: Any) -> TorchRuntime:
    from torch.distributed.pipelining import ScheduleDualPipeV

    return ScheduleDualPipeV(pippy.stages(model), model.schedule.m, loss_fn=pippy.loss)


def two_by_two() -> dict[str, Any]:
    torch.set_num_threads(1)
    share_traces()
    with process_group(timeout_s=60):
        layout = {"tp_size": 2, "pp_size": 2}
        return {
            "stp": compare("stp", 4, reproducible=True, **layout),
            "refused": placement_is_refused(),
        }


def test_two_by_two_ranks() -> None:
    for rank in launch(two_by_two, nproc=4, timeout_s=200):
        check(rank["stp"])
        assert rank["stp"]["braids"] > 0
        assert (
            "stages 0..3 on ranks [0, 1, 0, 1], but the model's chunks lie on ranks [0, 1, 1, 0]"
            in (rank["refused"])
        )


def sweep(pp: int, compile: bool | str) -> dict[str, Any]:
    torch.set_num_threads(1)
    share_traces()
    found = {}
    with process_group(timeout_s=120):
        layout = {"tp_size": 4 // pp, "pp_size": pp, "compile": compile, "layers": 2 * pp}
        m = 3 * pp - 1
        for name in ("stp", "zbv", "dualpipev", "interleaved_1f1b", "gpipe"):
            # Braided wherever it can be, which not all of them are by themselves.
            one = S.braid(S.build(name, p=pp, m=m))
            found[name] = compare(one, m, **layout)
            found[f"{name}, reproducible"] = compare(one, m, reproducible=True, **layout)
        if pp == 2:
            found["a user's"] = compare(Schedule.from_csv(USERS), 4, **{**layout, "layers": 2})
        found["vocabulary whole"] = compare("stp", m, vocab_parallel=False, **layout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "compile"), [(2, False), (4, False), (2, "unit")])
def test_every_schedule_to_the_bit(pp: int, compile: bool | str) -> None:
    for rank in launch(sweep, (pp, compile), nproc=4, timeout_s=1200):
        for found in rank.values():
            check(found)
        assert rank["stp, reproducible"]["losses"] == rank["gpipe, reproducible"]["losses"]
        assert all(rank[name]["braids"] > 0 for name in ("stp", "dualpipev", "interleaved_1f1b"))


def step_times(name: str, m: int) -> list[float]:
    """In a rank, on the emulated cluster's virtual clock with messages that cost nothing: milliseconds of a step of
    fxbraid's program, of torch's runtime with braids, and of it without."""
    torch.set_num_threads(1)
    share_traces()
    batch = make_batches(1, m, mask=False, steps=1)[0]
    with emulate.process_group(Cluster(Link(1e-3), Link(0.0)), timeout_s=100):
        model = braid(name, batch, m, tp_size=2, pp_size=2, split=[1] * 4, vocab_parallel=False)
        emulate.unit_times(lambda unit: 2e-3 if unit.name.startswith(("attn", "mlp")) else 0.0)
        times = []
        for run in (model, pippy.Runtime(model), pippy.Runtime(model, braided=False)):
            with emulate.stopwatch() as reading:
                run.step(**batch)
            times.append(round(reading.seconds * 1e3, 3))
    return times


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stp", "dualpipev"])
def test_braids_hide_in_torchs_runtime_what_they_hide_in_fxbraids(name: str) -> None:
    """The numbers of docs/pippy.md."""
    for program, braided, one_by_one in launch(step_times, (name, 8), nproc=4, timeout_s=300):
        print(f"{name}: {program} {braided} {one_by_one}")
        # A message leaves behind its block, so that the next rank may begin later.
        assert program <= braided < 1.02 * program < 1.08 * braided < one_by_one


def torchs_own() -> dict[str, Any]:
    """In a rank: torch's DualPipeV on our stages against ``BraidedModel.step`` of ours, whose order
    differs a little."""
    torch.set_num_threads(1)
    share_traces()
    with process_group(timeout_s=60):
        batches = make_batches(2, 6, mask=True, steps=2)
        ours, theirs = (braid("dualpipev", batches[0], 6, tp_size=2, pp_size=2) for _ in range(2))
        runtime = pippy.Runtime(theirs, dual_pipe_v(theirs))
        differ = []
        for batch in batches:
            if not torch.allclose(ours.step(**batch), runtime.step(**batch), rtol=1e-6):
                differ.append("loss")
            for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                if (a.grad - b.grad).abs().max() > 1e-5 * a.grad.abs().max():
                    differ.append(name)
        return {"differ": differ, "ran": runtime.ran}


@pytest.mark.slow
def test_torchs_own_schedule_class_braided() -> None:
    for rank in launch(torchs_own, nproc=4, timeout_s=200):
        assert rank["differ"] == []
        assert sum(n for name, n in rank["ran"].items() if "&" in name) > 0
