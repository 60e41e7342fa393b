"""Files that are read whole, and TOML, within the :mod:`zoo.limits`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zoo.errors import ArtifactError, ZooError
from zoo.limits import FILE_BYTES

__all__ = ["check_plain", "lines", "parse_toml", "read_bytes", "read_text"]

_PARTS = 64
"""Maximum number of parts of a key: ``tomllib`` takes memory by the square of their number."""
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*(?:{_PART}\.[ \t]*){{{_PARTS}}}", re.MULTILINE)


def check_plain(path: Path, fault: type[ZooError] = ArtifactError) -> None:
    """Raise ``fault`` for a device, which may have no end, or a pipe, which may have no writer."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise fault("not a plain file", path)


def read_bytes(path: Path, fault: type[ZooError] = ArtifactError) -> bytes:
    """Return the content of a file.

    Raises ``fault`` as :func:`check_plain` does, and for more than :data:`zoo.limits.FILE_BYTES`; and ``OSError`` if
    the file cannot be read.
    """
    check_plain(path, fault)
    limit = FILE_BYTES.value()
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        FILE_BYTES.refuse("a file that is read whole is too large", path, fault)
    return content


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file. Raises as :func:`read_bytes`, and ``ValueError`` for other encodings."""
    return read_bytes(path).decode()


def lines(file: IO[bytes], where: object) -> Iterator[bytes]:
    """Yield the lines of a file. Raises :class:`ArtifactError` for one of more than :data:`zoo.limits.FILE_BYTES`."""
    limit = FILE_BYTES.value()
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise ArtifactError(f"a line has more than {limit:,} bytes", where, FILE_BYTES.remedy)
        yield line


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ``ValueError`` or ``RecursionError``, also for keys of more than 64 parts."""
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {_PARTS} parts")
    return tomllib.loads(text)
