"""The script behind ``launch`` that imports once what all ranks need, forks them, and leaves them to the launcher.

Importing torch and transformers takes seconds of processor time; four ranks that do it each on two cores take four
times as long as one. The ranks are forked before anything was computed, from a process with a single thread, and this
process ends at once, so that the kernel makes them children of the launcher (a "child subreaper"), which can then wait
for them and end them as it does with ranks that it started itself.

In the job folder it finds ``fork``: file descriptors for the ranks' output and of a gate, their environments, modules
to import. A rank goes on when it reads a byte from the gate, and ends when that is closed. The script prints one line
of the ranks' process ids, or "no" and the reason where it has more than one thread.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
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
    spec = pickle.loads((job / "fork").read_bytes())
    sys.path[:] = spec["path"]
    for module in spec["modules"]:
        with contextlib.suppress(Exception):  # a rank that needs it imports it again, and says what is wrong
            importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        print(f"no: {len(threads)} threads", flush=True)
        return
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
    main(Path(sys.argv[1]), int(sys.argv[2]))
