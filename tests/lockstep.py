"""All ranks of a model in one process, in lockstep: what the passes made, run exactly, without process groups.

The tensor-parallel ranks hold their own shards and run the same units one after the other; an all-reduce is the sum
(or maximum) over them, in rank order. Chunks run in pipeline order, micro-batch by micro-batch. What is left out is
the order of schedules, blocks and messages, which the tests in real processes cover.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxbraid import batch as batches
from fxbraid import outputs
from fxbraid.inputs import Inputs, first
from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import TP_GATHER, TP_MAX, TP_SCATTER
from fxbraid.passes.pipeline import Lowered, lower_model
from fxbraid.passes.settle import TP_RANK
from fxbraid.passes.units import ChunkUnits, Unit
from fxbraid.state import aliases, constant


@dataclass
class Ranks:
    """The result of one step: the loss, and per TP rank the gradients by (first) parameter name."""

    lowered: Lowered
    loss: Tensor
    grads: list[dict[str, Tensor]] = field(default_factory=list)


def step(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    tp: int,
    n_chunks: int = 2,
    m: int = 2,
    lowered: Lowered | None = None,
    **options: Any,
) -> Ranks:
    """Forward and backward of ``batch`` in ``m`` micro-batches on ``tp`` x ``n_chunks`` ranks."""
    micro, lower = _micro(model, batch, m)
    if lowered is None:
        lowered = lower(n_chunks=n_chunks, tp_size=tp, **options)
    lowered.checks.check(batch, lambda: micro)
    lowered.check_selected(micro, m)
    runner = _Runner(model, lowered, tp)
    counts = _counts(lowered, micro, m)
    losses = [runner.run({k: v[i] for k, v in micro.items()} | counts) for i in range(m)]
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return Ranks(lowered, total, runner.finish())


def forward(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    tp: int,
    n_chunks: int = 2,
    m: int = 2,
    **options: Any,
) -> dict[str, list[Tensor]]:
    """What ``eval`` returns of ``batch``, by (flat) name: one value per TP rank, micro-batches put together."""
    micro, lower = _micro(model, batch, m)
    lowered = lower(n_chunks=n_chunks, tp_size=tp, training=False, **options)
    lowered.checks.check(batch, lambda: micro)
    runner = _Runner(model, lowered, tp)
    counts = _counts(lowered, micro, m)
    results = [
        runner.forward({k: v[i] for k, v in micro.items()} | counts, sorted(lowered.chunks), [])
        for i in range(m)
    ]
    together = outputs.rules(lowered, rows=batches.batch_size(batch) // m, m=m)
    return {
        name: [rule([out[k][rank] for out in results]) for rank in range(tp)]
        for k, (name, rule) in enumerate(together.items())
    }


def _micro(
    model: nn.Module, batch: Mapping[str, Any], m: int
) -> tuple[dict[str, list[Any]], Callable[..., Lowered]]:
    """The micro-batches of ``batch``, and what traces the first of them."""
    inputs = Inputs.of(model)
    micro, filled = inputs.cut(inputs.complete(batch), m)

    def lower(**options: Any) -> Lowered:
        lowered = lower_model(model, first(micro), **options)
        lowered.check_filled(filled)
        return lowered

    return micro, lower


def _counts(lowered: Lowered, micro: Mapping[str, list[Any]], m: int) -> dict[str, Tensor]:
    if lowered.count is None:
        return {}
    names = [n for n in lowered.inputs if n not in lowered.counts]
    parts = [lowered.count(*(micro[n][i] for n in names)) for i in range(m)]
    totals = [torch.stack(values).sum() for values in zip(*parts, strict=True)]
    last = lowered.partition.chunks[-1].graph_module.graph.output_node().args[0][0]
    dtype = last.meta["val"].dtype  # type: ignore[union-attr, index]
    return {name: total.to(dtype) for name, total in zip(lowered.counts, totals, strict=True)}


class _Runner:
    def __init__(self, model: nn.Module, lowered: Lowered, tp: int) -> None:
        self.lowered, self.tp = lowered, tp
        self.state: list[dict[str, Tensor]] = []
        full = dict(model.named_parameters())
        buffers = dict(model.named_buffers(remove_duplicate=False))
        read = {n for c in lowered.chunks.values() for n in c.joint.state.values()}
        for rank in range(tp):
            state = {
                alias: lowered.plan.params[name].take(full[name].detach(), rank)
                for name, names in aliases(model).items()
                for alias in names
            }
            for name in read - set(state):
                if name == TP_RANK:
                    state[name] = torch.tensor([rank])
                else:
                    state[name] = buffers[name] if name in buffers else constant(model, lowered, name)
            self.state.append(state)
        #: (chunk, name) -> per rank
        self.slots: dict[tuple[int, str], list[Tensor]] = {}

    def run(self, inputs: Mapping[str, Any]) -> Tensor:
        """One micro-batch through all chunks and back; returns its loss."""
        values: list[dict[fx.Node, list[Tensor]]] = []
        order = sorted(self.lowered.chunks)
        loss = self.forward(inputs, order, values)[0]
        assert all(torch.equal(loss[0].nan_to_num(), o.nan_to_num()) for o in loss), (
            "TP ranks disagree about the loss"
        )
        grads = [[torch.ones_like(loss[0])] * self.tp]
        for c in reversed(order):
            chunk, env = self.lowered.chunks[c], values[c]
            assert len(chunk.joint.tangents) == len(grads), (c, chunk.joint.tangents, len(grads))
            env |= dict(zip(chunk.joint.tangents, grads, strict=True))
            for phase in (Phase.I, Phase.W):
                for unit in chunk.units[phase]:
                    self._unit(chunk, unit, env)
            grads = [env[n] for n in chunk.input_grads]
        return loss[0]

    def forward(
        self, inputs: Mapping[str, Any], order: list[int], values: list[dict[fx.Node, list[Tensor]]]
    ) -> list[list[Tensor]]:
        """One micro-batch through all chunks; ``values`` gets what each has computed. The last chunk's outputs."""
        passed: list[list[Tensor]] = []
        for c in order:
            chunk = self.lowered.chunks[c]
            env = {node: [inputs[name]] * self.tp for name, node in chunk.joint.inputs.items()}
            env |= dict(zip(chunk.joint.boundary, passed, strict=True))
            for unit in chunk.units[Phase.F]:
                self._unit(chunk, unit, env)
            passed = [self._value(chunk, n, env) for n in chunk.outputs]
            values.append(env)
        return passed

    def _unit(self, chunk: ChunkUnits, unit: Unit, env: dict[fx.Node, list[Tensor]]) -> None:
        per_rank = []
        for rank in range(self.tp):
            args = [self._value(chunk, node, env)[rank] for node in unit.args]
            per_rank.append(unit.graph_module(*(self.state[rank][n] for n in unit.state), *args))
        for k, (node, name) in enumerate(zip(unit.outs, unit.grads, strict=True)):
            result = [outs[k] for outs in per_rank]
            if name is None:
                env[node] = result
                continue
            slot = self.slots.get((chunk.index, name))
            self.slots[chunk.index, name] = (
                result if slot is None else [a + b for a, b in zip(slot, result, strict=True)]
            )

    def _value(self, chunk: ChunkUnits, node: fx.Node, env: dict[fx.Node, list[Tensor]]) -> list[Tensor]:
        node = chunk.resolve(node)
        if node not in env and chunk.is_collective(node):
            env[node] = self._collective(node, self._value(chunk, node.args[0], env))  # type: ignore[arg-type]
        return env[node]

    def _collective(self, node: fx.Node, parts: list[Tensor]) -> list[Tensor]:
        if node.target is TP_GATHER:
            return [torch.cat(parts)] * self.tp
        total = parts[0]
        for part in parts[1:]:
            total = torch.maximum(total, part) if node.target is TP_MAX else total + part
        return list(total.chunk(self.tp)) if node.target is TP_SCATTER else [total] * self.tp

    def finish(self) -> list[dict[str, Tensor]]:
        """Sum over TP what is a part, then tied uses."""
        plan = self.lowered.plan
        grads: list[dict[str, Tensor]] = [{} for _ in range(self.tp)]
        for (_, name), parts in sorted(self.slots.items()):
            first = self.lowered.canonical[name]
            shard = plan.params[first]
            for rank in range(self.tp):
                if name in plan.partial:
                    total = sum(parts[1:], parts[0])
                else:
                    total = parts[rank].clone()
                    for i, piece in enumerate(shard.pieces(rank)):
                        same = [r for r in range(self.tp) if list(shard.pieces(r))[i].start == piece.start]
                        rows = [parts[r].narrow(shard.dim, piece.local, piece.length) for r in same]  # type: ignore[arg-type]
                        total.narrow(shard.dim, piece.local, piece.length).copy_(sum(rows[1:], rows[0]))  # type: ignore[arg-type]
                grads[rank][first] = grads[rank][first] + total if first in grads[rank] else total
        return grads


def errors(model: nn.Module, ranks: Ranks, loss: Tensor, grads: Mapping[str, Tensor]) -> tuple[float, float]:
    """Largest relative errors of the loss and of any gradient against those of the unsplit model.

    A gradient counts relative to its own largest entry, but to no less than 1e-4 of the model's: that of a key's
    bias is exactly zero, and its rounding errors mean nothing.
    """
    worst = 0.0
    least = 1e-4 * max(grad.abs().max().item() for grad in grads.values())
    plan = ranks.lowered.plan
    for rank, found in enumerate(ranks.grads):
        for name, wanted in grads.items():
            got = found.get(name)
            local = plan.params[name].take(wanted, rank)
            got = torch.zeros_like(local) if got is None else got
            assert got.shape == local.shape, (name, got.shape, local.shape)
            scale = wanted.abs().max().clamp(min=least)
            error = ((got - local).abs().max() / scale).item()
            assert error == error, f"gradient of {name} is not a number"
            worst = max(worst, error)
        extra = {n for n, g in found.items() if n not in grads and bool(g.abs().max() > 0)}
        assert not extra, f"gradients that the unsplit model has not: {extra}"
    return ((ranks.loss - loss).abs() / loss.abs()).item(), worst
