"""Checkpoints in real processes: saved by four ranks, resumed on other layouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fxbraid import Checkpointer
from fxbraid.checkpoint.export import convert
from fxbraid.checkpoint.folder import Saved, find, open_saved
from fxbraid.runtime.launch import RankError, RankTimeout, launch
from tests.checkpointed import (
    STEPS,
    braid,
    die_while_saving,
    elsewhere,
    resume,
    resume_in_ranks,
    save_in_ranks,
)
from tests.tiny import batch, qwen2

DP = {"dp_size": 2, "tp_size": 1, "pp_size": 2, "n_microbatches": 2}
FOUR: list[dict[str, Any]] = [
    {"tp_size": 4, "pp_size": 1, "n_microbatches": 2},
    {"tp_size": 1, "pp_size": 4, "schedule": "1f1b", "n_microbatches": 8},
]


@dataclass(frozen=True)
class Run:
    """What four ranks saved, and the losses of each: of the run that went on, and of those that were resumed."""

    name: str
    place: Path
    results: list[dict[str, Any]]

    @property
    def wanted(self) -> list[float]:
        return self.results[0]["losses"][0]  # type: ignore[no-any-return]

    @property
    def saved(self) -> Saved:
        path = find(self.place)
        assert path is not None
        return open_saved(path)


#: which model, and on which of these it is resumed
RUNS = [
    pytest.param(("phi3", [FOUR[0], DP]), id="phi3"),
    pytest.param(("phi3", [*FOUR, DP]), id="phi3 everywhere", marks=pytest.mark.slow),
    pytest.param(
        ("qwen2", [*FOUR, {**DP, "tp_size": 2, "pp_size": 1}]), id="qwen2 everywhere", marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name, layouts = request.param
    place = tmp_path_factory.mktemp("ranks")
    return Run(name, place, launch(save_in_ranks, (place, name, layouts), nproc=4, timeout_s=550))


def test_resumed_on_other_layouts(run: Run) -> None:
    for found in run.results:
        wanted, same, *others = found["losses"]
        assert same == wanted == run.wanted  # to the bit
        assert others
        for losses in others:
            assert losses == pytest.approx(wanted, rel=1e-5)
    assert resume(run.place, elsewhere(run.name, {})) == pytest.approx(run.wanted, rel=1e-5)


@pytest.mark.slow
def test_resumed_on_two_ranks(run: Run) -> None:
    layout = {"tp_size": 2, "pp_size": 1, "schedule": "gpipe"}
    for losses in launch(resume_in_ranks, (run.place, run.name, layout), nproc=2, timeout_s=200):
        assert losses == pytest.approx(run.wanted, rel=1e-5)


def test_ranks_write_about_as_much_and_every_box_once(run: Run) -> None:
    sizes: dict[str, int] = {}
    for name, said in run.saved.files.items():
        if name.endswith(".safetensors"):
            sizes[name.split("-")[1]] = sizes.get(name.split("-")[1], 0) + said["size"]
    assert sorted(sizes) == ["00000", "00001", "00002", "00003"]
    for stage in (("00000", "00001"), ("00002", "00003")):  # two neighbours hold as much
        assert min(sizes[r] for r in stage) > 0.9 * max(sizes[r] for r in stage)
    for said in run.saved.tensors.values():
        assert (
            sum(torch.Size(c["shape"]).numel() for c in said["chunks"]) == torch.Size(said["shape"]).numel()
        )
    if run.name == "phi3":  # three sections on each of two ranks
        assert len(run.saved.tensors["model.layers.0.self_attn.qkv_proj.weight"]["chunks"]) == 6


def test_exported_folders_are_one_model(run: Run, tmp_path: Path) -> None:
    """Plain transformers goes on where the run was: with what the command makes of the checkpoint, and, two steps
    later, with what four ranks wrote."""
    convert(run.saved, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    with torch.no_grad():
        assert float(loaded(**batch(8, seed=STEPS)).loss) == pytest.approx(run.wanted[0], rel=1e-5)
    model = braid(loaded)
    Checkpointer(run.place).load(model)
    with safe_open(str(next(tmp_path.glob("*.safetensors"))), "pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        for key in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(key), model.get_parameter(key))
    later = AutoModelForCausalLM.from_pretrained(run.place / "hf")
    assert len(list((run.place / "hf").glob("*.safetensors"))) > 4  # every rank wrote some
    model.load_pretrained(run.place / "hf")
    inputs = {key: value for key, value in batch(8, seed=9).items() if key != "labels"}
    with torch.no_grad():
        assert torch.equal(later.eval()(**inputs).logits, model.eval()(**inputs).logits)
        assert float(later.train()(**batch(8, seed=STEPS)).loss) < run.wanted[0]  # it has seen this batch


def test_a_flipped_bit_is_every_ranks_error(run: Run) -> None:
    (message,) = {found["damaged"] for found in run.results}
    assert "model-00002-" in message and "was changed" in message


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "after_s"), [(0, 0.03), (3, 0.11), (1, 0.2)])
def test_a_rank_is_killed_while_saving(tmp_path: Path, victim: int, after_s: float) -> None:
    with pytest.raises(RankError) as ended:
        launch(die_while_saving, (str(tmp_path), victim, after_s), nproc=4, timeout_s=500)
    assert not isinstance(ended.value, RankTimeout)
    model = braid(qwen2())
    restored = Checkpointer(tmp_path).load(model)
    assert restored is not None and restored.step >= 1
    assert all(bool((p == restored.step).all()) for p in model.parameters())
