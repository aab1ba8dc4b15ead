"""A model behind ``torch.compile(model, backend="fxbraid")``: what its calls do, and what is behind it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.utils.generic import ModelOutput

from .compat_dynamo import forget, hooked
from .gradients import Gradients
from .model import BraidedModel
from .passes.errors import BraidError


class AbsentOutputError(BraidError, AttributeError, LookupError):
    """Something else than the loss was wanted of a training call."""


@dataclass
class TrainingOutput(ModelOutput):
    """What a training call returns: ``loss``, and for everything else an error that says why it isn't there."""

    loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _absent(name, sys._getframe(1))

    def __getitem__(self, key: Any) -> Any:
        if key in ("loss", 0) or isinstance(key, slice):
            return super().__getitem__(key)
        raise _absent(key, sys._getframe(1))


def _absent(what: Any, frame: Any) -> AbsentOutputError:
    return AbsentOutputError(
        f"{frame.f_code.co_filename}:{frame.f_lineno} asks for {what!r} of a training call, which has the loss alone: "
        "forward and backward of that loss have run by then, micro-batch by micro-batch, and a loss made from "
        "anything else would have no gradients; let the model make it (labels=, its loss_function), or call "
        "eval() first for logits"
    )


class CompiledCall:
    """``compiled(*args, **kwargs)`` is the call of the user's model from the second one on, in place of Dynamo's.

    In training it runs the braided step and returns its loss, whose ``backward()`` adds the gradients to ``.grad``;
    in eval mode the pipelined forward. ``code``: what Dynamo has cached of the first call, and may forget.
    """

    def __init__(self, model: nn.Module, braided: BraidedModel, code: Any) -> None:
        self.braided = braided
        self._model = model
        self._code = code
        self._anchor = torch.zeros((), requires_grad=True)
        self.__signature__ = inspect.signature(model.forward)
        self._whole: list[tuple[str, nn.Module, str, nn.Parameter, Any]] = []
        for name, parameter in braided.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            self._whole.append((name, model.get_submodule(owner), leaf, parameter, _kind(parameter)))

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._code is not None:
            # Of no more use, and it counts towards the limit of recompilations, behind which models run uncompiled.
            forget(self._code)
            self._code = None
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The call itself."""
        batch = keywords(self._model, args, kwargs)
        self._check()
        training = self._model.training
        if training != self.braided.training:
            self.braided.train(training)
        if not training:
            return self.braided(**batch)
        if not torch.is_grad_enabled():
            raise BraidError(
                "the model is called in training mode under torch.no_grad(), and its training program is forward and "
                "backward in one; call eval() first"
            )
        gradients = self.braided._gradients
        with gradients.aside() as taken:
            loss = self.braided.step(**batch)
        return TrainingOutput(loss=_Loss.apply(self._anchor, loss, _Handover(gradients, taken)))

    def _check(self) -> None:
        """That the program and the user's model still share their parameters."""
        for name, owner, leaf, parameter, kind in self._whole:
            if owner._parameters.get(leaf) is not parameter:
                raise BraidError(
                    f"{name} was replaced after the first call, and the program would go on with the old one; copy "
                    "into it instead (parameter.data.copy_)"
                )
            if (now := _kind(parameter)) != kind:
                raise BraidError(
                    f"{name} was {kind} at the first call and is {now} now, and the program is made for the former; "
                    "convert or move the model before the first call"
                )
            if hooked(parameter):
                raise BraidError(
                    f"{name} has a hook, which would never be called: gradients do not come by way of autograd; "
                    "remove it, or work on .grad after backward()"
                )
        if self._model._forward_hooks or self._model._forward_pre_hooks or self._model._backward_hooks:
            raise BraidError(
                f"{type(self._model).__name__} has hooks of its own, which would not be called: fxbraid runs its "
                "program in place of the call; remove them, or register them on what torch.compile() returned"
            )


class _Handover:
    """The gradients of one step, for the first ``backward()`` of its loss."""

    def __init__(self, gradients: Gradients, taken: Mapping[nn.Parameter, Tensor]) -> None:
        self._gradients = gradients
        self._taken: Mapping[nn.Parameter, Tensor] | None = taken

    def give(self, scale: Tensor) -> None:
        taken, self._taken = self._taken, None
        if taken is None:
            raise RuntimeError(
                "backward a second time through the loss of one training call: its gradients were handed over the "
                "first time, and retain_graph=True does not keep them; call the model again"
            )
        self._gradients.add(taken, scale)


class _Loss(torch.autograd.Function):
    """The loss of a step that has run. ``anchor`` makes it require a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, handover: _Handover) -> Tensor:
        ctx.handover = handover
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:
        ctx.handover.give(scale)
        return None, None, None


def compiled_call(model: Any) -> CompiledCall | None:
    """What calls of ``model`` (or of what ``torch.compile`` returned for it) run; None before the first."""
    inner = getattr(model, "_orig_mod", model)
    call = getattr(inner, "_compiled_call_impl", None)
    return call if isinstance(call, CompiledCall) else None


def braided(model: nn.Module) -> BraidedModel:
    """The :class:`BraidedModel` behind ``torch.compile(model, backend="fxbraid")``, for ``report()``, ``last_step``,
    ``state_dict()`` and everything else. It shares its parameters with ``model``.

    Raises :class:`BraidError` where there is none: before the first call, or for another model.
    """
    if isinstance(model, BraidedModel):
        return model
    call = compiled_call(model)
    if call is None:
        raise BraidError(
            f"there is no braided model behind this {type(model).__name__} yet: "
            'torch.compile(model, backend="fxbraid", options={...}) makes it at the first call'
        )
    return call.braided


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    skip_if_nonfinite: bool = False,
) -> Tensor:
    """:meth:`BraidedModel.clip_grad_norm_` of the model behind ``torch.compile``: one exact norm over the whole model.
    ``torch.nn.utils.clip_grad_norm_`` would take that of this rank's shards. Collective."""
    if not isinstance(model, nn.Module):
        raise BraidError(
            f"clip_grad_norm_() wants the compiled model, not a {type(model).__name__}: the norm is over all ranks' "
            "parameters; give it the model"
        )
    return braided(model).clip_grad_norm_(
        max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, skip_if_nonfinite=skip_if_nonfinite
    )


def keywords(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are None as they would be by default."""
    known = inspect.signature(model.forward)
    named: dict[str, Any] = {}
    for name, value in known.bind(*args, **kwargs).arguments.items():
        kind = known.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise BraidError(
                f"{type(model).__name__} is called with {len(args)} arguments by position, and its forward does not "
                "name them; give them by name"
            )
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif value is not None or known.parameters[name].default is not None:
            named[name] = value
    return named


def _kind(parameter: nn.Parameter) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype} on {parameter.device}"
