"""SavedTensors counts what autograd holds: unique storages, no parameters, freed when the graph is; Memory what a
process does."""

from __future__ import annotations

import time

import torch
from torch import nn

from fxbraid.bench.loading import Memory
from fxbraid.bench.memory import SavedTensors


def test_saved_activations_are_counted_once_and_freed() -> None:
    linear = nn.Linear(8, 8, bias=False)
    saved = SavedTensors(linear.parameters())
    x = torch.randn(4, 8, requires_grad=True)
    with saved.watch():
        y = linear(x)  # saves x (and the weight, which is not counted)
        z = (y * y).sum()  # saves y twice
    assert saved.live == saved.peak == 2 * x.nbytes
    z.backward()
    assert saved.live == 0
    assert saved.peak == 2 * x.nbytes
    assert linear.weight.grad is not None


def test_the_gradients_do_not_change_and_views_share_a_storage() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (x.view(-1).exp() * x.view(-1)).sum().backward()
    expected, x.grad = x.grad, None
    saved = SavedTensors([])
    with saved.watch():
        out = (x.view(-1).exp() * x.view(-1)).sum()
    assert saved.live == 2 * x.nbytes  # x through two views, and exp's result
    out.backward()
    assert expected is not None and torch.equal(x.grad, expected)


def test_dropping_the_graph_frees_as_well() -> None:
    x = torch.randn(16, requires_grad=True)
    saved = SavedTensors([])
    with saved.watch():
        y = x.exp()
    assert saved.live == x.nbytes
    del y
    assert saved.live == 0


def test_memory_of_a_process_is_what_is_allocated_between() -> None:
    kept = torch.ones(2**20)
    with Memory() as memory:
        temporary = torch.ones(2**24)  # 64 MiB, gone again at the end
        assert float(temporary[-1]) == 1
        time.sleep(0.1)
        del temporary
    assert 60e6 < memory.own < 80e6 and 60e6 < memory.all < 80e6
    assert float(kept[0]) == 1
