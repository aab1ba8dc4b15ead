"""Checkpoints in one process: what comes back, what is damaged, what a crash leaves behind."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from typer.testing import CliRunner

import fxbraid
from fxbraid import BraidedModel, BraidError, Checkpointer
from fxbraid.checkpoint import folder as folders
from fxbraid.checkpoint import storage
from fxbraid.checkpoint.cli import app
from fxbraid.checkpoint.codec import decode, encode
from fxbraid.checkpoint.files import Spec, write_safetensors
from fxbraid.checkpoint.held import _boxes, _writers
from fxbraid.compat_transformers import save_groups, saved_names
from fxbraid.passes.layout import ParamShard, Section
from fxbraid.runtime.launch import launch
from fxbraid.state import skeleton
from tests.checkpointed import braid, kill_while_saving, optimizer_of, train
from tests.test_weights import mixtral
from tests.tiny import batch, qwen2

pytestmark = pytest.mark.usefixtures("shared_traces")

MODEL, OPTIMIZER = "model-00000-000.safetensors", "optimizer-00000-000.safetensors"


@pytest.fixture(scope="module")
def trained() -> BraidedModel:
    return braid(qwen2(vocab_size=97, tie_word_embeddings=True, num_hidden_layers=2))


@pytest.fixture(scope="module")
def folder(trained: BraidedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    place = tmp_path_factory.mktemp("checkpoints")
    optimizer = optimizer_of(trained)
    with Checkpointer(place) as saving:
        for step in (1, 2):
            train(trained, optimizer, step)
            saving.save(step, trained, optimizer)
    return place


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to / "copy")
    return to / "copy"


def values(model: BraidedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def refused(place: Path, model: BraidedModel, match: str, **options: Any) -> None:
    """Loading raises with ``match``, and the model is what it was."""
    before, optimizer = values(model), optimizer_of(model)
    with pytest.raises(BraidError, match=match):
        Checkpointer(place).load(model, optimizer, **options)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters()) and not optimizer.state


# -- what comes back


def odd() -> nn.Module:
    """A model with frozen parameters and a buffer."""
    plain = qwen2(vocab_size=97, num_hidden_layers=2)
    plain.model.layers[0].mlp.requires_grad_(False)  # type: ignore[union-attr, operator]
    plain.register_buffer("statistics", torch.arange(3.0))
    return plain


def test_everything_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written when training has gone on. The next steps are those of the run that went on, to the bit, and so are
    random numbers and the data."""
    model = braid(odd())
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(1.5)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])  # has a Counter
    saving = Checkpointer(tmp_path)
    for step in range(2):
        train(model, optimizer, step, scheduler)
    gone_on = threading.Event()

    def late(*arguments: Any) -> Any:
        assert gone_on.wait(60)
        return write_safetensors(*arguments)

    monkeypatch.setattr(storage, "write_safetensors", late)
    saving.save(2, model, optimizer, scheduler, data={"samples": 8}, extra={"best": (1.5, float("inf"))})
    drawn = (torch.rand(3), np.random.rand(), random.random())
    wanted = [train(model, optimizer, step, scheduler) for step in (2, 3)]
    gone_on.set()
    saving.wait()

    other = braid(odd())
    again = optimizer_of(other)
    schedule = torch.optim.lr_scheduler.MultiStepLR(again, [1, 3, 3])
    data: dict[str, Any] = {"old": 1}
    found = saving.load(other, again, schedule, data=data)
    assert found is not None and (found.step, found.extra) == (2, {"best": (1.5, float("inf"))})
    assert data == found.data == {"samples": 8}
    assert torch.equal(torch.rand(3), drawn[0]) and (np.random.rand(), random.random()) == drawn[1:]
    assert [train(other, again, step, schedule) for step in (2, 3)] == wanted
    assert schedule.milestones == Counter({3: 2, 1: 1})
    steps = {float(state["step"]) for state in again.state.values()}
    assert steps == {4.0} and all(state["step"].dtype is torch.float32 for state in again.state.values())
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert torch.equal(other.state_dict()["statistics"], torch.arange(3.0) * 1.5)
    assert {group["lr"] for group in again.param_groups} == {group["lr"] for group in optimizer.param_groups}


