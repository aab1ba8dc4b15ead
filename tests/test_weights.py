"""Weights from disk by slices, and models on the meta device: compared with transformers' own loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import fxbraid
from fxbraid import BraidError
from fxbraid.initialise import Initialiser
from fxbraid.passes.pipeline import lower_model
from fxbraid.runtime.launch import launch, process_group
from fxbraid.source import Source
from fxbraid.state import skeleton
from fxbraid.weights import Checkpoint
from tests.parity import share_traces
from tests.tiny import VOCAB, batch, qwen2


def save(model: nn.Module, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)  # type: ignore[operator]
    return path


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config)


def shards(model: nn.Module, path: Path, tp: int) -> None:
    """Every rank's every shard is that of the model in memory, and no rank reads much more than its shards."""
    lowered = lower_model(model, batch(1), n_chunks=2, tp_size=tp)
    full = dict(model.named_parameters())
    for rank in range(tp):
        source = Source(skeleton(model), Checkpoint.open(path, skeleton(model)))
        source.check(strict=True)
        held = 0
        for name, shard in lowered.plan.params.items():
            if name not in full:
                continue
            wanted = shard.take(full[name].detach(), rank)
            assert torch.equal(source.shard(name, shard, rank), wanted), name
            held += wanted.numel() * wanted.element_size()
        assert source.loaded().missing == () and source.loaded().unexpected == ()
        assert source.loaded().bytes_read <= 1.1 * held


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
def test_each_rank_reads_its_slices_only(
    tmp_path: Path, tied: bool, shard_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fxbraid.weights, "MAPPED", 5000)  # files are opened anew in between
    model = qwen2(tie_word_embeddings=tied)
    save(model, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    shards(model, tmp_path, tp=2)


def test_experts_lie_apart_on_disk_and_in_one_tensor_in_the_model(tmp_path: Path) -> None:
    model = mixtral()
    save(model, tmp_path)
    recipes = Checkpoint.open(tmp_path, skeleton(model)).recipes
    assert any(len(recipe.keys) > 1 for recipe in recipes.values())
    reloaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    source = Source(skeleton(model), Checkpoint.open(tmp_path, skeleton(model)))
    lowered = lower_model(model, batch(1), n_chunks=1, tp_size=1)
    for name, shard in lowered.plan.params.items():
        if name in reloaded:
            assert torch.equal(source.shard(name, shard, 0), reloaded[name]), name


def test_from_pretrained_trains_as_the_model_in_memory_does(tmp_path: Path) -> None:
    model = qwen2().train()
    save(model, tmp_path)
    options: dict[str, Any] = {"n_microbatches": 2, "compile": False}
    one, other = (
        fxbraid.braid(model, batch(4), **options),
        fxbraid.from_pretrained(tmp_path, batch(4), **options),
    )
    assert torch.equal(one.step(**batch(4)), other.step(**batch(4)))
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]) and torch.equal(parameter.grad, theirs[name].grad)  # type: ignore[arg-type]
    assert other.loaded.bytes_read == sum(p.numel() * p.element_size() for p in theirs.values())


