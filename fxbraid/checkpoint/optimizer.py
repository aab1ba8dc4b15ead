"""A torch optimizer's state, by parameter name: tensors that are cut as their parameter is, and the rest as JSON.

``optimizer/exp_avg/<parameter>`` is a full tensor of the checkpoint like any other, so that it is resharded with its
parameter. What has no dimension (a step count) goes to JSON, exactly. A tensor of another shape than its parameter's
(Adafactor's rows and columns) is whole where the parameter is; where that is cut, nobody can say what the full one is,
and each rank's is kept as it is, for a resume on as many tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..passes.errors import BraidError
from .codec import decode, encode
from .files import DTYPES
from .held import Held, whole

PREFIX = "optimizer/"


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among those that cut a parameter."""

    tp_rank: int
    tp_size: int

    @property
    def mark(self) -> str:
        """What ends the name of a tensor that is this rank's alone."""
        return f"@tp{self.tp_rank}of{self.tp_size}"


@dataclass(slots=True)
class Taken:
    """What was taken out of an optimizer, or is to be put in."""

    tensors: list[Held] = field(default_factory=list)
    #: kind, groups (options and names), scalars by parameter and key
    values: dict[str, Any] = field(default_factory=dict)


def take(optimizer: Optimizer, names: Mapping[int, str], held: Mapping[str, Held], place: Place) -> Taken:
    """The state of ``optimizer`` on this rank. ``names``: id of a parameter -> its name. Local.

    Raises BraidError for a parameter that is not the model's, and for a state that JSON can't hold.
    """
    taken = Taken()
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in names:
            raise BraidError(_not_of_the_model(optimizer))
        name = names[id(parameter)]
        if name not in held:  # another rank's
            continue
        for key, value in state.items():
            tensor = _tensor(key, value, held[name], place)
            if tensor is not None:
                taken.tensors.append(tensor)
            elif place.tp_rank == 0:  # the others have the same
                where = f"{type(optimizer).__name__}.state[{name}][{key!r}]"
                scalars.setdefault(name, {})[key] = encode(value, where)
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        if any(id(p) not in names for p in group["params"]):
            raise BraidError(_not_of_the_model(optimizer))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        said = encode(options, f"{type(optimizer).__name__}.param_groups[{i}]")
        groups.append({"options": said, "params": sorted(names[id(p)] for p in group["params"])})
    taken.values = {"kind": type(optimizer).__name__, "groups": groups, "state": scalars}
    return taken


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of all ranks as one: options of groups are those of the first, names and scalars everybody's."""
    merged: dict[str, Any] = {"kind": parts[0]["kind"], "groups": [], "state": {}}
    counts = {len(part["groups"]) for part in parts}
    if len(counts) > 1:
        raise BraidError(
            f"the optimizers of the ranks have {sorted(counts)} parameter groups; make the same groups on every rank, "
            "also where one has no parameters there"
        )
    for i, group in enumerate(parts[0]["groups"]):
        names = {name for part in parts for name in part["groups"][i]["params"]}
        merged["groups"].append({"options": group["options"], "params": sorted(names)})
    for part in parts:
        for name, values in part["state"].items():
            merged["state"].setdefault(name, {}).update(values)
    return merged


