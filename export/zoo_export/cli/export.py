"""``zoo export``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from zoo.artifact import ADAPTERS, LOOP, PROFILES, SERVING, WEB, Export, ModelDirectory, check_model_target
from zoo.artifact.provenance import base_name
from zoo.cli.model_argument import find_preset
from zoo.cli.options import PATH, Command, force_option, json_option, option, quiet_option
from zoo.cli.output import message
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError
from zoo_export.cli.options import (
    VERIFICATION,
    grid_option,
    model_directory,
    provider_option,
    refuse_onnx_options,
    refuse_options,
    sleep_when_idle,
)
from zoo_export.cli.results import comparing, say_record, say_report, summary

_FORMAT, _GRAPHS, _MODEL = "Format", "ONNX graphs", "Model"


@click.command("export", cls=Command)
@click.argument("model", default=".")
@option("--onnx", is_flag=True, section=_FORMAT, help="Short for --format onnx.")
@option("--format", "format_name", metavar="NAME", section=_FORMAT, help="Format of an installed exporter.")
@option(
    "--option",
    "texts",
    metavar="KEY=VALUE",
    multiple=True,
    section=_FORMAT,
    help="Option of the exporter; for ONNX functions=false.",
)
@option("--opset", type=int, metavar="N", section=_GRAPHS, help="Opset version, from 18 to 24.  [default: 23]")
@option(
    "--fix",
    multiple=True,
    metavar="DIM=SIZE",
    section=_GRAPHS,
    help="Give a free dimension a fixed size, such as batch=1. May be repeated.",
)
@option(
    "--profile",
    type=click.Choice(["portable", *PROFILES, SERVING, WEB]),
    section=_GRAPHS,
    help="'cpu' and 'cuda' update caches in place and are verified on that provider; 'serving' has fixed sizes, and "
    "rows with pasts of their own; 'web' has operators that run on WebGPU in browsers.  [default: portable]",
)
@option("--attentions", is_flag=True, section=_GRAPHS, help="Write graphs that also return attention weights.")
@option(
    "--queries-keys", is_flag=True, section=_GRAPHS, help="With --attentions, also return the queries, keys and biases."
)
@option(
    "--adapter",
    "adapters",
    metavar="[NAME=]DIR",
    multiple=True,
    section=_GRAPHS,
    help="Write the variant 'adapters', in which each row chooses one of these low-rank adapters of the model.",
)
@option(
    "--lora-files",
    is_flag=True,
    section=_GRAPHS,
    help="Also write each adapter as a file of ONNX Runtime's LoraAdapter.",
)
@option("--generate", is_flag=True, section=_GRAPHS, help="Also write generate.onnx, which contains the decoding loop.")
@option(
    "--graph-only",
    is_flag=True,
    section=VERIFICATION,
    help="Skip verification, and do not create weights for a preset. The export is marked unverified.",
)
@provider_option
@grid_option
@option(
    "-o",
    "--output",
    type=PATH,
    metavar="DIR",
    section=_MODEL,
    help="Directory to build a preset in, or to copy the model directory to.",
)
@option("--set", "settings", metavar="KEY=VALUE", multiple=True, section=_MODEL, help="Change a value of the preset.")
@force_option("Replace an earlier export.")
@json_option
@quiet_option
def command(
    model: str,
    onnx: bool,
    format_name: str | None,
    texts: tuple[str, ...],
    opset: int | None,
    fix: tuple[str, ...],
    profile: str | None,
    attentions: bool,
    queries_keys: bool,
    adapters: tuple[str, ...],
    lora_files: bool,
    generate: bool,
    graph_only: bool,
    provider: str,
    grid: str,
    output: Path | None,
    settings: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Export MODEL: a model directory (the current one by default), or a preset, which is built first.

    Files are written only if they match the PyTorch model.
    """
    sleep_when_idle()
    if onnx and format_name not in (None, "onnx"):
        raise UsageError("--onnx means --format onnx", f"--format {format_name}", "choose one of them")
    format_name = "onnx" if onnx else format_name
    if format_name is None:
        raise UsageError("no format", "zoo export", "add --onnx or --format NAME")
    from zoo.exporters import export_to, read_options

    if adapters:
        _export_adapters(model, adapters, lora_files, format_name, provider, grid == "full", force, as_json)
        return
    if lora_files and format_name == "onnx":
        raise UsageError("no adapters to write", "--lora-files", "add --adapter DIR")
    chosen = {}
    if format_name == "onnx":
        given = {"opset": opset, "profile": profile, "attentions": attentions or None, "fix": fix or None}
        given |= {"queries_keys": queries_keys or None, "provider": provider, "grid": grid}
        chosen = {key: value for key, value in given.items() if value is not None}
    else:
        refuse_onnx_options(
            f"--format {format_name}",
            "model",
            "format_name",
            "texts",
            "output",
            "settings",
            "force",
            "as_json",
            "quiet",
        )
    options = read_options(format_name, texts, chosen)
    variant = getattr(options, "variant", "")
    if generate and (graph_only or variant or fix):
        what = "generate.onnx needs a verified portable export without fixed dimensions"
        raise UsageError(what, "--generate", "export it separately")
    if graph_only:
        _export_graphs(model, output, settings, options, force, as_json)
        return
    record = looped = None
    with model_directory(model, output=output, settings=settings, force=force) as (place, directory):
        if not (generate and not force and Export(ModelDirectory.open(place, weights=False)).exists):
            with comparing() as progress:
                record = export_to(place, format_name, options=options, force=force, progress=progress)
        if generate:
            from zoo_export.export import export_loop

            looped = export_loop(place, force=force, provider=provider)  # type: ignore[arg-type]
    files: list[str] = []
    facts: dict[str, Any] = {"verified": True}
    if record is not None:
        record = replace(record, stored=ModelDirectory.open(directory, weights=False))
        if format_name != "onnx":
            say_record(record, format_name, "export", as_json)
            return
        from zoo_export.parity.report import Report

        report, export = Report(dict(record.evidence)), Export(record.stored, variant)
        _warn_of_cpu_nodes(export)
        facts = {**summary(report, variant), "without_functions": _note_missing_functions(export)}
        files = list(facts["files"])
        if not as_json:
            say_report(report, directory, variant)
    if looped is not None:
        files += summary(looped, LOOP)["files"]
        if not as_json:
            say_report(looped, directory, LOOP)
    if as_json:
        emit_json("export", {"directory": str(directory), **facts, "files": files})


