"""Memory needed by a comparison."""

from __future__ import annotations

from zoo.artifact import HALVES, ModelDirectory
from zoo.errors import ParityError
from zoo.system import free_memory

__all__ = ["check_memory"]

_COPIES = 11
"""Peak memory, in multiples of the weights."""


def check_memory(stored: ModelDirectory) -> None:
    """Raise :class:`ParityError` if there is not enough memory to compare a model.

    A comparison holds the model in float64 and in its own dtype, a perturbed copy, and the sessions with theirs.
    """
    size = sum(tensor.length for tensor in stored.layout.values()) * (2 if stored.dtype in HALVES else 1)
    needed, free = size * _COPIES, free_memory()
    if needed > free:
        raise ParityError(
            f"too large to verify here: needs {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free",
            stored.path,
            "zoo export --onnx --graph-only, then zoo verify on a larger machine",
        )
