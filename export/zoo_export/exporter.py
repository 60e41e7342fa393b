"""From a model directory, or a preset that is not built, to ONNX graphs that point into its safetensors file.

The model is traced without weights, or not at all when the same code and configuration were traced before. Every
initialiser becomes a pointer (file, offset, length), so nothing is stored twice and weights retrained in the same
layout need no new graph. Nothing here imports torch before something has to be traced or compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import cache
from zoo.artifact import (
    ATTENTIONS,
    CARD,
    LOOP,
    PROFILES,
    TOKENIZER,
    Export,
    ModelDirectory,
    declared_graphs,
    describe,
    digest_file,
    export_file,
    new_model,
    write_json,
)
from zoo.card import model_card
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError, UsageError, nearest
from zoo.exporting import Job, export_to
from zoo.registry import ModelSpec
from zoo.weights import StoredTensor
from zoo_export import traces
from zoo_export.evidence import stage_export, unverified, vouching, write_export
from zoo_export.graph_file import EVIDENCE_KEY, annotate, link, metadata, parse, serialize

if TYPE_CHECKING:
    from zoo_export.parity import Progress, Report
    from zoo_export.session import Provider

__all__ = [
    "OPSETS",
    "Options",
    "Request",
    "check_export",
    "export_graphs_only",
    "export_loop",
    "export_model",
    "export_onnx",
    "export_preset",
    "make_graphs",
    "verify_onnx",
]

OPSETS = (23, 24)
"""Versions of the standard operators that graphs are written in: torch translates no newer ones."""
PORTABLE = "portable"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be chosen about a graph."""

    opset: int = None  # type: ignore[assignment]
    """Version of the standard operators; by default the lowest that the profile can be written in."""
    functions: bool = True
    """Whether modules that repeat are functions, in the portable profile."""
    attentions: bool = False
    """Whether the graphs also return their attention weights."""
    profile: str = PORTABLE
    """How the graph is run: ``portable``, or ``cpu`` or ``cuda`` for one that is written for a provider."""

    @property
    def variant(self) -> str:
        """The name of such an export beside others."""
        if self.attentions:
            return ATTENTIONS
        return "" if self.profile == PORTABLE else self.profile

    def __post_init__(self) -> None:
        if self.attentions and self.profile != PORTABLE:
            raise UsageError("attention weights are returned by portable graphs", f"--profile {self.profile}")
        if self.profile not in (PORTABLE, *PROFILES):
            raise UsageError(f"no profile {self.profile!r}", "--profile", nearest(self.profile, (PORTABLE, *PROFILES)))
        known = OPSETS if self.profile == PORTABLE else OPSETS[1:]
        object.__setattr__(self, "opset", known[0] if self.opset is None else self.opset)
        if self.opset not in known:
            what = f"opset {self.opset} is not supported" + (f" in the profile {self.variant}" if self.variant else "")
            raise UsageError(what, "--opset", f"choose one of {known}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What can be chosen about an export."""

    options: Options = Options()
    """How the graphs are written."""
    provider: Provider = "cpu"
    """The execution provider to compare on."""
    whole_grid: bool = False
    """Compare at every point of the grid, however long that takes."""

    @property
    def variant(self) -> str:
        """The name of such an export beside others."""
        return self.options.variant


def export_model(
    directory: Path,
    *,
    options: Options = Options(),
    force: bool = False,
    provider: Provider = "cpu",
    whole_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Export every graph of a model directory beside its weights, once shown equal to the model.

    Args:
        directory: a model directory.
        options: how the graphs are written.
        force: replace an earlier export.
        provider: the execution provider to compare on.
        whole_grid: compare at every point of the grid, however long that takes.
        progress: called with each compared point and their number.

    Returns:
        The evidence, as written to parity.json.

    Raises:
        UsageError: there is an export already, or the provider does not load.
        ArtifactError: the directory is not a sound model.
        PluginError: the model cannot be traced.
        ParityError: the graph is not equal to the model. Nothing is written.
    """
    request = Request(options=options, provider=provider, whole_grid=whole_grid)
    evidence = export_to(directory, "onnx", options=request, force=force, progress=progress).evidence
    from zoo_export.parity import Report

    return Report(dict(evidence))


def export_onnx(job: Job) -> dict[str, Any]:
    """The exporter to ONNX, as the plugin of that name declares it."""
    request = job.options or Request()
    stored, export = job.model, job.model.export(job.variant)
    graphs = make_graphs(stored, request.options)
    from zoo_export.parity import compare  # tracing alone needs no runtime

    where, whole = request.provider, request.whole_grid
    report = compare(stored, graphs, declared=export.graphs, provider=where, whole_grid=whole, progress=job.progress)
    if not report.passed:
        raise ParityError(report.verdict(), stored.path, "nothing was written")
    stage_export(export, job.folder, graphs, report.evidence)
    return report.evidence


def verify_onnx(job: Job) -> dict[str, Any]:
    """Repeat the comparison of an ONNX export."""
    from zoo_export.parity import verify_model

    return verify_model(job.folder, variant=job.variant, progress=job.progress).evidence


def export_loop(directory: Path, *, force: bool = False, provider: Provider = "cpu") -> Report:
    """Export all of generation as one graph, ``generate.onnx``, beside a verified export of the same model.

    Raises:
        UsageError: the model does not generate, or there is such a graph already.
        ParityError: the plain export is not verified, or the loop does not generate what the model does.
    """
    from zoo_export.loop import make_loop, plan_loop

    stored = ModelDirectory.open(directory)
    plan_loop(stored.spec)
    plain, export = stored.export(), stored.export(LOOP)
    plain.check()
    plain.check_verified()
    if export.exists and not force:
        raise UsageError("already exported", directory / export.graph_files[LOOP], "use --force to export again")
    import onnx_ir as ir

    graphs = plain.read()
    made = make_loop(stored.spec, {name: ir.from_proto(parse(graph)) for name, graph in graphs.items()})
    loop = serialize(ir.to_proto(made))
    from zoo_export.loop_parity import compare_loop

    report = compare_loop(stored, graphs, loop, provider=provider)
    if not report.passed:
        raise ParityError(report.verdict(), directory, "nothing was written")
    write_export(export, {LOOP: loop}, report.evidence)
    return report


def export_graphs_only(directory: Path, *, options: Options = Options(), force: bool = False) -> list[str]:
    """Export every graph of a model directory without comparing it with anything, and say so in it.

    Returns the names of the files.
    """
    export = _open(directory, options, force=force)
    stored = export.stored
    layout = stored.layout if stored.weight_files() else _planned_layout(stored.spec, stored.dtype)
    graphs = _linked(stored.spec, stored.dtype, layout, options)
    write_export(export, graphs, unverified(graphs, "exported without a comparison"))
    return list(export.graph_files.values())


def export_preset(spec: ModelSpec, directory: Path, *, options: Options = Options(), force: bool = False) -> list[str]:
    """Export the graphs of a model that is not built, pointing at where its weights will lie. No weight is made.

    Returns the names of the files.
    """
    dtype = "float32"
    layout = _planned_layout(spec, dtype)
    graphs = _linked(spec, dtype, layout, options)
    description = describe(spec, dtype=dtype, seed=0)
    evidence = unverified(graphs, "exported without weights")
    files = {name: export_file(name, options.variant, "onnx") for name in graphs}
    with new_model(directory, description, force=force) as stage:
        evidence_file = stage / export_file("parity", options.variant, "json")
        write_json(evidence_file, {**evidence, "files": sorted(files.values())})
        for name, graph in graphs.items():
            (stage / files[name]).write_bytes(annotate(graph, {EVIDENCE_KEY: digest_file(evidence_file)}))
        if spec.tokenizer is not None:
            from zoo.tokenizer import write_tokenizer

            write_tokenizer(spec.tokenizer, stage / TOKENIZER, getattr(spec.config, "vocab_size", None))
        card = model_card(spec, description, spec.parameters(), "not here yet")
        (stage / CARD).write_text(card, encoding="utf-8")
    return list(files.values())


def check_export(directory: Path, *, options: Options = Options()) -> list[str]:
    """Trace the model again and compare the bytes with the graphs that are there. Returns the names of the files.

    Raises :class:`ArtifactError` where they differ.
    """
    export = ModelDirectory.open(directory).export(options.variant)
    export.check()
    entries = vouching(export.stored, (directory / export.evidence_file).read_bytes())
    there = export.read()
    for name, graph in make_graphs(export.stored, options, cached=False).items():
        if there[name] != annotate(graph, entries):
            path = directory / export.graph_files[name]
            raise ArtifactError("is not what this code exports from this model", path, _made_with(there[name]))
    return list(export.graph_files.values())


def make_graphs(stored: ModelDirectory, options: Options = Options(), *, cached: bool = True) -> dict[str, bytes]:
    """Every declared graph by its name, pointing at the weights, not yet compared with anything."""
    return _linked(stored.spec, stored.dtype, stored.layout, options, cached=cached)


def _linked(
    spec: ModelSpec, dtype: str, layout: Mapping[str, StoredTensor], options: Options, *, cached: bool = True
) -> dict[str, bytes]:
    graphs = unlinked_graphs(spec, dtype, options, cached=cached)
    return {name: link(graph, layout) for name, graph in graphs.items()}


def _made_with(graph: bytes) -> str:
    return f"it was made with {metadata(graph).get('zoo.tools', 'unknown tools')}"


def _open(directory: Path, options: Options, *, force: bool) -> Export:
    export = ModelDirectory.open(directory).export(options.variant)
    if not force and export.exists:
        file = next(iter(export.graph_files.values()))
        raise UsageError("already exported", directory / file, "use --force to export again")
    return export


def unlinked_graphs(spec: ModelSpec, dtype: str, options: Options, *, cached: bool = True) -> dict[str, bytes]:
    """Every declared graph by its name, from the cache or traced, pointing nowhere yet."""
    graphs = declared_graphs(spec, options.variant)
    return {graph.name: _unlinked(spec, graph, dtype, options, cached) for graph in graphs}


def _unlinked(spec: ModelSpec, graph: Graph, dtype: str, options: Options, cached: bool) -> bytes:
    key = traces.key(spec, graph.name, dtype, asdict(options))
    data = cache.read(key) if cached else None
    if data is None:
        if options.profile != PORTABLE:
            from zoo_export.profiles import specialise

            plain = Options(opset=options.opset, functions=False)
            data = specialise(_unlinked(spec, graph, dtype, plain, cached), graph, options.profile)
        else:
            from zoo_export.tracing import trace_graph

            data = trace_graph(spec, graph, dtype, opset=options.opset, functions=options.functions)
        cache.write(key, data)
    return data


def _planned_layout(spec: ModelSpec, dtype: str) -> dict[str, StoredTensor]:
    """Where the model's tensors will lie, from the cache or the model itself."""
    key = traces.key(spec, "layout", dtype, {})
    data = cache.read(key)
    if data is None:
        from zoo import models

        layout = models.plan_layout(spec, dtype)
        cache.write(key, json.dumps({name: astuple(tensor) for name, tensor in layout.items()}).encode())
        return layout
    return {
        name: StoredTensor(file, dtype, tuple(shape), offset, length)
        for name, (file, dtype, shape, offset, length) in json.loads(data).items()
    }
