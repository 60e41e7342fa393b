"""The jobs of ``zoo export --onnx``: verified graphs, graphs alone, and graphs with adapters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from zoo.artifact import ADAPTERS, LOOP, Export, ModelDirectory, check_model_target
from zoo.artifact.provenance import base_name
from zoo.cli.model_argument import find_preset
from zoo.cli.output import message
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError
from zoo.exporters import export_to
from zoo_export.cli.options import refuse_options
from zoo_export.cli.results import comparing, say_report, summary
from zoo_export.cli.target import Target
from zoo_export.comparison import Comparison
from zoo_export.export import Request, export_graphs_only, export_preset, export_variant
from zoo_export.graph.cuda_kernels import nodes_without_kernel
from zoo_export.graph.metadata import metadata, without_functions
from zoo_export.parity.report import Report
from zoo_export.trace.make import TRACED
from zoo_export.variants import recipe_of

__all__ = ["export_adapters", "export_graphs", "export_onnx"]


def export_onnx(target: Target, request: Request, comparison: Comparison, *, generate: bool) -> None:
    """Export graphs that are verified and, with ``generate``, the one with the decoding loop."""
    report = looped = None
    with target.directory() as (place, directory):
        if not (generate and not target.force and Export(ModelDirectory.open(place, weights=False)).exists):
            with comparing() as progress:
                record = export_to(place, "onnx", options=request, force=target.force, progress=progress)
            report = Report(dict(record.evidence))
        if generate:
            looped = export_variant(place, recipe_of(LOOP), comparison, force=target.force)[1]
    facts: dict[str, Any] = {"verified": True, "files": []}
    if report is not None:
        export = Export(ModelDirectory.open(directory, weights=False), request.variant)
        _warn_of_cpu_nodes(export)
        facts = {**summary(report, request.variant), "without_functions": _note_missing_functions(export)}
        if not target.as_json:
            say_report(report, directory, request.variant)
    if looped is not None:
        facts["files"] = [*facts["files"], *summary(looped, LOOP)["files"]]
        if not target.as_json:
            say_report(looped, directory, LOOP)
    if target.as_json:
        emit_json("export", {"directory": str(directory), **facts})


def export_adapters(
    target: Target, texts: tuple[str, ...], lora_files: bool, format_name: str, comparison: Comparison
) -> None:
    """Export a model directory with low-rank adapters."""
    graphs = {"opset", "fix", "profile", "attentions", "queries_keys", "generate", "graph_only"}
    refuse_options("cannot be combined with --adapter", {"texts", "settings", "output"} | graphs)
    if format_name != "onnx":
        raise UsageError("--adapter is only for ONNX", f"--format {format_name}", "leave it out")
    adapters: dict[str, Path] = {}
    for text in texts:
        name, separator, place = text.rpartition("=")
        name = name if separator else base_name(Path(place))
        if name in adapters:
            raise UsageError(f"two adapters are called {name!r}", "--adapter", "give other names: NAME=DIR")
        adapters[name] = Path(place)
    recipe = recipe_of(ADAPTERS, adapters=adapters, lora_files=lora_files)
    with comparing() as progress:
        _, report = export_variant(
            Path(target.model), recipe, replace(comparison, progress=progress), force=target.force
        )
    if target.as_json:
        facts = {**summary(report, ADAPTERS), "adapters": report.evidence["adapters"]}
        emit_json("export", {"directory": target.model, **facts})
        return
    say_report(report, Path(target.model), ADAPTERS)
    for name, facts in report.evidence["adapters"].items():
        say(f"adapter {name}: rank {facts['rank']} in {facts['layers']} layers, at {len(facts['points'])} points")


def export_graphs(target: Target, request: Request) -> None:
    """Export graphs without verification."""
    spec = find_preset(target.model, target.settings)
    if spec is not None:
        directory = target.output or Path(spec.name)
        check_model_target(directory, force=target.force)
        files = export_preset(spec, directory, options=request, force=target.force)
    else:
        with target.directory() as (place, directory):
            files = export_graphs_only(place, options=request, force=target.force)
    verify = f"zoo verify {directory}" + (f" --variant {request.variant}" if request.variant else "")
    message("warning", f"{directory}: {', '.join(files)} NOT VERIFIED: {verify} completes it")
    export = Export(ModelDirectory.open(directory, weights=False), request.variant)
    _warn_of_cpu_nodes(export)
    reasons = _note_missing_functions(export)
    if target.as_json:
        facts = {"files": files, "verified": False, "without_functions": reasons}
        emit_json("export", {"directory": str(directory), **facts})


def _note_missing_functions(export: Export) -> dict[str, str]:
    """Print why graphs were exported without functions, if they were requested. Return the reasons by graph."""
    graphs = export.read()
    reasons = {name: text for name, graph in graphs.items() for text in without_functions(graph).values()}
    for name, reason in reasons.items():
        which = f"graph {name} is " if len(graphs) > 1 else ""
        message("note", f"{export.stored.path}: {which}exported without functions: {reason}")
    return reasons


def _warn_of_cpu_nodes(export: Export) -> None:
    """Warn of operators without CUDA kernels, in CUDA graphs and in bfloat16 graphs, which cannot use the CPU."""
    if export.traits.provider != "cuda" and export.dtype != "bfloat16":
        return
    consequence = "cannot run" if export.dtype == "bfloat16" else "will run partly on the CPU"
    for name, graph in export.read().items():
        if int(metadata(graph)["zoo.opset"]) < TRACED:
            continue  # kernels of older opsets are not listed
        missing = Counter(node.operator for node in nodes_without_kernel(graph))
        if missing:
            names = ", ".join(f"{count} x {operator}" for operator, count in sorted(missing.items()))
            file = f"{export.stored.path}: {export.graph_files[name]}"
            message("warning", f"{file} {consequence}: CUDA has no kernel for {names}")
