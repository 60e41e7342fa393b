"""Weights that were put into an exported model's directory: the graphs are pointed at them. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from zoo.artifact import ModelDirectory, digest_file, entry_of, is_weights, write_json
from zoo.errors import ArtifactError
from zoo.weights import INDEX, read_layout
from zoo_export.graph_file import EVIDENCE_KEY, annotate, link

__all__ = ["relink"]

REASON = "the weights are not those that were compared"


def relink(directory: Path) -> bool:
    """Point the graphs of a model directory at the weights that lie there now, and list those in the manifest.

    Returns whether the evidence still holds: it does when the weights are those that were compared.

    Raises :class:`ArtifactError` when the weights are missing, or are not in the layout that the graphs need.
    """
    stored = ModelDirectory.open(directory, weights=False)
    exports = stored.exports() or [stored.export()]
    for export in exports:
        export.check()
    for path in stored.path.iterdir():
        if is_weights(path.name) and path.is_symlink():
            raise ArtifactError("a link, not a file", path, "runtimes refuse links: copy the file")
    layout = read_layout(stored.path)
    files = {name: entry for name, entry in stored.files.items() if not is_weights(name)}
    files |= {path.name: entry_of(path) for path in stored.path.iterdir() if is_weights(path.name)}
    compared = {name: entry["sha256"] for name, entry in files.items() if is_weights(name) and name != INDEX}
    changed = []
    for export in exports:
        graphs = export.read()
        try:
            linked = {name: link(graph, layout) for name, graph in graphs.items()}
        except ArtifactError as error:
            raise ArtifactError(str(error), directory, "build or export the model that these weights are of") from error
        verified = bool(export.evidence.get("verified")) and export.evidence.get("weights") == compared
        if not verified or linked != graphs:
            changed.append((export, linked))
    if files == stored.files and not changed:
        return True
    with stored.adding(files) as stage:
        for export, linked in changed:
            evidence = stage / export.evidence_file
            write_json(evidence, {**export.evidence, "verified": False, "reason": REASON})
            for name, graph in linked.items():
                file = stage / export.graph_files[name]
                file.write_bytes(annotate(graph, {EVIDENCE_KEY: digest_file(evidence)}))
    return not changed
