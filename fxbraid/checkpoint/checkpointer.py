"""``fxbraid.Checkpointer``: save while training goes on, resume on any layout."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ..model import BraidedModel
from ..passes.errors import BraidError
from ..runtime import ranks
from ..zero import inner
from . import folder as folders
from . import optimizer as optimizers
from . import rng, storage
from .codec import decode, encode
from .commit import Commit, facts
from .files import NAMES
from .folder import Saved
from .held import Held, held, names_of, replicas, structure


@dataclass(frozen=True, slots=True)
class Restored:
    """What :meth:`Checkpointer.load` found. ``data``: the data position as it was saved, ``extra``: the user's own,
    ``layout``: sizes and schedule of the run that saved it, ``path``: the checkpoint's folder."""

    step: int
    path: Path
    data: Any
    extra: Any
    layout: Mapping[str, Any]


class Checkpointer:
    """Saves a :class:`~fxbraid.BraidedModel` and what trains it into ``folder``, and resumes from there.

    ``folder``: shared by all ranks; several runs must not write to the same one at once. ``keep``: how many checkpoints
    stay (None: all). ``timeout_s``: how long a rank that has written its part waits for the others; by default the 30
    minutes that torch gives a gloo group, so what ``torch.distributed.checkpoint`` waits. ``max_file_bytes``: of a file
    of tensors (a larger tensor has a file of its own).

    Every method but :meth:`steps` is collective: all ranks call it, in the same order. ``with Checkpointer(...) as c:``
    waits at the end for what is still being written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int | None = 3,
        timeout_s: float = default_pg_timeout.total_seconds(),
        max_file_bytes: int = 2**31,
    ) -> None:
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise BraidError(
                f"keep={keep!r}: give the number of checkpoints that stay, 1 or more, or None for all"
            )
        if timeout_s <= 0 or max_file_bytes < 1:
            raise BraidError(f"timeout_s={timeout_s} and max_file_bytes={max_file_bytes} must be above 0")
        self.folder = Path(folder)
        self._keep, self._timeout, self._most = keep, timedelta(seconds=timeout_s), max_file_bytes
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        #: of the background's collectives alone
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.wait()
        else:  # whoever raised goes; the others may not be here
            self._join()

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, in order. Local."""
        return sorted({folders.order(name)[0] for name in folders.complete(self.folder)})

    def save(
        self,
        step: int,
        model: BraidedModel,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        data: Any = None,
        extra: Any = None,
        blocking: bool = False,
    ) -> None:
        """Copy everything to the host, and write it in the background; the last save is waited for first.

        ``optimizer``: any of torch, made from ``model.parameters()``. ``scheduler``: anything with ``state_dict()`` and
        ``load_state_dict()``. ``data``: where the data stands, an object with these two, or a dict. ``extra``: more of
        the user's. Random numbers' states are saved per rank. ``blocking``: return when it is on disk.

        Raises BraidError, on every rank, for what can't be saved, and for what went wrong in the last save. Collective.
        """
        self._join()
        failed, self._failure = self._failure, None
        error: str | None = failed
        staged: list[storage.Staged] = []
        values: dict[str, Any] = {}
        try:
            if failed is None:
                staged, values = _collect(step, model, optimizer, scheduler, data, extra)
        except BraidError as refused:
            error = str(refused)
        said = ranks.gather((error, step, uuid.uuid4().hex, failed is not None))
        if any(broken for *_, broken in said):
            self._group = None  # a rank that was lost for a while has left it in pieces
        ranks_error = next((one for one, *_ in said if one is not None), None)
        if ranks_error is not None:
            raise BraidError(ranks_error)
        if len({one for _, one, *_ in said}) > 1:
            raise BraidError(
                f"the ranks save different steps ({[one for _, one, *_ in said]}); give all the same"
            )
        if ranks.several() and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        commit = Commit(self.folder, step, said[0][2], self._keep, facts(model))
        self._thread = threading.Thread(
            target=self._write, args=(commit, staged, values), name=f"fxbraid-save-{step}"
        )
        self._thread.start()
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background. Raises BraidError, on every rank, where it went wrong. Collective."""
        self._join()
        failed, self._failure = self._failure, None
        said = ranks.gather(failed)
        if any(one is not None for one in said):
            self._group = None
            raise BraidError(next(one for one in said if one is not None))

    def load(
        self,
        model: BraidedModel,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        data: Any = None,
        step: int | None = None,
        random: bool = True,
        verify: bool = True,
    ) -> Restored | None:
        """Load the checkpoint that ``latest`` names, or that of ``step``, in place; None where there is none at all.

        What it holds of optimizer, scheduler and data is given to those that are passed. ``random``: set the random
        numbers of this rank too (with more ranks than before, those of rank r modulo the old number). ``verify``: hash
        every file first (each rank a share of them); False compares sizes and headers only.

        Raises BraidError, the same on every rank and before anything is changed, where a file is missing, damaged or of
        another save, naming it, and where the checkpoint does not fit. Collective.
        """
        self.wait()
        saved = self._find(step, verify=verify)
        if saved is None:
            return None
        found: _Prepared | None = None
        error: BraidError | None = None
        try:
            found = _prepare(saved, model, optimizer, scheduler, data)
        except BraidError as refused:
            error = refused
        ranks.raise_together(error)
        assert found is not None
        try:
            storage.load(found.tensors, saved, group=dist.group.WORLD if ranks.several() else None)
        except (CheckpointException, OSError, RuntimeError, ValueError) as failed:
            raise BraidError(
                f"reading {saved.path} failed when it had begun, so the model is no longer what it was: {_said(failed)}"
            ) from failed
        found.give(model, optimizer, scheduler, data, random=random)
        return Restored(
            saved.step, saved.path, found.data, decode(found.state.get("extra")), saved.manifest["layout"]
        )

    # -- inside

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, commit: Commit, staged: list[storage.Staged], values: dict[str, Any]) -> None:
        try:
            storage.save(
                staged,
                values,
                commit.path,
                commit.stamp,
                commit.finish,
                group=self._group,
                most_bytes=self._most,
            )
        except BaseException as error:
            self._failure = f"the checkpoint of step {commit.step} was not saved: {_said(error)}"
            shutil.rmtree(commit.path, ignore_errors=True)

    def _find(self, step: int | None, *, verify: bool) -> Saved | None:
        """The checkpoint to load, looked for by the first rank, opened and verified by all."""
        told: tuple[str | None, str | None] = (None, None)
        if ranks.rank() == 0:
            try:
                path = folders.find(self.folder, step)
                told = (None if path is None else path.name if path != self.folder else ".", None)
            except BraidError as error:
                told = (None, str(error))
            except OSError as error:
                told = (None, f"{self.folder} can't be read ({error.strerror or error})")
        name, said = ranks.gather(told)[0]
        if said is not None:
            raise BraidError(said)
        if name is None:
            return None
        saved: Saved | None = None
        error_here: BraidError | None = None
        try:
            saved = folders.open_saved(self.folder / name)
        except BraidError as error:
            error_here = error
        ranks.raise_together(error_here)
        assert saved is not None
        share = (ranks.rank(), ranks.world())
        found = [one for part in ranks.gather(folders.problems(saved, share, hashes=verify)) for one in part]
        if found:
            others = [str(other) for other in self.steps() if other != saved.step]
            way = (
                f"load(step=...) takes another one: {', '.join(others)}"
                if others
                else "there is no other one"
            )
            more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
            raise BraidError(
                f"{saved.path} is not what was saved: {'; '.join(found[:5])}{more}. Nothing was loaded; {way}"
            )
        return saved


def _collect(
    step: int, model: BraidedModel, optimizer: Optimizer | None, scheduler: Any, data: Any, extra: Any
) -> tuple[list[storage.Staged], dict[str, Any]]:
    """This rank's part of a checkpoint: tensors copied to the host, and the values that are no tensors."""
    _check_model(model)
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise BraidError(f"step={step!r}: give the number of steps done, 0 or more")
    tensors = held(model)
    for one in tensors.values():
        if one.tensor.dtype not in NAMES:
            raise BraidError(f"{one.name} is {one.tensor.dtype}, which safetensors has no name for")
    mesh = model._mesh
    values: dict[str, Any] = {"rng": encode(rng.capture(mesh.device), "the random numbers' state")}
    everything: list[Held] = list(tensors.values())
    if optimizer is not None:
        own = inner(optimizer)
        _follow(own, optimizer)
        places = tensors if own is optimizer else held(model, alone=True)
        taken = optimizers.take(own, names_of(model), places, _place(model))
        values["optimizer"] = taken.values
        everything += taken.tensors
    if scheduler is not None:
        state = encode(_state_of(scheduler, "scheduler"), "the scheduler's state")
        values["scheduler"] = {"kind": type(scheduler).__name__, "state": state}
    if data is not None:
        values["data"] = [replicas(mesh)[1], encode(_state_of(data, "data"), "data")]
    values["extra"] = encode(extra, "extra")
    return storage.stage(everything), values


