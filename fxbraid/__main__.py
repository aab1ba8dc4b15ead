"""``python -m fxbraid``: the same as the ``fxbraid`` command."""

from fxbraid.cli import main

main()
