"""Types of numbers: what gradients add up in, and the parameters that an optimizer sees.

Three settings of a model whose own type is bfloat16 (bytes per parameter with AdamW, gradients included):

=====================================  ====================================================  =====
bfloat16, ``grad_dtype=None``           everything in bfloat16                                    8
bfloat16 (the default)                  gradients add up in ``parameter.main_grad``, float32;
                                        ``.grad`` is its rounded copy                            12
bfloat16, ``master_weights=True``       ``parameters()`` are float32, so are their gradients
                                        and optimizer states; the program computes with
                                        rounded copies                                           18
=====================================  ====================================================  =====

(Micikevicius et al. 2018, "Mixed precision training", sections 3.1 and 3.3, without loss scaling, which bfloat16's
exponent makes needless.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .passes.errors import BraidError
from .runtime.unit import gradient


def accumulated_in(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What the gradients of a parameter of ``dtype`` add up in: the wider of the two."""
    if wanted is None or not dtype.is_floating_point:
        return dtype
    return torch.promote_types(dtype, wanted)


def check_grad_dtype(wanted: torch.dtype | None) -> None:
    """Raises :class:`BraidError` for what no gradient adds up in."""
    if wanted not in (None, torch.float32, torch.float64):
        raise BraidError(
            f"grad_dtype={wanted!r}: give torch.float32 or torch.float64, or None to add gradients up in each "
            "parameter's own type"
        )


def refuse_float16(model: nn.Module) -> None:
    """Training in float16 needs its loss scaled, and scaled anew where a gradient overflows."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise BraidError(
                f"{name} is float16, whose gradients vanish below 6e-8 and overflow above 65504 unless the loss is "
                "scaled, which fxbraid does not do; convert the model to torch.bfloat16 (or float32) before braid()"
            )


def ambient_autocast(device: torch.device) -> torch.dtype | None:
    """The type that ``torch.autocast`` is on with for ``device``, if it is."""
    if not torch.is_autocast_enabled(device.type):
        return None
    dtype = torch.get_autocast_dtype(device.type)
    if dtype is torch.float16:
        raise BraidError(
            "torch.autocast to float16 needs its loss scaled, which fxbraid does not do; use "
            f'torch.autocast("{device.type}", dtype=torch.bfloat16)'
        )
    return dtype


class Masters:
    """Float32 parameters for the optimizer, and the narrow copies that the program reads."""

    def __init__(self) -> None:
        self._masters: list[Tensor] = []
        self._copies: list[Tensor] = []

    @staticmethod
    def serve(dtype: torch.dtype) -> bool:
        """Does a parameter of ``dtype`` gain by a float32 master?"""
        return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize

    def copy_of(self, master: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The copy of ``dtype`` of a float32 parameter."""
        copied = master.detach().to(dtype)
        self._masters.append(master)
        self._copies.append(copied)
        return copied

    def refresh(self) -> None:
        """Round the masters into the copies: at every step, since nothing tells for sure whether an optimizer, a
        checkpoint or the user has written them (``p.data.copy_`` leaves no trace)."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._masters)


class MainGrads:
    """``parameter.main_grad`` of the parameters whose gradients add up in a wider type, and ``.grad``, its copy in the
    parameter's own type, which torch's optimizers read."""

    def __init__(self, parameters: Iterable[tuple[nn.Parameter, torch.dtype]]) -> None:
        self._wide = {p: dtype for p, dtype in parameters if dtype is not p.dtype}
        #: the ``.grad`` that was published last, and its version then
        self._published: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def resume(self) -> None:
        """Follow what was done to ``.grad`` since it was published: dropped or zeroed by ``zero_grad``, scaled, loaded.
        Untouched, it goes on from ``main_grad``, unrounded."""
        for p, dtype in self._wide.items():
            if p.grad is None:
                p.main_grad = None  # type: ignore[attr-defined]
            elif not self._untouched(p):
                p.main_grad = p.grad.to(dtype, copy=True)  # type: ignore[attr-defined]

    def publish(self) -> None:
        """``.grad = main_grad`` in the parameter's type."""
        for p, dtype in self._wide.items():
            main = gradient(p, dtype)
            if main is None:
                continue
            if p.grad is None:
                p.grad = main.to(p.dtype)
            else:
                p.grad.copy_(main)
            self._published[p] = (weakref.ref(p.grad), p.grad._version)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is published yet; afterwards, what was before."""
        before, self._published = self._published, {}
        try:
            yield
        finally:
            self._published = before

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient as it was added up."""
        return gradient(parameter, self._wide.get(parameter, parameter.dtype))

    def _untouched(self, p: nn.Parameter) -> bool:
        published, version = self._published.get(p, (lambda: None, 0))
        grad = published()
        return grad is not None and grad is p.grad and grad._version == version
