"""Peak activation bytes of an eager autograd run, from what autograd saves for the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


class SavedTensors:
    """Counts the storages that autograd keeps alive, each once, without those of ``excluded`` (parameters).

    ``live`` is the bytes now, ``peak`` the most so far. What autograd does not hold (receive buffers, a
    pipeline's own caches, gradients on their way) is not in it.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self.live = 0
        self.peak = 0
        self._excluded = {_storage(tensor).data_ptr() for tensor in excluded}
        self._counts: dict[int, int] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        storage = _storage(tensor)
        key = storage.data_ptr()  # its own while it lives, and the _Saved keeps it alive
        if key == 0 or key in self._excluded:
            return tensor
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        if count == 0:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        return _Saved(tensor, self)

    def _free(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        key = storage.data_ptr()
        self._counts[key] -= 1
        if self._counts[key] == 0:
            del self._counts[key]
            self.live -= storage.nbytes()


class _Saved:
    """What autograd holds in place of a saved tensor; tells its owner when it is dropped."""

    __slots__ = ("owner", "tensor")

    def __init__(self, tensor: Tensor, owner: SavedTensors) -> None:
        self.tensor = tensor.detach()  # a saved output would otherwise hold its own graph
        self.owner = owner

    def __del__(self) -> None:
        self.owner._free(self.tensor)


def _unpack(saved: _Saved | Tensor) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
