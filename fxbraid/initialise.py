"""Weights of a model on the meta device: made module by module, as the model itself would, on every layout alike.

``torch.device("meta")`` gives a model without memory. What a rank needs of it is made here: one module at a time gets
memory and is initialised by the model's own ``_init_weights`` (transformers) or ``reset_parameters`` (torch), with the
random numbers of its name. So a parameter's values depend on seed and name, and on nothing else: not on the order,
nor on what other ranks hold, nor on tp and pp. At most one module is in memory beside the shards.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .passes.errors import BraidError


class Initialiser:
    """``Initialiser(model, seed)[name]``: the whole value of a parameter or buffer that is on the meta device.

    The last module made is kept, so that its weight and its bias cost one initialisation.

    Raises BraidError where the model says nowhere how the tensor is initialised.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._kept: tuple[str, nn.Module] | None = None

    def __getitem__(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        if self._kept is None or self._kept[0] != owner:
            self._kept = (owner, self._make(owner, name))
        value = getattr(self._kept[1], leaf)
        assert isinstance(value, Tensor)
        return value.detach()

    def _make(self, owner: str, name: str) -> nn.Module:
        """The module ``owner`` by itself, with memory, initialised."""
        chain = list(_chain(self._model, owner))
        module = chain[-1]
        # Memory for its own tensors only; what it holds stays on meta, where initialisation costs nothing.
        memo = {id(child): child for child in module.children()}
        made = copy.deepcopy(module, memo).to_empty(device="cpu", recurse=False)
        tensors = {**dict(made.named_parameters(recurse=False)), **dict(made.named_buffers(recurse=False))}
        untouched = {leaf: tensor._version for leaf, tensor in tensors.items()}
        number = int.from_bytes(hashlib.sha256(f"{self._seed} {owner}".encode()).digest()[:7], "big")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(number)
            self._initialise(chain, made)
        for leaf, tensor in tensors.items():
            # What nobody wrote to is whatever was in memory before.
            if tensor._version == untouched[leaf] and tensor is getattr(made, leaf):
                raise BraidError(
                    f"nothing says how {owner}.{leaf} of a model on the meta device is initialised: the model's "
                    "_init_weights or reset_parameters leaves it out; load weights that have it, or make the model "
                    "on the CPU"
                )
        return made

    def _initialise(self, chain: list[nn.Module], made: nn.Module) -> None:
        parents = [m for m in chain if hasattr(m, "_init_weights")]
        if not parents:
            reset = getattr(made, "reset_parameters", None)
            if callable(reset):
                reset()
            return
        # The module first, then those around it: some models scale a parameter again from further up.
        parents[-1]._init_weights(made)  # type: ignore[operator]
        for at in range(len(chain) - 2, -1, -1):
            around = _with(chain, at, made)
            models = [m for m in chain[: at + 1] if hasattr(m, "_init_weights")]
            if models:
                models[-1]._init_weights(around)  # type: ignore[operator]


def _chain(model: nn.Module, owner: str) -> Iterator[nn.Module]:
    yield model
    for part in owner.split(".") if owner else ():
        model = model.get_submodule(part)
        yield model


def _with(chain: list[nn.Module], at: int, made: nn.Module) -> nn.Module:
    """A shallow copy of ``chain[at]`` in which the last module of the chain is ``made``; the rest is shared."""
    new = made
    for outer, inner in zip(reversed(chain[at:-1]), reversed(chain[at + 1 :]), strict=True):
        clone = copy.copy(outer)
        clone.__dict__ = dict(outer.__dict__)
        clone._modules = {k: new if child is inner else child for k, child in outer._modules.items()}
        new = clone
    return new
