"""``fxbraid.braid``: the one call that a training script needs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import schedule as schedules
from .agree import agree
from .arguments import check_model, check_seed, checked, read_budget
from .inputs import Inputs
from .memory import named
from .model import BraidedModel
from .offloading import Offload
from .options import Options
from .order import Order
from .passes.block import TIMING_ONLY, Collectives
from .passes.checkpoint import Checkpointing
from .passes.compile import Compile
from .passes.errors import BraidError
from .precision import ambient_autocast, check_grad_dtype, refuse_float16
from .runtime.buckets import DEFAULT_MB
from .runtime.mesh import join, make_mesh
from .runtime.profile import Profile
from .schedule import Schedule
from .source import Source, agreed
from .weights import Checkpoint


def braid(
    model: nn.Module,
    example_batch: Mapping[str, Any],
    device_mesh: DeviceMesh | None = None,
    *,
    tp_size: int | None = None,
    pp_size: int | None = None,
    dp_size: int | None = None,
    n_microbatches: int,
    schedule: str | Schedule | None = None,
    tp_plan: str | Mapping[str, str] = "auto",
    split: str | Sequence[int] = "auto",
    compile: Compile = "unit",
    braided: bool = True,
    collectives: Collectives | None = None,
    reproducible: bool = False,
    loss_reduction: str = "auto",
    max_programs: int = 8,
    order: Order | None = None,
    max_live: int | None = None,
    memory_budget: str | float | None = None,
    sequence_parallel: bool = False,
    regather: bool = False,
    checkpoint: Checkpointing = "none",
    vocab_parallel: bool | Literal["auto"] = "auto",
    grad_dtype: torch.dtype | None = torch.float32,
    master_weights: bool = False,
    bucket_mb: float = DEFAULT_MB,
    offload: Offload | None = None,
    static_inputs: str | Sequence[str] = "auto",
    seed: int = 0,
) -> BraidedModel:
    """Turn an unmodified Hugging Face model into this rank's part of a tensor- and pipeline-parallel one.

    Args:
        model: any ``nn.Module`` that ``torch.export`` can trace and whose output has a ``loss``. Every rank passes
            the same model with the same weights. It is not modified: its parameters are copied, shard by shard. What
            of it is on the meta device is initialised here, one module at a time, as the model's own ``_init_weights``
            would, with values that depend on ``seed`` and name alone: the same for every layout. ``load_pretrained``
            of the result, or :func:`from_pretrained`, reads weights from disk.
        example_batch: keyword arguments of the model as ``step`` will get them, tensors [batch, ...] whose dim 0
            divides into ``n_microbatches``; only shapes and dtypes are read (meta tensors are fine). With replicas,
            what one of them gets.
        device_mesh: a mesh with axes "pp" and "tp", and "dp" for replicas; or give the sizes, not both.
        tp_size, pp_size: a missing one is what the world leaves. With one process both are 1.
        dp_size: replicas of the model, each of tp_size x pp_size ranks, the slowest axis (docs/data_parallel.md); 1
            where it is left out. Each passes its own batch to ``step``; loss and gradients are those of all together.
        n_microbatches: m, micro-batches per step (of each replica).
        schedule: a name (``fxbraid.schedule.FAMILIES``) or a :class:`~fxbraid.schedule.Schedule`; "auto" measures this
            model on this machine and takes the fastest of all named schedules and of those that a search makes.
            Default: "stp"; with a ``memory_budget``, "auto".
        tp_plan: "auto" (the model's own plan; where it has none, one that follows from its graph, which ``report()``
            shows), or a dict of module patterns to styles of transformers ("colwise", "rowwise", "replicated", ...).
        split: "auto" (cut where the step is shortest: by the FLOPs of F, I and W, embedding and head included, or by
            measured costs of layers, where they are measured anyway; docs/partition.md), or the layers of each chunk,
            those of all towers in the order in which they run.
        compile: "unit" (Inductor, one artefact per distinct unit), "block" (Inductor on whole blocks, with launches and
            waits pinned; docs/compile.md) or False (eager).
        braided: False runs the same order with blocking collectives and nothing interleaved, for comparison.
        collectives: "overlap"; "blocking" waits right behind each launch, in the same order of units and with the same
            results; "free" leaves them out, for timing only: losses and gradients are then wrong, and everything that
            reports such a model says so. Default: "overlap", or "blocking" where ``braided`` is False.
        reproducible: add up gradients in micro-batch order under any schedule, so that any two agree to the bit (those
            of a parameter that several layers read: any two with the same number of chunks).
        loss_reduction: "auto" finds the mean cross entropy; "sum" or "mean" say what another loss is.
        max_programs: how many batch signatures may be traced before another one is refused.
        order: of units inside a block. "paper"; "costs" measures units and links (:func:`fxbraid.profile`), orders by
            them and leaves braiding out where it would not pay; a profile, or seconds by unit key, does the same with
            those. Default: "costs" for ``schedule="auto"``, else "paper". ``report()`` says what was chosen and why.
        vocab_parallel: cut embedding and LM head over the vocabulary, and compute the loss without whole logits
            (docs/vocab.md). "auto": where the traced model shows that it can be done, and ``report()`` says what stays
            whole and why; True: or raise; False: both are whole on every TP rank.
        grad_dtype: what gradients add up in, over micro-batches and steps, where parameters are narrower: in
            ``parameter.main_grad``, whose rounded copy ``.grad`` is. None: in each parameter's own type.
        master_weights: ``parameters()`` of the trained bfloat16 parameters are float32, with float32 gradients, and the
            program computes with their rounded copies (docs/precision.md).
        bucket_mb: MiB of gradients, at most, in one all-reduce over the replicas.
        offload: saved activations go to pinned host memory behind their forward and come back ahead of their backward,
            as many as there is time for at measured costs and the measured host link, so that no step waits
            (docs/offload.md). "chunk0": those of every rank's first chunk, which live longest; a fraction: at most that
            share of them; a function (chunk, unit) -> bool: those that the units make for which it is true, of any
            chunk. Results are the same to the bit.
        static_inputs: integer inputs whose values are part of a program, such as image grids (docs/multimodal.md): a
            batch with other values is traced anew, ``max_programs`` times at most. "auto": those that the trace turns
            out to need as numbers, which ``report()`` names.
        seed: of the values that a model on the meta device gets.
        max_live: of ``schedule="auto"``: the most chunk activations, at two chunks a rank, that a rank may hold.
        memory_budget: "60GiB", "80GB" or bytes: the most that any rank may need for parameters, gradients, AdamW's
            state and a step, by prediction (docs/memory_prediction.md; leave room for what torch's allocator and
            communicators take). With ``schedule="auto"`` the fastest named schedule that fits is taken, and
            ``report()`` says what the next larger budget would buy; where nothing fits, every rank says by how much.
        sequence_parallel: cut what tensor parallelism leaves whole (norms, residuals, messages) into tokens: a
            reduce-scatter and an all-gather in place of each all-reduce, as many bytes, and 1/tp_size of those
            activations (Korthikanti et al. 2022; docs/sequence_parallel.md). tp_size must divide the tokens.
        regather: with ``sequence_parallel``, W gathers the inputs of column-parallel linears again, which then are
            kept as this rank's tokens alone; False keeps what F gathered.
        checkpoint: whose activations the backward computes again from what leads into their unit (docs/memory.md):
            "none", "mlp", "attention", "attention+mlp", "all", or a function of a unit
            (:class:`~fxbraid.passes.checkpoint.ForwardUnit`) that says True or False, on every rank the same.

    Called in a ``torch.autocast`` region, the casts of that region become part of the program.

    Raises:
        fxbraid.BraidError: (or a subclass) for anything that can't be done, on every rank, before any training
            communication starts, with the numbers and the way out. Ranks compare all arguments first: where one
            differs, every rank names it.
    """
    asked = {name: value for name, value in locals().items() if name != "model"}
    check_model(model)
    check_seed(seed)
    return _build(Source(model, seed=seed), asked)


def from_pretrained(
    path: str | Path,
    example_batch: Mapping[str, Any],
    device_mesh: DeviceMesh | None = None,
    *,
    model_class: type[nn.Module] | None = None,
    config: Any = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    strict: bool = True,
    **options: Any,
) -> BraidedModel:
    """:func:`braid` of a checkpoint on disk, of which each rank reads its own slices only.

    Args:
        path: a folder of ``save_pretrained``: config.json beside one safetensors file or several with an index.
        example_batch, device_mesh: as in :func:`braid`.
        model_class: default: the class that config.json names under "architectures".
        config: default: read from ``path``.
        dtype: of the parameters; "auto" takes the checkpoint's.
        strict: raise where the checkpoint lacks a parameter; False initialises it, as the model itself would.
        options: everything else that :func:`braid` takes.

    The result's ``loaded`` says what was missing and unexpected, and how many bytes this rank read: about its shards.

    Raises:
        fxbraid.BraidError: no checkpoint there, files missing or damaged, shapes that differ, a parameter missing; and
            what :func:`braid` raises.
    """
    check_seed(options.get("seed", 0))
    join()  # a rank that alone finds no file must not leave the others waiting for it
    seed = options.get("seed", 0)
    source = agreed(lambda: _opened(Path(path), model_class, config, dtype, seed=seed, strict=strict))
    asked = inspect.signature(braid).bind(source.model, example_batch, device_mesh, **options)
    asked.apply_defaults()
    return _build(source, {name: value for name, value in asked.arguments.items() if name != "model"})


def _opened(
    path: Path,
    model_class: type[nn.Module] | None,
    config: Any,
    dtype: torch.dtype | Literal["auto"],
    *,
    seed: int,
    strict: bool,
) -> Source:
    """The model of a checkpoint on the meta device, and the open checkpoint that fits it."""
    import transformers

    if config is None:
        if not (path / "config.json").is_file():
            raise BraidError(f"{path} has no config.json; give config=, or a folder of save_pretrained")
        config = transformers.AutoConfig.from_pretrained(path)
    if model_class is None:
        names = getattr(config, "architectures", None) or []
        model_class = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
        if model_class is None:
            raise BraidError(f"transformers has no class of architectures={names}; give model_class=")
    make: Any = getattr(model_class, "_from_config", None)
    if make is None:
        raise BraidError(
            f"{model_class.__name__} is no model class of transformers; give model_class= one that is"
        )
    kind = getattr(config, "dtype", None) if dtype == "auto" else dtype
    with torch.device("meta"):
        model: nn.Module = make(config, **({} if kind is None else {"dtype": kind}))
    source = Source(model.train(), Checkpoint.open(path, model), seed=seed)
    source.check(strict=strict)
    return source


def profile(model: BraidedModel, *, repeats: int = 5, cache: bool = True) -> Profile:
    """What ``model`` costs on this machine: seconds of every distinct unit, of all-reduces and of messages.

    Every rank calls it and gets the same. Measured once, in a few seconds, and kept in a file (``$FXBRAID_CACHE_DIR``,
    else the user's cache folder) for this machine, torch, compile mode, world and shapes; ``cache=False`` measures
    anew and keeps nothing. On an emulated cluster the modelled times and links are taken. ``model.simulate(profile)``
    and ``braid(order=profile)`` take it.

    Raises :class:`BraidError` for a model that :func:`braid` did not make, or ``repeats`` below 1.
    """
    if not isinstance(model, BraidedModel):
        raise BraidError(
            f"profile() measures what braid() has made, and this is a {type(model).__name__}; give it "
            "braid(model, example_batch, ...)"
        )
    return model.profile(repeats=repeats, cache=cache)


def _build(source: Source, asked: Mapping[str, Any]) -> BraidedModel:
    """:func:`braid` with its arguments by name (``asked``), ``model`` replaced by where its tensors come from."""
    budget = asked["memory_budget"]
    if asked["schedule"] is None:
        asked = {**asked, "schedule": "stp" if budget is None else "auto"}
    if budget is not None:
        asked = {**asked, "memory_budget": read_budget(budget)}
    inputs = Inputs.of(source.model)
    collectives, order = checked(asked, inputs)
    example_batch = inputs.complete(asked["example_batch"])
    schedule, m = asked["schedule"], asked["n_microbatches"]
    auto = isinstance(schedule, str) and schedule.lower() == "auto"
    check_grad_dtype(asked["grad_dtype"])
    if source.model.training:
        refuse_float16(source.model)
    if collectives == "free":
        warnings.warn(f'collectives="free" is for {TIMING_ONLY}', stacklevel=3)
    told = {
        **asked,
        "model": source.model,
        "example_batch": dict(sorted(example_batch.items())),
        "order": order,
        "torch.autocast": {kind: ambient_autocast(torch.device(kind)) for kind in ("cpu", "cuda")},
    }
    told |= {f"values of {name}": value for name, value in inputs.layout(example_batch).items()}
    told |= {
        "collectives": collectives,
        "schedule": schedule.lower() if isinstance(schedule, str) else schedule,
    }
    sizes = {name: asked[name] for name in ("tp_size", "pp_size", "dp_size")}
    mesh = make_mesh(asked["device_mesh"], **sizes, agree=lambda: agree(told))
    chosen = None if auto else named(schedule, mesh.pp_size, m)
    if chosen is not None:
        if not asked["braided"]:
            chosen = schedules.unbraid(chosen)
        if asked["reproducible"] and order == "paper":
            chosen = schedules.reproducible(chosen)
        schedules.check(chosen)
    names = {field.name for field in fields(Options)}
    options = {name: value for name, value in asked.items() if name in names}
    options |= {"collectives": collectives, "order": order, "autocast": ambient_autocast(mesh.device)}
    return BraidedModel(source, example_batch, mesh, chosen, Options(**options))
