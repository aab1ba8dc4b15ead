"""``torch.compile(model, backend="fxbraid")``: the same as ``braid``, in a loop that calls the model and ``backward``.

Dynamo's private names are used by every test here: where a version of torch moves one, all of them fail.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import fxbraid
from fxbraid import compat_dynamo
from fxbraid.backend import backend
from fxbraid.compiled import CompiledCall, keywords
from fxbraid.passes.errors import BraidError
from fxbraid.runtime.launch import launch, process_group

from .parity import Case
from .test_parity import run, same
from .tiny import VOCAB, batch
from .tiny import qwen2 as qwen2_of

OPTIONS: dict[str, Any] = {"n_microbatches": 2, "compile": False}
LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def forget_frames() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert not compat_dynamo.convert_frame._bytecode_hooks, "a hook was left behind"


class Small(nn.Module):
    """What is traced in no time; the head is tied where ``tied``."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits = self.head(x)
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = nn.functional.cross_entropy(logits.view(-1, VOCAB).float(), labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


def qwen2() -> nn.Module:
    return qwen2_of(num_hidden_layers=2)


def data_of(seed: int = 0, seq: int = 16) -> dict[str, Tensor]:
    return batch(seed=seed, seq=seq, mask=False)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={**OPTIONS, **options})


def braid(model: nn.Module, example: dict[str, Any], **options: Any) -> fxbraid.BraidedModel:
    return fxbraid.braid(model, example, **{**OPTIONS, **options})


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> bool:
    assert set(got) == set(want)
    return all(float((got[n] - want[n]).abs().max() / want[n].abs().max()) < tolerance for n in want)


# -- the same as braid ---------------------------------------------------------------------------------------------


