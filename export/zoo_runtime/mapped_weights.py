"""The files of weights of an open session."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zoo.errors import ArtifactError

__all__ = ["MappedWeights"]


class MappedWeights:
    """The weights that ONNX Runtime maps, held open to see whether they lose bytes: reading these ends the process.

    A file that is replaced by another one of its name stays as it is for those that have it open.

    Args:
        directory: the model directory.
        sizes: the size of each file, by name.
    """

    def __init__(self, directory: Path, sizes: Mapping[str, int]) -> None:
        self._files = [(directory / name, size) for name, size in sizes.items()]
        self._descriptors = [os.open(path, os.O_RDONLY) for path, _ in self._files]
        self.close = weakref.finalize(self, _close_all, self._descriptors)

    def check(self) -> None:
        """Raise :class:`ArtifactError` if a file has been truncated. No-op after :meth:`close`."""
        for (path, size), descriptor in zip(self._files, list(self._descriptors), strict=False):
            with suppress(OSError):  # closed meanwhile, by another thread
                if os.fstat(descriptor).st_size < size:
                    what = "has been truncated while the session was open"
                    raise ArtifactError(what, path, "restore it and open the model again")


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
