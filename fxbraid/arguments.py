"""The arguments of ``braid``: what can be said of them before other ranks are asked and anything is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .inputs import Inputs
from .offloading import check_offload
from .order import Order, check_order
from .passes.block import COLLECTIVES, Collectives
from .passes.checkpoint import check_policy
from .passes.compile import Artefacts
from .passes.errors import BraidError
from .schedule import Schedule, ScheduleError
from .simulate.memory import read_amount

_FLAGS = ("braided", "reproducible", "sequence_parallel", "regather", "master_weights")
_SIZES = ("tp_size", "pp_size", "dp_size", "max_live")


def checked(asked: Mapping[str, Any], inputs: Inputs | None = None) -> tuple[Collectives, Order]:
    """``asked``: the arguments of ``braid`` by name, the model left out; ``inputs``: what it takes. Returns
    ``collectives`` and ``order`` with their defaults put in; raises :class:`BraidError` for anything that makes no
    sense, with what would."""
    _kinds(asked)
    _plan_and_split(asked)
    braided, max_live = asked["braided"], asked["max_live"]
    auto = isinstance(asked["schedule"], str) and asked["schedule"].lower() == "auto"
    if max_live is not None and not auto:
        raise BraidError(
            f'max_live={max_live} bounds what schedule="auto" may choose, and schedule={asked["schedule"]!s} is '
            'chosen already; leave max_live out, or use schedule="auto"'
        )
    (inputs or Inputs()).split(asked["example_batch"], asked["n_microbatches"])
    collectives = asked["collectives"]
    if collectives is None:
        collectives = "overlap" if braided else "blocking"
    if collectives not in COLLECTIVES:
        raise BraidError(f"collectives={collectives!r} is not one of {', '.join(map(repr, COLLECTIVES))}")
    if collectives == "overlap" and not braided:
        raise BraidError(
            'braided=False waits for every collective at once, and collectives="overlap" wants them to overlap; leave '
            "one of them out"
        )
    if asked["regather"] and not asked["sequence_parallel"]:
        raise BraidError(
            "regather=True gathers again what sequence_parallel=True has cut, and here nothing is cut; pass both, or "
            "neither"
        )
    return collectives, check_order(asked["order"], auto=auto)


def check_model(model: object) -> None:
    """Raise :class:`BraidError` for a model that is none."""
    if not isinstance(model, nn.Module):
        raise BraidError(f"model is of type {type(model).__name__}; give a torch.nn.Module")


def check_seed(seed: object) -> None:
    """Raise :class:`BraidError` for a seed that torch would not take."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise BraidError(f"seed={seed!r}: give a whole number of 64 bits")


def read_budget(budget: object) -> int:
    """Bytes of ``memory_budget``; raises :class:`BraidError` for what is no amount."""
    try:
        if isinstance(budget, bool) or not isinstance(budget, str | int | float):
            raise ScheduleError(f"{budget!r} is of type {type(budget).__name__}")
        return read_amount(budget)
    except ScheduleError as error:
        raise BraidError(f'memory_budget={budget!r}: {error}; give for example "60GiB", or bytes') from None


def _kinds(asked: Mapping[str, Any]) -> None:
    """Types and single values."""
    batch = asked["example_batch"]
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
        raise BraidError(
            f"example_batch is of type {type(batch).__name__}; give a dict of the model's keyword arguments, as step() "
            "will get them"
        )
    if any(not isinstance(v, Tensor) and isinstance(v, list | dict) for v in batch.values()):
        raise BraidError("example_batch holds a list or dict; give tensors or plain constants")
    _whole("n_microbatches", asked["n_microbatches"])
    _whole("max_programs", asked["max_programs"])
    for name in _SIZES:
        if asked[name] is not None:
            _whole(name, asked[name])
    for name in _FLAGS:
        if not isinstance(asked[name], bool):
            raise BraidError(f"{name}={asked[name]!r}: give True or False")
    if not (isinstance(asked["bucket_mb"], int | float) and asked["bucket_mb"] > 0):
        raise BraidError(f"bucket_mb={asked['bucket_mb']!r}: give a size in MiB above 0")
    check_seed(asked["seed"])
    check_offload(asked["offload"])
    Artefacts(asked["compile"])
    check_policy(asked["checkpoint"])
    _one_of("loss_reduction", asked["loss_reduction"], ("auto", "sum", "mean"))
    static = asked["static_inputs"]
    names = (
        not isinstance(static, str)
        and isinstance(static, Sequence)
        and all(isinstance(n, str) for n in static)
    )
    if static != "auto" and not names:
        raise BraidError(
            f'static_inputs={static!r}: use "auto", or names of inputs whose values are part of the program: '
            '("image_grid_thw",)'
        )
    _one_of("vocab_parallel", asked["vocab_parallel"], (True, False, "auto"))
    mesh, schedule = asked["device_mesh"], asked["schedule"]
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise BraidError(
            f'device_mesh={mesh!r}: give a DeviceMesh with axes "pp" and "tp", or leave it out and give tp_size and '
            "pp_size"
        )
    if not isinstance(schedule, str | Schedule):
        raise BraidError(
            f"schedule={schedule!r}: give the name of one (fxbraid.schedule.FAMILIES), or a Schedule"
        )


def _plan_and_split(asked: Mapping[str, Any]) -> None:
    plan, split = asked["tp_plan"], asked["split"]
    styles = isinstance(plan, Mapping) and all(
        isinstance(text, str) for pair in plan.items() for text in pair
    )
    if plan != "auto" and not styles:
        raise BraidError(
            f'tp_plan={plan!r}: use "auto", or a dict of module patterns to styles: {{"layers.*.up": "colwise", ...}}'
        )
    if split == "auto":
        return
    if isinstance(split, str) or not isinstance(split, Sequence) or not split:
        raise BraidError(f'split={split!r}: use "auto", or a list with the layers of each chunk')
    for layers in split:
        _whole("a chunk's layers in split", layers)


def _one_of(name: str, value: object, known: Sequence[Any]) -> None:
    if not any(type(value) is type(one) and value == one for one in known):
        raise BraidError(f"{name}={value!r}: use {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BraidError(f"{name}={value!r}: give a whole number, 1 or more")
