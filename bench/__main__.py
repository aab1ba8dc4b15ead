"""``python -m fxbraid.bench``, also under torchrun."""

from fxbraid.bench.cli import app

if __name__ == "__main__":
    app()
