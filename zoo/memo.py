"""Results cached on disk between processes.

Each entry carries a digest of its name and content; damaged entries, and copies of others, are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs

__all__ = ["VARIABLE", "Memo", "directory", "folder", "read", "write"]

VARIABLE = "ZOO_CACHE"
"""The environment variable that names the directory; ``off`` disables the cache."""
_DIGEST = 32
_KEPT = 2000
"""Results that a memo retains in addition to those last used."""


def directory() -> Path | None:
    """Return the directory of the cache, or None when it is disabled."""
    setting = os.environ.get(VARIABLE)
    if setting == "off":
        return None
    if setting:
        return Path(setting)
    return platformdirs.user_cache_path("zoo", appauthor=False)


def folder(name: str) -> Path | None:
    """Return a folder of the cache, made if it is missing. None if the cache is disabled or cannot be written."""
    cache = directory()
    if cache is None:
        return None
    with suppress(OSError):
        (cache / name).mkdir(parents=True, exist_ok=True)
        if os.access(cache / name, os.W_OK | os.X_OK):
            return cache / name
    return None


def read(name: str) -> bytes | None:
    """Return an entry, or None when it is missing or damaged."""
    cache = directory()
    if cache is None:
        return None
    with suppress(OSError):
        data = (cache / name).read_bytes()
        if _entry_digest(name, data[_DIGEST:]) == data[:_DIGEST]:
            return data[_DIGEST:]
    return None


def write(name: str, data: bytes) -> None:
    """Store an entry. Write failures are ignored."""
    cache = directory()
    if cache is None:
        return
    part = cache / f"{name}.{secrets.token_hex(4)}.part"
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                file.write(_entry_digest(name, data) + data)
            part.replace(cache / name)
        finally:
            part.unlink(missing_ok=True)


def _entry_digest(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + data).digest()


class Memo:
    """Results keyed by the facts that determine them. Both are plain data."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[str, Any] = {}
        with suppress(ValueError, RecursionError):  # not written by zoo
            results = json.loads(read(name) or b"{}")
            self._known = results if isinstance(results, dict) else {}
        self._used: dict[str, Any] = {}

    def get(self, facts: Any) -> Any:
        """Return the value stored for these facts, by this or an earlier process, or None."""
        key = _key(facts)
        if key in self._known:
            self._used.setdefault(key, self._known[key])
        return self._used.get(key)

    def put(self, facts: Any, value: Any) -> Any:
        """Store a value and return it. Store nothing when ``facts`` is None."""
        if facts is not None:
            self._used[_key(facts)] = value
        return value

    def keep(self) -> None:
        """Write the results used by this process, and the latest of the others."""
        if any(key not in self._known or self._known[key] != value for key, value in self._used.items()):
            rest = [item for item in self._known.items() if item[0] not in self._used]
            retained = dict(rest[-_KEPT:]) | self._used
            write(self._name, json.dumps(retained).encode())


def _key(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
