"""Start the processes of a launch, each a rank that runs ``rank_main.py`` in the job's folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import forked

Process = subprocess.Popen[bytes] | forked.Adopted


def start(
    job: Path, name: str, environments: Sequence[dict[str, str]], timeout_s: float
) -> Iterator[Process]:
    """A rank for each environment, as it is started. Several are forked from one process that has imported what they
    need, where that can be done. ``name``: "module:function". Raises ``subprocess.TimeoutExpired``."""
    adopted = None
    if len(environments) > 1 and forked.possible():
        adopted = forked.start(job, name.partition(":")[0], environments, timeout_s)
    if adopted is not None:
        yield from adopted
        return
    for rank, env in enumerate(environments):
        yield start_process(job, rank, env)


def start_process(job: Path, rank: int, env: dict[str, str]) -> Process:
    """One rank, in a process of its own."""
    # -P: the script's folder must not come first in the rank's search path.
    script = str(Path(__file__).with_name("rank_main.py"))
    command = [sys.executable, "-P", "-u", script, str(job), str(rank), str(os.getpid())]
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # one process group per rank: its own children end with it
    )


def rank_env(rank: int, nproc: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a rank whose rendezvous store listens on ``port``; ``env`` goes over the caller's."""
    result = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if interface := _loopback():
        result["GLOO_SOCKET_IFNAME"] = interface
    result.update(os.environ)
    result.update(env or {})
    result.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # Tells torch's env:// rendezvous that the store is served elsewhere: rank 0 is a client too.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return result


def _loopback() -> str | None:
    """The loopback interface: a host name that does not resolve must not stop local ranks."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
