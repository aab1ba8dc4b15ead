"""The script behind ``launch`` that imports once what all ranks need, forks them, and leaves them to the launcher.

Importing torch and transformers takes seconds of processor time; four ranks that do it each on two cores take four
times as long as one. The ranks are forked before anything was computed, from a process with a single thread, and this
process ends at once, so that the kernel makes them children of the launcher (a "child subreaper"), which can then wait
for them and end them as it does with ranks that it started itself.

In the job folder it finds ``fork``: file descriptors for the ranks' output and of a gate, their environments, modules
to import. A rank goes on when it reads a byte from the gate, and ends when that is closed. The script prints one line
of the ranks' process ids, or "no" and the reason where it has more than one thread.

With ``FXBRAID_FORK=keep`` a process that has imported the large modules stays (``serve``), and forks one that goes on
as this script for each launch. It ends with the launcher, or when its socket is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rank_main import _die_with, _run_rank

ADOPTED_S = 10.0  # how long a rank waits to become the launcher's child

sys.path.pop(0)


def main(job: Path, launcher: int) -> None:
    _die_with(launcher)
    _fork_ranks(job, launcher, pickle.loads((job / "fork").read_bytes()))


def serve(job: Path, launcher: int, descriptor: int) -> None:
    """Import what ``job`` wants of large modules; then, for each job folder that comes in with its descriptors (where
    to print, the gate, the ranks' output), fork a process that does what :func:`main` does, and say when it is over."""
    _die_with(launcher)
    first = pickle.loads((job / "fork").read_bytes())
    sys.path[:] = first["path"]
    _import(first["modules"][:-1])
    if len(os.listdir("/proc/self/task")) > 1:  # a fork would have one of them, and the others' locks
        os._exit(1)
    with socket.socket(fileno=descriptor) as asked:
        while True:
            folder, descriptors, _, _ = socket.recv_fds(asked, 4096, 256)
            if not folder:
                os._exit(0)
            child = os.fork()
            if child == 0:
                asked.close()
                said, gate, *outputs = descriptors
                os.dup2(said, 1)
                os.close(said)
                job = Path(os.fsdecode(folder))
                spec = {**pickle.loads((job / "fork").read_bytes()), "gate": gate, "outputs": outputs}
                os.environ.clear()
                os.environ.update(
                    {k: v for k, v in spec["env"][0].items() if k not in ("RANK", "LOCAL_RANK")}
                )
                _fork_ranks(job, launcher, spec)
                return
            for one in descriptors:
                os.close(one)
            os.waitpid(child, 0)
            asked.send(b".")


def _import(modules: list[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # a rank that needs it imports it again, and says what is wrong
            importlib.import_module(module)


def _fork_ranks(job: Path, launcher: int, spec: dict[str, Any]) -> None:
    sys.path[:] = spec["path"]
    _import(spec["modules"])
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        print(f"no: {len(threads)} threads", flush=True)
        os._exit(0)
    pids = []
    for rank, output in enumerate(spec["outputs"]):
        pid = os.fork()
        if pid == 0:
            _become(job, rank, output, spec, launcher)
            return
        pids.append(pid)
    print(*pids, flush=True)
    sys.stdout.flush()
    os._exit(0)  # no destructor of what was imported for others


def _become(job: Path, rank: int, output: int, spec: dict[str, Any], launcher: int) -> None:
    """Be a rank. This process then ends as any that runs ``rank_main`` does."""
    os.setsid()  # one process group per rank: its own children end with it
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in spec["outputs"]:
        os.close(descriptor)
    if not os.read(spec["gate"], 1):  # the launcher does not want us any more
        os._exit(1)
    os.close(spec["gate"])
    os.environ.clear()
    os.environ.update(spec["env"][rank])
    sys.argv[1:] = [str(job), str(rank), str(launcher)]
    until = time.monotonic() + ADOPTED_S
    while os.getppid() != launcher and time.monotonic() < until:
        time.sleep(0.001)
    _run_rank(job, rank, launcher)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
