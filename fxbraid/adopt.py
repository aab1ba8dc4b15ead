"""The user's own parameters as those of a braided model: for an optimizer that was made before it."""

from __future__ import annotations

from torch import Tensor, nn

from .passes.errors import BraidError
from .source import Source


class Adopting(Source):
    """A model in memory whose parameters become the braided model's: each keeps its identity, and its ``.data`` is
    this rank's part, or empty where this rank has none. :meth:`undo` gives everything back as it was; :meth:`commit`
    drops what the ranks do not need, and then there is no way back.

    Raises :class:`BraidError`, before anything is changed, for parameters without memory and for gradients of whole
    parameters.
    """

    def __init__(self, model: nn.Module, *, seed: int = 0) -> None:
        super().__init__(model, seed=seed)
        self._own = dict(model.named_parameters(remove_duplicate=False))
        self._before: dict[nn.Parameter, Tensor] = {}
        for name, parameter in self._own.items():
            if parameter.is_meta:
                raise BraidError(
                    f"{name} is on the meta device, and torch.compile takes parameters as they are; use "
                    "fxbraid.braid() or fxbraid.from_pretrained() for a model without memory"
                )
            if parameter.grad is not None:
                raise BraidError(
                    f"{name} has a gradient from before the first call, of the whole parameter; call zero_grad() first"
                )

    def parameter(self, name: str, value: Tensor, *, requires_grad: bool) -> nn.Parameter:
        parameter = self._own[name]
        self._before[parameter] = parameter.data
        parameter.data = value
        return parameter

    def undo(self) -> None:
        """Whole parameters again."""
        for parameter, data in self._before.items():
            parameter.data = data
        self._before.clear()

    def commit(self) -> dict[nn.Parameter, str]:
        """Let go of the whole parameters. Returns those of other ranks, which are empty from now on, with their names:
        an optimizer that was made before has them too."""
        elsewhere: dict[nn.Parameter, str] = {}
        for name, parameter in self._own.items():
            if parameter not in self._before:
                parameter.data = parameter.data.new_empty(0)
                elsewhere.setdefault(parameter, name)
        self._before.clear()
        return elsewhere
