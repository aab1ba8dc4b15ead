"""What a braided model says of itself: what runs, what a step was worth, what it will be worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from .batch import Signature
from .decide import Decision
from .memory import memory_of
from .metrics import StepMetrics
from .observe import Observed, gather, save
from .offloading import Offloading
from .options import Options, Plan
from .passes.compile import Artefacts
from .passes.errors import BraidError
from .passes.pipeline import Lowered
from .report import Report, make_report
from .runtime.costs import CollectiveTime, profile, workload
from .runtime.engine import Blocks, Engine
from .runtime.mesh import Mesh
from .runtime.profile import Profile, as_profile, make_profile
from .schedule import Schedule
from .simulate import INSTANT, Link, Result, Workload, simulate
from .simulate.memory import Memory
from .timeline import RankTimeline, Timeline
from .tracing import Tracer


class Explained(nn.Module):
    """The part of :class:`fxbraid.BraidedModel` that trains nothing. It reads what the rest has made:"""

    _mesh: Mesh
    _options: Options
    _schedule: Schedule
    _decision: Decision | None
    _tracer: Tracer
    _plan: Plan
    _artefacts: Artefacts
    #: parameters and buffers by name
    _state: dict[str, Tensor]
    #: meta tensors of the shapes that braid() was given
    _example: dict[str, Any]
    #: by signature of the batch and mode
    _engines: dict[tuple[Signature, bool], Engine]
    #: the engine of the last step, or the first one
    _last: Engine
    #: the last step, None where there was none or nobody timed it
    _observed: Observed | None
    #: what goes to the host, None where nothing was asked to
    _offloading: Offloading | None

    # -- what runs

    @property
    def program(self) -> fx.GraphModule:
        """This rank's program, the one of the last step: ``print(model.program.code)``."""
        return self._last.program

    @property
    def blocks(self) -> Blocks:
        """This rank's blocks: ``print(model.blocks["F&B"].code)``."""
        return self._last.blocks

    @property
    def schedule(self) -> Schedule:
        """The schedule of all ranks, as it runs."""
        return self._schedule

    @property
    def source(self) -> nn.Module:
        """The structure of the user's model, on the meta device."""
        return self._tracer.model

    @property
    def stepped(self) -> bool:
        """Was there a step, so that there is a :attr:`last_step`?"""
        return self._observed is not None

    @property
    def mesh(self) -> Mesh:
        """This process's place among the ranks, and its groups."""
        return self._mesh

    @property
    def lowered(self) -> Lowered:
        """The traced model of the last step: chunks, units, shards."""
        return self._last.lowered

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the matrix products: autocast's, or the largest parameter's."""
        if self._options.autocast is not None:
            return self._options.autocast
        return max((v for v in self._state.values() if v.is_floating_point()), key=Tensor.numel).dtype

    @property
    def plan(self) -> Plan:
        """Tensor-parallel styles and shards, and the partition into chunks."""
        return self._plan

    # -- what it was worth

    def report(self) -> Report:
        """What was built, and what the last step was worth: ``print(model.report())``. Local."""
        last = self._observed.metrics() if self._observed is not None else None
        choice = self._decision.choice if self._decision is not None else None
        return make_report(
            self._last,
            self._plan,
            self._mesh,
            self._options,
            len(self._artefacts),
            last,
            choice,
            offload=self._offloading.lines if self._offloading is not None else (),
        )

    @property
    def last_step(self) -> StepMetrics:
        """The last :meth:`step` in numbers: ``print(model.last_step)``. Every rank may ask, or only one."""
        if self._observed is None:
            raise BraidError(
                "there was no step() yet, or torch's runtime ran it, which leaves no times; call step(**batch)"
            )
        return self._observed.metrics()

    def timeline(self) -> RankTimeline:
        """This rank's spans of the last step, if :meth:`record` ran it; in ticks of its clock. Local."""
        if self._observed is None or self._observed.timeline is None:
            raise BraidError("the last step was not recorded; call record(**batch) in place of step(**batch)")
        return self._observed.timeline

    def write_timeline(self, path: str | Path | None = None) -> Timeline:
        """The spans of all ranks as one timeline, and as one file for Perfetto, chrome://tracing and
        ``fxbraid draw --measured`` (written by the first rank; None writes none). Collective; raises
        :class:`BraidError` on every rank where the file can't be written."""
        if self._observed is None:
            raise BraidError("there was no step() yet; call record(**batch) first")
        timeline = gather(self._observed)
        save(timeline, path, self._mesh)
        return timeline

    # -- what it will be worth

    def memory(self, *, optimizer: str | float = "adamw", zero: bool = False) -> Memory:
        """What every pipeline rank holds over one step, by what it is for: ``print(model.memory())``; ``as_dict()`` for
        JSON, and :mod:`fxbraid.draw.memory` for a picture. Predicted from the programs of all ranks. Local.

        ``optimizer``: "adamw", "adam", "sgd", "sgd_momentum", or bytes of state for each element of a parameter;
        ``zero``: lies it over the replicas (:func:`zero_optimizer`)? Raises :class:`BraidError` for another optimizer.
        """
        mesh = self._mesh
        size = f"tp {mesh.tp_size} x pp {mesh.pp_size}" + (
            f" x dp {mesh.dp_size}" if mesh.dp_size > 1 else ""
        )
        return memory_of(
            self._everything(),
            self._schedule,
            self._options,
            mesh.dp_size,
            optimizer=optimizer,
            zero=zero,
            ordered_by=self._ordered_by,
            offload=self._offloading.every if self._offloading is not None else None,
            label=f"{type(self.source).__name__}, {size}",
        )

    def profile(self, *, repeats: int = 5, cache: bool = True) -> Profile:
        """Seconds of every distinct unit by key, and links: measured once, cached on disk, the same on all ranks;
        what :meth:`simulate` and ``braid(order=...)`` take. Collective: every rank calls it. See
        :func:`fxbraid.profile`."""
        lowered = next((e.lowered for (_, training), e in self._engines.items() if training), None)
        if lowered is None:
            lowered = self._tracer.lower(self._example, self._schedule.placement)
        return make_profile(
            lowered, self._artefacts, self._mesh, self._schedule, repeats=repeats, cache=cache
        )

    def simulate(
        self,
        seconds: Mapping[str, float] | None = None,
        *,
        collective: CollectiveTime | None = None,
        link: Link = INSTANT,
    ) -> Result:
        """Predict one training step of all ranks: time, bubble, exposed communication, memory, critical path.

        ``seconds``: a :class:`Profile`, which brings its links, or seconds by unit key (default: measured here).
        ``collective``: bytes -> seconds of an all-reduce. The order of units, messages and collectives is that of the
        program. Local: no rank waits for another.
        """
        lowered = self._everything()
        times = as_profile(profile(lowered, self._artefacts) if seconds is None else seconds)
        if self._options.collectives == "free":
            collective = _free
        costs = workload(
            lowered,
            times,
            collective=collective or times.all_reduce.seconds,
            reduce=times.replicas.seconds if self._mesh.dp_size > 1 else None,
            link=link,
            host=times.host_link(),
            label=times.label,
        )
        return simulate(
            self._schedule,
            replace(costs, links=times.links(), contention=times.share),
            braided=self._options.collectives != "blocking",
            ordered_by=self._ordered_by,
            offload=self._offloading.every if self._offloading is not None else None,
        )

    # -- inside

    @property
    def _ordered_by(self) -> Workload | None:
        """The costs that units in blocks are ordered by; None is the paper's order."""
        return self._decision.ordered_by if self._decision is not None else None

    def _everything(self) -> Lowered:
        """The units of all chunks, also of other ranks, at the shapes of the first training trace."""
        if "_all" not in self.__dict__:
            self.__dict__["_all"] = self._tracer.lower(
                self._example, self._schedule.placement, everything=True
            )
        return cast(Lowered, self.__dict__["_all"])


def _free(size: int) -> float:
    return 0.0