def _export_adapters(
    model: str,
    texts: tuple[str, ...],
    lora_files: bool,
    format_name: str,
    provider: str,
    full_grid: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Export a model directory with low-rank adapters."""
    graphs = {"opset", "fix", "profile", "attentions", "queries_keys", "generate", "graph_only"}
    others = {"texts", "settings", "output"} | graphs
    refuse_options("cannot be combined with --adapter", others)
    if format_name != "onnx":
        raise UsageError("--adapter is only for ONNX", f"--format {format_name}", "leave it out")
    adapters: dict[str, Path] = {}
    for text in texts:
        name, separator, place = text.rpartition("=")
        name = name if separator else base_name(Path(place))
        if name in adapters:
            raise UsageError(f"two adapters are called {name!r}", "--adapter", "give other names: NAME=DIR")
        adapters[name] = Path(place)
    from zoo_export.adapters.export import export_adapters

    with comparing() as progress:
        report = export_adapters(
            Path(model),
            adapters,
            lora_files=lora_files,
            force=force,
            provider=provider,  # type: ignore[arg-type]
            full_grid=full_grid,
            progress=progress,
        )
    if as_json:
        facts = {**summary(report, ADAPTERS), "adapters": report.evidence["adapters"]}
        emit_json("export", {"directory": model, **facts})
        return
    say_report(report, Path(model), ADAPTERS)
    for name, facts in report.evidence["adapters"].items():
        say(f"adapter {name}: rank {facts['rank']} in {facts['layers']} layers, at {len(facts['points'])} points")


def _export_graphs(
    model: str, output: Path | None, settings: tuple[str, ...], options: object, force: bool, as_json: bool
) -> None:
    """Export graphs without verification."""
    from zoo_export.export import Request, export_graphs_only, export_preset

    if not isinstance(options, Request):
        raise UsageError("--graph-only is only for ONNX", "zoo export", "leave it out")
    spec = find_preset(model, settings)
    if spec is not None:
        directory = output or Path(spec.name)
        check_model_target(directory, force=force)
        files = export_preset(spec, directory, options=options, force=force)
    else:
        with model_directory(model, output=output, settings=settings, force=force) as (place, directory):
            files = export_graphs_only(place, options=options, force=force)
    verify = f"zoo verify {directory}" + (f" --variant {options.variant}" if options.variant else "")
    message("warning", f"{directory}: {', '.join(files)} NOT VERIFIED: {verify} completes it")
    export = Export(ModelDirectory.open(directory, weights=False), options.variant)
    _warn_of_cpu_nodes(export)
    reasons = _note_missing_functions(export)
    if as_json:
        facts = {"files": files, "verified": False, "without_functions": reasons}
        emit_json("export", {"directory": str(directory), **facts})


def _note_missing_functions(export: Export) -> dict[str, str]:
    """Print why graphs were exported without functions, if they were requested. Return the reasons by graph."""
    from zoo_export.graph.file import without_functions

    graphs = export.read()
    reasons = {name: text for name, graph in graphs.items() for text in without_functions(graph).values()}
    for name, reason in reasons.items():
        which = f"graph {name} is " if len(graphs) > 1 else ""
        message("note", f"{export.stored.path}: {which}exported without functions: {reason}")
    return reasons


def _warn_of_cpu_nodes(export: Export) -> None:
    """Warn of operators without CUDA kernels, in CUDA graphs and in bfloat16 graphs, which cannot use the CPU."""
    if export.variant != "cuda" and export.dtype != "bfloat16":
        return
    from zoo_export.graph.cuda_kernels import nodes_without_kernel
    from zoo_export.graph.file import metadata
    from zoo_export.trace.make import TRACED

    what = "cannot run" if export.dtype == "bfloat16" else "will run partly on the CPU"
    for name, graph in export.read().items():
        if int(metadata(graph)["zoo.opset"]) < TRACED:
            continue  # kernels of older opsets are not listed
        found = Counter(node.operator for node in nodes_without_kernel(graph))
        if found:
            names = ", ".join(f"{count} x {operator}" for operator, count in sorted(found.items()))
            file = f"{export.stored.path}: {export.graph_files[name]}"
            message("warning", f"{file} {what}: CUDA has no kernel for {names}")
