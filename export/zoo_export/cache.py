"""What tracing found out, kept between exports, by the digest of everything it was made from.

A graph depends on code, configuration and tools, never on weights. The code is that of zoo and of the package that
provides the model; of everything else that is installed, the version counts. Nothing is trusted that lies here: a
damaged entry is traced again, and what is exported is compared with the model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from zoo.registry import ModelSpec

__all__ = ["key", "read", "write"]

VARIABLE = "ZOO_CACHE"
"""The environment variable that names the directory; ``off`` keeps nothing."""
_DIGEST = 32


def directory() -> Path | None:
    """Where entries lie, None when none are kept."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoo"


def key(spec: ModelSpec, what: str, dtype: str, options: Mapping[str, Any]) -> str:
    """The digest of all that something is made from: ``what`` says which graph of the model, or what else."""
    facts = {
        "what": what,
        "architecture": [
            spec.plugin.distribution,
            spec.plugin.version,
            spec.architecture.name,
            spec.architecture.model,
        ],
        "config": spec.config.to_dict(),
        "dtype": dtype,
        "options": dict(options),
        "installed": sorted({f"{item.metadata['Name']} {item.version}" for item in distributions()}),
        "code": _code_digest(
            {"zoo", "zoo_export", _top_level(spec.architecture.model), _top_level(spec.architecture.config)}
        ),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


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


def _top_level(reference: str) -> str:
    return reference.partition(":")[0].partition(".")[0]


def _code_digest(packages: Iterable[str]) -> str:
    """The digest of every Python file of some top-level packages or modules."""
    digest = hashlib.sha256()
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        roots = list(spec.submodule_search_locations or ()) if spec else []
        files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
        if not roots and spec is not None and spec.origin:
            files = [Path(spec.origin)]
        for path in files:
            digest.update(f"{package} {path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
