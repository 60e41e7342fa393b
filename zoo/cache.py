"""What was found out once and need not be found out again, between processes.

Nothing is trusted that lies here: each entry carries its digest, and a damaged one is no entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "Memo", "directory", "read", "write"]

VARIABLE = "ZOO_CACHE"
"""The environment variable that names the directory; ``off`` keeps nothing."""
_DIGEST = 32
_KEPT = 2000
"""Results that a memo holds besides those that were last asked for."""


def directory() -> Path | None:
    """Where entries lie, None when none are kept."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoo"


def read(name: str) -> bytes | None:
    """An entry, None when there is none or it is damaged."""
    folder = directory()
    if folder is None:
        return None
    with suppress(OSError):
        data = (folder / name).read_bytes()
        if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
            return data[_DIGEST:]
    return None


def write(name: str, data: bytes) -> None:
    """Keep an entry. A cache that cannot be written is none."""
    folder = directory()
    if folder is None:
        return
    part = folder / f"{name}.{secrets.token_hex(4)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(data).digest() + data)
        part.replace(folder / name)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)


class Memo:
    """Results by what they follow from. Both are plain data."""

    def __init__(self, name: str) -> None:
        self._name = name
        data = read(name)
        self._known: dict[str, Any] = json.loads(data) if data is not None else {}
        self._used: dict[str, Any] = {}

    def get(self, facts: Any) -> Any:
        """What was put for these facts, now or in an earlier process; None for facts that nobody knows."""
        key = _key(facts)
        if key in self._known:
            self._used[key] = self._known[key]
        return self._used.get(key)

    def put(self, facts: Any, value: Any) -> Any:
        """Remember a value, and return it. Without facts, which are None, nothing is remembered."""
        if facts is not None:
            self._used[_key(facts)] = value
        return value

    def keep(self) -> None:
        """Keep what was asked for, and of the rest the latest."""
        if self._used.keys() - self._known.keys():
            rest = [item for item in self._known.items() if item[0] not in self._used]
            kept = dict(rest[-_KEPT:]) | self._used
            write(self._name, json.dumps(kept).encode())


def _key(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
