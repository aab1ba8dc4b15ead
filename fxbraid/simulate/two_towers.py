"""The analytic workload of a vision tower and a decoder, cut as one row of layers.

Blocks of the tower, then layers of the decoder, as pass ``partition`` cuts them; the merger and the text's embedding
lie between the two and go with either side::

    patches | block 0 ... block n-1 | merger, embedding | layer 0 ... layer k-1 | norm, head, loss

A block has an attention and an MLP unit, with an all-reduce of the patches behind each. Norms and residuals of the
tower work on all patches with sequence parallelism too, as only the text's tokens are cut. Heads that tp does not
divide are computed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from fxbraid.schedule import Placement, ScheduleError
from fxbraid.schedule.cut import At, Row, balance, search
from fxbraid.schedule.uneven import PhaseTimes, stand_in, total, uneven_makespan
from fxbraid.simulate.analytic import Group, Parts, Shape, Tail, assembled, named
from fxbraid.simulate.device import Device
from fxbraid.simulate.kernels import Kernels, pipeline_links
from fxbraid.simulate.model import ModelConfig
from fxbraid.simulate.tower import TowerConfig
from fxbraid.simulate.workload import ChunkCost, Link, UnitCost, Workload

QUICK = 8_000
"""Steps of schedules that the search for a cut may run through, where nothing better is asked for."""

LEAST = 16
"""Cuts that it looks at however long a schedule is."""


@dataclass(frozen=True, slots=True)
class Stretched:
    """A model as a row of stretches: what each computes, bytes of weights and their state, and the boundary in front of
    each. flops, label: as in ``Workload``."""

    row: Row
    groups: tuple[tuple[Group, ...], ...]
    static: tuple[float, ...]
    tails: tuple[Tail, ...]
    flops: float
    label: str

    @property
    def pieces(self) -> tuple[ChunkCost, ...]:
        """Every stretch as a chunk, without boundaries: what ``plan.cut.CutClock`` puts together."""
        return tuple(assembled(groups, None, None) for groups in self.groups)

    def chunks(self, at: At) -> tuple[ChunkCost, ...]:
        """The chunks that begin at the stretches ``at``."""
        ends = (0, *at, self.row.count)
        return tuple(
            assembled(
                [group for groups in self.groups[a:b] for group in groups],
                self.tails[a] if a else None,
                self.tails[b] if b < self.row.count else None,
            )
            for a, b in pairwise(ends)
        )


def stretched(model: ModelConfig, device: Device, shape: Shape) -> Stretched:
    """``model`` with ``shape.images`` images in every sequence. Raises ScheduleError for a model without a tower, and
    for images that do not fit."""
    tower = model.tower
    if tower is None:
        raise ScheduleError(
            f"{model.name} has no vision tower that the analytic model knows; leave the images out"
        )
    patches = tower.sized(shape.patches, model.name)
    if shape.images * tower.features(patches) > shape.seq:
        raise ScheduleError(
            f"{shape.images} images of {tower.features(patches)} tokens do not fit into a sequence of {shape.seq}"
        )
    kernels = Kernels(device, shape.width, shape.efficiency)
    text = Parts(model, kernels, shape)
    sight = _Tower(tower, patches, kernels, shape)
    blocks, row = tower.layers, Row(tower.layers + model.layers, (2 * tower.layers,))
    groups: list[list[Group]] = [[] for _ in range(row.count)]
    static = [0.0] * row.count
    each = 2 + 4 + 12 / shape.dp
    groups[0].append(sight.embedding())
    static[0] += tower.patch * tower.hidden * each
    for k in range(blocks):
        groups[2 * k + 1].append(named(sight.block(k), k, "v"))
        static[2 * k + 1] += sight.parameters * each
        if k in tower.deep:
            groups[2 * k + 2].append(named(sight.merger(), k, "deep"))
            static[2 * k + 2] += sight.merger_parameters * each
    groups[2 * blocks] += [sight.merger(), text.embedding()]
    static[2 * blocks] += sight.merger_parameters * each + model.vocab * model.hidden / shape.tp * each
    layer = text.layer()
    for k in range(model.layers):
        groups[2 * (blocks + k) + 1].append(named(layer, k))
        static[2 * (blocks + k) + 1] += (model.attention_parameters + model.mlp_parameters) / shape.tp * each
    groups[-1].append(text.head())
    static[-1] += model.vocab * model.hidden / shape.tp * each
    boundary = float(shape.tokens * model.hidden * shape.width) / shape.cut
    tails = [
        sight.tail(s) if s <= 2 * blocks else _carrying(text.tail(boundary), sight.carried(s))
        for s in range(row.count)
    ]
    images = shape.images * shape.batch
    return Stretched(
        row,
        tuple(map(tuple, groups)),
        tuple(static),
        tuple(tails),
        (model.step_flops(shape.tokens, shape.seq) + 3 * images * tower.forward_flops(patches)) / shape.tp,
        f"{model.name} on {device.name}, seq {shape.seq} with {shape.images} images of {patches} patches, micro-batch "
        f"{shape.batch}, tp {shape.tp}" + (", sequence parallel" if shape.sequence else ""),
    )


def both(
    model: ModelConfig,
    device: Device,
    placement: Placement,
    shape: Shape,
    layers: Sequence[int] | None = None,
    at: At | None = None,
) -> Workload:
    """What ``analytic`` gives for a model with images. It has ``layers`` of both towers in each chunk, or is cut ``at``
    stretches; else where a quick clock over whole actions (``schedule.uneven``) finds the step shortest, for one
    sequence and without recomputation."""
    made = stretched(model, device, shape)
    row = made.row
    if layers is not None:
        if len(layers) != placement.n_chunks or sum(layers) != row.layers or min(layers) < 1:
            tower = row.layers - model.layers
            raise ScheduleError(
                f"{list(layers)} are no layers for {placement.n_chunks} chunks of {model.name}, which has {tower} "
                f"blocks in its tower and {model.layers} layers; give one number of 1 or more per chunk that add up to "
                f"{row.layers}"
            )
        at = row.of_layers(layers)
    if row.layers < placement.n_chunks:
        raise ScheduleError(
            f"{model.name} has {row.layers} layers in both towers, too few for {placement.n_chunks} chunks; "
            "use fewer pipeline ranks or fewer chunks a rank"
        )
    if at is None:
        plain = replace(shape, batch=1, dp=1, checkpoint="none", sequence=False, regather=False)
        pieces = stretched(model, device, plain).pieces
        times = tuple(_times(piece) for piece in pieces)
        collectives = sum(piece.collective("F") for piece in pieces) / sum(f for f, _, _ in times)
        at = _quick(row, times, collectives, placement)
    link, links = pipeline_links(device, placement.p, shape.tp * shape.dp, placement.kind)
    return Workload(
        made.chunks(at),
        link=link,
        links=links,
        host=Link(device.latency, device.host * device.wire),
        flops=made.flops,
        peak=device.peak,
        static=tuple(sum(made.static[a:b]) for a, b in pairwise((0, *at, row.count))),
        label=f"{made.label}, cut {'-'.join(map(str, split_of(row, at)))}",
        memory_unit="bytes",
        contention=device.contention if shape.tp > 1 else 0.0,
    )


def split_of(row: Row, at: At) -> list[int]:
    """Layers of each chunk."""
    return [b // 2 - a // 2 for a, b in pairwise((0, *at, row.count))]


@lru_cache(maxsize=256)
def _quick(row: Row, times: tuple[PhaseTimes, ...], collectives: float, placement: Placement) -> At:
    """The cut for the schedule that stands for all of ``placement``."""
    schedule = stand_in(placement)
    if schedule is None:
        return balance([sum(time) for time in times], row, placement.n_chunks)

    def step_time(at: At) -> float:
        ends = pairwise((0, *at, row.count))
        return uneven_makespan(schedule, [total(times[a:b]) for a, b in ends], collectives)

    trials = max(LEAST, QUICK // sum(map(len, schedule.actions)))
    return search([sum(time) for time in times], row, placement.n_chunks, step_time, trials=trials)


def _times(piece: ChunkCost) -> PhaseTimes:
    return piece.seconds("F"), piece.seconds("I"), piece.seconds("W")


def _carrying(tail: Tail, nbytes: float) -> Tail:
    return replace(tail, nbytes=tail.nbytes + nbytes)


@dataclass(frozen=True, slots=True)
class _Tower:
    """The groups of a tower, for all images of a micro-batch."""

    config: TowerConfig
    patches: int
    kernels: Kernels
    shape: Shape

    @property
    def images(self) -> int:
        return self.shape.images * self.shape.batch

    @property
    def tokens(self) -> int:
        """What the decoder gets of them."""
        return self.images * self.config.features(self.patches)

    def _tp(self, size: int) -> int:
        """Ranks that share out what has ``size`` parts."""
        return self.shape.tp if size % self.shape.tp == 0 else 1

    @property
    def parameters(self) -> float:
        """Of a block, on one rank."""
        c = self.config
        attention = 4 * c.hidden * (c.hidden + 1)
        return attention / self._tp(c.heads) + (c.block_parameters - attention) / self._tp(c.ffn)

    @property
    def merger_parameters(self) -> float:
        return self.config.merger_parameters / self._merged

    def _parts(self, block: int, tp: int) -> Parts:
        c = self.config
        view = ModelConfig(
            "tower", c.hidden, c.layers, c.heads, c.heads, c.hidden // c.heads, c.ffn, 0, gated=c.gated
        )
        own = replace(
            self.shape, seq=c.sequence(self.patches), batch=self.images, tp=tp, sequence=False, regather=False
        )
        # Half of what attends is what a causal mask leaves, and here there is none.
        return Parts(view, self.kernels, own, context=2 * c.context(block, self.patches))

    def block(self, k: int) -> Group:
        """F, I and W of a block."""
        attn = self._parts(k, self._tp(self.config.heads)).attention()
        mlp = self._parts(k, self._tp(self.config.ffn)).mlp()
        return [*attn[0], *mlp[0]], [*mlp[1], *attn[1]], [*mlp[2], *attn[2]]

    def embedding(self) -> Group:
        """Patches as vectors, on every rank; no gradient goes back to pixels."""
        c, rows = self.config, self.images * self.patches
        forward, weight = (
            self.kernels.matmul(*size) for size in ((rows, c.patch, c.hidden), (c.patch, rows, c.hidden))
        )
        return (
            [UnitCost("patches", forward, 0)],
            [UnitCost("patches", 0.0, 0, heavy=False)],
            [UnitCost("patches", weight, 0)],
        )

    @property
    def _merged(self) -> int:
        """Ranks that share out a merger: two products or more, columns of the first and rows of the last."""
        c = self.config
        return self._tp(c.between[0][1]) if len(c.between) > 1 else 1

    def merger(self) -> Group:
        """Features of the decoder's width, summed over the ranks where they share it out."""
        tp, rows = self._merged, self.tokens
        sizes = [(a, b // tp) if k == 0 else (a // tp, b) for k, (a, b) in enumerate(self.config.between)]
        forward = sum(self.kernels.matmul(rows, a, b) for a, b in sizes)
        back = sum(self.kernels.matmul(rows, b, a) for a, b in sizes)
        weight = sum(self.kernels.matmul(a, rows, b) for a, b in sizes)
        first, last = self.config.between[0][0], self.config.between[-1][1]
        saved = float(rows * self.shape.width * sum(a for a, _ in sizes))
        made = float(rows * self.shape.width * sum(b for _, b in sizes))
        return (
            [UnitCost("merger", forward, 0, True, self.kernels.all_reduce(rows * last, tp), saves=saved)],
            [UnitCost("merger", back, 0, True, self.kernels.all_reduce(rows * first, tp), saves=made)],
            [UnitCost("merger", weight, 0, frees=saved + made)],
        )

    def tail(self, at: int) -> Tail:
        """The boundary in front of stretch ``at``, inside the tower or behind it."""
        elements = float(self.images * self.config.sequence(self.patches) * self.config.hidden)
        kernels = self.kernels
        nbytes = elements * self.shape.width + self.carried(at)
        return Tail(nbytes, kernels.passes(3 * elements), kernels.passes(5 * elements))

    def carried(self, at: int) -> float:
        """Bytes of features of blocks that wait for their layer of the decoder at the boundary in front of ``at``."""
        c, blocks = self.config, self.config.layers
        waiting = sum(2 * k + 2 < at <= 2 * (blocks + layer) + 1 for layer, k in enumerate(c.deep))
        return float(waiting * self.tokens * c.between[-1][1] * self.shape.width)
