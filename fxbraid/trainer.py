"""``BraidTrainer``: the Trainer of transformers on a braided model.

>>> model = fxbraid.braid(model, example_batch, tp_size=2, pp_size=2, n_microbatches=4)  # doctest: +SKIP
>>> trainer = fxbraid.BraidTrainer(model=model, args=TrainingArguments(...), train_dataset=...)  # doctest: +SKIP
>>> trainer.train()  # doctest: +SKIP

Started with torchrun, as the script of any Trainer. What a "device" is to the Trainer is a replica here, all tp x pp
ranks of it: they read the same batch, and ``per_device_train_batch_size`` is the batch of a replica, which
``n_microbatches`` divides.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_pt_utils import get_parameter_names
from transformers.trainer_utils import HubStrategy
from transformers.utils.generic import can_return_loss, find_labels

from .checkpoint.checkpointer import Checkpointer
from .model import BraidedModel
from .passes.errors import BraidError

#: In a folder of the Trainer's: what resumes optimizer and scheduler.
STATE = "fxbraid"
#: Parameters that the Trainer never decays, beside those of ``nn.LayerNorm``.
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class BraidTrainer(Trainer):
    """``transformers.Trainer`` for a :class:`~fxbraid.BraidedModel`: logging, evaluation, gradient accumulation,
    clipping, saving and resuming work as they do there, and so do callbacks.

    ``save_model`` and the checkpoint folders hold plain Hugging Face files; beside them lies ``fxbraid/``, from which
    another layout resumes. Logs have ``hidden_share``, ``exposed_share``, ``bubble_share`` and ``tokens_per_s`` of the
    last step. A last batch that is smaller is filled with rows without labels, which neither loss nor gradients see
    (an auxiliary loss of a mixture of experts does).

    Raises :class:`BraidError` for a model that ``braid`` did not make and for arguments that can't be kept.
    """

    def __init__(
        self, model: nn.Module | None = None, args: TrainingArguments | None = None, **options: Any
    ) -> None:
        if not isinstance(model, BraidedModel):
            raise BraidError(
                f"BraidTrainer trains what braid() has made, and this is a {type(model).__name__}; give it "
                "fxbraid.braid(model, example_batch, ...)"
            )
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        _refuse(args, model, options)
        super().__init__(model=model, args=args, **options)
        self._braided = model
        source = model.source
        if self.args.label_names is None:
            self.label_names = find_labels(type(source))
        self.can_return_loss = can_return_loss(type(source))
        parameters = inspect.signature(source.forward).parameters
        self.model_accepts_loss_kwargs = getattr(
            source,
            "accepts_loss_kwargs",
            any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()),
        )
        self._loss_shifts_labels = (
            LOSS_MAPPING.get(str(getattr(source, "loss_type", None))) is ForCausalLMLoss
        )
        self._own_accelerator()
        if args.gradient_accumulation_steps > 1 and not self.model_accepts_loss_kwargs:
            raise BraidError(
                f"the loss of {type(source).__name__} takes no num_items_in_batch, so "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} would weigh batches wrongly; raise "
                "per_device_train_batch_size and n_microbatches instead"
            )

    def _own_accelerator(self) -> None:
        """accelerate places nothing, wraps nothing, and deals batches to replicas, not to ranks."""
        from accelerate.data_loader import prepare_data_loader

        accelerator, mesh = self.accelerator, self._braided.mesh

        def keep(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
            if model not in accelerator._models:
                accelerator._models.append(model)
            return model

        def prepare(loader: Any, *_: Any, **__: Any) -> Any:
            prepared = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=mesh.dp_size,
                process_index=mesh.dp_rank,
                put_on_device=False,
                rng_types=accelerator.rng_types.copy() if accelerator.rng_types else None,
                even_batches=True,
                use_seedable_sampler=True,
                data_seed=self.args.data_seed,
            )
            accelerator._dataloaders.append(prepared)
            return prepared

        def clip(_: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
            return self._braided.clip_grad_norm_(max_norm, norm_type)

        accelerator.prepare_model = keep
        accelerator.prepare_data_loader = prepare
        accelerator.clip_grad_norm_ = clip
        accelerator.gather_for_metrics = self._without_repeats
        self.gather_function = accelerator.gather_for_metrics

    # -- data

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            names = list(inspect.signature(self._braided.source.forward).parameters)
            self._signature_columns: Any = list(
                dict.fromkeys([*names, "label", "label_ids", *self.label_names])
            )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of all replicas of an optimizer step."""
        return self._train_batch_size * args.gradient_accumulation_steps * self._braided.mesh.dp_size

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        if not batch_samples or "labels" not in batch_samples[0] or not self.model_accepts_loss_kwargs:
            return None
        labels = [b["labels"][..., 1:] if self._loss_shifts_labels else b["labels"] for b in batch_samples]
        count = torch.stack([one.ne(-100).sum() for one in labels]).sum().to(device)
        if self._braided.mesh.dp_group is not None:
            dist.all_reduce(count, group=self._braided.mesh.dp_group)
        return count

    def _filled(self, inputs: dict[str, Any], *, training: bool) -> tuple[dict[str, Any], int]:
        """``inputs`` with as many rows as other batches have, and how many are real."""
        tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.ndim > 0}
        rows = max((v.shape[0] for v in tensors.values()), default=0)
        wanted = self._train_batch_size if training else self.args.eval_batch_size
        if rows >= wanted or "labels" not in tensors:
            return inputs, rows
        filled = dict(inputs)
        for name, value in tensors.items():
            if value.shape[0] == rows:
                more = value[:1].expand(wanted - rows, *value.shape[1:])
                filled[name] = torch.cat([value, torch.full_like(more, -100) if name == "labels" else more])
        return filled, rows

    # -- steps

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of all micro-batches of ``inputs``; returns the loss, 0-d, the same on every rank: its
        share of the mean over all batches that one optimizer step adds up."""
        self._braided.train()
        if callable(switch := getattr(self.optimizer, "train", None)):  # schedule-free optimizers have modes
            switch()
        inputs, _ = self._filled(self._prepare_inputs(inputs), training=True)
        if num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": torch.as_tensor(num_items_in_batch)}
        return self._braided.step(**inputs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, logits and labels of all replicas' rows, on every rank."""
        inputs, rows = self._filled(self._prepare_inputs(inputs), training=False)
        with torch.no_grad():
            outputs = self._braided(**inputs)
        loss = outputs.get("loss")
        if loss is not None:  # the Trainer weighs it by rows, of which it knows those of one replica
            loss = loss.repeat(self._braided.mesh.dp_size)
        if prediction_loss_only:
            return loss, None, None
        ignored = {
            *(ignore_keys or getattr(self._braided.config, "keys_to_ignore_at_inference", ["cache"])),
            "loss",
        }
        found = self._everywhere(
            {k: v for k, v in outputs.items() if k not in ignored and isinstance(v, Tensor)}
        )
        logits = tuple(self._replicas(value[:rows]) for value in found.values())
        labels = tuple(self._replicas(inputs[n][:rows]) for n in self.label_names if n in inputs)
        return loss, _one(logits), _one(labels)

    def _everywhere(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of the last chunk's ranks, on every rank of the pipeline."""
        mesh, schedule = self._braided.mesh, self._braided.schedule
        if mesh.pp_size == 1:
            return values
        source = mesh.global_rank(schedule.placement.rank_of(schedule.n_chunks - 1))
        told = [[(name, tuple(value.shape), value.dtype) for name, value in values.items()]]
        dist.broadcast_object_list(told, source, group=mesh.pp_group, device=mesh.device)
        found = {}
        for name, shape, dtype in told[0]:
            value = (
                values[name].contiguous()
                if name in values
                else torch.empty(shape, dtype=dtype, device=mesh.device)
            )
            dist.broadcast(value, source, group=mesh.pp_group)
            found[name] = value
        return found

    def _without_repeats(self, value: Any, *_: Any, **__: Any) -> Any:
        """Every rank has all rows; those that filled up the last batch go."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return value
        return pytree.tree_map_only(Tensor, lambda one: one[: state.remainder], value)

    def _replicas(self, value: Tensor) -> Tensor:
        mesh = self._braided.mesh
        if mesh.dp_group is None:
            return value
        parts = [torch.empty_like(value) for _ in range(mesh.dp_size)]
        dist.all_gather(parts, value.contiguous(), group=mesh.dp_group)
        return torch.cat(parts)

    # -- optimizer and logs

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As the Trainer decides it, from the modules of the user's model: here all are plain containers."""
        return get_parameter_names(self._braided.source, [nn.LayerNorm], _NOT_DECAYED)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """With what the last step hid, where the log is one of training."""
        if "loss" in logs and self._braided.stepped:
            step = self._braided.last_step
            found = {
                "hidden_share": step.hidden_share,
                "exposed_share": step.exposed_tp_share,
                "bubble_share": step.bubble_share,
                "tokens_per_s": step.tokens_per_s,
            }
            logs = {**logs, **{name: round(value, 4) for name, value in found.items() if value is not None}}
        super().log(logs, *args, **options)

    # -- saving and resuming

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Plain Hugging Face files, and those of the tokenizer (``processing_class``, or the data collator's).
        Collective: every rank calls it."""
        folder = Path(str(output_dir or self.args.output_dir))
        self._braided.save_pretrained(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if self.args.should_save and tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _checkpoints(self, folder: str) -> Checkpointer:
        return Checkpointer(Path(folder) / STATE, keep=None, timeout_s=self.args.ddp_timeout)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._checkpoints(output_dir) as checkpoints:
            checkpoints.save(
                self.state.global_step,
                self._braided,
                _plain(self.optimizer),
                self.lr_scheduler,
                blocking=True,
            )

    def _save_rng_state(self, output_dir: str) -> None:
        """Lies in ``fxbraid/``, for any number of ranks."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Was loaded with the optimizer."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._braided.load_pretrained(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._braided.load_pretrained(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with self._checkpoints(checkpoint) as checkpoints:
            if checkpoints.load(self._braided, _plain(self.optimizer), self.lr_scheduler) is None:
                raise BraidError(
                    f"{checkpoints.folder} holds no state of optimizer and scheduler (save_only_model=True?); train "
                    f"from load_pretrained({checkpoint!r}) instead of resuming"
                )


def _one(values: tuple[Tensor, ...]) -> Any:
    return values[0] if len(values) == 1 else values or None


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """What accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _refuse(args: TrainingArguments, model: BraidedModel, options: dict[str, Any]) -> None:
    """What the Trainer offers and a braided model can't keep."""
    reasons = {
        "fp16": "float16 needs its loss scaled; use bfloat16",
        "gradient_checkpointing": "what a braided model saves is its own affair",
        "activation_checkpointing": "what a braided model saves is its own affair",
        "bf16_full_eval": "the program was traced in the types of training",
        "fp16_full_eval": "the program was traced in the types of training",
        "torch_compile": "units are compiled by braid(compile=...)",
        "auto_find_batch_size": "the program was traced for one batch size",
        "label_smoothing_factor": "the loss is part of the traced model",
        "use_liger_kernel": "the model is traced already",
        "fsdp": "shards are the braided model's own",
        "deepspeed": "shards are the braided model's own",
        "neftune_noise_alpha": "the embedding is part of the traced model",
    }
    for name, reason in reasons.items():
        if value := getattr(args, name, None):
            raise BraidError(f"TrainingArguments({name}={value!r}) can't be kept: {reason}; leave it out")
    for name in ("compute_loss_func", "model_init"):
        if options.get(name) is not None:
            raise BraidError(f"{name}= can't be kept: the loss is part of the traced model; leave it out")
    pushed = HubStrategy(args.hub_strategy)
    if args.push_to_hub and pushed is not HubStrategy.END:
        raise BraidError(
            f"TrainingArguments(push_to_hub=True, hub_strategy={pushed.value!r}) can't be kept: it "
            'would push a pickle of the arguments with every save; give hub_strategy="end", which pushes with '
            "save_model() and push_to_hub()"
        )
    if args.bf16 and model.compute_dtype is not torch.bfloat16:
        raise BraidError(
            f"TrainingArguments(bf16=True), but the model computes in {model.compute_dtype}; call braid() inside "
            "torch.autocast to bfloat16, or with a bfloat16 model (master_weights=True keeps float32 weights)"
        )
