"""The states of random number generators: torch's (CPU and this rank's GPU), Python's and numpy's."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import Any

import torch


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every generator of this process, for :func:`..codec.encode`."""
    import numpy as np

    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, array("I", words).tobytes(), gauss),
        "numpy": (str(kind), np.asarray(keys), int(position), int(has_gauss), float(cached)),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Set every generator to ``state``; one that it lacks (a GPU's, of a run on CPUs) stays as it is."""
    import numpy as np

    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array("I", words)), gauss))
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
