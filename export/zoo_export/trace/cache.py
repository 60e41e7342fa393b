"""The cache of traces, and of other results that depend on a model's code.

A key (:mod:`zoo_export.trace.key`) covers the code that a model imports. It cannot cover all: the files of an installed
package may be edited without a new version. A failure is therefore decided without the cache. A model whose code reads
files or the environment, or runs generated code, has an empty key, under which nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from zoo import memo
from zoo.errors import ArtifactError, ParityError

__all__ = ["note_help", "read", "repeat_if_stale", "was_helped", "write"]

Result = TypeVar("Result")


@dataclass
class _Attempt:
    """The use of the cache by one call of a function."""

    afresh: bool
    """Whether results of earlier calls are ignored."""
    was_helped: bool = False
    """Whether the result of an earlier call was used."""
    written: set[str] = field(default_factory=set)


_attempt: ContextVar[_Attempt | None] = ContextVar("attempt", default=None)


def read(key: str) -> bytes | None:
    """Return a result, or None if it is missing, damaged or to be computed again, or has no key."""
    if not key:
        return None
    attempt = _attempt.get()
    if attempt is None or key in attempt.written:
        return memo.read(key)
    if attempt.afresh:
        return None
    data = memo.read(key)
    attempt.was_helped |= data is not None
    return data


def write(key: str, data: bytes) -> None:
    """Store a result, unless it has no key."""
    if not key:
        return
    if (attempt := _attempt.get()) is not None:
        attempt.written.add(key)
    memo.write(key, data)


def was_helped() -> bool:
    """Return whether this attempt used the result of an earlier call."""
    attempt = _attempt.get()
    return attempt is not None and attempt.was_helped


def note_help(helped: bool) -> None:
    """Record that another process used results of earlier calls for this attempt."""
    if (attempt := _attempt.get()) is not None:
        attempt.was_helped |= helped


def repeat_if_stale(function: Callable[[], Result]) -> Result:
    """Call a function. If it fails with cached results, call it again without them, and replace them.

    A failure is :class:`ArtifactError`, for weights that do not fit a graph, or :class:`ParityError`.
    """
    attempt = _Attempt(afresh=False)
    try:
        return _call(function, attempt)
    except (ArtifactError, ParityError):
        if not attempt.was_helped:
            raise
    return _call(function, _Attempt(afresh=True))


def _call(function: Callable[[], Result], attempt: _Attempt) -> Result:
    token = _attempt.set(attempt)
    try:
        return function()
    finally:
        _attempt.reset(token)
