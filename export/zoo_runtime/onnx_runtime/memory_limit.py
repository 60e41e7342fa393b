"""A limit on the memory that graphs allocate in a command: an allocation fails, and the system need not kill it.

A library leaves the limits of its process alone. So does CUDA, which reserves any amount of address space.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from zoo import signals, system
from zoo.limits import GRAPH_BYTES

__all__ = ["limit_load", "limit_run", "remedy"]

_AGE = 1.0
"""Seconds after which the limit follows the memory that is free; to find that out costs as much as a small run."""
_STACK = 2**23
"""Bytes of address space that the stack of a thread takes."""
_next = 0.0
_cuda = False


def limit_load(provider: str, threads: int, folder: str | os.PathLike[str] | None) -> None:
    """Limit what a session allocates while it is opened, apart from ``threads`` and the files of a folder.

    ONNX Runtime maps weights so that they count as memory of the process.
    """
    global _cuda
    if not signals.in_command():
        return
    if provider == "cuda" or _cuda:
        _cuda = True
        system.limit_memory(None)
        return
    mapped = 0
    if folder is not None:
        with suppress(OSError):
            mapped = sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())
    _limit((threads or system.usable_cores()) * _STACK + mapped)


def limit_run() -> None:
    """Limit what a run allocates."""
    if signals.in_command() and time.monotonic() >= _next and not _cuda:
        _limit(0)


def _limit(more: int) -> None:
    global _next
    system.limit_memory(GRAPH_BYTES.value() + more)
    _next = time.monotonic() + _AGE


def remedy() -> str:
    """Return the remedy of errors about a lack of memory."""
    return GRAPH_BYTES.remedy if signals.in_command() and not _cuda else "free some memory"
