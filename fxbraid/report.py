"""``BraidedModel.report()``: what was built, in numbers and sentences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .metrics import StepMetrics
from .passes.aliases import storage
from .passes.block import TIMING_ONLY, Collectives
from .passes.cost import nbytes
from .passes.joint import Phase
from .passes.marks import COLLECTIVES
from .passes.partition import Partition
from .plan.choose import Choice
from .runtime.engine import Engine
from .runtime.mesh import Mesh
from .schedule import parts
from .schedule.stp import below_closed_form

if TYPE_CHECKING:
    from .options import Options, Plan


_MODES = {
    "overlap": "overlapped collectives",
    "blocking": "blocking collectives",
    "free": f"NO collectives ({TIMING_ONLY})",
}


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """One chunk of this rank. ``units`` and ``matmuls`` by phase, "R" for what I computes again. Bytes are per
    micro-batch, each storage once; ``handed`` lives from I to W."""

    index: int
    layers: range
    units: dict[str, int]
    collectives: dict[str, dict[str, int]]
    matmuls: dict[str, int]
    saved_bytes: int
    handed_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """See the fields; ``str()`` gives the text."""

    sizes: str
    schedule: str
    chunks: tuple[ChunkReport, ...]
    layers_per_chunk: tuple[int, ...]
    blocks: dict[str, int]
    units: int
    artefacts: int
    compile: str
    braided: bool
    collectives: Collectives
    notes: tuple[str, ...]
    last_step: StepMetrics | None = None
    choice: Choice | None = None
    offload: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"fxbraid: {self.sizes}",
            f"schedule {self.schedule}, {'braided' if self.braided else 'unbraided'}, {_MODES[self.collectives]}",
            *(self.choice.lines if self.choice is not None else ()),
            f"layers per chunk: {', '.join(map(str, self.layers_per_chunk))}",
            "blocks of this rank's program: " + ", ".join(f"{n} x {kind}" for kind, n in self.blocks.items()),
            f"{self.units} units {'in' if self.compile == 'block' else 'share'} {self.artefacts} artefacts "
            f"(compile={self.compile})",
        ]
        for chunk in self.chunks:
            phases = "; ".join(
                f"{p}: {chunk.units[p]} units, {chunk.matmuls[p]} matmuls, "
                f"{_collectives(chunk.collectives.get(p, {}))}"
                for p in chunk.units
            )
            lines.append(
                f"chunk {chunk.index} (layers {chunk.layers.start} to {chunk.layers.stop - 1}): {phases}; saves "
                f"{chunk.saved_bytes:,} bytes a micro-batch, hands {chunk.handed_bytes:,} from I to W"
            )
        lines += self.offload
        if self.last_step is not None:
            lines.append(str(self.last_step))
        return "\n".join([*lines, *self.notes])


def _sizes(mesh: Mesh, m: int) -> str:
    more, where = (f" x dp {mesh.dp_size}", f"dp {mesh.dp_rank}, ") if mesh.dp_size > 1 else ("", "")
    each = " each" if more else ""
    return (
        f"tp {mesh.tp_size} x pp {mesh.pp_size}{more}, {m} micro-batches{each}, rank "
        f"({where}pp {mesh.pp_rank}, tp {mesh.tp_rank})"
    )


def _collectives(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}s" for name, count in counts.items()) or "0 all-reduces"


def _towers(partition: Partition) -> list[str]:
    """Which layers of which tower each chunk holds, where there is more than one tower."""
    names = partition.names
    if len({name.rpartition(".")[0] for name in names}) < 2:
        return []
    return [
        f"chunk {chunk.index} holds {names[chunk.layers.start]} to {names[chunk.layers.stop - 1]}"
        for chunk in partition.chunks
    ]


def make_report(
    engine: Engine,
    plan: Plan,
    mesh: Mesh,
    options: Options,
    artefacts: int,
    last_step: StepMetrics | None = None,
    choice: Choice | None = None,
    *,
    offload: tuple[str, ...] = (),
) -> Report:
    """The report of one engine on this rank, of the last step, if there was one, and of what was chosen by costs."""
    schedule = engine.schedule
    counts: Counter[str] = Counter()
    for step in schedule.actions[mesh.pp_rank]:
        counts["&".join(action.phase.value for action in parts(step))] += 1
    chunks = []
    for index, chunk in sorted(engine.lowered.chunks.items()):
        joint = chunk.joint
        phases = [p for p in Phase if chunk.units[p]]
        everything = [unit for phase in phases for unit in chunk.units[phase]]
        kinds = [kind for kind in "FRIW" if any(unit.kind == kind for unit in everything)]
        saved = {storage(n) for n in (*chunk.for_I, *chunk.for_W)} - set(joint.inputs.values())
        handed = {storage(n) for n in chunk.handed} - saved
        chunks.append(
            ChunkReport(
                index=index,
                layers=joint.chunk.layers,
                units={kind: sum(unit.kind == kind for unit in everything) for kind in kinds},
                collectives={
                    p.value: dict(
                        Counter(
                            COLLECTIVES[n.target]
                            for n, q in joint.phase.items()
                            if q is p and chunk.is_collective(n)
                        )
                    )
                    for p in phases
                },
                matmuls={
                    kind: sum(unit.matmuls for unit in everything if unit.kind == kind) for kind in kinds
                },
                saved_bytes=sum(nbytes(n.meta["val"]) for n in saved),
                handed_bytes=sum(nbytes(n.meta["val"]) for n in handed),
            )
        )
    below = below_closed_form(schedule.p, schedule.m) if schedule.name == "stp" else []
    return Report(
        sizes=_sizes(mesh, options.n_microbatches),
        schedule=f"{schedule.name}, {schedule.n_chunks} chunks on {schedule.p} ranks ({schedule.placement.kind})",
        chunks=tuple(chunks),
        layers_per_chunk=tuple(len(c.layers) for c in plan.partition.chunks),
        blocks=dict(counts),
        units=sum(len(u) for c in engine.lowered.chunks.values() for u in c.units.values()),
        artefacts=artefacts,
        compile=str(options.compile),
        braided=options.braided,
        collectives=options.collectives,
        notes=(*plan.tp.notes, *_towers(plan.partition), *map(str, plan.partition.skips), *below),
        last_step=last_step,
        choice=choice,
        offload=offload,
    )
