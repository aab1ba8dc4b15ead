"""``braid(order=...)``: whose costs units in a block are ordered by."""

from __future__ import annotations

from collections.abc import Mapping

from .passes.errors import BraidError
from .plan.choose import UNIT_ORDERS
from .runtime.profile import as_profile

Order = str | Mapping[str, float]
"""What ``braid(order=...)`` takes: "paper", "costs", or the costs themselves."""


def check_order(order: Order | None, *, auto: bool) -> Order:
    """``order``, or its default: "costs" for the schedule "auto", which measures anyway, else "paper"."""
    if order is None:
        return "costs" if auto else "paper"
    if isinstance(order, str) and order not in UNIT_ORDERS:
        raise BraidError(
            f'order={order!r}: use "paper", "costs" (measured), or a profile: fxbraid.profile(model) or seconds by '
            "unit key"
        )
    return order if isinstance(order, str) else as_profile(order)
