"""BraidTrainer against transformers' Trainer on the plain model: losses, evaluation, saving, resuming."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import fxbraid
from fxbraid import BraidError
from fxbraid.runtime.launch import launch, process_group

from .tiny import batch, qwen2

pytestmark = pytest.mark.usefixtures("shared_traces")

ROWS = 4


class Rows(torch.utils.data.Dataset):
    """Random rows with ragged labels."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._rows = batch(count, seed=seed)

    def __len__(self) -> int:
        return len(self._rows["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self._rows.items()}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    return TrainingArguments(**{**options, **more})


def accuracy(predicted: Any) -> dict[str, float]:
    guessed, labels = predicted.predictions[:, :-1].argmax(-1), predicted.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean()), "rows": float(len(labels))}


def train(trainer: Trainer, **options: Any) -> list[dict[str, float]]:
    trainer.train(**options)
    return [{k: v for k, v in log.items() if isinstance(v, float)} for log in trainer.state.log_history]


def of(logs: list[dict[str, float]], name: str) -> list[float]:
    return [log[name] for log in logs if name in log]


def plain(folder: Path, **more: Any) -> list[dict[str, float]]:
    return train(
        Trainer(
            qwen2(),
            arguments(folder, save_strategy="no", **more),
            train_dataset=Rows(18),
            eval_dataset=Rows(7, seed=5),
            compute_metrics=accuracy,
        )
    )


def made(**options: Any) -> fxbraid.BraidedModel:
    return fxbraid.braid(qwen2(**options), batch(ROWS), n_microbatches=2, compile=False)


@functools.cache
def shared() -> fxbraid.BraidedModel:
    """For tests to which it does not matter what a model has learned."""
    return made()


