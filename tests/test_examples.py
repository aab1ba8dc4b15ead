"""The scripts of docs/examples, as a user starts them: under torchrun, on tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def start(script: str, ranks: int, *options: str, folder: Path) -> str:
    """Its output; raises where it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{script}.py"), "--compile", "no", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def test_a_plain_loop_stops_and_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    start("plain", 2, "--pp", "2", "--steps", "10", folder=tmp_path)
    said = start("plain", 1, "--steps", "12", folder=tmp_path)
    records = [json.loads(row) for row in (tmp_path / "runs/plain.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, 13))
    assert records[-1]["loss"] < 0.8 * records[0]["loss"] and "step 12" in said
    assert (tmp_path / "runs/plain/final/config.json").exists()


@pytest.mark.slow  # what they call has tests of its own; every script starts with torchrun as the first one does
@pytest.mark.parametrize(
    ("script", "ranks", "options", "words"),
    [
        pytest.param("trainer", 2, ("--tp", "2", "--steps", "10"), "eval_loss", id="trainer"),
        pytest.param("titan", 2, ("--dp", "2", "--steps", "3"), "step 3", id="titan"),
        pytest.param("plain", 4, ("--tp", "2", "--pp", "2"), "step 20", id="plain 2x2"),
        pytest.param("titan", 4, ("--dp", "2", "--pp", "2"), "step 10", id="titan 2x2"),
    ],
)
def test_it_runs(script: str, ranks: int, options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert words in start(script, ranks, *options, folder=tmp_path)
