"""Runs inside ranks: fxbraid against the unsplit model, step by step, and a digest for bitwise comparisons."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxbraid.tracing
from fxbraid.passes.pipeline import lower_model
from fxbraid.runtime.launch import process_group

from .families import whole_loss

VOCAB, SEQ = 96, 16
EPS = 1e-5  # AdamW divides noise by noise where gradients vanish; this keeps three steps comparable


class KeepDouble(TorchFunctionMode):
    """float64 stays float64 where Hugging Face casts to float32 (norms, loss), in the plain model and in the trace
    alike: without it nothing could agree to 1e-12."""

    entered = 0

    def __enter__(self) -> Any:
        KeepDouble.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        KeepDouble.entered -= 1
        return super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            wanted = [*args[1:], *kwargs.values()]
            if func is Tensor.float or (func in (Tensor.to, Tensor.type) and torch.float32 in wanted):
                return args[0]
            if kwargs.get("dtype") is torch.float32:  # softmax(x, dtype=torch.float32)
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def keep_double(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """:class:`KeepDouble` for float64, nothing for anything else."""
    return KeepDouble() if dtype is torch.float64 else contextlib.nullcontext()


@dataclass(frozen=True)
class Case:
    """One run of fxbraid: which model, on which layout, how."""

    model: str = "qwen2"
    tied: bool = True
    layers: int = 4
    tp: int = 2
    pp: int = 2
    m: int = 5
    schedule: str = "stp"
    compile: Any = False
    braided: bool = True
    reproducible: bool = False
    dtype: torch.dtype = torch.float32
    mask: bool = True
    steps: int = 3
    rows: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    #: torch.compile(backend="fxbraid") in place of braid()
    backend: bool = False


@dataclass
class Outcome:
    """What one rank saw: relative errors against one process, and digests of the losses and of every gradient
    (by parameter and TP rank), over all steps."""

    case: Case
    loss: float
    grad: float
    norm: float
    digests: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def make_model(name: str, *, tied: bool, layers: int, dtype: torch.dtype) -> nn.Module:
    """``qwen2`` and ``llama`` for float32; for float64 ``odd``, ``towers:`` and a model of :mod:`tests.towers`, or any
    family of the zoo. ``name-frozen``: its first layer and embedding have no gradients. ``images:name`` is a
    vision-language model (``multimodal``), and ``images:name-tower`` the same with what that freezes."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    from . import families, multimodal, odd, towers

    if name.startswith("towers:"):
        return towers.MODELS[name.removeprefix("towers:")]()  # type: ignore[no-any-return]

    if name.startswith("images:"):
        family, _, frozen = name.removeprefix("images:").partition("-")
        model = multimodal.make(family, text_num_hidden_layers=layers)
        return (multimodal.freeze(model, frozen) if frozen else model).to(dtype)
    family, _, frozen = name.removeprefix("zoo:").partition("-frozen")
    if name == "odd":
        return odd.Odd(layers)
    if name not in ("qwen2", "llama"):
        plain = families.make(families.FAMILIES[family], num_hidden_layers=layers, n_layer=layers)
        for key, parameter in plain.named_parameters():
            parameter.requires_grad_(not frozen or not ("embed" in key or "layers.0." in key))
        return plain.to(dtype)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        # Where float32 itself lies within 3e-6 of float64 in every gradient, so that 1e-5 measures fxbraid: at the
        # usual 0.02 attention is uniform and gradients of q and k nearly cancel, at 0.2 the depth amplifies.
        "initializer_range": 0.1,
    }
    torch.manual_seed(7)
    config, kind = {
        "qwen2": (Qwen2Config(**sizes), Qwen2ForCausalLM),
        "llama": (LlamaConfig(**sizes, attention_bias=True, mlp_bias=True), LlamaForCausalLM),
    }[name]
    model = kind(config).to(dtype)
    for key, parameter in model.named_parameters():
        # Biases start at zero and norms at one: move them, or a missing or doubled one would not show.
        if "bias" in key or "norm" in key:
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_batches(rows: int, m: int, *, mask: bool, steps: int) -> list[dict[str, Tensor]]:
    """Random tokens, labels ragged over rows with -100 (one micro-batch nearly empty), padding on the left."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (rows * m, SEQ), generator=generator)
        labels = ids.clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        labels[0, : SEQ - 2] = -100
        batch = {"input_ids": ids, "labels": labels}
        if mask:
            pad = torch.ones_like(ids)
            for row in range(0, rows * m, 2):
                pad[row, : 1 + row % 5] = 0
            labels[pad == 0] = -100
            batch["attention_mask"] = pad
        batches.append(batch)
    return batches


def batches_of(model: str, rows: int, m: int, *, mask: bool, steps: int) -> list[dict[str, Any]]:
    """:func:`make_batches` with what ``model`` takes beside them, or batches of images."""
    if model.startswith("images:"):
        return _images(model.removeprefix("images:").partition("-")[0], rows, m, mask=mask, steps=steps)
    if model.startswith("towers:"):
        from .towers import batch

        return [batch(model.removeprefix("towers:"), rows * m, seed=step) for step in range(steps)]
    more = {"mixing": "left"} if model == "odd" else {}
    return [{**batch, **more} for batch in make_batches(rows, m, mask=mask, steps=steps)]


def _images(name: str, rows: int, m: int, *, mask: bool, steps: int) -> list[dict[str, Any]]:
    """One and two images a sample, and none: other samples have them in every micro-batch and step."""
    from . import multimodal

    def counts(step: int, mb: int) -> list[int]:
        own = [1, 2, *([0] * rows)][:rows] if rows > 1 else [1]
        turn = (step + mb) % rows
        return own[turn:] + own[:turn]

    return [
        multimodal.batch(name, [n for mb in range(m) for n in counts(step, mb)], seed=step, mask=mask)
        for step in range(steps)
    ]


@lru_cache(maxsize=8)
def reference(
    model: str, tied: bool, layers: int, dtype: torch.dtype, rows: int, m: int, mask: bool, steps: int
) -> list[tuple[Tensor, dict[str, Tensor], Tensor]]:
    """(loss, gradients, norm) of every step of the unsplit model in one process."""
    plain = make_model(model, tied=tied, layers=layers, dtype=dtype)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-4, eps=EPS)
    result = []
    for batch in batches_of(model, rows, m, mask=mask, steps=steps):
        with keep_double(dtype):
            loss = whole_loss(plain, batch, m)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        result.append((loss.detach(), grads, norm))
    return result


class Compiled:
    """What ``torch.compile`` returns, with the face of a ``BraidedModel``; ``parameters()`` are the user's."""

    def __init__(self, plain: nn.Module, options: dict[str, Any]) -> None:
        from fxbraid.backend import backend

        self.parameters = plain.parameters
        self.compiled: Any = torch.compile(plain, backend=backend, options=options)

    def step(self, **batch: Any) -> Tensor:
        loss = self.compiled(**batch).loss
        loss.backward()
        return loss.detach()

    def __getattr__(self, name: str) -> Any:
        return getattr(fxbraid.braided(self.compiled), name)


