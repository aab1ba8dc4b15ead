"""``python -m fxbraid.bench.vocab``: memory of the rank with the last chunk, with a whole and with a cut vocabulary.

The rank runs its real program, with the shapes of a real one, next to ranks that are not there (torch's fake process
group moves nothing): what it holds depends on shapes alone. On a CPU every tensor that an operator makes is followed
from its birth to its release, temporaries inside a unit included; on CUDA the allocator is asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxbraid
from fxbraid import compat
from fxbraid.passes.cost import nbytes
from fxbraid.passes.joint import Phase
from fxbraid.passes.marks import is_collective
from fxbraid.runtime.launch import launch

MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators make while the mode is on: ``live`` now, ``peak`` the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := _key(leaf)) not in given and key not in self._known:
                self._born(key, leaf)
        return result

    def _born(self, key: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the rank with the last chunk: ``parameters`` of embedding and head there, ``peak`` of one step beyond
    parameters and gradients, ``saved`` from F to I and W and ``handed`` from I to W per micro-batch; ``loss`` bytes
    that the collectives of head and loss move."""

    parallel: bool
    parameters: int
    peak: int
    saved: int
    handed: int
    loss: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and its batch; one micro-batch of one sequence."""

    vocab: int
    hidden: int
    tokens: int
    tp: int
    dtype: str
    device: str


def make_model(sizes: Sizes) -> nn.Module:
    """Two layers of a Qwen2 with a head of its own."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = max(sizes.tp, sizes.hidden // 64)
    config = Qwen2Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=False,
        max_position_embeddings=sizes.tokens,
    )
    return Qwen2ForCausalLM(config).to(getattr(torch, sizes.dtype))


def measure(sizes: Sizes, parallel: bool) -> Memory:
    """In a process of its own: the first TP rank of the last of two pipeline ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=compat.FakeStore(), rank=sizes.tp, world_size=2 * sizes.tp)
    try:
        ids = torch.randint(0, sizes.vocab, (1, sizes.tokens))
        batch = {"input_ids": ids, "labels": ids}
        model = fxbraid.braid(
            make_model(sizes),
            batch,
            tp_size=sizes.tp,
            pp_size=2,
            n_microbatches=1,
            schedule="1f1b",
            compile=False,
            vocab_parallel=parallel,
        )
        model.step(**batch)  # makes the gradients and the receive buffers
        peak = _peak(model, batch, sizes)
        chunk = model._last.lowered.chunks[1]
        saved = {*chunk.for_I, *chunk.for_W} - set(chunk.joint.inputs.values())
        marks = [n for n, p in chunk.joint.phase.items() if is_collective(n) and p is Phase.F]
        return Memory(
            parallel=parallel,
            parameters=sum(
                p.numel() * p.element_size() for n, p in model.named_parameters() if "lm_head" in n
            ),
            peak=peak,
            saved=sum(nbytes(n.meta["val"]) for n in saved),
            handed=sum(nbytes(n.meta["val"]) for n in chunk.handed),
            loss=sum(nbytes(n.meta["val"]) for n in marks[2:]),
        )
    finally:
        dist.destroy_process_group()


def _peak(model: fxbraid.BraidedModel, batch: Mapping[str, Any], sizes: Sizes) -> int:
    if sizes.device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.step(**batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        model.step(**batch)
    return live.peak


def table(rows: list[Memory], tokens: int) -> str:
    """One line per way, in MiB."""
    return tabulate(
        [
            (
                "cut" if row.parallel else "whole",
                f"{row.parameters / MIB:.1f}",
                f"{row.saved / MIB:.1f}",
                f"{row.handed / MIB:.1f}",
                f"{row.peak / MIB:.1f}",
                f"{row.loss / tokens:.0f}" if row.parallel else "0",
            )
            for row in rows
        ],
        headers=[
            "vocabulary",
            "head's weight",
            "saved by F",
            "handed from I to W",
            "peak of a step",
            "bytes per token in the loss's all-reduces",
        ],
        tablefmt="github",
        disable_numparse=True,
    )


def main(
    vocab: Annotated[int, typer.Option(help="entries of the vocabulary")] = 32000,
    hidden: Annotated[int, typer.Option(help="hidden size")] = 256,
    tokens: Annotated[int, typer.Option(help="tokens of a micro-batch")] = 1024,
    tp: Annotated[int, typer.Option(help="tensor-parallel ranks")] = 4,
    dtype: Annotated[str, typer.Option(help="of weights and logits")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Memory of the last chunk before and after."""
    sizes = Sizes(vocab, hidden, tokens, tp, dtype, device)
    rows: list[Memory] = []
    for parallel in (False, True):
        rows += launch(measure, (sizes, parallel), nproc=1, timeout_s=600)
    print(
        f"last of 2 chunks, vocabulary {vocab}, hidden size {hidden}, {tokens} tokens, tp {tp}, {dtype}, eager, "
        f"{device}; MiB\n"
    )
    print(table(rows, tokens))
    print(f"\npeak: {rows[0].peak / rows[1].peak:.2f} times less with the vocabulary cut over {tp} ranks")


if __name__ == "__main__":
    # Ranks import the function by its name, which __main__ does not have.
    from fxbraid.bench.vocab import main as run

    typer.run(run)
