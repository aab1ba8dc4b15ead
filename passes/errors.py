"""What a user can get wrong, as exceptions whose text says what, with which numbers, and the way out."""

from __future__ import annotations


class BraidError(ValueError):
    """Anything that fxbraid refuses. Raised before the first collective, the same on every rank."""


class CaptureError(BraidError):
    """The model does not trace: names the module, the source line and the cause."""


class PlanError(BraidError):
    """The tensor-parallel plan or the sizes do not fit the model."""


class PartitionError(BraidError):
    """The model cannot be cut into as many chunks as the schedule wants."""


class UnsupportedError(BraidError):
    """The model needs something that fxbraid does not do yet."""


class VerifyError(RuntimeError):
    """A pass broke a contract: a bug of fxbraid, found by the verifier between passes."""
