"""Graphs that a tool can call which passes the declared inputs and stores the past itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.artifact import EVIDENCE_KEY, Export, evidence_digest
from zoo.errors import ParityError, UsageError
from zoo.exporters import Progress
from zoo_export.comparison import Comparison
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.metadata import annotate
from zoo_export.parity.evidence import metadata_of
from zoo_export.variants import recipe_of
from zoo_export.variants.quantized.make import portable_model
from zoo_export.variants.quantized.recipe import Quantized

__all__ = ["declared_inputs"]


def declared_inputs(
    export: Export, tool: str | None, progress: Progress | None
) -> tuple[Mapping[str, bytes], Mapping[str, Any]]:
    """Return graphs with the declared inputs by name, and the evidence for them.

    ``tool`` is the name of one that keeps a past of one length for all layers, or None.

    The graphs of a quantised decoder write to the caller's buffers. Others are made for the same weights, and compared
    with the model.

    Raises:
        UsageError: the layers of the past have different lengths, which ``tool`` does not support.
        ParityError: a graph made here is not equal to the model.
    """
    stored = export.stored
    if tool is not None and any(graph.has_windows for graph in export.graphs):
        problem = f"layers with windows keep a shorter past than others, and {tool} expects one length"
        raise UsageError(problem, stored.path, "export it again with --option windows=false --force")
    recipe = recipe_of(export.variant)
    if not isinstance(recipe, Quantized) or not any(graph.pasts for graph in stored.spec.graphs):
        return export.read(), export.evidence
    candidate = recipe.candidate(stored, portable_model(stored, recipe.precision))
    report = recipe.compare(candidate, Comparison(progress=progress))
    if not report.passed:
        raise ParityError(report.verdict(), stored.path, "nothing was written")
    entries = {**metadata_of(stored), EVIDENCE_KEY: evidence_digest(report.evidence)}
    return {name: _annotated(graph, entries) for name, graph in candidate.files.items()}, report.evidence


def _annotated(graph: bytes, entries: Mapping[str, str]) -> bytes:
    model = parse(graph)
    annotate(model, entries)
    return serialize(model)
