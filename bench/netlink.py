"""A real slow link: each rank in a network namespace of its own, on a bridge, behind a token bucket.

Nothing is modelled here. The kernel holds packets back (tbf), gloo's threads sleep meanwhile, and the processor is
free to compute. It is the third leg beside the emulated cluster's clocks: on plain loopback gloo needs the very cores
that compute, and little can be hidden. Linux, root, and the tools ``ip`` and ``tc``::

    with netlink.Network(ranks=4) as network:
        results = network.launch(rank_main, args, timeout_s=300)      # as fxbraid.runtime.launch.launch

Everything is removed when the body ends, also when this process is killed: a helper that reads from a pipe of ours
cleans up when the pipe closes, however that happens.

    python -m fxbraid.bench.netlink        # measures an all-reduce, matmuls, and both at once
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fxbraid.runtime import launch as launcher

CLONE_NEWNET = 0x40000000
INSIDE = "eth0"  # the rank's interface, in its namespace
SYSCTLS = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")
#: A smaller burst splits the kernel's 64 kB segments and burns processor time; a larger one gives messages away free.
BURST, LIMIT = "72kb", "16mb"
CLEANUP_S = 20.0


class NetlinkError(RuntimeError):
    """The link cannot be built here; says why."""


def reason() -> str | None:
    """Why no real slow link can be built here, or None."""
    if sys.platform != "linux":
        return f"a real slow link needs Linux's network namespaces; this is {sys.platform}"
    if missing := [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]:
        return f"a real slow link needs the tools {', '.join(missing)}; install iproute2 and procps"
    if os.geteuid() != 0:
        return "a real slow link needs root, to make network namespaces; run as root or in a privileged container"
    return None


@dataclass(frozen=True, slots=True)
class Names:
    """What one network is made of; ``owner`` is the process that made it."""

    owner: int
    ranks: int

    @property
    def bridge(self) -> str:
        return f"fxb{self.owner}"

    def namespace(self, rank: int) -> str:
        return f"fxb{self.owner}-{rank}"

    def outside(self, rank: int) -> str:
        return f"fxb{self.owner}v{rank}"

    def address(self, host: int) -> str:
        return f"10.213.{self.owner % 256}.{host}"

    @property
    def master(self) -> str:
        """The bridge's own address: where this process serves the ranks' store."""
        return self.address(254)


class Network:
    """``ranks`` namespaces, each with an interface that sends at most ``rate`` (as tc writes it).

    The label says what it is, for outputs. Raises ``NetlinkError`` where it cannot be built.
    """

    def __init__(self, ranks: int, rate: str = "200mbit") -> None:
        if not 1 <= ranks <= 200:
            raise NetlinkError(f"ranks={ranks} do not fit into one network; give 1 to 200")
        self.names = Names(os.getpid(), ranks)
        self.rate = rate
        self.label = f"real link: {rate} per rank (tbf {BURST} in network namespaces), nothing modelled"
        self._helper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        if why := reason():
            raise NetlinkError(why)
        remove_leftovers()
        self._helper = subprocess.Popen(
            ["sh", "-c", "cat >/dev/null; " + cleanup(self.names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach it
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything. Can be called twice."""
        helper, self._helper = self._helper, None
        if helper is None or helper.stdin is None:
            return
        helper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(CLEANUP_S)

    def _build(self) -> None:
        names = self.names
        _run("ip", "link", "add", names.bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{names.master}/24", "dev", names.bridge)
        _run("ip", "link", "set", names.bridge, "up")
        for rank in range(names.ranks):
            space, outside = names.namespace(rank), names.outside(rank)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INSIDE, "netns", space)
            _run("ip", "link", "set", outside, "master", names.bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{names.address(rank + 1)}/24", "dev", INSIDE)
            _run("ip", "-n", space, "link", "set", INSIDE, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            shape = ("rate", self.rate, "burst", BURST, "limit", LIMIT)
            _run("tc", "-n", space, "qdisc", "add", "dev", INSIDE, "root", "tbf", *shape)
            _run("ip", "netns", "exec", space, "sysctl", "-qw", *SYSCTLS)

    def launch(
        self,
        target: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        timeout_s: float,
        on_line: launcher.LineCallback | None = None,
    ) -> list[Any]:
        """As ``fxbraid.runtime.launch.launch``, with one rank in each namespace."""
        name = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        return launcher.launch(
            f"{NAME}:inside",
            (self.names.owner, self.names.ranks, name, args),
            nproc=self.names.ranks,
            timeout_s=timeout_s,
            env={"GLOO_SOCKET_IFNAME": INSIDE},
            on_line=on_line,
        )


def inside(owner: int, ranks: int, target: str, args: tuple[Any, ...]) -> Any:
    """In a rank: enter its namespace, then run ``target``."""
    names = Names(owner, ranks)
    # Threads that exist already stay outside; those that gloo starts are children of this one.
    with open(f"/var/run/netns/{names.namespace(int(os.environ['RANK']))}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET) != 0:
            raise NetlinkError(f"cannot enter {space.name}: {os.strerror(ctypes.get_errno())}")
    os.environ["MASTER_ADDR"] = names.master
    module, _, function = target.partition(":")
    return getattr(__import__(module, fromlist=["_"]), function)(*args)


def cleanup(names: Names) -> str:
    """Shell commands that remove all of ``names``, whatever of it is there."""
    ranks = range(names.ranks)
    lines = [f"ip link del {names.outside(rank)}" for rank in ranks]
    lines += [f"ip netns del {names.namespace(rank)}" for rank in ranks]
    return "; ".join([*lines, f"ip link del {names.bridge}", "true"])


def remove_leftovers() -> None:
    """Remove the networks of processes that are gone (where the helper was killed as well)."""
    owners: dict[int, int] = {}
    for line in _run("ip", "netns", "list").splitlines():
        if found := re.match(r"fxb(\d+)-(\d+)\b", line):
            owners[int(found[1])] = max(owners.get(int(found[1]), 0), int(found[2]) + 1)
    for line in _run("ip", "-o", "link", "show", "type", "bridge").splitlines():
        if found := re.match(r"\d+: fxb(\d+):", line):
            owners.setdefault(int(found[1]), 0)
    for owner, ranks in owners.items():
        if not os.path.exists(f"/proc/{owner}"):
            subprocess.run(["sh", "-c", cleanup(Names(owner, ranks))], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetlinkError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# -- the measurement


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians, in seconds, of the slowest rank: an all-reduce, matmuls, and both at once; ``idle``: share of the
    all-reduce in which its rank's processor time stood still."""

    nbytes: int
    reduce_s: float
    compute_s: float
    both_s: float
    idle: float

    @property
    def hidden(self) -> float:
        """Share of the shorter one that cost nothing."""
        return (self.reduce_s + self.compute_s - self.both_s) / min(self.reduce_s, self.compute_s)


def measure(megabytes: float, rounds: int) -> Overlap:
    """In each rank: time an all-reduce of ``megabytes`` (1e6 bytes), as long a chain of matmuls, and both."""
    import torch
    import torch.distributed as dist

    from fxbraid.runtime.launch import process_group

    torch.set_num_threads(1)
    with process_group(timeout_s=120, device_type="cpu"):
        x = torch.ones(round(megabytes * 1e6 / 4))
        a = torch.randn(256, 256)

        def reduce() -> None:
            dist.all_reduce(x)

        def compute(count: int) -> None:
            for _ in range(count):
                a @ a

        def both(count: int) -> None:
            work = dist.all_reduce(x, async_op=True)
            compute(count)
            assert work is not None
            work.wait()

        def slowest(values: Iterable[float]) -> float:
            worst = torch.tensor(statistics.median(values), dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            return float(worst)

        def clock(body: Callable[[], None]) -> tuple[float, float]:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            body()
            return time.perf_counter() - start, time.process_time() - used

        alone = slowest(clock(reduce)[0] for _ in range(3))
        count = max(round(alone / slowest(clock(lambda: compute(20))[0] / 20 for _ in range(5))), 1)
        found: list[list[tuple[float, float]]] = [[], [], []]
        for _ in range(rounds):  # in turn, so that a slow moment of the machine hits all alike
            for i, body in enumerate((reduce, lambda: compute(count), lambda: both(count))):
                found[i].append(clock(body))
        reduce_s, compute_s, both_s = (slowest(took for took, _ in part) for part in found)
        idle = 1 - slowest(used / took for took, used in found[0])
        return Overlap(x.numel() * 4, reduce_s, compute_s, both_s, idle)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    ranks: Annotated[int, typer.Option(help="Ranks, each in a namespace of its own.")] = 2,
    rate: Annotated[str, typer.Option(help="What each may send, as tc writes it.")] = "200mbit",
    megabytes: Annotated[float, typer.Option(help="Size of the all-reduce.")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Repetitions; medians are shown.")] = 7,
    plain: Annotated[bool, typer.Option(help="Measure on plain loopback too.")] = True,
) -> None:
    """Time an all-reduce over a real slow link, matmuls, and both at once. Needs root."""
    args = (megabytes, rounds)
    try:
        with Network(ranks, rate) as network:
            _show(network.label, network.launch(f"{NAME}:measure", args, timeout_s=300)[0])
    except NetlinkError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    if plain:
        _show("plain loopback", launcher.launch(f"{NAME}:measure", args, nproc=ranks, timeout_s=300)[0])


NAME = __spec__.name if __spec__ else __name__


def _show(label: str, found: Overlap) -> None:
    print(
        f"{label}\n  all-reduce of {found.nbytes / 1e6:g} MB {found.reduce_s * 1e3:.1f} ms (its rank idle for "
        f"{found.idle:.0%} of it), matmuls {found.compute_s * 1e3:.1f} ms, both {found.both_s * 1e3:.1f} ms: "
        f"{found.hidden:.2f} hidden"
    )


if __name__ == "__main__":
    app()
