"""Values in a trace: inputs that are layout (image grids), and how many entries a mask of the inputs selects.

A trace knows shapes and no values. Models of images need some: how many patches each image has says how attention is
split, and a mask of image tokens picks as many hidden states as there are features. While the model is traced, a
``TorchFunctionMode`` (:class:`Values`) gives them:

* A **static input** is no placeholder but its own real tensor. An operator whose tensors are all real runs for real,
  outside of the trace, and so does one without tensors (``torch.arange``) in a function that holds a static value. Its
  numbers are constants of the trace, which is for this value of the input alone::

      lengths = grid[:, 1] * grid[:, 2]                      q0, q1 = split(q, [16, 24])
      q = torch.split(q, lengths.tolist())             =>

* ``x[mask]``, where the mask follows from integer inputs alone, has as many rows as the mask has True, counted on the
  micro-batch that is traced; a :class:`Count` says so, and every other micro-batch is held to it::

      rows = x[mask]                                   =>    rows = x[nonzero_static(mask, size=4)]

* Where the trace reads another integer input as numbers, ``needed`` names that input.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..compat import FakeTensor, same_storage, without_modes
from .errors import CaptureError

#: How a tensor becomes numbers.
_READS = frozenset({"tolist", "item", "__int__", "__index__", "__bool__", "__float__"})
#: Operators without tensor arguments that make one.
_FACTORIES = frozenset({"arange", "tensor", "as_tensor", "zeros", "ones", "full", "empty", "eye", "linspace"})
#: Those of them that make integers of integers.
_OF_INTEGERS = frozenset({"arange", "tensor", "as_tensor"})
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True, slots=True)
class Given:
    """What ``capture`` may know of inputs. ``static``: their values are constants of the trace; ``known``: the integer
    inputs of the micro-batch that is traced, by name; ``could``: those that can be made static once they are needed.
    """

    static: Mapping[str, Tensor] = field(default_factory=dict)
    known: Mapping[str, Tensor] = field(default_factory=dict)
    could: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Count:
    """``number`` of entries that a mask of the inputs selected in the trace; ``of`` counts those of other inputs."""

    number: int
    of: Callable[[Mapping[str, Tensor]], int]
    where: str


@dataclass(frozen=True, slots=True)
class _Made:
    """How a tensor followed from inputs (``names``) by operators on integers."""

    make: Callable[[Mapping[str, Tensor]], Any]
    names: frozenset[str]


class Needed(CaptureError):
    """The trace needs the numbers of integer inputs, ``names``."""

    def __init__(self, text: str, names: frozenset[str]) -> None:
        super().__init__(text)
        self.names = names


class Values(TorchFunctionMode):
    """See the module's docstring. ``where``: the module that runs."""

    def __init__(self, given: Given, where: Callable[[], str]) -> None:
        super().__init__()
        self._given, self._where = given, where
        self._made: dict[int, _Made] = {}
        self._alive: list[Tensor] = []  # an id is taken again once its tensor is gone
        self._real = {id(tensor) for tensor in given.static.values()}
        #: inputs that were read as numbers
        self.needed: set[str] = set()
        self.counts: list[Count] = []
        self._counted_once: set[int] = set()

    def over(self, inputs: Mapping[str, Any]) -> Values:
        """This, for a forward that gets ``inputs``, by name."""
        for name, tensor in inputs.items():
            if isinstance(tensor, Tensor) and tensor.dtype in _INTEGERS:
                self._made[id(tensor)] = _Made(lambda given, name=name: given[name], frozenset({name}))  # type: ignore[misc]
                self._alive.append(tensor)
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self._runs(name, tensors, kwargs):
            with without_modes():
                result = func(*args, **kwargs)
            self._keep_real(result)
            return result
        if name in ("__get__", "__set__"):
            return self._follow(func, args, kwargs, tensors, func(*args, **kwargs))
        written = (
            args[0] if args and (name == "__setitem__" or (name[-1:] == "_" and name[-2:] != "__")) else None
        )
        if isinstance(written, Tensor) and not isinstance(written, FakeTensor) and self._is_real(written):
            raise CaptureError(
                f"{self._where()} writes values of the trace into a tensor that follows from static inputs; that "
                "can't be traced"
            )
        if name in _READS:
            self._note(tensors[:1])
        if name in ("__getitem__", "__setitem__"):
            taken = (args[0], self._counted(args[1]), *args[2:])
        elif name in ("new_zeros", "new_ones", "new_full", "new_empty", *_FACTORIES):
            taken = tuple(map(self._number, args))
        else:
            taken = tuple(args)
        result = func(*taken, **kwargs)
        if isinstance(written, Tensor):
            self._forget(written)
            return result
        return self._follow(func, args, kwargs, tensors, result)

    # -- what runs for real

    def _is_real(self, tensor: Tensor) -> bool:
        return id(tensor) in self._real

    def _runs(self, name: str, tensors: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
        if tensors:
            return all(not isinstance(t, FakeTensor) and self._is_real(t) for t in tensors)
        dtype = kwargs.get("dtype")
        integers = name in _OF_INTEGERS if dtype is None else name in _FACTORIES and dtype in _INTEGERS
        return integers and self._called_with_static()

    def _called_with_static(self) -> bool:
        """Does the function that makes a tensor of nothing hold a static value in one of its variables?"""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and any(id(value) in self._real for value in frame.f_locals.values())

    def _keep_real(self, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._real.add(id(leaf))
                self._alive.append(leaf)

    # -- what follows from inputs

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> Any:
        """Remember how an integer tensor followed from integer inputs."""
        fakes = [t for t in tensors if id(t) in self._made]
        if not fakes or any(id(t) not in self._made and not self._is_real(t) for t in tensors):
            return result
        names = frozenset().union(*(self._made[id(t)].names for t in fakes))
        made = self._made
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        steps = [made[id(x)].make if isinstance(x, Tensor) and id(x) in made else None for x in leaves]
        leaves = [x if step is None else None for x, step in zip(leaves, steps, strict=True)]

        def make(inputs: Mapping[str, Tensor]) -> Any:
            values = [x if step is None else step(inputs) for x, step in zip(leaves, steps, strict=True)]
            again, named = pytree.tree_unflatten(values, spec)
            return func(*again, **named)

        outs = pytree.tree_leaves(result)
        for i, out in enumerate(outs):
            if isinstance(out, Tensor) and out.dtype in _INTEGERS and id(out) not in self._made:
                take = make if out is result else (lambda inputs, i=i: pytree.tree_leaves(make(inputs))[i])
                self._made[id(out)] = _Made(take, names)
                self._alive.append(out)
        return result

    def _forget(self, written: Tensor) -> None:
        """What shares memory with a tensor that was written no longer follows from inputs as it did."""
        for tensor in self._alive if written.dtype in _INTEGERS else ():
            if tensor is written or same_storage(tensor, written):
                self._made.pop(id(tensor), None)

    def _note(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if id(tensor) in self._made:
                self.needed |= self._made[id(tensor)].names
                if found := self.needed & self._given.could:
                    raise Needed(
                        f"{self._where()} reads {', '.join(sorted(found))} as numbers", frozenset(found)
                    )

    def _counted(self, index: Any) -> Any:
        """The index ``mask, ...`` by places in the mask, of which there are as many as it has True."""
        parts = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        for part in parts:
            masked = isinstance(part, Tensor) and part.dtype is torch.bool and isinstance(part, FakeTensor)
            number = self._count(part, lambda mask: int(mask.sum())) if masked else None
            if number is None:
                found.append(part)
            else:
                found += torch.nonzero_static(part, size=number).unbind(1)
        return tuple(found) if len(found) != len(parts) or any(map(operator.is_not, found, parts)) else index

    def _number(self, argument: Any) -> Any:
        """A count among the sizes of what is made."""
        if not isinstance(argument, FakeTensor) or argument.ndim or argument.dtype not in _INTEGERS:
            return argument
        number = self._count(argument, int)
        return argument if number is None else number

    def _count(self, tensor: Tensor, read: Callable[[Tensor], int]) -> int | None:
        """Read of the micro-batch that is traced; None where its values are not known."""
        made = self._made.get(id(tensor))
        if made is None or not made.names <= self._given.known.keys():
            self._note([tensor])
            return None
        with without_modes():
            number = read(made.make(self._given.known))
        if id(tensor) not in self._counted_once:
            self._counted_once.add(id(tensor))
            self.counts.append(Count(number, lambda inputs: read(made.make(inputs)), self._where()))
        return number


@contextmanager
def knowing(module: nn.Module, given: Given | None, stack: list[str]) -> Iterator[Values | None]:
    """The forward of ``module`` runs under :class:`Values`, and gets its static inputs."""
    if given is None:
        yield None
        return
    values = Values(given, lambda: (stack[-1] if stack else "") or type(module).__name__)
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with values.over(kwargs):
            return forward(*args, **kwargs, **given.static)

    own = "forward" in vars(module)
    module.forward = run
    try:
        yield values
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


def check_sizes(graph: fx.Graph, module: nn.Module, values: Values) -> None:
    """No size in the graph hangs on what a tensor holds."""
    for node in graph.nodes:
        val = node.meta.get("val")
        sizes = val.shape if isinstance(val, Tensor) else (val,)
        if any(isinstance(size, torch.SymInt | torch.SymBool | torch.SymFloat) for size in sizes):
            raise Needed(
                f"{type(module).__name__} does not trace: the size of {node.name} ({node.target}) depends on the "
                f"values of its inputs, {', '.join(sorted(values.needed)) or 'none of which is an integer input'}",
                frozenset(values.needed),
            )