def test_float32_masters_of_a_bfloat16_model_come_back(tmp_path: Path) -> None:
    def build() -> tuple[BraidedModel, torch.optim.Optimizer]:
        model = braid(qwen2(num_hidden_layers=2).bfloat16(), master_weights=True)
        return model, optimizer_of(model)

    (model, optimizer), (other, again) = build(), build()
    train(model, optimizer, 0)
    with Checkpointer(tmp_path) as saving:
        saving.save(1, model, optimizer)
        wanted = train(model, optimizer, 1)
    assert saving.load(other, again) is not None
    assert train(other, again, 1) == wanted
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32 and torch.equal(parameter, other.get_parameter(name))
    for dtype in (None, torch.bfloat16):
        other.save_pretrained(tmp_path / "hf", dtype=dtype)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        assert loaded.dtype is (dtype or torch.float32)
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(loaded.get_parameter(name), model.get_parameter(name).to(loaded.dtype))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False, amsgrad=True),
    ],
)
def test_any_optimizer(tmp_path: Path, trained: BraidedModel, make: Callable[..., Any]) -> None:
    optimizer, other = make(trained.parameters()), make(trained.parameters())
    train(trained, optimizer, 0)
    saving = Checkpointer(tmp_path)
    saving.save(1, trained, optimizer, blocking=True)
    saving.load(trained, other)
    assert len(optimizer.state) == len(other.state) > 0
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state[parameter][key])), key


