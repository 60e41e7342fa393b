"""What vouches for an exported graph, how the two are tied together, and what is said where nothing does."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zoo import __version__
from zoo.artifact import TOKENIZER, Export, ModelDirectory, write_json
from zoo_export.graph_file import EVIDENCE_KEY, TOKENIZER_KEY, WEIGHTS_KEY, annotate, graph_digest

__all__ = ["stage_export", "unverified", "versions", "vouching", "weights_of", "write_export"]


def versions() -> dict[str, str]:
    """What a comparison ran on."""
    tools = ("onnxruntime", "torch", "onnx", "onnx-ir", "onnxscript")
    found = {"zoo": __version__, "python": platform.python_version()}
    for name in tools:
        for distribution in (name, f"{name}-gpu"):
            with suppress(PackageNotFoundError):
                found[name] = version(distribution)
    return found


def weights_of(stored: ModelDirectory) -> dict[str, str]:
    """The digest of every file of weights."""
    return stored.weight_digests()


def unverified(graphs: Mapping[str, bytes], reason: str) -> dict[str, Any]:
    """Evidence that says that there is none."""
    return {
        "schema": 1,
        "verified": False,
        "reason": reason,
        "graphs": {name: {"sha256": graph_digest(graph)} for name, graph in graphs.items()},
        "versions": {"zoo": __version__},
    }


def write_export(export: Export, graphs: Mapping[str, bytes], evidence: Mapping[str, Any]) -> None:
    """Add graphs, by name, and the evidence for them to a model directory, atomically."""
    with export.stored.adding() as stage:
        stage_export(export, stage, graphs, evidence)


def stage_export(export: Export, stage: Path, graphs: Mapping[str, bytes], evidence: Mapping[str, Any]) -> None:
    """Write graphs and the evidence for them to a stage of their model directory."""
    files = {path.name for path in stage.iterdir()} | {export.graph_files[name] for name in graphs}
    write_json(stage / export.evidence_file, {**evidence, "files": sorted(files)})
    entries = vouching(export.stored, (stage / export.evidence_file).read_bytes())
    for name, graph in graphs.items():
        (stage / export.graph_files[name]).write_bytes(annotate(graph, entries))


def vouching(stored: ModelDirectory, evidence: bytes) -> dict[str, str]:
    """Metadata that ties a graph to its evidence, its weights and its tokenizer."""
    digests = [stored.files[name]["sha256"] for name in stored.weight_files()]
    entries = {EVIDENCE_KEY: hashlib.sha256(evidence).hexdigest()}
    if digests:
        joined = hashlib.sha256("".join(digests).encode()).hexdigest()
        entries[WEIGHTS_KEY] = digests[0] if len(digests) == 1 else joined
    if TOKENIZER in stored.files:
        entries[TOKENIZER_KEY] = stored.files[TOKENIZER]["sha256"]
    return entries
