"""manifest.json: the SHA-256 and size of every file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.artifact.digests import Digests, digest_file
from zoo.artifact.layout import CONFIG, MANIFEST, SCHEMA, SIGNATURE, write_json
from zoo.artifact.weights import load_json, plain_name
from zoo.errors import ArtifactError, UnreadableError

__all__ = ["check_file", "entries_of", "entry_of", "read_manifest", "write_manifest"]


def entry_of(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file."""
    return {"sha256": digest_file(path), "size": path.stat().st_size}


def entries_of(stage: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of the files in a stage."""
    return {path.name: entry_of(path) for path in stage.iterdir() if path.is_file()}


def write_manifest(stage: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    write_json(stage / MANIFEST, {"schema": SCHEMA, "files": dict(sorted(files.items()))})


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    if path.is_symlink():
        raise ArtifactError("is a link, not a file", path)
    data = load_json(path)
    files = data.get("files")
    is_current = type(data.get("schema")) is int and data["schema"] == SCHEMA
    if not is_current or set(data) != {"schema", "files"} or not isinstance(files, dict):
        raise ArtifactError("not a manifest that this version of zoo reads", path)
    for name, entry in files.items():
        is_file = plain_name(name) and name not in (MANIFEST, SIGNATURE)
        if not is_file or not isinstance(entry, dict) or set(entry) != {"sha256", "size"}:
            raise ArtifactError(f"bad entry {name!r}", path)
    if CONFIG not in files:
        raise ArtifactError(f"{CONFIG} is not listed", path)
    return files


def check_file(path: Path, entry: Mapping[str, Any], digests: Digests) -> None:
    if path.is_symlink() or not path.is_file():
        raise ArtifactError("missing", path, "rebuild the model or restore the file")
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise ArtifactError(f"has {size} bytes, the manifest says {entry['size']}", path, "restore the file")
        if digests.of(path) != entry["sha256"]:
            raise ArtifactError("altered: its SHA-256 differs from the manifest's", path, "restore the file")
    except OSError as error:
        raise UnreadableError(f"cannot read ({error.strerror})", path) from error