def prepare(
    optimizer: Optimizer,
    values: Mapping[str, Any],
    stored: Mapping[str, Mapping[str, Any]],
    names: Mapping[int, str],
    held: Mapping[str, Held],
    place: Place,
) -> Taken:
    """Check that the state of a checkpoint fits ``optimizer``, and make room for its tensors. Nothing is changed.

    ``values``: what :func:`merge` gave; ``stored``: the tensors of the checkpoint. Raises BraidError where kind, groups
    or shapes differ.
    """
    if values["kind"] != type(optimizer).__name__:
        raise BraidError(
            f"the checkpoint has the state of {values['kind']}, and the optimizer is {type(optimizer).__name__}; make "
            "the same optimizer, or load without one"
        )
    if len(values["groups"]) != len(optimizer.param_groups):
        raise BraidError(
            f"the optimizer of the checkpoint has {len(values['groups'])} parameter groups, and this one "
            f"{len(optimizer.param_groups)}; make the same groups"
        )
    keys: dict[str, list[str]] = {}
    for full in stored:
        if full.startswith(PREFIX):
            _, key, rest = full.split("/", 2)
            keys.setdefault(rest.split("@tp")[0], []).append(f"{key}/{rest}")
    scalars = {name: state for name, state in values["state"].items() if name in held}
    wanted = Taken(values={"groups": values["groups"], "state": scalars})
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, values["groups"], strict=True)):
        known = set(saved["params"])
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise BraidError(_not_of_the_model(optimizer))
            name = names[id(parameter)]
            if name not in known:
                raise BraidError(
                    f"{name} is in parameter group {i}, and in the checkpoint it was not; make the same groups"
                )
            for key in keys.get(name, []) if name in held else ():
                if (room := _room(key, stored[PREFIX + key], held[name], place)) is not None:
                    wanted.tensors.append(room)
    return wanted


def put(optimizer: Optimizer, wanted: Taken, names: Mapping[int, str]) -> None:
    """Give ``optimizer`` what :func:`prepare` made room for and the checkpoint has filled."""
    filled: dict[str, dict[str, Any]] = {}
    for tensor in wanted.tensors:
        _, key, rest = tensor.name.split("/", 2)
        filled.setdefault(rest.split("@tp")[0], {})[key] = tensor.tensor
    for name, values in wanted.values["state"].items():
        filled.setdefault(name, {}).update({key: decode(value) for key, value in values.items()})
    packed = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for mine, group, saved in zip(
        packed["param_groups"], optimizer.param_groups, wanted.values["groups"], strict=True
    ):
        for number, parameter in zip(mine["params"], group["params"], strict=True):
            if values := filled.get(names[id(parameter)]):
                state[number] = values
        kept = {key: mine[key] for key in ("params", "param_names") if key in mine}
        groups.append({**decode(saved["options"]), **kept})
    optimizer.load_state_dict({**packed, "state": state, "param_groups": groups})
    # torch casts states to their parameter's type; one that was kept in another type goes on in that.
    for parameter, now in optimizer.state.items():
        for key, value in filled.get(names[id(parameter)], {}).items():
            if isinstance(value, Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)


def _tensor(key: Any, value: Any, of: Held, place: Place) -> Held | None:
    """``value`` as a tensor of the checkpoint; None for what goes to JSON."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if not isinstance(key, str) or "/" in key:
        raise BraidError(
            f"the optimizer's state of {of.name} has the key {key!r}; a checkpoint takes plain names"
        )
    name = f"{PREFIX}{key}/{of.name}"
    if value.shape == of.tensor.shape:
        return of.like(value.detach(), name)
    if not of.cut:
        return whole(name, value.detach(), writes=any(box.writes for box in of.boxes))
    return whole(name + place.mark, value.detach(), writes=of.first)


def _room(key: str, stored: Mapping[str, Any], of: Held, place: Place) -> Held | None:
    """Zeros for what the checkpoint has as ``stored``; None for what is another rank's."""
    shape = tuple(stored["shape"])
    options: dict[str, Any] = {"dtype": DTYPES[stored["dtype"]], "device": of.tensor.device}
    if "@tp" in key:
        mark = "@tp" + key.split("@tp")[1]
        if not mark.endswith(f"of{place.tp_size}"):
            raise BraidError(
                f"the optimizer's {key.split('/')[0]} of {of.name} has not the parameter's shape, so it is kept as "
                f"each rank had it ({mark[1:]}), and can't go on with tp_size={place.tp_size}; resume on as many "
                "tensor-parallel ranks, or load without the optimizer"
            )
        if mark != place.mark:
            return None
    elif shape == of.full:
        return of.like(torch.zeros(of.tensor.shape, **options), PREFIX + key)
    return whole(PREFIX + key, torch.zeros(shape, **options), writes=False)


def _not_of_the_model(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} has a parameter that is not one of the model's, so the checkpoint has no name for "
        "it; make the optimizer from model.parameters(), after braid()"
    )
