"""The command line: every command is there, and only ``bench`` and ``doctor`` load torch
(``checkpoint convert`` too, when it runs)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fxbraid.cli import COMMANDS

ROOT = Path(__file__).parent.parent


def run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fxbraid", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_help_names_every_command() -> None:
    said = run("--help")
    assert all(name in said for name in [*COMMANDS, "doctor"])


@pytest.mark.parametrize("name", ["checkpoint", "draw", "plan", "simulate"])
def test_planning_loads_no_torch(name: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['fxbraid', {name!r}, '--help']\n"
        "from fxbraid.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120, capture_output=True)


def test_doctor_finds_this_machine_fit() -> None:
    said = run("doctor")
    assert "torch" in said and "private torch interfaces: all there" in said


def test_a_picture_in_the_terminal_and_in_files(tmp_path: Path) -> None:
    assert "rank 1" in run("draw", "stp", "--pp", "2", "-m", "4")
    run("draw", "stp", "--pp", "2", "-m", "4", "--svg", str(tmp_path / "one.svg"))
    assert (tmp_path / "one.svg").read_text().startswith("<svg")


def test_an_unknown_command() -> None:
    assert "No such command" in run("nosuch", code=2)