def _follow(one: Optimizer, other: Optimizer) -> None:
    """Give the groups of ``one`` the options of ``other`` (a scheduler writes those of the outer optimizer, and the one
    that holds a replica's share hears of it with the next step)."""
    if one is not other:
        for group, options in zip(one.param_groups, other.param_groups, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})


@dataclass(slots=True)
class _Prepared:
    """A checkpoint that fits, and room for what comes out of it."""

    state: Mapping[str, Any]
    tensors: list[Held]
    optimizer: optimizers.Taken | None
    names: Mapping[int, str]
    data: Any

    def give(
        self, model: BraidedModel, optimizer: Optimizer | None, scheduler: Any, data: Any, *, random: bool
    ) -> None:
        if optimizer is not None and self.optimizer is not None:
            own = inner(optimizer)
            optimizers.put(own, self.optimizer, self.names)
            _follow(optimizer, own)
        if scheduler is not None:
            scheduler.load_state_dict(decode(self.state["scheduler"]["state"]))
        if hasattr(data, "load_state_dict"):
            data.load_state_dict(self.data)
        elif data is not None:
            data.clear()
            data.update(self.data)
        if random:
            states = self.state["rng"]
            rng.restore(decode(states[ranks.rank() % len(states)]), model._mesh.device)


def _prepare(
    saved: Saved, model: BraidedModel, optimizer: Optimizer | None, scheduler: Any, data: Any
) -> _Prepared:
    """Does everything fit? Raises BraidError; nothing is changed."""
    _check_model(model)
    state = saved.state()
    tensors = held(model)
    wrong = [
        f"{one.name} is {tuple(saved.tensors[one.name]['shape'])} there and {one.full} in the model"
        for one in tensors.values()
        if one.name in saved.tensors and tuple(saved.tensors[one.name]["shape"]) != one.full
    ]
    wrong += [f"{name} is missing there" for name in tensors if name not in saved.tensors]
    expected = {*structure(model).state_dict(), *(name for name, _ in structure(model).named_parameters())}
    wrong += [
        f"{name} is unknown to the model"
        for name in saved.tensors
        if not name.startswith(optimizers.PREFIX) and name not in expected
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise BraidError(f"the checkpoint {saved.path} does not fit the model: {'; '.join(wrong[:5])}{more}")
    for name, asked in (("optimizer", optimizer), ("scheduler", scheduler), ("data", data)):
        if asked is not None and not state.get(name):
            raise BraidError(f"the checkpoint {saved.path} has no {name}; load without it")
    names = names_of(model)
    wanted = None
    if optimizer is not None:
        wanted = optimizers.prepare(
            inner(optimizer), state["optimizer"], saved.tensors, names, tensors, _place(model)
        )
    if scheduler is not None and state["scheduler"]["kind"] != type(scheduler).__name__:
        raise BraidError(
            f"the checkpoint has the state of {state['scheduler']['kind']}, and the scheduler is "
            f"{type(scheduler).__name__}; make the same scheduler, or load without one"
        )
    if data is not None and not hasattr(data, "load_state_dict") and not isinstance(data, MutableMapping):
        raise BraidError(f"data is a {type(data).__name__}; give an object with load_state_dict(), or a dict")
    position = _position(state["data"], model) if state.get("data") else None
    every = [*tensors.values(), *(wanted.tensors if wanted is not None else ())]
    return _Prepared(state, every, wanted, names, position)


def _position(saved: Sequence[Any], model: BraidedModel) -> Any:
    """The data position of this rank: every data-parallel rank had its own, or all the same."""
    copies, copy = replicas(model._mesh)
    if len(saved) == copies:
        return decode(saved[copy])
    if all(one == saved[0] for one in saved):
        return decode(saved[0])
    raise BraidError(
        f"the checkpoint has data positions of {len(saved)} data-parallel ranks, which differ, and here are {copies}; "
        "save one that counts over all of them (samples, say), or load without data"
    )


def _check_model(model: Any) -> None:
    if not isinstance(model, BraidedModel):
        raise BraidError(
            f"a Checkpointer takes what braid() has made, and this is a {type(model).__name__}; give it "
            "braid(model, example_batch, ...)"
        )


def _place(model: BraidedModel) -> optimizers.Place:
    return optimizers.Place(model._mesh.tp_rank, model._mesh.tp_size)


def _state_of(value: Any, name: str) -> Any:
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, Mapping):
        return dict(value)
    raise BraidError(f"{name} is a {type(value).__name__}; give an object with state_dict(), or a dict")


def _said(error: BaseException) -> str:
    """What went wrong, and on which ranks, in a sentence."""
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {type(one).__name__}: {one}" for rank, (one, _) in sorted(error.failures.items())
        )
    return f"{type(error).__name__}: {error}"