def test_torch_reads_the_files_under_hugging_face_names(folder: Path, trained: BraidedModel) -> None:
    path = folder / "step-00000002"
    name = "model.layers.1.mlp.down_proj.weight"
    found = {name: torch.zeros(32, 48)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(found[name], trained.get_parameter(name))
    with safe_open(str(path / MODEL), "pt") as file:
        names = set(file.keys())
        assert torch.equal(
            file.get_tensor("model.embed_tokens.weight"), trained.get_parameter("lm_head.weight")
        )
    assert names == {name for name, _ in trained.named_parameters()}  # a tied one once
    assert not [p for p in path.iterdir() if p.suffix not in (".safetensors", ".json")]


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "double": torch.rand(2, 3, dtype=torch.float64),
        "eight": torch.rand(5).to(torch.float8_e4m3fn),
        "view": torch.arange(12).view(3, 4).t(),
    }
    specs = {name: Spec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    written = write_safetensors(tmp_path / "one.safetensors", specs, tensors.__getitem__, {"format": "pt"})
    assert written.size == (tmp_path / "one.safetensors").stat().st_size
    with safe_open(str(tmp_path / "one.safetensors"), "pt") as file:
        for name, wanted in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == wanted.dtype and found.shape == wanted.shape
            assert torch.equal(found.double(), wanted.double())


def test_values_come_back_as_they_were() -> None:
    value = {
        "a": [1, 2.5, None, True, "x", (1, (2,))],
        3: {(1, 2): b"\x00\xff"},
        "c": Counter({1: 2}),
        "!tag": 1,
        "nan": float("inf"),
        "t": torch.tensor([1, 2], dtype=torch.int16),
        "n": np.arange(4.0).reshape(2, 2),
        "s": np.float32(0.1),
    }
    found = decode(json.loads(json.dumps(encode(value, "it"))))
    assert torch.equal(found.pop("t"), value.pop("t")) and np.array_equal(found.pop("n"), value.pop("n"))
    assert found == value and type(found["s"]) is np.float32 and list(found) == list(value)
    with pytest.raises(
        BraidError, match=r"extra\['a'\]\[1\] is a builtins.set, which a checkpoint can't hold"
    ):
        encode({"a": [0, {1}]}, "extra")


def test_experts_go_apart_as_transformers_writes_them() -> None:
    """Group by group, what its own conversion makes of the whole state, in its order."""
    plain = mixtral()
    state = plain.state_dict()
    wanted = revert_weight_conversion(plain, dict(state))
    assert len(wanted) > len(state)
    found: dict[str, Tensor] = {}
    for group in save_groups(skeleton(plain), saved_names(plain)):
        assert len(group.names) == 1
        found.update(group.convert({name: state[name] for name in group.names}))
    assert list(found) == list(wanted) and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_replicas_write_a_share_each() -> None:
    """Along an axis of copies every box is written once, by holders only, and nobody writes much more than another."""
    shards = [
        ParamShard("qkv", (12, 8), 0, 4, (Section(8, 4), Section(2, 2), Section(2, 2))),
        ParamShard("norm", (8,), None, 4),
        *(ParamShard(f"up{k}", (16, 8), 0, 4) for k in range(6)),
    ]
    chosen = _writers({shard.name: shard for shard in shards}, 4, copies=3)
    load = Counter[tuple[int, int]]()
    for shard in shards:
        starts = {(rank, start): box for rank in range(4) for start, box in _boxes(shard, rank)}
        for start in {start for _, start in starts}:
            rank, copy = chosen[shard.name, start]
            assert (rank, start) in starts and copy in range(3)
            load[rank, copy] += torch.Size(starts[rank, start].shape).numel()
    assert sum(load.values()) == sum(torch.Size(shard.shape).numel() for shard in shards)
    assert len(load) == 12 and max(load.values()) <= 2 * min(load.values())


# -- which checkpoint


def test_the_last_k_stay_and_latest_says_which(tmp_path: Path, trained: BraidedModel) -> None:
    saving = Checkpointer(tmp_path, keep=2)
    assert saving.load(trained) is None and saving.steps() == []
    for step in (1, 2, 3):
        saving.save(step, trained)
    saving.wait()
    assert saving.steps() == [2, 3] and (tmp_path / "latest").read_text() == "step-00000003\n"
    # Back to step 2, and on from there: what was written later is what stays.
    assert saving.load(trained, step=2).step == 2  # type: ignore[union-attr]
    saving.save(3, trained, blocking=True)
    assert sorted(folders.complete(tmp_path)) == ["step-00000003", "step-00000003-2"]
    found = saving.load(trained)
    assert found is not None and found.path.name == "step-00000003-2"
    (tmp_path / "latest").write_text("step-00000009\n")
    assert saving.load(trained).path.name == "step-00000003-2"  # type: ignore[union-attr]
    with pytest.raises(BraidError, match="no checkpoint of step 7; it has 3, 3"):
        saving.load(trained, step=7)


def test_an_error_in_the_background_surfaces_once(
    tmp_path: Path, trained: BraidedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Checkpointer(tmp_path)
    saving.save(1, trained, blocking=True)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_safetensors", full)
        saving.save(2, trained)
        saving._join()
    with pytest.raises(BraidError, match=r"the checkpoint of step 2 was not saved: OSError: .*No space left"):
        saving.save(3, trained)
    assert saving.steps() == [1] and not list(tmp_path.glob(".saving-*"))
    saving.save(3, trained, blocking=True)
    assert saving.steps() == [1, 3]


def test_what_does_not_fit_is_said(folder: Path, trained: BraidedModel, tmp_path: Path) -> None:
    saving = Checkpointer(tmp_path)
    with pytest.raises(BraidError, match="has a parameter that is not one of the model's"):
        saving.save(1, trained, torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(BraidError, match="give the number of steps done"):
        saving.save(-1, trained)
    with pytest.raises(BraidError, match="this is a Linear"):
        saving.save(1, nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(BraidError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    loading, optimizer = Checkpointer(folder), optimizer_of(trained)
    with pytest.raises(BraidError, match="has the state of AdamW, and the optimizer is SGD"):
        loading.load(trained, torch.optim.SGD(trained.parameters()))
    with pytest.raises(BraidError, match="2 parameter groups, and this one 1"):
        loading.load(trained, torch.optim.AdamW(trained.parameters()))
    groups = [{"params": group["params"]} for group in reversed(optimizer.param_groups)]
    with pytest.raises(BraidError, match="is in parameter group 0, and in the checkpoint it was not"):
        loading.load(trained, torch.optim.AdamW(groups))
    with pytest.raises(BraidError, match="has no scheduler; load without it"):
        loading.load(trained, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    wider = braid(qwen2(vocab_size=98, tie_word_embeddings=True, num_hidden_layers=2))
    refused(folder, wider, r"model\.embed_tokens\.weight is \(97, 32\) there and \(98, 32\) in the model")


# -- damage


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (lambda p: _flip(p / OPTIMIZER), f"{OPTIMIZER} was changed: SHA-256"),
    "a flipped bit in the state": (lambda p: _flip(p / "state.json"), "state.json was changed"),
    "a flipped bit in the manifest": (lambda p: _flip(p / "manifest.json"), r"manifest\.json (was|can't)"),
    "a truncated file": (
        lambda p: (p / MODEL).write_bytes((p / MODEL).read_bytes()[:-9]),
        f"{MODEL} is cut short",
    ),
    "an empty file": (lambda p: (p / MODEL).write_bytes(b""), f"{MODEL} is cut short: 0 bytes"),
    "a longer file": (
        lambda p: (p / MODEL).write_bytes((p / MODEL).read_bytes() + b" "),
        f"{MODEL} has grown",
    ),
    "a missing shard": (lambda p: (p / MODEL).unlink(), f"{MODEL} is missing"),
    "mixed steps": (
        lambda p: shutil.copy(p.parent / "step-00000001" / MODEL, p / MODEL),
        rf"{MODEL} is of another save \(of step 1\), and this is step 2",
    ),
    "the state of another step": (
        lambda p: shutil.copy(p.parent / "step-00000001/state.json", p / "state.json"),
        r"state\.json is of another save \(of step 1\)",
    ),
    "the manifest of another step": (
        lambda p: shutil.copy(p.parent / "step-00000001/manifest.json", p / "manifest.json"),
        r"is of another save \(of step 2\), and this is step 1",
    ),
    "a shard too many": (
        lambda p: shutil.copy(p / MODEL, p / "model-00001-000.safetensors"),
        r"model-00001-000\.safetensors belongs to no checkpoint",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_by_name_before_anything_is_loaded(
    folder: Path, trained: BraidedModel, tmp_path: Path, damage: str
) -> None:
    harm, match = DAMAGES[damage]
    place = copied(folder, tmp_path)
    harm(place / "step-00000002")
    refused(place, trained, match)
    if "manifest" not in damage:
        refused(place, trained, "Nothing was loaded; .* takes another one: 1")
    assert Checkpointer(place).load(trained, step=1) is not None


def test_a_file_that_the_disk_does_not_give_back_is_named(
    folder: Path, trained: BraidedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(folders, "_sha256", broken)
    refused(folder, trained, rf"{MODEL} can't be read \(Input/output error\)")


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_pickle_runs_no_code(folder: Path, trained: BraidedModel, tmp_path: Path, sealed: bool) -> None:
    """In place of any file; ``sealed``: with a manifest that has its size and hash. Also as torch's .metadata."""
    bomb, mark = pickle.dumps(_Bomb(tmp_path / "mark")), tmp_path / "mark"
    names = [p.name for p in (folder / "step-00000002").iterdir()]
    assert len(names) >= 5
    for name in [*names, ".metadata", "latest"]:
        place = copied(folder, tmp_path)
        path = place / "step-00000002"
        manifest = json.loads((path / "manifest.json").read_text())
        (place / name if name == "latest" else path / name).write_bytes(bomb)
        if sealed and name in manifest["files"]:
            import hashlib

            manifest["files"][name] = {"size": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
            del manifest["digest"]
            (path / "manifest.json").write_text(folders.sealed(manifest))
        harmless = name in (".metadata", "latest") or (sealed and name.endswith("config.json"))
        if harmless:
            assert Checkpointer(place).load(trained) is not None
        else:
            refused(place, trained, name)
        shutil.rmtree(place)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # it would have


# -- crashes


def test_kill_while_saving(tmp_path: Path) -> None:
    assert launch(kill_while_saving, (str(tmp_path), 4), nproc=1, timeout_s=120)[0] == 4


@pytest.mark.slow
def test_twenty_kills_while_saving(tmp_path: Path) -> None:
    assert launch(kill_while_saving, (str(tmp_path), 20, 1), nproc=1, timeout_s=400)[0] == 20


# -- the command line


def command(*arguments: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_shows_verifies_and_converts(folder: Path, trained: BraidedModel, tmp_path: Path) -> None:
    said = command("show", folder)
    for word in ("tp 1 x pp 1, stp", "AdamW: 2 groups", "model.embed_tokens.weight", "97 x 32", "<- latest"):
        assert word in said, said
    command("convert", folder, tmp_path / "hf", "--dtype", "bfloat16", "--max-shard-size", "20KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype is torch.bfloat16 and (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    for name, value in values(trained).items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
    place = copied(folder, tmp_path)
    _flip(place / "step-00000001" / MODEL)
    assert "ok  step-00000002" in command("verify", place)
    said = command("verify", place, "--all", code=1)
    assert f"step-00000001: {MODEL} was changed" in said and "ok  step-00000002" in said
    assert "has no checkpoint of step 5; it has 1, 2" in command("verify", place, "--step", 5, code=2)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_can_not_be_written_is_every_ranks_error(
    trained: BraidedModel, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()  # the last step alone fails, and on one rank
    with pytest.raises(BraidError, match="can't be written"):
        trained.save_pretrained(tmp_path)


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_save_pretrained_is_what_transformers_loads(
    trained: BraidedModel, tmp_path: Path, max_shard_size: str
) -> None:
    trained.save_pretrained(tmp_path, max_shard_size="10KB")  # what is stale goes
    trained.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    inputs = {key: value for key, value in batch(4, seed=5).items() if key != "labels"}
    trained.eval()
    try:
        assert torch.equal(loaded(**inputs).logits, trained(**inputs).logits)
    finally:
        trained.train()
    # File by file what transformers itself would have written.
    plain = qwen2(vocab_size=97, tie_word_embeddings=True, num_hidden_layers=2)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)  # type: ignore[operator]
    names = {p.name for p in (tmp_path / "theirs").iterdir()}
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == names
    for name in names:
        if name.endswith(".safetensors"):
            with (
                safe_open(str(tmp_path / name), "pt") as mine,
                safe_open(str(tmp_path / "theirs" / name), "pt") as wanted,
            ):
                assert set(mine.keys()) == set(wanted.keys())
                assert all(torch.equal(mine.get_tensor(k), wanted.get_tensor(k)) for k in mine.keys())  # noqa: SIM118
    indices = [list(p.glob("*.index.json")) for p in (tmp_path, tmp_path / "theirs")]
    mine_said, theirs_said = ([json.loads(p.read_text()) for p in found] for found in indices)
    assert mine_said == theirs_said and bool(mine_said) == (max_shard_size == "20KB")
    config, theirs = (json.loads((p / "config.json").read_text()) for p in (tmp_path, tmp_path / "theirs"))
    assert config == theirs
    again = fxbraid.from_pretrained(tmp_path, batch(4), n_microbatches=2, compile=False)
    assert torch.equal(again.get_parameter("model.norm.weight"), trained.get_parameter("model.norm.weight"))
