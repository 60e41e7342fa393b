"""Paths and URLs of fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from zoo.errors import StorageError, UsageError, ZooError

__all__ = ["base_name", "file_system", "is_url", "local", "remote_errors"]


def is_url(text: str) -> bool:
    """Return whether fsspec has to open a path: it has a protocol other than ``file``."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", text) is not None and not text.startswith("file://")


def local(text: str) -> str:
    """Return the path in a ``file`` URL, and other texts as they are."""
    return unquote(urlsplit(text).path) if text.startswith("file://") else text


def base_name(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError("URLs need fsspec", url, "pip install attention-zoo[remote]") from error
    try:
        fs, place = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"fsspec cannot open it ({error})", url) from error
    return fs, str(place)


@contextmanager
def remote_errors(where: str, kind: type[ZooError]) -> Iterator[None]:
    try:
        yield
    except ZooError:
        raise
    except Exception as error:  # each file system raises its own classes
        verb = "write" if kind is StorageError else "read"
        raise kind(f"cannot {verb} ({str(error) or type(error).__name__})", where) from error
