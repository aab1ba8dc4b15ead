"""Start ranks by forking them from one process that has imported what they need (``fork_main.py``). Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
    script = str(Path(__file__).with_name("fork_main.py"))
    with _adopting():
        done = subprocess.run(
            [sys.executable, "-P", "-u", script, str(job), str(os.getpid())],
            env={k: v for k, v in environments[0].items() if k not in ("RANK", "LOCAL_RANK")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[*outputs, gate],
            start_new_session=True,
            check=False,
            text=True,
            timeout=timeout_s,
        )
    words = done.stdout.split()
    good = done.returncode == 0 and len(words) == len(outputs) and all(word.isdigit() for word in words)
    return [int(word) for word in words] if good else None


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
