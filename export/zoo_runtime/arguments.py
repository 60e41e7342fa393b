"""Checks of the arguments of functions."""

from __future__ import annotations

import math

import numpy as np

from zoo.errors import UsageError

__all__ = ["check_count", "check_seconds", "check_text"]


def check_count(name: str, value: object, most: int | None = None) -> int | None:
    """Return a whole number from 1 to ``most``, or None. Raises :class:`UsageError` for anything else."""
    if value is None:
        return None
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < 1 or value > (most or math.inf):  # type: ignore[operator]
        wanted = "of at least 1" if most is None else f"from 1 to {most}"
        raise UsageError(f"{name} must be a whole number {wanted}, got {value!r:.80}")
    return int(value)  # type: ignore[call-overload]


def check_seconds(name: str, value: object) -> float | None:
    """Return a number of seconds, or None. Raises :class:`UsageError` for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UsageError(f"{name} must be a number of seconds, got {value!r:.80}")
    return float(value)


def check_text(name: str, value: object) -> None:
    """Raise :class:`UsageError` unless a value is a string or None."""
    if not isinstance(value, str | None):
        raise UsageError(f"{name} must be a string, got {value!r:.80}")
