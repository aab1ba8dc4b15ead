"""Start ranks by forking them from one process that has imported what they need (``fork_main.py``). Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: worth importing once where the launcher has them too: it is then about to launch ranks that use them
HEAVY = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torch.export",
    "transformers.modeling_utils",
    "transformers.generation",
    "fxbraid.model",
)

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37

_SCRIPT = [sys.executable, "-P", "-u", str(Path(__file__).with_name("fork_main.py"))]

#: variables that differ from launch to launch, and that nothing reads while it is imported
_EACH = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST")

#: one launch at a time may have this process adopt orphans: that is a property of the whole process
_ADOPTS = threading.Lock()


class Adopted:
    """A process that this one did not start but is the parent of: as much of ``subprocess.Popen`` as is needed."""

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.stdout = open(output, "rb")  # noqa: SIM115 - closed by who reads it
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def possible() -> bool:
    """Can ranks be forked here? A GPU's driver does not survive a fork, should anything have touched it."""
    if sys.platform != "linux" or os.environ.get("FXBRAID_FORK") == "0":
        return False
    import torch

    return not torch.cuda.is_available()


def start(
    job: Path, module: str, environments: Sequence[Mapping[str, str]], timeout_s: float
) -> list[Adopted] | None:
    """A rank for each environment, running ``rank_main`` in ``job``; None where they can't be forked, and nothing was
    started then. ``module``: the target's, which every rank imports. Raises ``subprocess.TimeoutExpired``."""
    pipes = [os.pipe() for _ in environments]
    gate = os.pipe()
    adopted: list[Adopted] | None = None
    try:
        pids = _fork(job, module, environments, [write for _, write in pipes], gate[0], timeout_s)
        if pids is None:
            return None
        adopted = [Adopted(pid, read) for pid, (read, _) in zip(pids, pipes, strict=True)]
        os.write(gate[1], b"." * len(pids))
        return adopted
    finally:
        for descriptor in (*gate, *(write for _, write in pipes)):
            os.close(descriptor)
        if adopted is None:
            for read, _ in pipes:
                os.close(read)


def _fork(
    job: Path,
    module: str,
    environments: Sequence[Mapping[str, str]],
    outputs: list[int],
    gate: int,
    timeout_s: float,
) -> list[int] | None:
    spec = {
        "path": [p or os.getcwd() for p in sys.path],
        "modules": [*(name for name in HEAVY if name in sys.modules), module],
        "outputs": outputs,
        "gate": gate,
        "env": [dict(env) for env in environments],
    }
    (job / "fork").write_bytes(pickle.dumps(spec))
    env = {k: v for k, v in environments[0].items() if k not in ("RANK", "LOCAL_RANK")}
    with _adopting():
        if os.environ.get("FXBRAID_FORK") == "keep":
            words = _Kept.of(job, spec, env).fork(job, [gate, *outputs], timeout_s).split()
        else:
            done = subprocess.run(
                [*_SCRIPT, str(job), str(os.getpid())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[*outputs, gate],
                start_new_session=True,
                check=False,
                text=True,
                timeout=timeout_s,
            )
            words = done.stdout.split() if done.returncode == 0 else []
    good = len(words) == len(outputs) and all(word.isdigit() for word in words)
    return [int(word) for word in words] if good else None


class _Kept:
    """The process that ``FXBRAID_FORK=keep`` leaves for the next launch: one, for one environment."""

    _now: _Kept | None = None

    def __init__(self, key: Any, job: Path, env: Mapping[str, str]) -> None:
        self._key = key
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [*_SCRIPT, str(job), str(os.getpid()), str(theirs.fileno())],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    @classmethod
    def of(cls, job: Path, spec: Mapping[str, Any], env: Mapping[str, str]) -> _Kept:
        """The one there is, where it has imported what ``spec`` wants in an environment like ``env``; or a new one."""
        key = (
            spec["modules"][:-1],
            spec["path"],
            {name: value for name, value in env.items() if name not in _EACH},
        )
        kept = cls._now
        if kept is None or kept._key != key or kept._owner != os.getpid() or kept._process.poll() is not None:
            if kept is not None and kept._owner == os.getpid():
                kept.end()
            cls._now = kept = cls(key, job, env)
        return kept

    def fork(self, job: Path, descriptors: Sequence[int], timeout_s: float) -> str:
        """What the script prints for ``job``, once its process has ended. Raises ``subprocess.TimeoutExpired``."""
        read, write = os.pipe()
        with open(read, encoding="ascii") as said:
            try:
                socket.send_fds(self._socket, [os.fsencode(job)], [write, *descriptors])
            except OSError:  # it has died
                return ""
            finally:
                os.close(write)
            if not select.select([self._socket], [], [], timeout_s)[0]:
                self.end()
                raise subprocess.TimeoutExpired(_SCRIPT, timeout_s)
            return said.readline() if self._socket.recv(1) else ""

    def end(self) -> None:
        """With what it is forking."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        type(self)._now = None


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """While it lasts, orphans among this process's descendants become its children."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    with _ADOPTS:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
