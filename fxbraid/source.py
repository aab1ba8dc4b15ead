"""Where a braided model's tensors come from: a model in memory, its own initialisation, or a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .agree import agree
from .initialise import Initialiser
from .passes.errors import BraidError
from .passes.layout import ParamShard
from .state import aliases
from .weights import Checkpoint, Loaded


class Source:
    """``model`` gives structure and names. Its tensors are taken where they have memory; those on the meta device come
    from ``checkpoint``, which is read by slices, or, where that has no such name, are initialised one module at a time,
    the same for every layout (``seed``)."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint | None = None, *, seed: int = 0) -> None:
        self.model, self.checkpoint = model, checkpoint
        self._tensors: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._names = aliases(model)
        self._initialiser = Initialiser(model, seed)

    def shard(self, name: str, shard: ParamShard, tp_rank: int) -> Tensor:
        """This rank's part of a parameter (its first name), on the CPU or the model's device."""
        if (saved := self._saved(name)) is not None and self.checkpoint is not None:
            return self.checkpoint.take(saved, shard, tp_rank)
        value = self._tensors[name].detach()
        return shard.take(self._initialiser[name] if value.is_meta else value, tp_rank)

    def parameter(self, name: str, value: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """The parameter that holds ``value``, this rank's part of ``name``: a new one."""
        return nn.Parameter(value, requires_grad=requires_grad)

    def buffer(self, name: str) -> Tensor:
        """A buffer, whole."""
        if self.checkpoint is not None and name in self.checkpoint:
            return self.checkpoint.buffer(name)
        value = self._tensors[name].detach()
        return self._initialiser[name] if value.is_meta else value

    def check(self, *, strict: bool) -> None:
        """Before anything is read: shapes, and (``strict``) that nothing is missing. The same on every rank."""
        if self.checkpoint is None:
            return
        self.checkpoint.check(
            {
                saved: tuple(self._tensors[name].shape)
                for name in self._names
                if (saved := self._saved(name)) is not None
            }
        )
        missing = self.loaded().missing
        if strict and missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise BraidError(
                f"the checkpoint {self.checkpoint.path} lacks {', '.join(missing[:5])}{more}; give another one, or "
                "strict=False to initialise them"
            )

    def describe(self) -> str:
        """What the checkpoint holds, without where it lies: equal on ranks that may go on together."""
        if self.checkpoint is None:
            return "none"
        recipes = sorted((name, recipe.keys) for name, recipe in self.checkpoint.recipes.items())
        return f"{len(recipes)} parameters and buffers: {recipes}"

    def loaded(self) -> Loaded:
        """What came of the checkpoint."""
        if self.checkpoint is None:
            return Loaded((), (), 0)
        saved_buffers = set(self.model.state_dict()) - {n for names in self._names.values() for n in names}
        missing = [name for name in self._names if self._saved(name) is None]
        missing += [name for name in saved_buffers if name not in self.checkpoint]
        return Loaded(tuple(sorted(missing)), self.checkpoint.unexpected, self.checkpoint.bytes_read)

    def fill(self, state: Mapping[str, Tensor], shards: Mapping[str, ParamShard], tp_rank: int) -> None:
        """Copy what the checkpoint has into ``state``: this rank's parameters and saved buffers by name."""
        with torch.no_grad():
            for name, value in state.items():
                if name in shards and self._saved(name) is not None:  # under its first name, if it is tied
                    value.copy_(self.shard(name, shards[name], tp_rank))
                elif (
                    not isinstance(value, nn.Parameter)
                    and self.checkpoint is not None
                    and name in self.checkpoint
                ):
                    value.copy_(self.checkpoint.buffer(name))

    def _saved(self, name: str) -> str | None:
        """The name under which the checkpoint has a parameter: a tied one is saved under any one of its names."""
        if self.checkpoint is None:
            return None
        return next((alias for alias in self._names[name] if alias in self.checkpoint), None)


def agreed(opened: Callable[[], Source]) -> Source:
    """``opened()``, a source with a checkpoint that was checked; where it raises on one rank, or ranks find different
    ones, all raise. Collective over the default process group."""
    told: str | BraidError
    try:
        source = opened()
        told = source.describe()
    except BraidError as error:
        told = error
    agree({"the checkpoint": told})
    if isinstance(told, BraidError):
        raise told
    return source