@pytest.mark.parametrize("tied", [False, True])
def test_load_pretrained_fills_a_model_without_weights(tmp_path: Path, tied: bool) -> None:
    model = qwen2(tie_word_embeddings=tied)
    save(model, tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    braided = fxbraid.braid(empty, batch(2), n_microbatches=1, compile=False)
    assert not torch.equal(braided.get_parameter("lm_head.weight"), model.lm_head.weight)
    assert braided.load_pretrained(tmp_path).missing == ()
    for name, value in braided.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    wanted = model(**batch(2)).loss
    assert torch.allclose(braided.train().step(**batch(2)), wanted.detach(), rtol=1e-6)


def test_a_prefix_that_is_missing_on_disk_is_found(tmp_path: Path) -> None:
    model = qwen2()
    model.model.save_pretrained(tmp_path)  # no head, no "model." in its keys
    with pytest.raises(BraidError, match=r"lacks lm_head\.weight; .*strict=False"):
        fxbraid.from_pretrained(tmp_path, batch(2), model_class=type(model), n_microbatches=1)
    options: dict[str, Any] = {"n_microbatches": 1, "compile": False, "strict": False}
    braided = fxbraid.from_pretrained(tmp_path, batch(2), model_class=type(model), **options)
    assert braided.loaded.missing == ("lm_head.weight",)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(braided.get_parameter(name), model.get_parameter(name))


def test_what_is_wrong_on_disk_is_said_before_anything_is_read(tmp_path: Path) -> None:
    model = qwen2()
    options: dict[str, Any] = {"n_microbatches": 1, "compile": False}
    with pytest.raises(BraidError, match=r"no config\.json"):
        fxbraid.from_pretrained(tmp_path / "none", batch(2), **options)
    save(model, tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = index["weight_map"]["lm_head.weight"]
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    with pytest.raises(BraidError, match=f"lacks 1 of .* files of its index: {name}"):
        fxbraid.from_pretrained(tmp_path, batch(2), **options)
    (tmp_path / name).write_bytes(content[:-10])
    with pytest.raises(BraidError, match="can't be read as safetensors"):
        fxbraid.from_pretrained(tmp_path, batch(2), **options)
    (tmp_path / name).write_bytes(content)
    model.config.vocab_size *= 2
    with pytest.raises(BraidError, match=r"model\.embed_tokens\.weight is \(\d+, \d+\) there and"):
        fxbraid.from_pretrained(tmp_path, batch(2), config=model.config, **options)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BraidError, match="no index of safetensors"):
        Checkpoint.open(tmp_path, skeleton(model))


def in_ranks(path: str, rows: int) -> list[Any]:
    """In each of 2 x 2 ranks: a checkpoint trained one step, its norm; and one that a single rank does not find."""
    share_traces()
    with process_group(timeout_s=60, device_type="cpu"):
        options: dict[str, Any] = {"tp_size": 2, "pp_size": 2, "n_microbatches": 4, "compile": False}
        model = fxbraid.from_pretrained(path, batch(rows), **options)
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        loss = float(model.step(**batch(rows)))
        norm = float(model.clip_grad_norm_(1e9))
        with torch.device("meta"):
            empty = qwen2(vocab_size=97)
        made = fxbraid.braid(empty, batch(rows), **options)
        sums = {name: float(p.detach().double().sum()) for name, p in made.named_parameters()}
        with pytest.raises(BraidError, match=r"checkpoint differs between ranks .*no config\.json"):
            fxbraid.from_pretrained(path + "-gone" * (dist.get_rank() == 2), batch(rows), **options)
        return [loss, norm, held, model.loaded.bytes_read, sums]


def test_four_ranks_read_their_shards_and_agree(tmp_path: Path) -> None:
    model = qwen2(vocab_size=97)  # padded: 97 rows over two ranks
    save(model, tmp_path)
    loss = model(**batch(4)).loss
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    results = launch(in_ranks, (str(tmp_path), 4), nproc=4, timeout_s=200)
    for found, total, held, read, _ in results:
        assert found == pytest.approx(float(loss), rel=1e-6) and total == pytest.approx(norm, rel=1e-5)
        assert read <= 1.1 * held
    # Without weights: a whole parameter is the same on every rank, as it is in one process.
    with torch.device("meta"):
        empty = qwen2(vocab_size=97)
    values = Initialiser(empty, 0)
    names = [name for name, p in model.named_parameters() if "layernorm" in name]
    assert names
    for name in names:
        wanted = float(values[name].double().sum())
        assert all(sums[name] == wanted for *_, sums in results if name in sums)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=64, n_head=4, vocab_size=96, n_positions=32))


@pytest.mark.parametrize("build", [qwen2, gpt2, mixtral])
def test_a_model_on_meta_is_initialised_as_its_class_does(build: Any) -> None:
    """Standard deviations and constants are those of transformers' own initialisation, parameter by parameter."""
    built = build()
    reference = type(built)(built.config)  # the tiny models' weights are moved away from their initial values
    with torch.device("meta"):
        empty = type(reference)(reference.config)
    values = Initialiser(empty, 0)
    for name, wanted in (*reference.named_parameters(), *reference.named_buffers()):
        made = values[name]
        assert made.shape == wanted.shape and made.dtype == wanted.dtype
        if float(wanted.detach().double().std()) == 0 or name in dict(reference.named_buffers()):
            assert torch.equal(made, wanted), name
        elif wanted.numel() > 200:
            assert float(made.std() / wanted.detach().std()) == pytest.approx(1, abs=0.2), name


def test_the_values_depend_on_seed_and_name_alone() -> None:
    def values(seed: int, names: list[str]) -> dict[str, Tensor]:
        with torch.device("meta"):
            empty = type(reference)(reference.config)
        made = Initialiser(empty, seed)
        return {name: made[name].clone() for name in names}

    reference = qwen2()
    names = [name for name, _ in reference.named_parameters()]
    state = torch.get_rng_state()
    forth, back = values(5, names), values(5, names[::-1][:4])
    assert all(torch.equal(forth[name], value) for name, value in back.items())
    assert torch.equal(state, torch.get_rng_state())
    other = values(6, names)
    assert not torch.equal(forth["lm_head.weight"], other["lm_head.weight"])
    one, two = (forth[f"model.layers.{k}.mlp.up_proj.weight"] for k in (0, 1))
    assert not torch.equal(one, two)


def test_what_nobody_initialises_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.linear = nn.Linear(3, 3)

    with torch.device("meta"):
        model = Bare()
    values = Initialiser(model, 0)
    assert float(values["linear.weight"].abs().max()) > 0
    with pytest.raises(BraidError, match=r"nothing says how .*scale .* is initialised"):
        values["scale"]
