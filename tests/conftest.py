"""Every test runs with the verifier between passes, and never looks for a hub."""

from __future__ import annotations

import os

os.environ["FXBRAID_VERIFY"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config, items):  # type: ignore[no-untyped-def]
    """Slow tests run when they are asked for (-m slow, or -m "")."""
    import pytest

    if config.getoption("-m"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
