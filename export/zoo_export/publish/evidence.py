"""Evidence beside published graphs: it lists the files that lie there, and names those of the model directory so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zoo.artifact import write_json
from zoo.artifact.digests import digest_file
from zoo.artifact.exports import SOURCE_PREFIX, of_the_directory

__all__ = ["write_evidence"]


def write_evidence(folder: Path, name: str, evidence: Mapping[str, Any], files: Iterable[str]) -> None:
    """Write the evidence for published graphs.

    Digests of files of the model directory are kept with ``source_`` before the name of the field. With these fields in
    their former places, :func:`zoo.artifact.evidence_digest` is that in the metadata of the graphs.

    Args:
        folder: the folder of the evidence.
        name: the name of its file.
        evidence: the evidence for the graphs in the model directory.
        files: the published graphs and their weights, relative to ``folder``.
    """
    source = {f"{SOURCE_PREFIX}{key}" if of_the_directory(key) else key: value for key, value in evidence.items()}
    digests = {file: digest_file(folder / file) for file in sorted(files)}
    write_json(folder / name, {**source, "files": digests})
