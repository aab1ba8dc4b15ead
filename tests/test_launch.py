"""launch: results in order, one cause per failure, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxbraid.runtime import forked, start
from fxbraid.runtime import launch as launch_module
from fxbraid.runtime.launch import RankError, RankTimeout, launch, process_group

# --- what the ranks run ------------------------------------------------------------------------


def add_ranks(extra: int) -> tuple[int, int, str]:
    import torch
    import torch.distributed as dist

    with process_group(timeout_s=30):
        total = torch.tensor(dist.get_rank() + extra)
        dist.all_reduce(total)
        return dist.get_rank(), int(total), os.environ["OMP_NUM_THREADS"]


def raise_beside_a_collective(folder: str, bad: int) -> None:
    import torch
    import torch.distributed as dist

    note_pid(folder)
    with process_group(timeout_s=300):
        dist.barrier()
        if dist.get_rank() == bad:
            raise ValueError("the embedding is on fire")
        dist.all_reduce(torch.ones(1))


def raise_after_tidying_up(bad: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        dist.barrier()
        if dist.get_rank() == bad:
            raise ValueError("the embedding is on fire")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def hang_in_a_collective(folder: str) -> None:
    import torch
    import torch.distributed as dist

    note_pid(folder)
    with process_group(timeout_s=300):
        print(f"hello from {dist.get_rank()}")
        if dist.get_rank() == 0:
            time.sleep(300)
        dist.all_reduce(torch.ones(1))


def sleep_with_a_child(folder: str, ignore: bool) -> None:
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(folder, f"pid-child-{child.pid}").touch()
    note_pid(folder)
    time.sleep(300)


def die(folder: str, number: int) -> None:
    if os.environ["RANK"] == "1":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        Path(folder, f"pid-child-{child.pid}").touch()
        os.kill(os.getpid(), number)
    time.sleep(300)


def leave_early() -> None:
    if os.environ["RANK"] == "1":
        os._exit(0)
    time.sleep(300)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def note_pid(folder: str) -> None:
    Path(folder, f"pid-{os.environ['RANK']}-{os.getpid()}").touch()


# --- tests -------------------------------------------------------------------------------------


def pids(folder: Path) -> list[int]:
    return [int(path.name.rsplit("-", 1)[1]) for path in folder.glob("pid-*")]


def assert_gone(folder: Path, count: int, within_s: float = 3.0) -> None:
    found = pids(folder)
    assert len(found) == count
    until = time.monotonic() + within_s
    while time.monotonic() < until and any(map(lives, found)):
        time.sleep(0.05)
    assert not [pid for pid in found if lives(pid)]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def nothing_to_import_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process have imported is no matter of these."""
    monkeypatch.setattr(forked, "HEAVY", ())


