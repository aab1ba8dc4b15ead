"""What a command line says, as a schedule and a workload; shared by ``fxbraid simulate``, ``draw`` and
``plan``.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path

from fxbraid.schedule import Costs, Schedule, ScheduleError, auto, braid, build, check
from fxbraid.schedule.offload import OffloadPlan
from fxbraid.simulate.constants import constants
from fxbraid.simulate.model import ModelConfig
from fxbraid.simulate.offload import early_chunks, plan_offload
from fxbraid.simulate.workload import Link, Workload

MOST_RANKS = 1024
MOST_ACTIONS = 2**20
"""What a schedule by name may have: far beyond any pipeline, and within what a minute and a GB can hold."""


def read_schedule(
    name: str, p: int, m: int, v: int | None = None, *, braided: bool = False, costs: Costs | None = None
) -> Schedule:
    """A schedule by name, or from a CSV file; checked. braided: pair its neighbours where that pays at
    ``costs``.
    """
    if name.endswith(".csv"):
        if not Path(name).is_file():
            raise ScheduleError(f"there is no file {name}")
        schedule = Schedule.from_csv(Path(name))
    else:
        _check_size(p, m, v or 2)
        if name == "auto" and costs is not None:
            schedule = auto(p=p, m=m, v=v or 2, costs=costs)
        else:
            schedule = build(name, p=p, m=m, v=v)
    if braided:
        schedule = braid(schedule) if costs is None else braid(schedule, costs)
    check(schedule)
    return schedule


def read_times(text: str) -> tuple[float, float, float, float]:
    """``1,1,1,0.25`` -> T_F, T_I, T_W, T_AR."""
    parts = text.split(",")
    try:
        f, i, w, ar = (float(part) for part in parts)
    except ValueError:
        raise ScheduleError(f"times are T_F,T_I,T_W,T_AR, for example 1,1,1,0.25, not {text!r}") from None
    if not all(isfinite(time) and time >= 0 for time in (f, i, w, ar)):
        raise ScheduleError(f"times are finite and 0 or more, not {text!r}")
    if f + i + w == 0:
        raise ScheduleError(
            f"with times {text} nothing takes any time; give one of T_F, T_I and T_W more than 0"
        )
    return f, i, w, ar


def _check_size(p: int, m: int, v: int) -> None:
    actions = 3 * p * m * v
    if p > MOST_RANKS or actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{p} ranks with {m} micro-batches and {v} chunks a rank make {actions} actions; a schedule may have "
            f"{MOST_RANKS} ranks and {MOST_ACTIONS} actions at most, so give fewer ranks or micro-batches"
        )


def read_imbalance(text: str) -> dict[int, float]:
    """``0:1.2,3:0.9`` -> {0: 1.2, 3: 0.9}."""
    found: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        rank, colon, factor = part.partition(":")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            colon = ""
        if not colon:
            raise ScheduleError(f"imbalance is RANK:FACTOR, for example 0:1.2, not {part!r}")
    return found


def read_images(model: ModelConfig, images: int, patches: int, seq: int) -> tuple[int, int]:
    """``--images`` (-1: one, where the model has a tower) and ``--patches``, as numbers of a ``Shape``."""
    found = images if images >= 0 else int(model.tower is not None)
    if not found:
        if patches:
            raise ScheduleError("--patches is the size of images, and there are none; give --images too")
        return 0, 0
    if model.tower is None:
        raise ScheduleError(f"{model.name} has no vision tower that is known; leave --images out")
    size = model.tower.sized(patches, model.name)
    tokens = model.tower.features(size)
    if found * tokens > seq:
        raise ScheduleError(
            f"{found} images of {size} patches make {found * tokens} tokens, more than the {seq} of a sequence; give "
            f"fewer images, smaller ones, or --seq {found * tokens}"
        )
    return found, size


def read_host_link(text: str) -> Link | None:
    """``10e-6,25e9``: latency and bandwidth of a device's link to its host, each way, in the workload's units; "" is
    None."""
    if not text:
        return None
    latency, comma, bandwidth = text.partition(",")
    try:
        if comma:
            return Link(float(latency), float(bandwidth))
    except ValueError:
        pass
    raise ScheduleError(f"a host link is LATENCY,BANDWIDTH, for example 10e-6,25e9, not {text!r}")


def read_offload(
    text: str,
    schedule: Schedule,
    workload: Workload,
    *,
    host: str = "",
    braided: bool = True,
    ordered_by: Workload | None = None,
) -> tuple[Workload, OffloadPlan | None]:
    """``chunk0`` or a fraction: the plan for it, and the workload with the ``host`` link that it is made for; "" moves
    nothing."""
    link = read_host_link(host)
    if not text:
        if link is not None:
            raise ScheduleError("--host-link is what --offload moves activations over; give --offload too")
        return workload, None
    try:
        fraction = 1.0 if text == "chunk0" else float(text)
    except ValueError:
        raise ScheduleError(f"offload is chunk0 or a share of it, for example 0.5, not {text!r}") from None
    if link is not None:
        workload = replace(workload, host=link)
    wanted = early_chunks(schedule, fraction)
    return workload, plan_offload(schedule, workload, wanted, braided=braided, ordered_by=ordered_by)


def constant_workload(
    schedule: Schedule,
    times: tuple[float, float, float, float],
    *,
    layers: int = 1,
    latency: float = 0.0,
    imbalance: str = "",
) -> Workload:
    """All chunks alike, in units of time; messages take ``latency``."""
    if layers * schedule.n_chunks > MOST_ACTIONS:
        raise ScheduleError(
            f"{layers} layers in each of {schedule.n_chunks} chunks are {layers * schedule.n_chunks}; at most "
            f"{MOST_ACTIONS} can be simulated"
        )
    workload = constants(schedule, *times, layers=layers, link=Link(latency))
    return imbalanced(schedule, workload, imbalance)


def imbalanced(schedule: Schedule, workload: Workload, imbalance: str) -> Workload:
    """The workload with the compute of some ranks stretched; "" leaves it as it is."""
    factors = read_imbalance(imbalance)
    if not factors:
        return workload
    place = schedule.placement
    return workload.imbalanced(factors, tuple(place.rank_of(chunk) for chunk in range(place.n_chunks)))
