"""Towers, skips and boundaries of several tensors: what the cut makes, and that it is exact."""

from __future__ import annotations

from typing import Any

import pytest

from . import towers
from .test_zoo import assert_exact

CHUNKS = {"towers": 8, "towers-deep": 8, "encoder-decoder": 6, "unet": 6}


def lowered(name: str, n_chunks: int, *, tp: int = 1, **options: Any) -> Any:
    model = towers.MODELS[name]()
    plan = towers.plan(model) if tp > 1 else "auto"
    return assert_exact(model, towers.batch(name, 4), tp=tp, n_chunks=n_chunks, tp_plan=plan, **options)


@pytest.mark.parametrize("name", towers.MODELS)
def test_one_layer_a_chunk_is_exact(name: str) -> None:
    parts = lowered(name, CHUNKS[name]).partition
    assert parts.layers == CHUNKS[name] and all(len(chunk.layers) == 1 for chunk in parts.chunks)


@pytest.mark.parametrize("name", towers.MODELS)
def test_two_tensor_parallel_ranks_and_four_chunks_are_exact(name: str) -> None:
    lowered(name, 4, tp=2)
