"""Calls of the ``tokenizers`` library, which panics for some tokenizers that it has read without complaint."""

from __future__ import annotations

import json
import os
import threading
from types import TracebackType
from typing import Any, Self

from zoo.errors import ArtifactError

__all__ = ["description", "guarded", "hide_reports"]

_MAIN = threading.main_thread().ident
_hidden: tuple[int, int] | None = None
"""Descriptors of stderr and of the null device, if reports are hidden."""


def hide_reports() -> None:
    """Discard what Rust prints on stderr about a panic, in calls of the main thread. For processes that run a command.

    Calls of other threads do not: the main thread may be printing meanwhile.
    """
    global _hidden
    _hidden = os.dup(2), os.open(os.devnull, os.O_WRONLY)


class guarded:  # noqa: N801
    """Raise :class:`ArtifactError` for a panic in the block, which would be a ``BaseException`` of a private class.

    Args:
        where: the file of the tokenizer or the input, for the error.
    """

    __slots__ = ("_stderr", "_where")

    def __init__(self, where: object = None) -> None:
        self._where = where
        self._stderr: int | None = None

    def __enter__(self) -> Self:
        if _hidden is not None and threading.get_ident() == _MAIN:
            self._stderr, null = _hidden
            os.dup2(null, 2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stderr is not None:
            os.dup2(self._stderr, 2)
        if kind is not None and kind.__module__ == "pyo3_runtime":
            what = f"the tokenizer cannot be used ({error})"
            raise ArtifactError(what, self._where, "check its tokenizer.json") from error


def description(backend: Any, where: object = None) -> dict[str, Any]:
    """Return the content of the tokenizer.json of a tokenizer of the library.

    Raises :class:`ArtifactError` if the library cannot represent it.
    """
    with guarded(where):
        content: dict[str, Any] = json.loads(backend.to_str())
    return content
