"""Export of a model directory, or of a preset, to ONNX graphs that refer to its safetensors files.

Models are traced without weights, and traces of the same code and configuration are cached. Every initialiser is a
reference (file, offset, length), so no weight is stored twice, and retrained weights in the same layout need no new
export. torch is imported only to trace or compare.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from zoo.artifact import (
    CARD,
    EVIDENCE_KEY,
    PORTABLE,
    TOKENIZER,
    Export,
    ModelDirectory,
    describe,
    evidence_digest,
    export_file,
    new_model,
    variant_of,
)
from zoo.artifact.card import model_card
from zoo.contract import standard_fields
from zoo.errors import EXPORT_AGAIN, ArtifactError, ParityError, UsageError, argument, values_of
from zoo.exporters import Job, export_to
from zoo.factories import check_code
from zoo.models.count import parameter_count
from zoo.registry import ModelSpec
from zoo_export.comparison import Comparison
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.metadata import annotate, metadata
from zoo_export.parity.evidence import (
    metadata_of,
    stage_export,
    stage_graphs,
    unverified,
    write_export,
)
from zoo_export.trace.cache import repeat_if_stale
from zoo_export.trace.make import Options, attention_facts, link_graphs, make_graphs, planned_layout
from zoo_export.variants import recipe_of
from zoo_export.variants.base import Candidate, Recipe

if TYPE_CHECKING:
    from zoo.exporters import Progress
    from zoo_export.parity.report import Report
    from zoo_runtime.onnx_runtime.providers import Provider

__all__ = [
    "Request",
    "export_graphs_only",
    "export_model",
    "export_onnx",
    "export_preset",
    "export_variant",
    "retrace",
]

C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, kw_only=True)
class Request(Options):
    """Options of the ONNX exporter: how graphs are written and verified."""

    provider: Literal["cpu", "cuda"] = "cpu"
    """Execution provider to verify on. The profiles ``cpu``, ``cuda`` and ``openvino`` are verified on their own."""
    grid: Literal["standard", "full"] = "standard"
    """``full`` also compares at points that take minutes for a large model."""

    @property
    def uses_contrib(self) -> bool:
        return super().uses_contrib and self.provider == "cpu"

    @property
    def compared_on(self) -> Provider:
        """The execution provider that the graphs are verified on."""
        return variant_of(self.variant).provider or self.provider


def export_model(
    directory: str | os.PathLike[str],
    *,
    options: Options = Options(),
    force: bool = False,
    provider: Literal["cpu", "cuda"] = "cpu",
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Export every graph of a model directory, and write it beside the weights if it matches the model.

    Args:
        directory: a model directory.
        options: how the graphs are written.
        force: replace an earlier export.
        provider: the execution provider to verify on.
        full_grid: compare at all points of the grid, including slow ones.
        progress: called with the number of each comparison and the total.

    Returns:
        The evidence, as written to parity.json.

    Raises:
        UsageError: an export already exists, or the provider does not load.
        ArtifactError: the directory is not a valid model directory.
        PluginError: the model cannot be traced.
        ParityError: the graph does not match the model. Nothing is written.
    """
    values = {field.name: getattr(options, field.name) for field in fields(Options)}
    request = Request(**values, provider=provider, grid="full" if full_grid else "standard")
    evidence = export_to(directory, "onnx", options=request, force=force, progress=progress).evidence
    from zoo_export.parity.report import Report

    return Report(dict(evidence))


def export_onnx(job: Job) -> dict[str, Any]:
    """Export a model to ONNX (the exporter's ``export``)."""
    request = job.options or Request()
    comparison = Comparison(provider=request.compared_on, full_grid=request.grid == "full", progress=job.progress)
    recipe = recipe_of(request.variant, options=request)
    recipe.check(job.model, comparison)
    return _stage(job.model, recipe, comparison, job.folder)[1].evidence


def export_variant(
    directory: Path, recipe: Recipe[C], comparison: Comparison = Comparison(), *, force: bool = False
) -> tuple[C, Report]:
    """Add a variant to a model directory, if its graphs match the model and their error is within its bounds.

    Args:
        directory: a model directory.
        recipe: makes and compares the variant.
        comparison: how it is compared.
        force: replace an earlier export of the same variant.

    Returns:
        What was made, and the evidence as written.

    Raises:
        UsageError: the export already exists, or the model or this machine cannot have this variant.
        ArtifactError: the directory is not a valid model directory, or lacks what the variant is made from.
        ParityError: the graphs are wrong, or their error exceeds its bounds. Nothing is written.
    """
    stored = ModelDirectory.open(directory)
    export = Export(stored, recipe.variant)
    if recipe.variant_is_known and export.exists and not force:
        file = next(iter(export.graph_files.values()))
        raise UsageError(f"already exported as {recipe.variant}", stored.path / file, EXPORT_AGAIN)
    recipe.check(stored, comparison)
    with stored.adding(removed=recipe.replaced(export)) as stage:
        return _stage(stored, recipe, comparison, stage)


