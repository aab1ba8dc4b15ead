"""Which way to split a model: calculators, predictions and the ranking. Imports no torch.

>>> from fxbraid.plan import bubble_fraction, tp_bytes_per_layer
>>> round(tp_bytes_per_layer(1, 8192, 8192, 8) / 1e6)
940
>>> round(100 * bubble_fraction(p=8, m=32), 1)
17.9
"""

from __future__ import annotations

from fxbraid.plan.calculators import all_reduce_bytes, bubble_fraction, tp_bytes_per_layer
from fxbraid.plan.predict import Prediction
from fxbraid.plan.search import Plan, plan
from fxbraid.plan.space import Candidate, Request

__all__ = [
    "Candidate",
    "Plan",
    "Prediction",
    "Request",
    "all_reduce_bytes",
    "bubble_fraction",
    "plan",
    "tp_bytes_per_layer",
]
