"""Keys of the trace cache: digests of what a trace depends on.

A graph depends on code, configuration and tools, never on weights. The key includes the code of zoo, of the package
that provides the model and of all that it imports outside of versioned distributions, and the metadata of all installed
packages, versions included. A model that may read more, such as files, or that a user's own code builds, has no key:
nothing of it is cached.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from zoo.registry import ModelSpec
from zoo_export.trace.reachable import code_digest

__all__ = ["key"]

_OWN = frozenset({"zoo", "zoo_export", "zoo_plugins", "zoo_runtime"})


def key(spec: ModelSpec, result: str, dtype: str, options: Mapping[str, Any]) -> str:
    """Return the cache key of ``result``: a graph's name, or that of another result derived from the model.

    It is empty if the model may depend on more than a key covers.
    """
    if spec.config.outside_code is not None:
        return ""
    references = (spec.architecture.model, spec.architecture.config)
    reachable = code_digest(reference.partition(":")[0] for reference in references)
    if reachable is None:
        return ""
    facts = {
        "what": result,
        "architecture": [
            spec.plugin.distribution,
            spec.plugin.version,
            spec.architecture.name,
            spec.architecture.model,
        ],
        "config": spec.config.to_dict(),
        "dtype": dtype,
        "options": dict(options),
        "installed": sorted(set(map(_metadata, distributions()))),
        "reachable": reachable,
        "code": [_own_code_digest(), _code_digest({*map(_top_level, references)} - _OWN)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _metadata(distribution: Distribution) -> str:
    """Return the digest of an installed package's metadata, which is not parsed since that takes a second for all."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return hashlib.sha256(text.encode()).hexdigest()


def _top_level(reference: str) -> str:
    return reference.partition(":")[0].partition(".")[0]


@cache
def _own_code_digest() -> str:
    """Return the digest of the product's own code, which a process reads once: it has been imported by then."""
    return _code_digest(_OWN)


def _code_digest(packages: Iterable[str]) -> str:
    """Return the digest of all Python files of top-level packages or modules."""
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
