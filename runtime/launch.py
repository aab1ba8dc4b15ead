"""Start local ranks, supervise them, bring their results back.

Contract of ``launch``: it returns one result per rank, in rank order, or raises. Whatever happens
(a rank raises, hangs or is killed, the user presses Ctrl-C, this process dies), no rank outlives it
for more than about two seconds. ``rank_main.py`` is the script that each rank runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .start import Process, rank_env, start

if TYPE_CHECKING:
    import torch

POLL_S = 0.05
GRACE_S = 1.0  # between SIGTERM and SIGKILL
SETTLE_S = 0.15  # after a first failure: wait for the others' word, then name the cause
LOST_PEER = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Socket closed")
TAIL_LINES = 40  # of each rank's output, kept for error messages

LineCallback = Callable[[int, str], None]


class RankError(RuntimeError):
    """A rank failed. ``rank``, ``message`` and ``traceback_text`` say which, why and where."""

    def __init__(self, rank: int, message: str, traceback_text: str = "") -> None:
        super().__init__(f"rank {rank} failed: {message}" + (f"\n{traceback_text}" if traceback_text else ""))
        self.rank = rank
        self.message = message
        self.traceback_text = traceback_text


class RankTimeout(RankError, TimeoutError):
    """The ranks did not end in time. The message quotes what each of them last printed."""


@dataclass(slots=True)
class _Rank:
    rank: int
    process: Process
    reader: threading.Thread
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


@dataclass(frozen=True, slots=True)
class _Failure:
    when: int
    rank: int
    message: str
    traceback_text: str

    @property
    def is_consequence(self) -> bool:
        """A rank that tidies up before it reports can break its peers' collectives first."""
        return any(text in self.message for text in LOST_PEER)


def launch(
    target: str | Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    nproc: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on_line: LineCallback | None = None,
) -> list[Any]:
    """Run ``target(*args)`` in ``nproc`` processes and return what each returned, in rank order.

    ``target`` is "module:function", or a function that can be named so. Arguments and results travel
    by pickle. Every rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT set for ``init_process_group``, and OMP_NUM_THREADS=1 unless the caller's environment
    or ``env`` says otherwise. The rendezvous store lives in this process, on a port that the system
    chose, so that no two launches can collide.

    Each line that a rank prints goes to ``on_line(rank, line)``, in the caller's thread (default: to
    stderr, with the rank in front).

    On Linux without a GPU several ranks are forked from one process that has imported the target's module and what of
    torch and transformers this process has imported (``FXBRAID_FORK=0``: each rank imports for itself; ``keep``: that
    process stays for the launches to come, which then start at once).

    Raises ``RankError`` when a rank raises or dies; its siblings are ended (SIGTERM, a second later
    SIGKILL), also while they wait in a collective. Raises ``RankTimeout`` after ``timeout_s`` seconds.
    """
    if nproc < 1:
        raise ValueError(f"nproc={nproc} starts no rank; give a number of ranks that is at least 1")
    name = _name_of(target)
    begun = time.monotonic()
    store, port = _start_store()
    with tempfile.TemporaryDirectory(prefix="fxbraid-launch-") as folder:
        job = Path(folder)
        _write_job(job, name, args)
        lines: queue.SimpleQueue[tuple[_Rank, str]] = queue.SimpleQueue()
        ranks: list[_Rank] = []
        try:
            environments = [rank_env(rank, nproc, port, env) for rank in range(nproc)]
            for process in start(job, name, environments, timeout_s):
                ranks.append(_with_reader(len(ranks), process, lines))
            _supervise(job, ranks, lines, on_line or _echo, timeout_s, begun)
        except subprocess.TimeoutExpired:
            raise RankTimeout(
                0, f"the ranks' imports alone took more than {timeout_s:g} s; give a larger limit"
            ) from None
        finally:
            _end(ranks)
        results = [_read(job / f"result-{rank}") for rank in range(nproc)]
    del store  # held until here: the ranks' rendezvous
    return results


def under_torchrun() -> bool:
    """True when some launcher has already made this process a rank of a group."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def init_process_group(timeout_s: float = 60.0, device_type: str | None = None) -> torch.device:
    """Join the default process group that the environment describes; return this rank's device.

    ``device_type`` None means "cuda" (NCCL, with gloo for CPU tensors) where every local rank gets a
    GPU of its own, else "cpu" (gloo). A collective that a peer never joins fails after ``timeout_s``.
    """
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if device_type is None:
        device_type = "cuda" if torch.cuda.device_count() >= local_size else "cpu"
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=timeout_s), device_id=device)
        return device
    if device_type != "cpu":
        raise ValueError(f"device_type={device_type!r} has no process group here; use 'cpu' or 'cuda'")
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return torch.device("cpu")


def destroy_process_group() -> None:
    """Leave the default process group, if this process is in one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def process_group(timeout_s: float = 60.0, device_type: str | None = None) -> Iterator[torch.device]:
    """``init_process_group`` on entry, ``destroy_process_group`` on exit; gives the rank's device.

    After an exception the group is left as it is: peers shall hear of the cause from ``launch``, not
    from a connection that closes.
    """
    yield init_process_group(timeout_s, device_type)
    destroy_process_group()


