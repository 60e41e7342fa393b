"""Checks of the arguments of functions."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from zoo.errors import UsageError
from zoo.terminal import shown

__all__ = ["check_adapters", "check_count", "check_flag", "check_path", "check_seconds", "check_text", "check_texts"]


def check_adapters(value: object, inputs: int) -> None:
    """Raise :class:`UsageError` unless a value is a name, None, or a sequence with one of these for each input."""
    if isinstance(value, str | None):
        return
    if not isinstance(value, Sequence):
        raise _wrong("adapter", "a name or a sequence of names", value)
    if len(value) != inputs:
        raise UsageError(f"{len(value)} adapters for {inputs} inputs", "adapter", "give one for each")


def check_count(name: str, value: object, most: int | None = None) -> int | None:
    """Return a whole number from 1 to ``most``, or None. Raises :class:`UsageError` for anything else."""
    if value is None:
        return None
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < 1 or value > (most or math.inf):  # type: ignore[operator]
        bounds = "of at least 1" if most is None else f"from 1 to {most}"
        raise _wrong(name, f"a whole number {bounds}", value)
    return int(value)  # type: ignore[call-overload]


def check_flag(name: str, value: object) -> bool:
    """Return a truth value. Raises :class:`UsageError` for anything else, such as a string."""
    if not isinstance(value, bool | np.bool_):
        raise _wrong(name, "True or False", value)
    return bool(value)


def check_path(name: str, value: object) -> Path:
    """Return a path. Raises :class:`UsageError` for anything else, and for a NUL character, which no path can have."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or "\0" in path:
        raise _wrong(name, "a path", value)
    return Path(path)


def check_seconds(name: str, value: object) -> float | None:
    """Return a number of seconds, or None. Raises :class:`UsageError` for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise _wrong(name, "a number of seconds", value)
    return float(value)


def check_text(name: str, value: object) -> None:
    """Raise :class:`UsageError` unless a value is a string or None."""
    if not isinstance(value, str | None):
        raise _wrong(name, "a string", value)


def check_texts(name: str, value: object) -> None:
    """Raise :class:`UsageError` unless a value is a mapping of strings to strings."""
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for item in value.items() for part in item):
        raise _wrong(name, "a mapping of strings to strings", value)


def _wrong(name: str, expected: str, value: object) -> UsageError:
    return UsageError(f"{name} must be {expected}, got {shown(value)}")
