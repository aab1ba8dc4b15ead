"""The script that each rank of ``launch`` runs: tie this life to the parent's, do the job, say how it went.

Its module level needs nothing but the standard library, and it is run by its path, not as a module:
a rank must be bound to its parent before it spends seconds on importing torch.

In the job folder it finds ``job``; it leaves ``result-RANK`` or ``error-RANK`` there, each written whole or
not at all.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def _die_with(parent: int) -> None:
    """Have this process killed when its parent dies, however the parent dies."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(0.5)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _write(path: Path, value: Any) -> None:
    """Write whole or not at all: the parent may look at any moment."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.replace(path)


def _leave_process_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _run_rank(job: Path, rank: int, parent: int) -> None:
    _die_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        spec = pickle.loads((job / "job").read_bytes())
        sys.path[:] = spec["path"]
        module, function = spec["name"].split(":")
        target: Any = __import__(module, fromlist=["_"])
        for part in function.split("."):
            target = getattr(target, part)
        result = target(*pickle.loads(spec["args"]))
        _leave_process_group()
        _write(job / f"result-{rank}", result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank as well
        when = time.monotonic_ns()  # one clock for all processes of a machine
        message = f"{type(error).__name__}: {error}"
        _write(
            job / f"error-{rank}",
            {"when": when, "message": message, "traceback_text": traceback.format_exc().rstrip()},
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no destructor of a broken process group may hold the rank back


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