def _name_of(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        module, _, function = target.partition(":")
    else:
        module, function = target.__module__, target.__qualname__
    if not module or not function or "<" in function or module == "__main__":
        raise ValueError(
            f"the ranks cannot import {target!r}: they need 'module:function', and {module!r}:{function!r} "
            "is not one; move the function to the top level of an importable module"
        )
    return f"{module}:{function}"


def _start_store() -> tuple[Any, int]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def _write_job(job: Path, name: str, args: tuple[Any, ...]) -> None:
    # The arguments are pickled apart: a rank needs the search path before it can unpickle them.
    payload = {"name": name, "path": [p or os.getcwd() for p in sys.path], "args": pickle.dumps(args)}
    (job / "job").write_bytes(pickle.dumps(payload))


def _with_reader(rank: int, process: Process, lines: queue.SimpleQueue[tuple[_Rank, str]]) -> _Rank:
    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for raw in output:
                lines.put((entry, raw.decode(errors="replace").rstrip("\n")))

    entry = _Rank(rank, process, threading.Thread(target=read, daemon=True))
    entry.reader.start()
    return entry


def _echo(rank: int, line: str) -> None:
    print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)


def _supervise(
    job: Path,
    ranks: Sequence[_Rank],
    lines: queue.SimpleQueue[tuple[_Rank, str]],
    on_line: LineCallback,
    timeout_s: float,
    begun: float,
) -> None:
    """Return when every rank has ended well; raise as soon as one has not."""
    deadline = begun + timeout_s
    while True:
        _drain(lines, on_line, wait_s=POLL_S)
        # Asked in this order: a rank writes its result before it ends, never the other way round.
        ended = [entry for entry in ranks if _has_ended(entry.process)]
        if _failures(job, ranks, ended):
            cause = _cause(job, ranks)
            _end(ranks)
            _drain(lines, on_line)
            raise RankError(cause.rank, cause.message, cause.traceback_text or _quote(ranks, [cause.rank]))
        if len(ended) == len(ranks):
            for entry in ranks:
                entry.reader.join(GRACE_S)
            _drain(lines, on_line)
            return
        if time.monotonic() > deadline:
            late = [entry for entry in ranks if entry not in ended]
            raise _timeout(ranks, late, lines, on_line, timeout_s)


def _cause(job: Path, ranks: Sequence[_Rank]) -> _Failure:
    """The first failure that no other explains; a lone lost peer gets a moment to explain itself."""
    until = time.monotonic() + GRACE_S
    time.sleep(SETTLE_S)
    while True:
        failures = _failures(job, ranks, [entry for entry in ranks if _has_ended(entry.process)])
        first = min(failures, key=lambda failure: (failure.is_consequence, failure.when))
        if not first.is_consequence or time.monotonic() > until:
            return first
        time.sleep(POLL_S)


def _failures(job: Path, ranks: Sequence[_Rank], ended: Sequence[_Rank]) -> list[_Failure]:
    found = []
    for entry in ranks:
        if (path := job / f"error-{entry.rank}").exists():
            found.append(_Failure(rank=entry.rank, **_read(path)))
        elif entry in ended and not (job / f"result-{entry.rank}").exists():
            # Killed or ended behind Python's back: always a cause, never a consequence.
            found.append(_Failure(0, entry.rank, _ending(entry.process), ""))
    return found


def _ending(process: Process) -> str:
    code = _exit_code(process) or 0
    if code >= 0:
        return f"it ended with exit code {code} before its function returned"
    name = signal.Signals(-code).name
    hint = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
    return f"it was ended by signal {-code} ({name}){hint}"


def _timeout(
    ranks: Sequence[_Rank],
    late: Sequence[_Rank],
    lines: queue.SimpleQueue[tuple[_Rank, str]],
    on_line: LineCallback,
    timeout_s: float,
) -> RankTimeout:
    for entry in late:  # each prints where its threads stand
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.process.pid, signal.SIGUSR1)
    until = time.monotonic() + 2 * SETTLE_S
    while time.monotonic() < until:
        _drain(lines, on_line, wait_s=POLL_S)
    _end(ranks)
    _drain(lines, on_line)
    numbers = [entry.rank for entry in late]
    message = (
        f"{len(late)} of {len(ranks)} ranks ({', '.join(map(str, numbers))}) did not end within "
        f"{timeout_s:g} s and were killed; give a larger limit, or look at where each of them stood"
    )
    return RankTimeout(numbers[0], message, _quote(ranks, [entry.rank for entry in ranks]))


def _quote(ranks: Sequence[_Rank], numbers: Sequence[int]) -> str:
    parts = []
    for entry in ranks:
        if entry.rank in numbers:
            text = "\n".join(f"  {line}" for line in entry.tail) or "  (nothing)"
            parts.append(f"rank {entry.rank} last printed:\n{text}")
    return "\n".join(parts)


def _drain(
    lines: queue.SimpleQueue[tuple[_Rank, str]], on_line: LineCallback, wait_s: float | None = None
) -> None:
    """Hand over the lines that have come; wait up to ``wait_s`` for the first of them."""
    with contextlib.suppress(queue.Empty):
        for _ in range(max(1, lines.qsize())):  # bounded: a flood of lines must not stop the supervision
            entry, line = lines.get(timeout=wait_s) if wait_s else lines.get_nowait()
            entry.tail.append(line)
            on_line(entry.rank, line)


def _exit_code(process: Process) -> int | None:
    """As ``Popen.poll``, but without reaping: the id, and so its group's, stays ours until ``_end``."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _has_ended(process: Process) -> bool:
    return _exit_code(process) is not None


def _end(ranks: Sequence[_Rank]) -> None:
    """End what is left of every rank's process group. Can be called twice."""
    living = [entry.process for entry in ranks if entry.process.returncode is None]
    try:
        for process in living:
            if not _has_ended(process):
                _signal_group(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and not all(map(_has_ended, living)):
            time.sleep(POLL_S / 5)
    finally:  # also when a second Ctrl-C comes
        for process in living:
            _signal_group(process, signal.SIGKILL)  # not reaped yet, so the id is still ours
            process.wait()
        for entry in ranks:
            entry.reader.join(GRACE_S)


def _signal_group(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())
