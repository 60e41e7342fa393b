"""Weights that were put into an exported model's directory: the graphs are pointed at them. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from zoo.artifact import EVIDENCE, ModelDirectory, digest_file, entry_of, is_weights, write_json
from zoo.errors import ArtifactError
from zoo.weights import read_layout
from zoo_export.graph_file import EVIDENCE_KEY, annotate, link

__all__ = ["relink"]

REASON = "the weights are not those that were compared"


def relink(directory: Path) -> bool:
    """Point the graphs of a model directory at the weights that lie there now, and list those in the manifest.

    Returns whether the evidence still holds: it does when the weights are those that were compared.

    Raises :class:`ArtifactError` when the weights are missing, or are not in the layout that the graphs need.
    """
    stored = ModelDirectory.open(directory, weights=False)
    stored.check_exported()
    for path in stored.path.iterdir():
        if is_weights(path.name) and path.is_symlink():
            raise ArtifactError("a link, not a file", path, "runtimes refuse links: copy the file")
    layout = read_layout(stored.path)
    graphs = {name: (stored.path / name).read_bytes() for name in stored.graph_files()}
    try:
        linked = {name: link(graph, layout) for name, graph in graphs.items()}
    except ArtifactError as error:
        raise ArtifactError(str(error), directory, "build or export the model that these weights are of") from error
    files = {name: entry for name, entry in stored.files.items() if not is_weights(name)}
    files |= {path.name: entry_of(path) for path in stored.path.iterdir() if is_weights(path.name)}
    evidence = stored.evidence
    compared = {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}
    holds = bool(evidence.get("verified")) and evidence.get("weights") == compared and linked == graphs
    if files == stored.files and linked == graphs:
        return holds
    with stored.adding(files) as stage:
        if not holds:
            write_json(stage / EVIDENCE, {**evidence, "verified": False, "reason": REASON})
            for name, graph in linked.items():
                (stage / name).write_bytes(annotate(graph, {EVIDENCE_KEY: digest_file(stage / EVIDENCE)}))
    return holds