def test_an_optimizer_from_before_trains_as_with_braid_and_modes_change() -> None:
    model, reference = qwen2(), braid(qwen2(), batch())
    loop = compiled(model)
    identities = {n: id(p) for n, p in model.named_parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for seed in range(4):
        data = batch(seed=seed)
        out = loop(**data)
        assert torch.equal(out.loss.detach(), reference.step(**data))
        assert out.loss.requires_grad and not grads(model)
        out.loss.backward()
        assert equal(grads(model), grads(reference))
        assert torch.equal(fxbraid.clip_grad_norm_(loop, 0.5), reference.clip_grad_norm_(0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if seed == 1:
            loop.eval()
            reference.eval()
            with torch.inference_mode():
                got, want = loop(**data), reference(**data)
            assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
            loop.train()
            reference.train()
    assert {n: id(p) for n, p in model.named_parameters()} == identities
    assert isinstance(fxbraid.braided(loop), fxbraid.BraidedModel) and fxbraid.braided(model).last_step
    assert "logits" not in out and not hasattr(out, "logits") and out[0] is out.loss


def test_ranks_see_their_shards_and_agree_with_braid_to_the_bit() -> None:
    base = Case(tp=2, pp=2, tied=True, m=2, layers=2, schedule="1f1b")
    assert same(*run([base, replace(base, backend=True)]))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_other_layouts(tp: int, pp: int) -> None:
    options: dict[str, Any]
    for options in ({}, {"compile": "unit", "schedule": "1f1b"}):
        base = Case(tp=tp, pp=pp, tied=False, m=2, layers=8 if pp == 4 else 4, **options)
        assert same(*run([base, replace(base, backend=True)]))


def replicas() -> bool:
    """In each of two replicas: two losses at once, of its half of the batch; gradients are those of the whole."""
    torch.set_num_threads(1)
    model, plain = Small(), Small()
    with process_group():
        loop = compiled(model, dp_size=2)
        losses, wanted = [], []
        for seed in (1, 2):
            data = data_of(seed=seed)
            half = {name: value.chunk(2)[dist.get_rank()] for name, value in data.items()}
            losses.append(loop(**half).loss)
            wanted.append(plain(**data).loss)
        (losses[0] + 3 * losses[1]).backward()
        (wanted[0] + 3 * wanted[1]).backward()
        assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(losses, wanted, strict=True))
        return close(grads(model), grads(plain))


@pytest.mark.slow
def test_replicas() -> None:
    assert launch(replicas, (), nproc=2, timeout_s=200) == [True, True]


def checkpointed(place: Path) -> list[float]:
    """On each of two pipeline ranks, with an optimizer from before the first call, which has the other rank's
    parameters too: the loss after a checkpoint, again after loading it."""
    torch.set_num_threads(1)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with process_group(timeout_s=60):
        loop = compiled(model, pp_size=2, schedule="1f1b")

        def train(seed: int) -> float:
            loss = loop(**data_of(seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        train(0)
        inside = fxbraid.braided(loop)
        with fxbraid.Checkpointer(place) as saving:
            saving.save(1, inside, optimizer)
            losses = [train(1), train(2)]
            assert saving.load(inside, optimizer) is not None
        losses += [train(1), train(2)]
        with fxbraid.Checkpointer(place / "again") as saving:  # what was loaded can be saved
            saving.save(2, inside, optimizer)
        return losses


def test_a_checkpoint_with_an_optimizer_from_before(tmp_path: Path) -> None:
    alone = braid(Small(), data_of())
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1.0)
    for first, second, *again in launch(checkpointed, (tmp_path,), nproc=2, timeout_s=200):
        assert again == [first, second]
    assert fxbraid.Checkpointer(tmp_path).load(alone, optimizer) is not None
    assert len(optimizer.state) == len(list(alone.parameters()))
    for wanted, seed in ((first, 1), (second, 2)):
        assert alone.step(**data_of(seed=seed)).item() == pytest.approx(wanted, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", [{}, {"fullgraph": True}, {"dynamic": True}])
def test_both_ways_to_compile(how: dict[str, Any]) -> None:
    want = braid(Small(), data_of()).step(**data_of())
    method, function = Small(), Small()
    method.compile(backend=backend, options=OPTIONS, **how)
    loop = torch.compile(function, backend=backend, options=OPTIONS, **how)
    for call in (method, loop):
        for _ in range(3):  # of Dynamo, and twice past it
            assert torch.equal(call(**data_of()).loss.detach(), want)
    assert torch.equal(function(**data_of()).loss.detach(), want)  # shards run as such, whoever calls


def test_arguments_by_position_and_first_calls_without_gradients() -> None:
    model, data = Small(), data_of()
    want = Small()(**data).loss
    loop = compiled(model).eval()
    with torch.inference_mode():
        loop(**data)
    loop.train()
    loss = loop(data["input_ids"], labels=data["labels"]).loss
    loss.backward()
    assert torch.allclose(loss, want, rtol=1e-6)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    given = keywords(qwen2(), [data["input_ids"]], {"labels": data["labels"], "use_cache": None})
    assert set(given) == {"input_ids", "labels"}


def test_other_shapes_are_other_programs() -> None:
    model, plain = Small(), Small()
    loop = compiled(model, max_programs=2)
    for seq in (16, 12, 16):
        losses = [m(**data_of(seq=seq)).loss for m in (loop, plain)]
        assert torch.allclose(*losses, rtol=1e-6)
        for loss in losses:
            loss.backward()
    with pytest.raises(BraidError, match="program number 3"):
        loop(**data_of(seq=8))
    assert close(grads(model), grads(plain))


def test_a_second_model_of_the_same_class_is_another_one() -> None:
    first, second = Small(), Small()
    with torch.no_grad():
        for p in second.parameters():
            p.mul_(0.5)
    wanted = [braid(m, data_of()) for m in (first, second)]
    loops = [compiled(m) for m in (first, second)]
    for seed in range(3):
        for loop, model, want in zip(loops, (first, second), wanted, strict=True):
            loss = loop(**data_of(seed=seed)).loss
            loss.backward()
            assert torch.equal(loss.detach(), want.step(**data_of(seed=seed)))
            assert equal(grads(model), grads(want)) or seed  # a sum is put together in another order
    assert fxbraid.braided(loops[0]) is not fxbraid.braided(loops[1])


def test_more_models_than_dynamo_would_compile() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for k in range(4):
            model = Small()
            loop = compiled(model, seed=k)
            for _ in range(2):
                loop(**data_of())
            assert isinstance(model._compiled_call_impl, CompiledCall)


# -- gradients -----------------------------------------------------------------------------------------------------


def test_gradients_accumulate_scaled_by_what_comes_in() -> None:
    model, plain = Small(tied=True), Small(tied=True)
    loop = compiled(model)
    for seed in range(3):
        (loop(**data_of(seed=seed)).loss / 3).backward()
        (plain(**data_of(seed=seed)).loss / 3).backward()
    assert close(grads(model), grads(plain))
    # Two losses at once, of which one counts twice, and one that nobody wants.
    a, b, _ = (loop(**data_of(seed=seed)).loss for seed in range(3))
    assert close(grads(model), grads(plain))
    (2 * a + b).backward()
    (2 * plain(**data_of(seed=0)).loss + plain(**data_of(seed=1)).loss).backward()
    assert close(grads(model), grads(plain))
    for seed in (4, 5):  # zeroed between forward and backward
        losses = [m(**data_of(seed=seed)).loss for m in (loop, plain)]
        loop.zero_grad(set_to_none=seed == 4)
        plain.zero_grad(set_to_none=seed == 4)
        for loss in losses:
            loss.backward()
        assert close(grads(model), grads(plain))


def test_a_loss_goes_backward_once() -> None:
    model = Small()
    loss = compiled(model)(**data_of()).loss
    loss.backward(retain_graph=True)
    want = {n: g.clone() for n, g in grads(model).items()}
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    assert equal(grads(model), want)


def test_gradients_of_bfloat16_add_up_in_float32() -> None:
    model = Small().to(LOW)
    reference = braid(copy.deepcopy(model), data_of())
    loop = compiled(model)
    for seed in range(3):
        losses = [loop(**data_of(seed=seed)).loss for _ in range(2)]
        torch.stack(losses).mean().backward()
        reference.step(**data_of(seed=seed))
    wide = {n: p.main_grad for n, p in model.named_parameters()}
    assert {g.dtype for g in wide.values()} == {torch.float32}
    assert close(wide, {n: p.main_grad for n, p in reference.named_parameters()}, 1e-6)
    assert equal(grads(model), {n: g.to(LOW) for n, g in wide.items()})
    model.zero_grad()
    reference.zero_grad()
    loop(**data_of()).loss.backward()
    reference.step(**data_of())
    assert equal(grads(model), grads(reference))


def test_masters_are_the_users_parameters() -> None:
    model = Small().to(LOW)
    reference = braid(copy.deepcopy(model), data_of(), master_weights=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (model, reference)]
    loop = compiled(model, master_weights=True)
    for seed in range(3):
        loss = loop(**data_of(seed=seed)).loss
        loss.backward()
        assert torch.equal(loss.detach(), reference.step(**data_of(seed=seed)))
        assert equal(grads(model), grads(reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# -- what can't be done --------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.inner = Broken(self.first)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.first(x)).sum()}


class Broken(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        print("broken")
        return self.linear(x)


class AtTheTop(Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        print("broken")
        return super().forward(x)


class BeforeAnything(Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        print("broken")
        return {"loss": self.second(self.first(x)).sum()}


class Below(Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(self.first(x)).sum()}


class InALoop(Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for _ in range(2):
            x = self.inner(x)
        return {"loss": x.sum()}


class NoLoss(Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.second(self.first(x))}


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize("kind", [AtTheTop, BeforeAnything, Below, InALoop])
def test_a_graph_break_is_named_by_its_line(kind: type[Linear], suppress: bool) -> None:
    where = Broken if kind in (Below, InALoop) else kind
    lines, begin = inspect.getsourcelines(where.forward)
    at = begin + next(i for i, line in enumerate(lines) if "print" in line)
    loop = compiled(kind())
    with torch._dynamo.config.patch(suppress_errors=suppress):
        for _ in range(2):
            with pytest.raises(
                BraidError, match=rf"graph of {kind.__name__} breaks at .*test_backend.py:{at}[ ,]"
            ):
                loop(x=torch.ones(4, 3))


def test_only_models_are_taken() -> None:
    model = Linear()

    def step(x: Tensor) -> Tensor:
        return model(x)["loss"]

    with pytest.raises(
        BraidError, match=r"this is the function step at .*test_backend\.py:\d+; compile the model"
    ):
        torch.compile(step, backend=backend, options=OPTIONS)(torch.ones(4, 3))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tp_size": 1}, "options lack n_microbatches"),
        ({**OPTIONS, "nosuch": 1}, "'nosuch' is no option of fxbraid; .* tp_size, pp_size"),
        ({"n_microbatches": 3}, "n_microbatches=3 does not divide the batch of 4; use 1, 2 or 4"),
        ({**OPTIONS, "schedule": "nosuch"}, "nosuch"),
    ],
)
def test_options_are_checked_and_a_refused_model_is_as_it_was(options: dict[str, Any], sentence: str) -> None:
    model = Small()
    before = {n: (p.data_ptr(), p.shape) for n, p in model.named_parameters()}
    want = model(**data_of()).loss
    loop = torch.compile(model, backend=backend, options=options)
    for _ in range(2):
        with pytest.raises(ValueError, match=sentence):
            loop(**data_of())
    with pytest.raises(BraidError, match="no braided model behind this"):
        fxbraid.braided(loop)
    assert {n: (p.data_ptr(), p.shape) for n, p in model.named_parameters()} == before
    assert torch.equal(model(**data_of()).loss, want)


def test_a_failure_behind_the_shards_gives_whole_parameters_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import fxbraid.model

    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room for an engine")

    model, data = Small(), data_of()
    loop = compiled(model)
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    with monkeypatch.context() as broken, pytest.raises(MemoryError, match="no room"):
        broken.setattr(fxbraid.model, "Engine", fails)
        loop(**data)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before
    assert torch.equal(loop(**data).loss.detach(), braid(Small(), data).step(**data))


class Memory(np.ndarray):
    """An array that can be watched."""


def test_whole_parameters_are_let_go_of() -> None:
    model, watched = Small(), []
    for p in model.parameters():
        memory = p.detach().numpy().copy().view(Memory)
        watched.append(weakref.ref(memory))
        p.data = torch.from_numpy(memory)
        del memory
    assert all(one() is not None for one in watched)
    compiled(model)(**data_of())
    assert all(one() is None for one in watched)


def test_inductors_modes_are_refused() -> None:
    with pytest.raises(BraidError, match="mode='reduce-overhead' is one of Inductor's"):
        torch.compile(Linear(), backend=backend, mode="reduce-overhead")(x=torch.ones(4, 3))


def test_a_training_call_has_the_loss_alone() -> None:
    out = compiled(Small())(**data_of())
    with pytest.raises(
        BraidError, match=r"test_backend.py:\d+ asks for 'logits' of a training call"
    ) as raised:
        out.loss + out.logits.mean()  # the line that is named
    line = raised.traceback[0].lineno + 1
    assert f"test_backend.py:{line} " in str(raised.value)
    for key in ("logits", 1):
        with pytest.raises(BraidError, match=f"asks for {key!r} of a training call"):
            out[key]
    loop = compiled(NoLoss())
    with pytest.raises(BraidError, match="loss"):
        loop(x=torch.ones(4, 3))


def test_what_the_program_would_not_follow_is_refused() -> None:
    model, data = Small(), data_of()
    loop = compiled(model)
    model(**data).loss.backward()
    with pytest.raises(BraidError, match="has a gradient from before the first call"):
        loop(**data)
    model.zero_grad()
    loop(**data)
    with torch.no_grad(), pytest.raises(BraidError, match=r"training mode under torch\.no_grad\(\)"):
        loop(**data)
    weight = model.head.weight
    hook = weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr, operator]
    with pytest.raises(BraidError, match=r"head\.weight has a hook"):
        loop(**data)
    hook.remove()
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(BraidError, match="Small has hooks of its own"):
        loop(**data)
    hook.remove()
    model.head.weight = nn.Parameter(weight.detach().clone())  # type: ignore[union-attr, operator]
    with pytest.raises(BraidError, match=r"head\.weight was replaced after the first call"):
        loop(**data)
    model.head.weight = weight  # type: ignore[union-attr]
    loop(**data)
    model.to(LOW)
    with pytest.raises(BraidError, match=r"was \(96, 16\) torch\.float32 on cpu at the first call"):
        loop(**data)
    with pytest.raises(BraidError, match="give it the model"):
        fxbraid.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[arg-type]