def braided(
    folder: Path,
    model: fxbraid.BraidedModel | None = None,
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> fxbraid.BraidTrainer:
    model = model or made()
    return fxbraid.BraidTrainer(
        model=model,
        args=arguments(folder, **more),
        train_dataset=Rows(18),
        eval_dataset=Rows(7, seed=5),
        compute_metrics=accuracy,
        **(extra or {}),
    )


def assert_same(got: list[dict[str, float]], want: list[dict[str, float]], replicas: int = 1) -> None:
    """18 rows are four batches and a half, 7 rows one and three quarters. Replicas fill up the last one with rows that
    were there before, and a batch has one loss."""
    for name, tolerance in (
        ("loss", 1e-4),
        ("grad_norm", 1e-3),
        ("learning_rate", 0.0),
        ("eval_accuracy", 1e-6),
    ):
        steps = slice(4 if replicas > 1 and name in ("loss", "grad_norm") else None)
        assert of(got, name)[steps] == pytest.approx(of(want, name)[steps], rel=tolerance), name
    assert len(of(got, "loss")) == 5 and of(got, "eval_rows") == [7.0, 7.0, 7.0]
    assert of(got, "eval_loss") == pytest.approx(of(want, "eval_loss"), rel=0.01 if replicas > 1 else 1e-5)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_logs_are_those_of_the_plain_trainer(accumulated: int, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": accumulated}
    trainer = braided(tmp_path / "b", save_strategy="no", **more)
    got = train(trainer)
    assert_same(got, plain(tmp_path / "p", **more))
    assert all(0 <= share <= 1 for share in of(got, "bubble_share")) and of(got, "tokens_per_s")
    names = set(trainer.get_decay_parameter_names(trainer.model))
    assert names == set(
        Trainer(qwen2(), arguments(tmp_path / "n", eval_strategy="no")).get_decay_parameter_names(qwen2())
    )


def test_it_stops_and_goes_on_and_the_folder_is_plain(tmp_path: Path) -> None:
    whole = train(braided(tmp_path / "whole"))
    train(braided(tmp_path / "parts"))
    again = braided(tmp_path / "parts", made(initializer_range=0.1))
    resumed = train(again, resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert of(resumed, "loss") == of(whole, "loss")  # to the bit
    plain_model = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-3")
    assert plain_model.config.vocab_size == 96
    again.save_model(str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in again.model.named_parameters():  # type: ignore[union-attr]
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"fp16": True}, "float16 needs its loss scaled"),
        ({"bf16": True}, "the model computes in torch.float32"),
        ({"label_smoothing_factor": 0.1}, "the loss is part of the traced model"),
        ({"torch_compile": True}, "units are compiled by braid"),
        ({"push_to_hub": True}, 'a pickle of the arguments with every save; give hub_strategy="end"'),
    ],
)
def test_what_cannot_be_kept_is_refused(option: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=words):
        braided(tmp_path, shared(), **option)


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny model's vocabulary."""
    plain = Tokenizer(WordLevel({f"w{k}": k for k in range(96)}, unk_token="w0"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0", pad_token="w0")


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """At this rate each evaluation is worse than the one before: the first checkpoint is the best one."""
    trainer = braided(
        tmp_path,
        learning_rate=2.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    logs = train(trainer)
    assert of(logs, "eval_loss")[0] < of(logs, "eval_loss")[1]
    best = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    loaded = AutoModelForCausalLM.from_pretrained(best)
    for name, parameter in trainer.model.named_parameters():  # type: ignore[union-attr]
        assert torch.equal(loaded.get_parameter(name), parameter)
    assert trainer.evaluate()["eval_loss"] == of(logs, "eval_loss")[0]


class Hub:
    """Takes what is pushed."""

    def __init__(self) -> None:
        self.files: list[set[str]] = []

    def create_repo(self, name: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=f"somebody/{name}")

    def upload_folder(self, *, repo_id: str, folder_path: str, **_: Any) -> None:
        assert repo_id == "somebody/model"
        self.files.append({path.name for path in Path(folder_path).iterdir()})


def test_the_tokenizer_goes_with_the_model_and_the_hub_gets_both_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    trainer = braided(
        tmp_path / "run",
        shared(),
        extra={"processing_class": words()},
        max_steps=2,
        save_steps=1,
        eval_strategy="no",
        push_to_hub=True,
        hub_strategy="end",
        hub_model_id="model",
    )
    trainer.train()
    assert hub.files == []
    trainer.save_model()
    (files,) = hub.files
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    trainer.data_collator, trainer.processing_class = SimpleNamespace(tokenizer=words()), None  # type: ignore[assignment]
    trainer.save_model(str(tmp_path / "run" / "collated"), _internal_call=True)
    for folder in ("", "checkpoint-1", "collated"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / folder)
        assert tokenizer("w7 w5 w95")["input_ids"] == [7, 5, 95]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]


def test_a_plain_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="give it fxbraid"):
        fxbraid.BraidTrainer(model=qwen2(), args=arguments(tmp_path))


def in_ranks(folder: Path, layouts: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Train on each layout, and resume on the last one what the first one saved."""
    found = []
    with process_group(timeout_s=60, device_type="cpu"):
        for k, layout in enumerate(layouts):
            replicas = layout.get("dp_size", 1)
            model = fxbraid.braid(qwen2(), batch(ROWS // replicas), n_microbatches=2, compile=False, **layout)
            sizes = {
                "per_device_train_batch_size": ROWS // replicas,
                "per_device_eval_batch_size": ROWS // replicas,
            }
            trainer = braided(folder / str(k), model, **sizes)
            found.append(train(trainer))
        first = str(folder / "0" / "checkpoint-3")
        found.append(
            train(
                trainer.__class__(
                    model=model,
                    args=arguments(folder / "again", **sizes),
                    train_dataset=Rows(18),
                    eval_dataset=Rows(7, seed=5),
                    compute_metrics=accuracy,
                ),
                resume_from_checkpoint=first,
            )
        )
    return found


REPLICAS = {"dp_size": 2, "pp_size": 2, "tp_size": 1}


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([REPLICAS], id="replicas"),
        pytest.param(
            [{"tp_size": 2, "pp_size": 2}, REPLICAS], id="2x2, then replicas", marks=pytest.mark.slow
        ),
    ],
)
def test_four_ranks_and_replicas_log_the_same(tmp_path: Path, layouts: list[dict[str, Any]]) -> None:
    """The last layout goes on from the first one's checkpoint, too."""
    want = plain(tmp_path / "plain")
    for found in launch(in_ranks, (tmp_path, layouts), nproc=4, timeout_s=280):
        for layout, logs in zip([*layouts, layouts[-1]], found, strict=True):
            assert_same(logs, want, layout.get("dp_size", 1))