def run_case(case: Case) -> Outcome:
    """Three AdamW steps with clipping; every loss, gradient and norm against the reference."""
    expected = reference(
        case.model, case.tied, case.layers, case.dtype, case.rows, case.m, case.mask, case.steps
    )
    batches = batches_of(case.model, case.rows, case.m, mask=case.mask, steps=case.steps)
    plain = make_model(case.model, tied=case.tied, layers=case.layers, dtype=case.dtype)
    before = {name: p.clone() for name, p in plain.named_parameters()}
    options: dict[str, Any] = {
        "tp_size": case.tp,
        "pp_size": case.pp,
        "n_microbatches": case.m,
        "schedule": case.schedule,
        "compile": case.compile,
        "braided": case.braided,
        "reproducible": case.reproducible,
        **dict(case.options),
    }
    model: Any
    if case.backend:
        model = Compiled(plain, options)
    else:
        with keep_double(case.dtype):
            model = fxbraid.braid(plain, batches[0], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, eps=EPS)
    outcome = Outcome(case, 0.0, 0.0, 0.0)
    digests: dict[str, Any] = {}
    for batch, (loss, grads, norm) in zip(batches, expected, strict=True):
        got = model.step(**batch)
        outcome.losses.append(got.item())
        outcome.loss = max(outcome.loss, relative(got, loss))
        # Of the zoo's models some gradients are zero but for rounding (a key's bias): they count relative to the rest.
        least = 1e-4 * max(g.abs().max().item() for g in grads.values()) if ":" in case.model else 0.0
        digests.setdefault("loss", hashlib.sha256()).update(got.numpy().tobytes())
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            if name not in grads:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            whole = model.plan.tp.params[name].take(grads[name], model._mesh.tp_rank)
            outcome.grad = max(outcome.grad, relative(parameter.grad, whole, grads[name], least))
            key = f"{name}@{model._mesh.tp_rank}"
            digests.setdefault(key, hashlib.sha256()).update(parameter.grad.contiguous().numpy().tobytes())
        outcome.norm = max(outcome.norm, relative(model.clip_grad_norm_(0.5), norm))
        optimizer.step()
        optimizer.zero_grad()
    for name, p in plain.named_parameters():
        if not case.backend:
            assert torch.equal(p, before[name]), f"{name} of the user's model was modified"
        elif name not in dict(model.named_parameters()):
            assert p.numel() == 0 and p.grad is None and p not in optimizer.state, name
        else:
            assert model.get_parameter(name) is p and p in optimizer.state, name
    outcome.digests = {key: digest.hexdigest() for key, digest in digests.items()}
    return outcome


