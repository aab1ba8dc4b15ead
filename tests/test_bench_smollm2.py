"""SmolLM2-135M from the registry package: read once, its first loss, trained beside the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoConfig

from fxbraid.bench import smollm2
from fxbraid.bench.config import ConfigError
from fxbraid.bench.smollm2_run import SmolConfig, agree, check, run


def installed() -> bool:
    try:
        return smollm2.find_gguf().exists()
    except FileNotFoundError:
        return False


needs_package = pytest.mark.skipif(not installed(), reason="the extra smollm2 is not installed")


def test_a_missing_package_is_said_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match=r"pip install 'fxbraid\[smollm2\]'"):
        smollm2.find_gguf()
    with pytest.raises(ConfigError, match="no-such-package is not installed"):
        run(SmolConfig(), Console(quiet=True), None, 1.0)


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXBRAID_CACHE", str(tmp_path))
    assert smollm2.cache_root() == tmp_path
    monkeypatch.delenv("FXBRAID_CACHE")
    assert smollm2.cache_root() == Path.home() / ".cache" / "fxbraid"


def test_sizes_are_refused_with_the_heads() -> None:
    hf: Any = AutoConfig.for_model(
        "llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3
    )
    with pytest.raises(ConfigError, match="9 attention heads are not divisible by --tp 2; use --tp 1 or 3"):
        check(SmolConfig(tps=(2,)), hf)
    with pytest.raises(ConfigError, match="--pp 20 wants 40 chunks, and the model has 32 layers"):
        check(SmolConfig(pp=20), hf)
    check(SmolConfig(), hf)


def test_losses_agree_within_the_tolerances() -> None:
    assert agree([2.0, 3.0], [2.0, 3.0001])
    assert not agree([2.0, 3.0], [2.0001, 3.0])
    assert not agree([2.0, 3.0], [2.0, 3.1])
    assert not agree([2.0, 3.0], [2.0, float("nan")])


@pytest.mark.slow
@needs_package
def test_the_weights_are_kept_and_give_the_expected_loss() -> None:
    folder = smollm2.prepare()
    assert smollm2.prepare() == folder
    assert (folder / "model.safetensors").exists()
    assert not [path for path in folder.parent.iterdir() if ".part-" in path.name]
    model: Any = smollm2.load_model(folder)
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (30, 9)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = smollm2.load_batches(folder, 1, 1)[0]
    assert batch["input_ids"].shape == (1, 128)
    assert float(model(**batch).loss.detach()) == pytest.approx(2.494, abs=0.01)


@needs_package
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_steps_give_the_plain_models_losses() -> None:
    console = Console(record=True)
    assert run(SmolConfig(), console, None, 800.0), console.export_text()
