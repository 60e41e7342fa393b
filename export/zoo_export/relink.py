"""Relinking of an export to new weights, without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from zoo.artifact import CARD, CONFIG, Export, ModelDirectory, entry_of, find_exports, is_weights, write_json
from zoo.artifact.card import model_card
from zoo.artifact.weights import StoredTensor, digest_layout, read_layout
from zoo.errors import ArtifactError
from zoo.models.count import parameter_count
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.links import link
from zoo_export.parity.evidence import check_graphs, stage_graphs

__all__ = ["relink"]

REASON = "the graph did not point at the weights"


def relink(directory: Path) -> bool:
    """Make the graphs of a model directory use its current weights, and list those in the manifest.

    Returns:
        Whether the export is still verified, that is, whether the weights are the verified ones.

    Raises:
        ArtifactError: the weights are missing, or do not have the tensors that the graphs need; or a graph is invalid.
        ParityError: a graph does not belong to its evidence.
    """
    stored = ModelDirectory.open(directory, weights=False)
    exports = find_exports(stored) or [Export(stored)]
    for export in exports:
        export.check()
        export.check_files()
    for path in stored.path.iterdir():
        if is_weights(path.name) and path.is_symlink():
            raise ArtifactError("weights file is a symbolic link", path, "copy the file: runtimes reject links")
    layout = read_layout(stored.path)
    weights = {path.name: entry_of(path) for path in stored.path.iterdir() if is_weights(path.name)}
    files = {name: entry for name, entry in stored.files.items() if not is_weights(name)} | weights
    changed = []
    for export in (Export(replace(stored, files=files), export.variant) for export in exports):
        graphs = export.read()
        check_graphs(export, graphs)
        try:
            linked = {name: _linked(graph, layout, export.files) for name, graph in graphs.items()}
        except ArtifactError as error:
            raise ArtifactError(str(error), directory, "build or export the model of these weights") from error
        if not export.is_verified() or linked != graphs:
            changed.append((export, linked))
    origin = stored.origin.of(digest_layout(stored.path, layout))
    before = {name: entry for name, entry in stored.files.items() if is_weights(name)}
    if weights == before and not changed and origin == stored.origin:
        return True
    with stored.adding(listed={**dict.fromkeys(before), **weights}, action="relinked") as stage:
        if origin != stored.origin:
            write_json(stage / CONFIG, {**stored.description, "origin": origin.to_dict()})
            (stage / CARD).write_text(
                model_card(stored.spec, stored.dtype, origin, parameter_count(stored.spec)), encoding="utf-8"
            )
        for export, linked in changed:
            evidence = {**export.evidence, "verified": False, "reason": export.doubt() or REASON}
            files_of_export = {export.graph_files[name]: graph for name, graph in linked.items()}
            stage_graphs(stage, files_of_export, export.evidence_file, evidence)
    return not changed


def _linked(graph: bytes, layout: Mapping[str, StoredTensor], files: Collection[str]) -> bytes:
    """Return a graph linked to the tensors of a layout, except its initialisers in ``files``."""
    model = parse(graph)
    link(model, layout, kept=files)
    return serialize(model)
