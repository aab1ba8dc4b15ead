"""``python -m fxbraid.bench``, also under torchrun."""

import typer

from fxbraid.bench.cli import bench

if __name__ == "__main__":
    typer.run(bench)
