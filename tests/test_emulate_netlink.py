"""The real slow link: it is slow, it lets its ranks sleep, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxbraid.bench import netlink

needs_root = pytest.mark.skipif(netlink.reason() is not None, reason=str(netlink.reason()))


def traces(owner: int) -> list[str]:
    """What is left of the network of process ``owner``."""
    spaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.split()
    return [name for name in [*spaces, *os.listdir("/sys/class/net")] if name.startswith(f"fxb{owner}")]


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if netlink.reason() is None:
        pytest.fail("a user who is not root was not told")
    with pytest.raises(netlink.NetlinkError, match="a real slow link needs"):
        netlink.Network(2).__enter__()


@needs_root
def test_an_all_reduce_takes_as_long_as_its_bytes_and_its_ranks_sleep() -> None:
    with netlink.Network(2, "200mbit") as network:
        assert len(traces(os.getpid())) >= 3
        found = network.launch("fxbraid.bench.netlink:measure", (1.0, 3), timeout_s=120)[0]
        assert "real link: 200mbit per rank" in network.label
    # 1 MB at 25 MB/s is 40 ms, less the bursts and what the tail of the buffer lets through.
    assert 0.03 < found.reduce_s < 0.4
    assert found.idle > 0.5
    assert traces(os.getpid()) == []


@needs_root
def test_a_failing_rank_leaves_nothing_behind() -> None:
    from fxbraid.runtime.launch import RankError

    with pytest.raises(RankError), netlink.Network(1) as network:
        network.launch("fxbraid.bench.netlink:no_such_function", timeout_s=60, on_line=lambda *_: None)
    assert traces(os.getpid()) == []


@needs_root
def test_a_killed_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import sys, time; from fxbraid.bench import netlink\n"
        f"netlink.Network(2).__enter__(); open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        wait_until(lambda: (tmp_path / "up").exists(), 30)
        assert len(traces(owner.pid)) >= 3
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not traces(owner.pid), 15)


def wait_until(condition, seconds: float) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