@pytest.fixture(params=["0", "1", "keep"], ids=["started", "forked", "kept"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FXBRAID_FORK", request.param)

    def refuse(*_: object) -> None:
        raise AssertionError("ranks were started, not forked" if forks else "ranks were forked, not started")

    forks = request.param != "0" and forked.possible()
    if forks:
        monkeypatch.setattr(start, "start_process", refuse)
    else:
        monkeypatch.setattr(forked, "start", refuse)
    return str(request.param)


def who() -> tuple[int, int, int, str]:
    return os.getpid(), os.getppid(), os.getpgid(0), os.environ["RANK"]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_ranks_are_this_processs_own_children_in_groups_of_their_own(way: str) -> None:
    results = launch(who, (), nproc=3, timeout_s=60)
    assert len({pid for pid, *_ in results}) == 3
    for rank, (pid, parent, group, name) in enumerate(results):
        assert (parent, group, name) == (os.getpid(), pid, str(rank))
        with pytest.raises(ChildProcessError):  # waited for: no zombie is left
            os.waitpid(pid, os.WNOHANG)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_what_is_kept_serves_later_launches_and_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXBRAID_FORK", "keep")
    if not forked.possible():
        pytest.skip("ranks are not forked here")
    monkeypatch.setattr(start, "start_process", lambda *_: pytest.fail("a rank was started, not forked"))

    def kept_after_a_launch() -> int:
        assert len(set(launch("os:getpid", (), nproc=2, timeout_s=60))) == 2
        assert forked._Kept._now is not None
        return forked._Kept._now._process.pid

    first, again = kept_after_a_launch(), kept_after_a_launch()
    assert first == again
    os.kill(first, signal.SIGKILL)
    forked._Kept._now._process.wait()  # type: ignore[union-attr]
    second = kept_after_a_launch()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # something that an import may have read
    third = kept_after_a_launch()
    assert len({first, second, third}) == 3
    assert not lives(second)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_imports_that_take_too_long_are_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="imports alone took more than 1 s"):
        launch("slow_to_import:f", (), nproc=2, timeout_s=1)
    assert time.monotonic() - start < 10


def test_a_module_that_fails_to_import_is_named(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_to_import.py").write_text("raise RuntimeError('no such luck')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RankError, match="no such luck"):
        launch("bad_to_import:f", (), nproc=2, timeout_s=60, on_line=lambda *_: None)


def test_results_come_back_in_rank_order(way: str) -> None:
    results = launch(add_ranks, (10,), nproc=3, timeout_s=90, env={"OMP_NUM_THREADS": "2"})
    assert results == [(rank, 33, "2") for rank in range(3)]


def test_target_by_name_and_default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(f"{__name__}:environment", ("OMP_NUM_THREADS",), nproc=2, timeout_s=60) == ["1", "1"]


def test_a_raising_rank_stops_the_others(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed: ValueError: the embedding is on fire") as caught:
        launch(raise_beside_a_collective, (str(tmp_path), 1), nproc=3, timeout_s=120)
    assert time.monotonic() - start < 60  # not the process group's 300 s; most of it is importing torch
    assert caught.value.rank == 1
    assert "raise_beside_a_collective" in caught.value.traceback_text
    assert not isinstance(caught.value, RankTimeout)
    assert_gone(tmp_path, 3)


def test_the_cause_is_named_even_if_it_breaks_its_peers_first() -> None:
    with pytest.raises(RankError, match="rank 2 failed: ValueError: the embedding is on fire"):
        launch(raise_after_tidying_up, (2,), nproc=3, timeout_s=120, on_line=lambda *_: None)


def test_a_hanging_rank_hits_the_timeout(tmp_path: Path) -> None:
    lines: list[tuple[int, str]] = []
    with pytest.raises(RankTimeout, match=r"2 of 2 ranks \(0, 1\) did not end within 15 s") as caught:
        launch(
            hang_in_a_collective,
            (str(tmp_path),),
            nproc=2,
            timeout_s=15,
            on_line=lambda rank, line: lines.append((rank, line)),
        )
    assert {(0, "hello from 0"), (1, "hello from 1")} <= set(lines)
    assert "hello from 0" in str(caught.value)
    assert "hang_in_a_collective" in str(caught.value)  # where its threads stood
    assert_gone(tmp_path, 2)


def test_a_rank_that_ignores_sigterm_and_its_children_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    with pytest.raises(RankTimeout):
        launch(sleep_with_a_child, (str(tmp_path), True), nproc=2, timeout_s=2, on_line=lambda *_: None)
    assert time.monotonic() - start < 8
    assert_gone(tmp_path, 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_and_its_children_end(
    number: signal.Signals, way: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=f"rank 1 failed: it was ended by signal .*{number.name}"):
        launch(die, (str(tmp_path), int(number)), nproc=2, timeout_s=60, on_line=lambda *_: None)
    assert_gone(tmp_path, 1)


def test_a_rank_that_leaves_without_a_result_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 failed: it ended with exit code 0 before its function"):
        launch(leave_early, (), nproc=2, timeout_s=60)


def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    def interrupt(rank: int, line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(hang_in_a_collective, (str(tmp_path),), nproc=2, timeout_s=60, on_line=interrupt)
    assert_gone(tmp_path, len(pids(tmp_path)))


@pytest.mark.slow
def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    script = (
        "from fxbraid.runtime.launch import launch\n"
        f"launch('{__name__}:sleep_alone', ({str(tmp_path)!r},), nproc=2, timeout_s=60)\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    (tmp_path / "tmp").mkdir()  # a killed parent cannot remove its job folder
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp")}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env)
    until = time.monotonic() + 60
    while len(pids(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert_gone(tmp_path, 2)


def sleep_alone(folder: str) -> None:
    note_pid(folder)
    time.sleep(300)


@pytest.mark.parametrize("bad", ["no_function", "module:", lambda: None])
def test_a_target_that_ranks_cannot_import_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="the ranks cannot import"):
        launch(bad, (), nproc=1, timeout_s=1)  # type: ignore[arg-type]


def test_nproc_is_checked() -> None:
    with pytest.raises(ValueError, match="nproc=0 starts no rank"):
        launch(environment, ("X",), nproc=0, timeout_s=1)


def test_torchrun_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert not launch_module.under_torchrun()
    for name in names:
        monkeypatch.setenv(name, "1")
    assert launch_module.under_torchrun()
