"""Workloads from a model's configuration and a named device: every unit's FLOPs over rate and bytes over
bandwidth.

A layer has two units, as the ``units`` pass cuts them. Each starts with what the collective before it owes
(residual and norm) and ends with the partial sums of the next::

    F   attn: add, norm, qkv, rotary, attention, out        | all-reduce     mlp: add, norm, up, gate, act,
    down | all-reduce I   mlp: down', act', up', gate'                        | all-reduce     attn: norm',
    add, out', attention', qkv' | ... W   the matrix products of the same layer's weights

The embedding and the head are sharded over the vocabulary. Pointwise kernels are counted as fused: one read
of each input and one write of each output. Bytes: what F saves is freed by I or W, whichever reads it last.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fxbraid.schedule import Placement, ScheduleError
from fxbraid.simulate.device import Device
from fxbraid.simulate.kernels import Kernels, pipeline_links
from fxbraid.simulate.model import ModelConfig
from fxbraid.simulate.tokens import Collective, apart
from fxbraid.simulate.workload import ChunkCost, Link, UnitCost, Workload

Checkpoint = Literal["none", "selective", "full", "mlp", "attention", "attention+mlp", "all"]
"""What F keeps: everything; all but norms and activation functions, which I makes again; only each unit's input, I
running all of F once more. By the names of ``fxbraid.braid(checkpoint=...)``: only the input of the units so named,
which a unit of its own in front of I's makes again, without their last product; of the others what "selective" keeps.
"""


CHECKPOINTS: tuple[Checkpoint, ...] = ("none", "selective", "full")
"""Lightest recomputation first."""

POLICIES: tuple[Checkpoint, ...] = ("mlp", "attention", "attention+mlp", "all")
"""The names of ``fxbraid.braid``."""

Group = tuple[list[UnitCost], list[UnitCost], list[UnitCost]]
"""F, I and W of a layer, of the embedding or of the head."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One micro-batch on one rank of a TP group. efficiency: see ``Kernels``. sequence: norms and residuals work on
    seq / tp tokens (``fxbraid.simulate.tokens``); regather: W gathers its inputs again, which then are not kept.
    images: of a sequence, and patches: of each, 0 for what the tower is made for; without images no tower runs.
    """

    seq: int
    batch: int = 1
    tp: int = 1
    dp: int = 1
    checkpoint: Checkpoint = "none"
    width: int = 2
    efficiency: float = 1.0
    sequence: bool = False
    regather: bool = False
    images: int = 0
    patches: int = 0

    @property
    def cut(self) -> int:
        """Into how many parts the tokens between the parallel regions are cut."""
        return self.tp if self.sequence else 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq * self.batch


def analytic(
    model: ModelConfig,
    device: Device,
    placement: Placement,
    shape: Shape,
    layers: Sequence[int] | None = None,
) -> Workload:
    """The workload of ``model`` cut into the chunks of ``placement``; ``layers`` gives their numbers of
    layers, else they are balanced by cost, embedding and head included; with images in ``shape``, layers of both towers
    (``simulate.two_towers``). Raises ScheduleError where tp does not divide.
    """
    check_shape(model, shape)
    if shape.images:
        from fxbraid.simulate.two_towers import both  # which is made of the parts here

        return both(model, device, placement, shape, layers)
    parts = Parts(model, Kernels(device, shape.width, shape.efficiency), shape)
    counts = parts.split(placement) if layers is None else list(layers)
    if len(counts) != placement.n_chunks or sum(counts) != model.layers or min(counts) < 0:
        raise ScheduleError(
            f"{counts} are no layers for {placement.n_chunks} chunks of {model.name}, "
            f"which has {model.layers}; give one number per chunk that add up to that"
        )
    last = placement.n_chunks - 1
    boundary = float(shape.tokens * model.hidden * shape.width) / shape.cut
    layer = parts.layer()
    made: dict[tuple[int, bool, bool], ChunkCost] = {}
    for k, count in enumerate(counts):
        key = (count, k == 0, k == last)
        if key not in made:
            made[key] = parts.chunk(layer, *key, boundary)
    chunks = tuple(made[count, k == 0, k == last] for k, count in enumerate(counts))
    link, links = pipeline_links(device, placement.p, shape.tp * shape.dp, placement.kind)
    return Workload(
        chunks,
        link=link,
        links=links,
        host=Link(device.latency, device.host * device.wire),
        flops=model.step_flops(shape.tokens, shape.seq) / shape.tp,
        peak=device.peak,
        static=tuple(parts.static(count, k == 0, k == last) for k, count in enumerate(counts)),
        label=f"{model.name} on {device.name}, seq {shape.seq}, micro-batch {shape.batch}, tp {shape.tp}{_said(shape)}",
        memory_unit="bytes",
        contention=device.contention if shape.tp > 1 else 0.0,
    )


def check_shape(model: ModelConfig, shape: Shape) -> None:
    """Raises ScheduleError where tp does not divide what it has to."""
    if shape.sequence and shape.seq % shape.tp:
        raise ScheduleError(
            f"tp={shape.tp} does not divide the {shape.seq} tokens of a sequence, which sequence parallelism cuts; "
            f"take {shape.seq + shape.tp - shape.seq % shape.tp} tokens, or leave it out"
        )
    if shape.regather and not shape.sequence:
        raise ScheduleError("regather gathers what sequence parallelism has cut; it means nothing without it")
    for name, size in (("heads", model.heads), ("ffn columns", model.ffn)):
        if size % shape.tp:
            raise ScheduleError(
                f"tp={shape.tp} does not divide the {size} {name} of {model.name}; choose a divisor"
            )


@dataclass(frozen=True, slots=True)
class _Memory:
    """local: bytes that F makes and keeps, besides its input and the normed one. for_w: bytes inside the unit
    that W reads; kept: what F keeps of them. handed: columns of the gradient that I leaves to W. inner: bytes that are
    only there while the unit is made again.
    """

    local: float
    for_w: float
    kept: float
    handed: int
    inner: float = 0.0


@dataclass(frozen=True, slots=True)
class Tail:
    """A chunk's boundary: its bytes, and seconds of what stands at it in F (of the chunk before) and in I (of the one
    behind)."""

    nbytes: float
    f: float
    i: float


@dataclass(frozen=True, slots=True)
class Parts:
    """The groups of a decoder. context: twice what a token attends to, where that is not the causal half of ``seq``."""

    model: ModelConfig
    kernels: Kernels
    shape: Shape
    context: int = 0

    @property
    def stream(self) -> float:
        """Elements of the residual stream of a micro-batch."""
        return float(self.shape.tokens * self.model.hidden)

    @property
    def part(self) -> float:
        """Elements of what a rank holds of it between the parallel regions."""
        return self.stream / self.shape.cut

    @property
    def queries(self) -> int:
        return self.model.heads * self.model.head // self.shape.tp

    @property
    def keys(self) -> int:
        """Columns of k and v; a kv head is at least one, so beyond kv_heads ranks they are copies."""
        return 2 * max(1, self.model.kv_heads // self.shape.tp) * self.model.head

    @property
    def ffn(self) -> int:
        return self.model.ffn // self.shape.tp

    @property
    def vocab(self) -> int:
        return -(-self.model.vocab // self.shape.tp)

    def split(self, placement: Placement) -> list[int]:
        """Layers per chunk: each layer goes to the chunk with the least to do, then to the rank with the
        least.
        """
        layer = sum(unit.seconds for units in self.layer() for unit in units)
        load = [0.0] * placement.n_chunks
        load[0] += sum(unit.seconds for units in self.embedding() for unit in units)
        load[-1] += sum(unit.seconds for units in self.head() for unit in units)
        if self.model.layers < placement.n_chunks:
            raise ScheduleError(
                f"{self.model.name} has {self.model.layers} layers, too few for {placement.n_chunks} chunks; "
                "use fewer pipeline ranks or fewer chunks a rank"
            )
        counts = [0] * placement.n_chunks
        ranks = [placement.rank_of(chunk) for chunk in range(placement.n_chunks)]
        total = [sum(load[c] for c in placement.chunks_of(rank)) for rank in range(placement.p)]

        def key(c: int) -> tuple[float, float, int]:
            return round(load[c], 12), total[ranks[c]], -c

        # Keys only grow, so one that is out of date is put back when it comes up.
        heap = [key(c) for c in range(placement.n_chunks)]
        heapq.heapify(heap)
        while sum(counts) < self.model.layers:
            entry = heap[0]
            chunk = -entry[2]
            if entry != key(chunk):
                heapq.heapreplace(heap, key(chunk))
                continue
            counts[chunk] += 1
            load[chunk] += layer
            total[ranks[chunk]] += layer
        return counts

    def chunk(self, layer: Group, layers: int, first: bool, last: bool, boundary: float) -> ChunkCost:
        groups = [named(layer, k) for k in range(layers)]
        if first:
            groups.insert(0, self.embedding())
        if last:
            groups.append(self.head())
        return assembled(
            groups, None if first else self.tail(boundary), None if last else self.tail(boundary)
        )

    def tail(self, boundary: float) -> Tail:
        return Tail(boundary, self.kernels.passes(3 * self.part), self.kernels.passes(5 * self.part))

    def layer(self) -> Group:
        """F, I and W of one layer, I and W in the order in which they run."""
        attn, mlp = self.attention(), self.mlp()
        return [*attn[0], *mlp[0]], [*mlp[1], *attn[1]], [*mlp[2], *attn[2]]

    def attention(self) -> Group:
        m, s, kernel = self.model, self.shape, self.kernels
        tokens, wide = s.tokens, self.queries + self.keys
        qkv, out = kernel.matmul(tokens, m.hidden, wide), kernel.matmul(tokens, self.queries, m.hidden)
        rotary = kernel.passes(2 * tokens * (self.queries + self.keys / 2))
        norm = kernel.passes(4 * self.part)
        forward = norm + qkv + rotary + kernel.attention(tokens, self.context or s.seq, self.queries) + out
        back = (
            kernel.passes(5 * self.part)
            + kernel.matmul(tokens, m.hidden, self.queries)
            + kernel.attention(tokens, self.context or s.seq, self.queries, backward=True)
            + rotary
            + kernel.matmul(tokens, wide, m.hidden)
        )
        weight = kernel.matmul(m.hidden, tokens, wide) + kernel.matmul(self.queries, tokens, m.hidden)
        local = tokens * (self.queries + wide) * s.width  # q, k, v and what attention returns
        returned = tokens * self.queries * s.width
        kept = returned if self._level("attn") != "full" else 0
        rows = self._rows(self.queries)
        return self._three("attn", forward, back, weight, norm, _Memory(local, returned, kept, wide), rows)

    def mlp(self) -> Group:
        m, s, kernel = self.model, self.shape, self.kernels
        tokens, up = s.tokens, (2 if m.gated else 1) * self.ffn
        norm, act = kernel.passes(4 * self.part), kernel.passes(tokens * (up + self.ffn))
        forward = norm + kernel.matmul(tokens, m.hidden, up) + act + kernel.matmul(tokens, self.ffn, m.hidden)
        back = (
            kernel.passes(5 * self.part)
            + kernel.matmul(tokens, m.hidden, self.ffn)
            + kernel.passes(tokens * (2 * up + 2 * self.ffn))
            + kernel.matmul(tokens, up, m.hidden)
        )
        weight = kernel.matmul(m.hidden, tokens, up) + kernel.matmul(self.ffn, tokens, m.hidden)
        acted = tokens * self.ffn * s.width
        kept = acted if self._level("mlp") == "none" else 0
        memory = _Memory(tokens * up * s.width + kept, acted, kept, up, acted - kept)
        return self._three("mlp", forward, back, weight, norm + act, memory, self._rows(self.ffn))

    def _level(self, name: str) -> Literal["none", "selective", "full"]:
        """What is made again of a unit."""
        policy = self.shape.checkpoint
        if policy == "none" or policy == "selective" or policy == "full":
            return policy
        named = {"attn": ("attention", "attention+mlp", "all"), "mlp": ("mlp", "attention+mlp", "all")}
        return "full" if policy in named.get(name, ("all",)) else "selective"

    def _rows(self, inner: int) -> tuple[float, float, float]:
        """Seconds of a row-parallel product in F, I and W."""
        tokens, hidden = self.shape.tokens, self.model.hidden
        sizes = (tokens, inner, hidden), (tokens, hidden, inner), (inner, tokens, hidden)
        f, i, w = (self.kernels.matmul(*size) for size in sizes)
        return f, i, w

    def _three(
        self,
        name: str,
        forward: float,
        back: float,
        weight: float,
        cheap: float,
        memory: _Memory,
        rows: tuple[float, float, float],
    ) -> Group:
        """One unit in its three phases. cheap: seconds that selective recomputation repeats.
        rows: of its row-parallel product in F, I and W."""
        s = self.shape
        stream, part = self.stream * s.width, self.part * s.width
        level = self._level(name)
        normed = (part if s.regather else stream) if level == "none" else 0.0
        saved = part if level == "full" else part + normed + memory.local
        again = {"none": 0.0, "selective": cheap, "full": forward}[level]
        # W reads the normed input, its own part of what is local, and two gradients: the one that came into I
        # and the one inside it. What F did not keep of that, I makes again.
        kept = normed + memory.kept
        made = (part if s.regather else stream) + memory.for_w - kept + stream
        made += s.tokens * memory.handed * s.width
        ar = 0.0 if s.sequence else self.kernels.all_reduce(self.stream, s.tp)
        if level == "full" and s.checkpoint in POLICIES and not s.sequence:
            # The unit that runs again makes all that is inside, of which W reads a part, too.
            inside, for_w = stream + memory.local + memory.inner, stream + memory.for_w
            back_made = stream + s.tokens * memory.handed * s.width
            return (
                [UnitCost(name, forward, 0, True, ar, saves=part)],
                [
                    UnitCost(name, forward - rows[0], 0, saves=inside, again=True),
                    UnitCost(name, back, 0, True, ar, saves=back_made, frees=part + inside - for_w),
                ],
                [UnitCost(name, weight, 0, frees=for_w + back_made)],
            )
        whole = (
            UnitCost(name, forward, 0, True, ar, saves=saved),
            UnitCost(name, back + again, 0, True, ar, saves=made, frees=saved - kept),
            UnitCost(name, weight, 0, frees=kept + made),
        )
        if not s.sequence:
            return [whole[0]], [whole[1]], [whole[2]]
        ends = self.kernels.passes(4 * self.part), self.kernels.passes(5 * self.part)
        gather = Collective(self.kernels.gather(self.stream, s.tp), stream)
        return apart(*whole, ends, rows, gather, again=level != "none", regather=s.regather)

    def embedding(self) -> Group:
        seconds = self.kernels.passes(2 * self.stream)
        back = _unit("embed", self.kernels.passes(5 * self.part), light=True)
        if self.shape.sequence:
            ar = self.kernels.gather(self.stream, self.shape.tp)  # its gradient is gathered
            back = replace(back, launches=True, collective=ar)
        else:
            ar = self.kernels.all_reduce(self.stream, self.shape.tp)
        forward = UnitCost("embed", seconds, 0, True, ar, heavy=False)
        return [forward], [back], [_unit("embed", seconds, light=True)]

    def head(self) -> Group:
        m, s, kernel = self.model, self.shape, self.kernels
        logits = s.tokens * self.vocab
        product = kernel.matmul(s.tokens, m.hidden, self.vocab)
        # The loss reads the logits twice (maximum and sum), its gradient once more, and writes them once.
        forward = kernel.passes(4 * self.stream) + product + kernel.passes(3 * logits)
        back = kernel.passes(3 * logits) + kernel.matmul(s.tokens, self.vocab, m.hidden)
        weight = kernel.matmul(m.hidden, s.tokens, self.vocab)
        stream, kept = self.stream * s.width, logits * s.width
        if not s.sequence:
            ar = kernel.all_reduce(self.stream, s.tp)
            if s.checkpoint == "all":
                return (
                    [UnitCost("head", forward, 0, saves=stream)],
                    [
                        UnitCost("head", forward, 0, saves=stream + kept, again=True),
                        UnitCost("head", back, 0, True, ar, saves=kept, frees=stream + kept),
                    ],
                    [UnitCost("head", weight, 0, frees=stream + kept)],
                )
            return (
                [UnitCost("head", forward, 0, saves=2 * stream + kept)],
                [UnitCost("head", back, 0, True, ar, saves=kept, frees=stream + kept)],
                [UnitCost("head", weight, 0, frees=stream + kept)],
            )
        gather, part = kernel.gather(self.stream, s.tp), self.part * s.width
        norm = kernel.passes(4 * self.part)
        return (
            [
                UnitCost("norm_head", norm, 0, True, gather, heavy=False),
                UnitCost("head", forward - kernel.passes(4 * self.stream), 0, saves=part + stream + kept),
            ],
            [UnitCost("head", back, 0, True, gather, saves=kept, frees=part + kept)],
            [UnitCost("head", weight, 0, frees=stream + kept)],
        )

    def static(self, layers: int, first: bool, last: bool) -> float:
        """Bytes of weights, gradients and Adam's state on one rank: 2 + 4 + 12/dp each parameter (bf16
        weights, fp32 gradients, fp32 master weights and two moments, the last three sharded over dp).
        """
        m, s = self.model, self.shape
        count = layers * (m.attention_parameters + m.mlp_parameters) / s.tp
        count += (int(first) + int(last)) * m.vocab * m.hidden / s.tp
        return count * (2 + 4 + 12 / s.dp)


def assembled(groups: Sequence[Group], before: Tail | None, behind: Tail | None) -> ChunkCost:
    """A chunk of ``groups``, in the order in which they run forward; None where the model begins or ends."""
    f: list[UnitCost] = []
    i: list[UnitCost] = []
    w: list[UnitCost] = []
    for forward, _, _ in groups:
        f += forward
    for _, back, weight in reversed(groups):
        i += back
        w += weight
    if behind is not None:
        f.append(_unit("tail", behind.f, light=True))
    if before is not None:
        i.append(_unit("tail", before.i, light=True))
    return ChunkCost(
        _numbered(f),
        _numbered(i),
        _weights(i, w),
        0.0 if behind is None else behind.nbytes,
        0.0 if before is None else before.nbytes,
    )


def named(group: Group, k: int, before: str = "") -> Group:
    """``attn`` -> ``attn3``, or with ``v`` before it ``vattn3``."""
    f, i, w = ([replace(unit, name=f"{before}{unit.name}{k}") for unit in units] for units in group)
    return f, i, w


def _said(shape: Shape) -> str:
    if not shape.sequence:
        return ""
    return ", sequence parallel" + (", W gathers again" if shape.regather else "")


def _unit(name: str, seconds: float, *, light: bool) -> UnitCost:
    return UnitCost(name, seconds, 0, heavy=not light)


def _numbered(units: Sequence[UnitCost]) -> tuple[UnitCost, ...]:
    return tuple(_at(unit, depth) for depth, unit in enumerate(units))


def _weights(i: Sequence[UnitCost], w: Sequence[UnitCost]) -> tuple[UnitCost, ...]:
    """W's units with the place in I of the unit of the same name."""
    depth = {unit.name: k for k, unit in enumerate(i)}
    return tuple(_at(unit, depth[unit.name]) for unit in w)


def _at(unit: UnitCost, depth: int) -> UnitCost:
    return replace(unit, depth=depth)