def relative(got: Tensor, wanted: Tensor, scale: Tensor | None = None, least: float = 0.0) -> float:
    """max |got - wanted| over max |scale| (``least`` or more); infinite where ``got`` is not a number."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    top = (wanted if scale is None else scale).abs().max().double()
    error = ((got - wanted).abs().max().double() / top.clamp(min=max(least, 1e-30))).item()
    return error if error == error else float("inf")


_TRACED: dict[str, Any] = {}


def share_traces() -> None:
    """Trace each combination of model, shapes and chunks once per process: the cases differ in what they do with
    it, and tracing is most of a case's time. In a test the fixture ``shared_traces`` does it, for its file."""

    def lower_once(source: nn.Module, micro: dict[str, Any], **options: Any) -> Any:
        config = getattr(source, "config", None)
        if config is None:
            return lower_model(source, micro, **options)  # a test's own class may close over anything
        shapes = {k: (tuple(v.shape), str(v.dtype)) if isinstance(v, Tensor) else v for k, v in micro.items()}
        grids = {k: v.tolist() for k, v in micro.items() if k.endswith("_grid_thw")}
        weights = [
            (n, tuple(p.shape), str(p.dtype), p.requires_grad)
            for n, p in source.named_parameters(remove_duplicate=False)
        ]
        modules = [
            (n, type(m), m.training, getattr(m, "gradient_checkpointing", None), m.extra_repr())
            for n, m in source.named_modules()
        ]
        attention = getattr(config, "_attn_implementation", None)
        doubles = KeepDouble.entered > 0
        key = repr(
            (modules, config, attention, weights, shapes, grids, doubles, sorted(options.items(), key=str))
        )
        if key not in _TRACED:
            _TRACED[key] = lower_model(source, micro, **options)
        return _TRACED[key]

    fxbraid.tracing.lower_model = lower_once  # type: ignore[attr-defined]


def run_cases(cases: list[Case]) -> list[Outcome]:
    """In a rank: all cases, one after the other, in one process group."""
    torch.set_num_threads(1)
    share_traces()
    if cases[0].tp * cases[0].pp == 1:
        return [run_case(case) for case in cases]
    with process_group(timeout_s=60):
        return [run_case(copy.copy(case)) for case in cases]


def merge(outcomes: list[Outcome]) -> Outcome:
    """One outcome of all ranks: the largest errors, all digests; two ranks that hold the same value must agree."""
    whole = copy.copy(outcomes[0])
    whole.digests = {}
    for outcome in outcomes:
        whole.loss, whole.grad = max(whole.loss, outcome.loss), max(whole.grad, outcome.grad)
        whole.norm = max(whole.norm, outcome.norm)
        for key, digest in outcome.digests.items():
            assert whole.digests.setdefault(key, digest) == digest, f"ranks disagree about {key}"
    return whole
