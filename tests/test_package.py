"""The package as it is installed: wheel, imports, command."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path, timeout: float = 240) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment with the wheel in it; dependencies come from this one."""
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", place, ROOT, cwd=place)
    (wheel,) = place.glob("fxbraid-*.whl")
    venv.create(place / "venv", with_pip=True)
    python = place / "venv" / "bin" / "python"
    (site,) = (place / "venv").glob("lib/python*/site-packages")
    run(python, "-m", "pip", "install", "--no-deps", "-q", wheel, cwd=place)
    import torch

    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parent.parent))
    return python


def test_a_wheel_holds_every_package_under_its_import_name(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, fxbraid\n"
        "for name in ('passes.pipeline', 'runtime.engine', 'bench.cli', 'schedule', 'cli', 'model'):\n"
        "    module = importlib.import_module('fxbraid.' + name)\n"
        "    assert 'venv' in module.__file__, module.__file__\n"
        "print(fxbraid.__file__)"
    )
    assert str(installed.parent.parent) in run(installed, "-c", code, cwd=tmp_path)


def test_the_command_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    said = run(installed.parent / "fxbraid", "--help", cwd=tmp_path)
    assert "bench" in said and "doctor" in said
    assert "torch" in run(installed.parent / "fxbraid", "doctor", cwd=tmp_path)


def test_the_wheel_registers_the_backend(installed: Path, tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "print('fxbraid' in torch.compiler.list_backends(), lookup_backend('fxbraid').__module__)"
    )
    assert run(installed, "-c", code, cwd=tmp_path).split() == ["True", "fxbraid.backend"]


def test_the_schedule_package_and_the_bare_import_need_no_torch() -> None:
    code = (
        "import sys, fxbraid, fxbraid.schedule as s\n"
        "s.check(s.build('stp', p=2, m=8))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    run(sys.executable, "-c", code, cwd=ROOT)


def test_unknown_attributes_are_named() -> None:
    import fxbraid

    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        fxbraid.nosuch  # noqa: B018
    assert "braid" in dir(fxbraid)
