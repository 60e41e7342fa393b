"""SHA-256 digests of files. Digests of large files are cached between processes until the file changes.

A cached digest is valid while path, inode, size, mtime and ctime of the file are unchanged. It is stored in zoo's cache
and not beside the file, so a copy of a model directory is read in full once.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from zoo.memo import Memo

__all__ = ["Digests", "digest_file"]

LARGE = 1 << 20
"""Minimum size in bytes of a large file. Smaller files are always read."""
SETTLED = 2_000_000_000
"""Nanoseconds for which a file must be unchanged before its digest is cached.

File systems round times, some to two seconds, so a write right after the file was read may not change its times.
"""


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Digests:
    """Digests of files. Large files are read only if they have changed, or if ``rehash`` is true."""

    def __init__(self, *, rehash: bool = False) -> None:
        self._rehash = rehash
        self._memo: Memo | None = None

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a file in hexadecimal."""
        started = time.time_ns()
        status = path.stat()
        if status.st_size < LARGE:
            return digest_file(path)
        if self._memo is None:
            self._memo = Memo("digests")
        facts = _facts(path, status)
        cached = None if self._rehash else self._memo.get(facts)
        if isinstance(cached, str):
            return cached
        digest = digest_file(path)
        if facts == _facts(path, path.stat()) and max(status.st_mtime_ns, status.st_ctime_ns) <= started - SETTLED:
            self._memo.put(facts, digest)
        return digest

    def keep(self) -> None:
        """Store new digests for later processes."""
        if self._memo is not None:
            self._memo.keep()


def _facts(path: Path, status: os.stat_result) -> list[object]:
    """Return values that change when a file is written or replaced; programs cannot set ctime."""
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
