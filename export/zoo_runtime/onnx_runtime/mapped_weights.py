"""The files of weights of an open session."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError

__all__ = ["MappedWeights"]


@dataclass(slots=True)
class _File:
    path: Path
    size: int
    sha256: str
    sound: int
    """Time of modification at which the contents were right, in nanoseconds."""
    altered: int | None = None
    """Time of modification at which they were not."""


class MappedWeights:
    """The weights that ONNX Runtime maps, held open to see whether they change: answers would, or the process ends.

    A file that is replaced by another one of its name stays as it is for those that have it open.

    Args:
        directory: the model directory.
        entries: the size and SHA-256 of each file, by name, as in the manifest.
    """

    def __init__(self, directory: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._descriptors = [os.open(directory / name, os.O_RDONLY) for name in entries]
        self.close = weakref.finalize(self, _close_all, self._descriptors)
        self._files = [
            _File(directory / name, entry["size"], entry["sha256"], os.fstat(descriptor).st_mtime_ns)
            for (name, entry), descriptor in zip(entries.items(), self._descriptors, strict=True)
        ]

    def check(self) -> None:
        """Raise :class:`ArtifactError` if a file has been truncated or altered. No-op after :meth:`close`.

        The contents of a file are read only if its time of modification has changed.
        """
        for file, descriptor in zip(self._files, list(self._descriptors), strict=False):
            try:
                status = os.fstat(descriptor)
            except OSError:  # closed meanwhile, by another thread
                return
            _check(file, status)


def _check(file: _File, status: os.stat_result) -> None:
    if status.st_size < file.size:
        change = "truncated"
    elif status.st_mtime_ns == file.sound:
        return
    elif status.st_mtime_ns != file.altered and _is_whole(file, status):
        file.sound = status.st_mtime_ns
        return
    else:
        file.altered = status.st_mtime_ns
        change = "altered"
    raise ArtifactError(
        f"has been {change} while the session was open", file.path, "restore it and open the model again"
    )


def _is_whole(file: _File, status: os.stat_result) -> bool:
    """Return whether the open file has the contents of the manifest, as far as it can be read by its name."""
    try:
        with file.path.open("rb") as stream:
            same = os.path.samestat(os.fstat(stream.fileno()), status)
            return same and hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
    except OSError:
        return False


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
