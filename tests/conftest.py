"""Every test runs with the verifier between passes and poisoned receive buffers, and never looks for a hub."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Profiles that tests measure are nobody else's, and tests find none of the user's.
os.environ["FXBRAID_CACHE_DIR"] = tempfile.mkdtemp(prefix="fxbraid-test-")
atexit.register(shutil.rmtree, os.environ["FXBRAID_CACHE_DIR"], ignore_errors=True)
os.environ["FXBRAID_VERIFY"] = "1"
os.environ["FXBRAID_POISON"] = "1"  # receive buffers are NaN from the moment that nothing should read them
os.environ.setdefault("FXBRAID_FORK", "keep")  # a worker's launches share what ranks import
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config, items):  # type: ignore[no-untyped-def]
    """Slow tests run when they are asked for (-m slow, or -m "")."""
    if config.getoption("-m"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


@pytest.fixture(scope="module")
def shared_traces() -> Iterator[None]:
    """For the tests of a file that use it: equal models are traced once in this process (``parity.share_traces``)."""
    import fxbraid.tracing

    from .parity import share_traces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fxbraid.tracing, "lower_model", fxbraid.tracing.lower_model)  # put back afterwards
        share_traces()
        yield