def _stage(stored: ModelDirectory, recipe: Recipe[C], comparison: Comparison, stage: Path) -> tuple[C, Report]:
    """Make a variant, measure it, compare it, and write its files and its evidence to a staged model directory."""
    candidate, report = repeat_if_stale(partial(_verified, stored, recipe, comparison, stage))
    stage_export(Export(stored, candidate.variant), stage, candidate.files, report.evidence, report.recorded)
    return candidate, report


def _verified(stored: ModelDirectory, recipe: Recipe[C], comparison: Comparison, stage: Path) -> tuple[C, Report]:
    """Return a new variant and the evidence for it. Raises :class:`ParityError` if it is not equal to the model."""
    with recipe.begin(stored, stage) as make:
        from zoo_export.parity.laws import check_laws  # late: a process that has imported PyTorch is not forked

        laws = check_laws(stored, variant_of(recipe.variant).dtype)
        candidate = make()
    certificate = recipe.certificate(candidate, comparison)
    if certificate is not None and not certificate.passed:
        problem = f"{candidate.variant} is too far from {certificate.reference}: {certificate.failures[0]}"
        raise ParityError(problem, stored.path, "nothing was written")
    report = recipe.compare(candidate, comparison)
    if not report.passed:
        raise ParityError(report.verdict(), stored.path, "nothing was written")
    measured = {} if certificate is None else {"certificate": certificate.evidence}
    report.evidence |= {"laws": laws, **measured, **candidate.facts}
    return candidate, report


def export_graphs_only(directory: Path, *, options: Options = Options(), force: bool = False) -> list[str]:
    """Export every graph of a model directory without verification, marked as unverified.

    Returns:
        The names of the files.
    """
    export = _open(directory, options, force=force)
    stored = export.stored
    layout = stored.layout if stored.weight_files() else planned_layout(stored.spec, stored.dtype)
    graphs = link_graphs(stored.spec, stored.dtype, layout, options)
    evidence = unverified("exported without a comparison", options)
    write_export(export, graphs, evidence | attention_facts(stored.spec, stored.dtype, options))
    return list(export.graph_files.values())


def export_preset(spec: ModelSpec, directory: Path, *, options: Options = Options(), force: bool = False) -> list[str]:
    """Export the graphs of a preset without creating its weights. The graphs refer to where the weights will be.

    Returns:
        The names of the files.
    """
    dtype = "float32"
    layout = planned_layout(spec, dtype)
    graphs = link_graphs(spec, dtype, layout, options)
    description = describe(spec, dtype=dtype)
    files = {export_file(name, options.variant, "onnx"): graph for name, graph in graphs.items()}
    with new_model(directory, description, force=force) as stage:
        evidence_file = export_file("parity", options.variant, "json")
        evidence = unverified("exported without weights", options) | attention_facts(spec, dtype, options)
        stage_graphs(stage, files, evidence_file, evidence)
        if spec.tokenizer is not None:
            from zoo.tokenizers.files.given import write_given

            write_given(spec.tokenizer, stage / TOKENIZER, standard_fields(spec.config).vocab_size)
        (stage / CARD).write_text(model_card(spec, dtype, None, parameter_count(spec)), encoding="utf-8")
    return list(files)


def retrace(directory: Path, *, variant: str = "") -> list[str]:
    """Trace a model again and compare the result with its exported graphs, byte for byte.

    Returns:
        The names of the compared files.

    Raises:
        ArtifactError: a graph differs.
        UsageError: the variant is not traced from the model.
    """
    export = Export(ModelDirectory.open(directory), variant)
    export.check()
    if "options" not in export.evidence:
        raise UsageError(f"the graphs of {variant} are not traced from the model", argument("variant"))
    check_code(export.stored.spec.config.outside_code, export.stored.spec.name)
    with values_of(directory / export.evidence_file):
        options = Options.of_export(export.evidence)
        if options.variant != variant:
            raise UsageError(f"the options are those of another variant, {options.variant or PORTABLE}")
        traced = make_graphs(export.stored, options, cached=False)
    entries = {EVIDENCE_KEY: evidence_digest(export.evidence), **metadata_of(export.stored)}
    there = export.read()
    for name, graph in traced.items():
        model = parse(graph)
        annotate(model, entries)
        if there[name] != serialize(model):
            path = directory / export.graph_files[name]
            raise ArtifactError("differs from a new trace of the model", path, _made_with(there[name]))
    return list(export.graph_files.values())


def _made_with(graph: bytes) -> str:
    return f"it was made with {metadata(graph).get('zoo.tools', 'unknown tools')}"


def _open(directory: Path, options: Options, *, force: bool) -> Export:
    export = Export(ModelDirectory.open(directory), options.variant)
    if not force and export.exists:
        file = next(iter(export.graph_files.values()))
        raise UsageError("already exported", directory / file, EXPORT_AGAIN)
    return export
