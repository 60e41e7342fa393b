"""What names an entry of the cache of traces: the digest of everything it was made from.

A graph depends on code, configuration and tools, never on weights. The code is that of zoo and of the package that
provides the model; of everything else that is installed, the version counts. Nothing is trusted that lies there: what
is exported is compared with the model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from zoo.registry import ModelSpec

__all__ = ["key"]


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
