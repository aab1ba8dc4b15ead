"""``BraidedModel``: this rank's shards under the Hugging Face names, and the step that trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from . import batch as batches
from .agree import agree_on_units
from .budget import Budget
from .decide import Asked, Decision, decide, decide_under
from .explained import Explained
from .gradients import Gradients, Nonfinite
from .inputs import values_of
from .observe import Watch, observed, watch
from .offloading import Offloading, offloading
from .options import Options, Plan
from .outputs import model_output, nested, rules, total
from .passes.compile import Artefacts
from .passes.errors import BraidError
from .passes.pipeline import Lowered
from .precision import Masters
from .replicas import Replicas
from .runtime.engine import Engine
from .runtime.measure import measure
from .runtime.mesh import Mesh
from .runtime.profile import make_profile, order_from
from .runtime.record_step import record
from .schedule import Placement, Schedule, forward_only
from .source import Source, agreed
from .state import constants_of, skeleton, take, uses
from .tracing import Tracer, Traces
from .weights import Checkpoint, Loaded

#: Runs one step's blocks: (engine, inputs per micro-batch) -> the last chunk's outputs per micro-batch.
Run = Callable[[Engine, Mapping[str, Sequence[Tensor]]], list[list[Tensor]]]


class BraidedModel(Explained):
    """Made by :func:`fxbraid.braid`; not by hand.

    ``parameters()``, ``named_parameters()``, ``state_dict()`` and ``load_state_dict()`` hold this rank's shards
    under the names of the Hugging Face model. A tied parameter that two ranks use is on both, with the same
    gradient.
    """

    def __init__(
        self,
        source: Source,
        example_batch: Mapping[str, Any],
        mesh: Mesh,
        schedule: Schedule | None,
        options: Options,
    ) -> None:
        """``schedule``: None is to be chosen, at measured costs."""
        super().__init__()
        model = source.model
        self.config = getattr(model, "config", None)
        self._mesh, self._options = mesh, options
        self._engines = {}
        self._artefacts = Artefacts(options.compile)
        self._tracer = Tracer(skeleton(model), mesh, options)
        self._example = self._tracer.inputs.example(example_batch)
        self._decision = None
        if options.memory_budget is not None:
            schedule = self._fit(example_batch, schedule, options.memory_budget)
        if schedule is None or (self._options.order != "paper" and self._decision is None):
            self._decision = self._decide(example_batch, schedule)
            schedule = self._decision.schedule
        self._schedule = schedule
        if self._decision is not None and model.training:
            lowered = self._decision.lowered
        else:
            lowered = self._tracer.lower(example_batch, schedule.placement, training=model.training)
        self._tracer.settle(lowered)
        if callable(options.checkpoint):
            agree_on_units(lowered)
        self._plan = Plan(lowered.plan, lowered.partition)
        self._uses = uses(lowered)
        here = schedule.placement.chunks_of(mesh.pp_rank)
        self._masters = Masters()
        options = self._options
        masters = self._masters if options.master_weights else None
        self._state = take(self, source, lowered, self._uses, here, mesh, masters)
        #: behind ``torch.compile``: the user's parameters that other ranks hold, empty here, and their names
        self._elsewhere: Mapping[nn.Parameter, str] = {}
        #: what came of the checkpoint that the weights were read from, if there was one
        self.loaded: Loaded = source.loaded()
        self._replicas = Replicas(mesh)
        parameters = dict(self.named_parameters(remove_duplicate=False))
        # Constants of static inputs are a batch's and not the model's.
        layout = constants_of(lowered, self.source, mesh.device) if lowered.static else {}
        held = {name: value for name, value in self._state.items() if name not in layout}
        self._replicas.compare({**held, **parameters})
        self._gradients = Gradients(
            lowered,
            self._uses,
            parameters,
            mesh,
            self._schedule,
            options.grad_dtype,
            bucket_mb=options.bucket_mb,
        )
        #: steps whose gradients :meth:`clip_grad_norm_` has dropped, since they were not finite
        self.skipped_steps = 0
        self._offloading = self._offload(lowered if model.training else None)
        key = (self._signature(example_batch), model.training)
        self._engines[key] = self._engine(lowered, training=model.training)
        self._last = next(iter(self._engines.values()))
        self._observed = None
        self._registered = {
            name: (self.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], p, p.requires_grad)
            for name, p in parameters.items()
        }
        self.train(model.training)

    # -- training

    def step(self, **batch: Any) -> Tensor:
        """Forward and backward of the whole batch, all micro-batches; gradients add to ``.grad``.

        ``batch``: tensors [batch, ...], the same on every rank of a replica; of equal shapes on all replicas, whose
        batches together are the whole one. Returns the loss of the whole batch, 0-d, detached, the same on every
        rank. A new shape or keyword is traced and cached. :attr:`last_step` then says where the time went.
        """
        return self._step(batch, recorded=False)

    def record(self, **batch: Any) -> Tensor:
        """:meth:`step`, recorded: every unit, launch, wait and message with its times, for :meth:`timeline` and
        :meth:`write_timeline`. The program runs node by node, which costs the host some microseconds a node."""
        return self._step(batch, recorded=True)

    def _step(self, batch: dict[str, Any], *, recorded: bool, run: Run = Engine.run) -> Tensor:
        """``run``: the program, or what runs its blocks in its place (:mod:`fxbraid.pippy`), without times then."""
        if not self.training:
            raise BraidError(
                "step() trains, but the model is in eval mode; call train() first, or model(**batch)"
            )
        begun, inputs = self._prepare(batch, training=True)
        engine = begun.engine
        self._gradients.begin()
        with self._no_autocast():
            recording = record(engine, inputs) if recorded else None
            results = recording.results if recording is not None else run(engine, inputs)
        self._last = engine
        self._gradients.finish()
        loss = self._share(engine, [values[0] for values in results])
        timed = run is Engine.run
        self._observed = (
            observed(begun, batch, self._options.collectives, recording, ordered_by=self._ordered_by)
            if timed
            else None
        )
        return loss

    def forward(self, **batch: Any) -> Any:
        """The pipelined forward of the whole batch in eval mode, without gradients.

        Returns a ``transformers`` ModelOutput: ``loss``, where there are labels, on every rank; everything else
        (logits [batch, ...], hidden states, router logits) on the ranks that hold the last chunk, None on the others.
        An ``aux_loss`` is the mean of the micro-batches', as it counts in :meth:`step`. Raises :class:`BraidError` for
        an output of which it isn't known what it is for the whole batch.
        """
        if self.training:
            raise BraidError(
                "model(**batch) is the forward of eval mode; call step(**batch) to train, or eval() first"
            )
        begun, inputs = self._prepare(batch, training=False)
        engine, m = begun.engine, self._options.n_microbatches
        together = rules(engine.lowered, rows=batches.batch_size(batch) // m, m=m)
        with self._no_autocast():
            results = engine.run(inputs)
        outputs: dict[str, Any] = {}
        for k, (name, rule) in enumerate(together.items()):
            values = [row[k] for row in results]
            if name == "loss":
                outputs[name] = self._share(engine, values)
            else:
                outputs[name] = rule(values) if values else None
        return model_output(nested(outputs))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        skip_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm`` (``inf``: only measure).

        Every parameter counts once, whether sharded, replicated over TP or tied across ranks. Returns the norm
        before clipping, 0-d, float32 (float64 for a float64 model), the same on every rank, as
        ``torch.nn.utils.clip_grad_norm_`` does. Where that is not finite, every rank does the same:
        ``error_if_nonfinite`` raises RuntimeError; ``skip_if_nonfinite`` drops all gradients (``.grad = None``), so
        that the optimizer changes nothing, and counts in ``skipped_steps``; by default it scales, as torch does.
        """
        if error_if_nonfinite and skip_if_nonfinite:
            raise BraidError(
                "error_if_nonfinite and skip_if_nonfinite exclude each other; leave one of them out"
            )
        nonfinite: Nonfinite = "raise" if error_if_nonfinite else "skip" if skip_if_nonfinite else "scale"
        norm = self._gradients.clip(self.named_parameters(), max_norm, norm_type, nonfinite)
        if skip_if_nonfinite and not bool(torch.isfinite(norm)):
            self.skipped_steps += 1
        return norm

    def load_pretrained(self, path: str | Path, *, strict: bool = True) -> Loaded:
        """Read this rank's shards from a folder of safetensors (``save_pretrained``) into its parameters, in place.

        ``strict``: raise where a parameter is missing; else it keeps its value. Raises BraidError before anything is
        changed where files are missing or damaged or shapes differ, the same on every rank.
        """

        def opened() -> Source:
            source = Source(self.source, Checkpoint.open(path, self.source))
            source.check(strict=strict)
            return source

        source = agreed(opened)
        source.fill(self.state_dict(keep_vars=True), self._plan.tp.params, self._mesh.tp_rank)
        self.loaded = source.loaded()
        return self.loaded

    def save_pretrained(
        self, folder: str | Path, *, max_shard_size: int | str = "5GB", dtype: torch.dtype | None = None
    ) -> None:
        """Write plain Hugging Face files: config.json, and weights as safetensors, in one file or several with an
        index, tied ones once. ``transformers`` loads them without fxbraid.

        One parameter at a time is whole on one rank, and files go round the ranks, which must share ``folder``.
        ``dtype``: of the weights (default: as they are here). Raises BraidError, on every rank, where the disk refuses.
        Collective: every rank calls it.
        """
        from .checkpoint.export import save_pretrained

        save_pretrained(self, folder, max_shard_size=max_shard_size, dtype=dtype)

    def measure_peak(self, **batch: Any) -> int:
        """Run one step and return the peak of this rank's live activation bytes, sampled at every node of the program.

        Counts every distinct storage that the step makes and that lives between two units (saved activations,
        hand-over, boundaries, receive buffers, messages); not parameters, gradients, the batch, or temporaries inside a
        unit. Gradients are left as they were.
        """
        begun, inputs = self._prepare(batch, training=True)
        with self._no_autocast(), self._gradients.untouched():
            return measure(begun.engine, inputs, held=self._state.values()).peak

    # -- inside

    def _offload(self, lowered: Lowered | None) -> Offloading | None:
        """What was asked to leave the device, planned at the costs of the decision, or measured ones. Collective.
        ``lowered``: this rank's chunks, traced for training, if they are."""
        options, decision = self._options, self._decision
        if options.offload is None:
            return None
        lowered = lowered or self._tracer.lower(self._example, self._schedule.placement)
        return offloading(
            options.offload,
            self._schedule,
            lowered,
            decision.profile
            if decision is not None
            else make_profile(lowered, self._artefacts, self._mesh, self._schedule),
            self._mesh,
            braided=options.collectives != "blocking",
            ordered_by=self._ordered_by,
        )

    def _asked(self, schedule: Schedule | None) -> Asked:
        options = self._options
        return Asked(
            schedule,
            options.order,
            options.n_microbatches,
            braided=options.braided,
            reproducible=options.reproducible,
            max_live=options.max_live,
        )

    def _decide(self, example_batch: Mapping[str, Any], schedule: Schedule | None) -> Decision:
        return decide(self._asked(schedule), self._mesh, self._artefacts, Traces(self._tracer, example_batch))

    def _fit(self, example_batch: Mapping[str, Any], schedule: Schedule | None, nbytes: int) -> Schedule:
        """The schedule (``schedule``, or where it is None the fastest one), and the options, that fit into ``nbytes``
        a rank."""

        def trace(options: Options, n_chunks: int) -> Lowered:
            if schedule is not None:
                placement = schedule.placement
            else:  # every chunk is traced, wherever it lies
                v = n_chunks // self._mesh.pp_size
                placement = Placement("v" if v == 2 else "loop", self._mesh.pp_size, v)
            return self._tracer.under(options).lower(example_batch, placement, everything=True)

        mesh = self._mesh
        budget = Budget(nbytes, self._options, (mesh.pp_size, mesh.dp_size), trace, schedule)
        fits = budget.fitting(offload=True)
        if schedule is not None and fits:
            changes = min(fits, key=budget.again).variant.changes
        else:
            self._decision, changes = decide_under(self._asked(None), budget, mesh, self._artefacts)
            schedule = self._decision.schedule
        self._options = replace(self._options, **changes)
        self._tracer = self._tracer.under(self._options)
        return schedule

    def _engine(self, lowered: Lowered, *, training: bool) -> Engine:
        return Engine(
            lowered,
            self._schedule if training else forward_only(self._schedule),
            self._mesh,
            state=self._state_of(lowered),
            slots=self._gradients.slots,
            artefacts=self._artefacts,
            collectives=self._options.collectives,
            order=order_from(costs, lowered)
            if training and (costs := self._ordered_by) is not None
            else None,
            reduces=reducer.modules if (reducer := self._gradients.reducer) is not None else None,
            offload=self._offloading.plan_for(lowered) if training and self._offloading is not None else None,
        )

    def _state_of(self, lowered: Lowered) -> dict[str, Tensor]:
        """Parameters and buffers, and the constants of one trace, which may have other values than another's."""
        return {**self._state, **constants_of(lowered, self.source, self._mesh.device)}

    def _engine_for(self, batch: Mapping[str, Any], *, training: bool) -> Engine:
        key = (self._signature(batch), training)
        if key not in self._engines:
            if len(self._engines) >= self._options.max_programs:
                static = sorted(name for name in self._tracer.static if name in batch)
                bucket = (
                    f"the values of {', '.join(static)} are part of a program, so bucket the data: resize images to "
                    "few sizes, and put as many of each size into every micro-batch"
                )
                raise BraidError(
                    f"this batch ({key[0]}) would be program number {len(self._engines) + 1}, and max_programs is "
                    f"{self._options.max_programs}; {bucket if static else 'pad batches to fewer shapes'}, or raise "
                    "max_programs"
                )
            lowered = self._tracer.lower(batch, self._schedule.placement, training=training)
            known = {(chunk, name) for uses in self._uses.values() for chunk, name in uses}
            new = [n for c in lowered.partition.chunks for n in c.params if (c.index, n) not in known]
            if new:  # found from all chunks, so that every rank says it
                raise BraidError(
                    f"with these inputs the model reads {new[0]}, which it did not read with the example batch; "
                    "braid() with an example that has all the inputs of training"
                )
            key = (self._signature(batch), training)  # the trace may have found static inputs
            self._engines[key] = self._engine(lowered, training=training)
        return self._engines[key]

    def _signature(self, batch: Mapping[str, Any]) -> batches.Signature:
        return self._tracer.inputs.signature(batch, self._options.n_microbatches, self._tracer.static)

    def _prepare(self, given: Mapping[str, Any], *, training: bool) -> tuple[Watch, dict[str, list[Any]]]:
        """The engine for a batch, watched from here on, and its inputs. What speaks against it is raised before any
        collective, and where there are replicas on all of them."""
        m = self._options.n_microbatches

        def prepare() -> tuple[Watch, dict[str, list[Any]]]:
            self._check_unchanged()
            batch = self._tracer.inputs.complete(given)
            begun = watch(self._engine_for(batch, training=training))
            return begun, self._inputs(begun.engine, batch)

        if self._mesh.dp_size > 1 and not self._knows(given, training=training):
            # Shapes first, then their trace: they are new on all replicas or refused on all.
            takes = self._tracer.inputs
            self._replicas.together(lambda: takes.split(takes.complete(given), m), self._told(given))
        begun, inputs = self._replicas.together(prepare, self._told(given))
        lowered = begun.engine.lowered
        if lowered.count is not None and begun.engine.has_last:
            totals = self._replicas.counts(self._count(lowered, lowered.count, inputs))
            for name, total in zip(lowered.counts, totals, strict=True):
                inputs[name] = [total.to(begun.engine.one.dtype)] * m
        return begun, inputs

    def _knows(self, given: Mapping[str, Any], *, training: bool) -> bool:
        try:
            known = self._signature(self._tracer.inputs.complete(given))
        except BraidError:
            return False
        return (known, training) in self._engines

    def _told(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What replicas compare of a batch: shapes, and the values that are part of a program."""
        static = {n for n in self._tracer.static if isinstance(given.get(n), Tensor)}
        return {**given, **{name: values_of(given[name]) for name in static}}

    def _inputs(self, engine: Engine, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        self._masters.refresh()
        m, takes = self._options.n_microbatches, self._tracer.inputs
        parts, filled = takes.cut(batch, m)
        engine.lowered.check_filled(filled)
        engine.lowered.checks.check(batch, lambda: parts)
        engine.lowered.check_selected(parts, m)
        device = self._mesh.device
        if takes.kinds:  # cut on the host, where tokens say whose image is whose
            rows = [batches.move({name: part[i] for name, part in parts.items()}, device) for i in range(m)]
            micro = {name: [row[name] for row in rows] for name in parts}
        else:
            micro = takes.split(batches.move(batch, device), m)
        return {name: values for name, values in micro.items() if isinstance(values[0], Tensor)}

    def _count(
        self, lowered: Lowered, count: fx.GraphModule, inputs: Mapping[str, list[Tensor]]
    ) -> list[Tensor]:
        """The loss denominators of this replica's batch."""
        names = [n for n in lowered.inputs if n not in lowered.counts]
        per_micro = [count(*(inputs[n][mb] for n in names)) for mb in range(self._options.n_microbatches)]
        return [torch.stack(values).sum() for values in zip(*per_micro, strict=True)]

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum over micro-batches, in their order."""
        if losses:
            return total(losses)
        return torch.zeros((), device=self._mesh.device, dtype=self._last.one.dtype)

    def _share(self, engine: Engine, losses: Sequence[Tensor]) -> Tensor:
        """The loss of the whole batch on every rank, from those of the micro-batches on the last chunk's."""
        loss = self._total(losses)
        if engine.has_last:
            loss = self._replicas.total(loss)
        if self._mesh.pp_group is not None and self._mesh.pp_size > 1:
            source = self._schedule.placement.rank_of(self._schedule.n_chunks - 1)
            dist.broadcast(loss, self._mesh.global_rank(source), group=self._mesh.pp_group)
        return loss

    def _check_unchanged(self) -> None:
        """The program reads the parameters that ``braid`` made, with the types and ``requires_grad`` of then."""
        for name, (module, leaf, parameter, wanted) in self._registered.items():
            if module._parameters.get(leaf) is not parameter:
                raise BraidError(
                    f"{name} was replaced after braid(), and the program would go on with the old one; copy into it "
                    "instead (load_state_dict without assign=True, parameter.data.copy_)"
                )
            if parameter.requires_grad != wanted:
                raise BraidError(
                    f"requires_grad of {name} was {wanted} when the program was made and is "
                    f"{parameter.requires_grad} now; set it before braid()"
                )
        self._check_autocast()

    def _no_autocast(self) -> torch.autocast:
        """Around what runs: its casts are in the graph, once."""
        return torch.autocast(self._mesh.device.type, enabled=False)

    def _check_autocast(self) -> None:
        kind = self._mesh.device.type
        now = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        then = self._options.autocast
        if now not in (None, then):
            traced = f"with {then}" if then is not None else "without it"
            raise BraidError(
                f"torch.autocast to {now} is on for {kind}, but the program was traced {traced}, and its casts are "
                "part of it; call braid() in the same autocast region, or leave the region before the step"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> BraidedModel:
        """``to``, ``half``, ``cuda``, ...: what changes nothing is fine, anything else would no longer fit the
        program and is refused."""
        for name, tensor in self._state.items():
            wanted = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if wanted.dtype != tensor.dtype or wanted.device != tensor.device:
                raise BraidError(
                    f"{name} is {tensor.dtype} on {tensor.device}, and the program was traced for that; convert or "
                    f"move the model to {wanted.dtype} on {wanted.device} before braid()"
                )
        return self

    def __getstate__(self) -> Any:
        raise BraidError(
            "a BraidedModel holds process groups and compiled programs, which can't be copied or pickled; save "
            "state_dict(), and braid() again where it is loaded"
        )
