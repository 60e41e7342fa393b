"""``zoo show``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo import plugins
from zoo.artifact import ADAPTER, coverage_summary, find_records
from zoo.cli import figures
from zoo.cli.model_argument import find_model
from zoo.cli.options import PATH, json_option
from zoo.cli.output import echo
from zoo.cli.report import bytes_text, columns, emit_json
from zoo.contract import Graph, KeyValues, States
from zoo.errors import ArtifactError, UsageError
from zoo.models.count import parameter_count
from zoo.registry import ModelSpec
from zoo.terminal import one_line
from zoo.training.defaults import preset_defaults

if TYPE_CHECKING:
    from zoo.artifact import ModelDirectory

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def describe(spec: ModelSpec) -> dict[str, Any]:
    """Describe a model without allocating its weights."""
    parameters = parameter_count(spec)
    pasts = [item for graph in spec.graphs for item in graph.pasts]
    kept = sum(item.elements_per_token() for item in pasts if isinstance(item, KeyValues))
    fixed = sum(item.elements() for item in pasts if isinstance(item, States))
    return {
        "name": spec.name,
        "description": spec.description,
        "architecture": spec.architecture.name,
        "reference": spec.architecture.reference,
        "plugin": spec.plugin.name,
        "distribution": spec.plugin.distribution,
        "task": spec.task,
        "objectives": [item.name for _, item in plugins.active().objectives() if spec.task in item.tasks],
        "tokenizer": spec.tokenizer,
        "source": spec.source,
        "config": spec.config.to_dict(),
        "training": preset_defaults(spec),
        "parameters": parameters,
        "active_parameters": spec.cost.active if spec.cost else None,
        "bytes": {dtype: parameters * size for dtype, size in ITEM_BYTES.items()},
        "kv_cache_bytes_per_token": {dtype: kept * size for dtype, size in ITEM_BYTES.items()} if kept else None,
        "kv_cache_bytes_with_windows": _with_windows(spec),
        "state_bytes": {dtype: fixed * size for dtype, size in ITEM_BYTES.items()} if fixed else None,
        "flops_per_token": spec.cost.flops if spec.cost else None,
        "graphs": [_graph(graph) for graph in spec.windowed_graphs],
    }


def _with_windows(spec: ModelSpec) -> dict[str, dict[str, int]] | None:
    """Return the bytes of keys and values that grow by a token, and those that full windows hold; None without any."""
    pasts = [item for graph in spec.windowed_graphs for item in graph.pasts if isinstance(item, KeyValues)]
    if not any(item.has_windows for item in pasts):
        return None
    growing = sum(item.elements_per_token() for item in pasts)
    longest = max(window or 0 for item in pasts for window in item.windows)
    full = sum(item.elements(longest) - item.elements_per_token() * longest for item in pasts)
    return {
        name: {dtype: elements * size for dtype, size in ITEM_BYTES.items()}
        for name, elements in (("per_token", growing), ("in_windows", full))
    }


def describe_directory(stored: ModelDirectory) -> dict[str, Any]:
    """Describe a model directory's weights, and its exports with their evidence.

    Nothing that is altered or missing counts as verified. Large weight files are read only if they have changed.
    """
    error = _error(stored)
    doubts = [(record, "the weights are not usable" if error else record.doubt()) for record in find_records(stored)]
    return {
        "directory": str(stored.path),
        "dtype": stored.dtype,
        "weight_bytes": sum(
            stored.files[name]["size"] for name in (*stored.weight_files(), ADAPTER) if name in stored.files
        ),
        "weight_error": error,
        "exports": [
            {
                "evidence": record.evidence_file,
                "files": record.files,
                "verified": doubt is None,
                "reason": doubt,
                "coverage": coverage_summary(record.evidence) if record.stem == "parity" and doubt is None else None,
            }
            for record, doubt in doubts
        ],
    }


def _error(stored: ModelDirectory) -> str | None:
    """Return the error with which the weights cannot be loaded, or None."""
    try:
        type(stored).open(stored.path)
    except ArtifactError as error:
        return str(error)
    return None


def _kind(stored: ModelDirectory) -> str:
    """Return what a directory holds, as a title."""
    adapter = stored.description.get("adapter")
    return f"adapter of {adapter['base']}, in" if isinstance(adapter, dict) and "base" in adapter else "model directory"


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "inputs": {tensor.name: list(tensor.dims) for tensor in graph.input_tensors()},
        "outputs": {tensor.name: list(tensor.dims) for tensor in graph.output_tensors()},
        "attentions": {tensor.name: list(tensor.dims) for tensor in graph.attentions},
        "sizes": {name: str(size) for name, size in graph.sizes.items()},
    }


def _write_page(
    stored: ModelDirectory, texts: Sequence[str], target: Path, force: bool, as_json: bool, **options: Any
) -> None:
    """Write an attention page and say what it has."""
    from zoo.figures.attention_page import attention_page, check_page

    check_page(target, force=force)
    page = attention_page(stored.path, *texts, **options)
    page.write(target, force=force)
    size, evidence = target.stat().st_size, page.facts["evidence"]
    maps, heads = len(page.facts["maps"]), sum(len(item["heads"]) for item in page.facts["maps"])
    if as_json:
        error = page.facts["error"]
        emit_json("show", {"attention": str(target), "bytes": size, "maps": maps, "error": error, "evidence": evidence})
        return
    verdict = "verified" if evidence["verified"] else f"NOT VERIFIED ({evidence['reason']})"
    echo(one_line(f"{target}: {maps} layers, {heads} heads, {verdict}, {bytes_text(size)}"))


def _facts(spec: ModelSpec, stored: ModelDirectory | None) -> dict[str, Any]:
    return describe(spec) | (describe_directory(stored) if stored is not None else {})


@click.command("show")
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a configuration value.")
@click.option("--figure", type=PATH, metavar="FILE", help="Write a figure instead: .svg, or .png of a plot.")
@click.option(
    "--of", "kind", type=click.Choice(list(figures.KINDS)), help=f"What the figure shows.  [default: {figures.MODULES}]"
)
@click.option("--variant", metavar="NAME", help="Variant of the export to plot.  [default: the plain one]")
@click.option(
    "--layer", type=click.IntRange(min=0), metavar="N", multiple=True, help="Layer to show, from 0. May be repeated."
)
@click.option(
    "--head", type=click.IntRange(min=0), metavar="N", multiple=True, help="Head to show, from 0. May be repeated."
)
@click.option("--token", type=int, metavar="N", help="Token of TEXT to plot, from 0, or from the end if negative.")
@click.option(
    "--attention",
    is_flag=True,
    help="Write a page with the attention weights of TEXT, of a pair, or of an image or sound file and its text.",
)
@click.option("-o", "--output", type=PATH, metavar="FILE.html", help="The page to write.")
@click.option(
    "--generate", type=click.IntRange(min=1), metavar="N", help="Generate N tokens first, and show each step."
)
@click.option("--queries-keys", is_flag=True, help="Also put the queries and keys on the page, if they were exported.")
@click.option("--unverified", is_flag=True, help="Show the attention of an export that is not verified.")
@click.option("--force", is_flag=True, help="Replace an existing figure or page.")
@json_option
def command(
    model: str,
    texts: tuple[str, ...],
    settings: tuple[str, ...],
    figure: Path | None,
    kind: str | None,
    variant: str | None,
    layer: tuple[int, ...],
    head: tuple[int, ...],
    token: int | None,
    attention: bool,
    output: Path | None,
    generate: int | None,
    queries_keys: bool,
    unverified: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Show MODEL, a preset or a model directory: configuration, exact parameter count, memory, FLOPs and graphs.

    No weights are allocated, except to plot them or what they compute. For a directory, exports are shown too, and its
    files are compared with the manifest.
    """
    if attention and figure is not None:
        raise UsageError("both --attention and --figure", None, "choose one of them")
    if figure is None:
        for option, given in {"--of": kind, "--variant": variant, "--token": token}.items():
            if given is not None:
                raise UsageError(f"{option} applies to --figure only", None, "name a file with --figure")
    if not attention:
        for option, chosen in {"--layer": layer, "--head": head}.items():
            if chosen and figure is None:
                raise UsageError(
                    f"{option} applies to --figure and --attention only", None, "name a file with --figure"
                )
        for name, value in (
            (f"the argument {texts[0]!r}" if texts else "", texts if figure is None else ()),
            ("--output", output),
            ("--generate", generate),
            ("--queries-keys", queries_keys),
            ("--unverified", unverified and figure is None),
        ):
            if value:
                raise UsageError(f"{name} applies to --attention only", None, "add --attention")
    spec, stored = find_model(model, settings)
    if attention:
        if stored is None or settings:
            raise UsageError("attention is shown for a model directory as it is", model, f"zoo build {model}")
        if output is None:
            raise UsageError("no file for the page", "--attention", "name one with -o FILE.html")
        _write_page(
            stored, texts, output, force, as_json, generate=generate or 0, unverified=unverified, layers=layer,
            heads=head, queries_keys=queries_keys,
        )  # fmt: skip
        return
    if figure is not None:
        figures.write(
            kind or figures.MODULES, figure, spec, stored, texts, describe=lambda: _facts(spec, stored), force=force,
            as_json=as_json, variant=variant, layer=layer, head=head, token=token,
            unverified=unverified,
        )  # fmt: skip
        return
    if force:
        raise UsageError("--force applies to --figure and --attention only", None, "name a file with --figure")
    facts = _facts(spec, stored)
    if as_json:
        emit_json("show", facts)
        return
    title = facts["description"] if stored is None else f"{_kind(stored)} {stored.path}"
    echo(one_line(f"{facts['name']}: {title}"))
    echo(one_line(f"{facts['architecture']} ({facts['reference']}), from {facts['distribution']}") + "\n")
    columns((*facts["config"].items(), *((f"training.{key}", value) for key, value in facts["training"].items())))
    echo()
    sizes = ", ".join(f"{bytes_text(size)} in {dtype}" for dtype, size in facts["bytes"].items())
    if stored is not None:
        sizes = f"{bytes_text(facts['weight_bytes'])} in {stored.dtype}"
    rows = [("parameters", f"{facts['parameters']:,}"), ("weights", sizes)]
    if facts["active_parameters"] not in (None, facts["parameters"]):
        rows.insert(1, ("parameters per token", f"{facts['active_parameters']:,}"))
    if facts["source"]:
        rows.append(("published weights", f"{facts['source']} (zoo get {facts['name']})"))
    for title, key in (("KV cache per token", "kv_cache_bytes_per_token"), ("states per sequence", "state_bytes")):
        if facts[key]:
            rows.append((title, ", ".join(f"{bytes_text(size)} in {dtype}" for dtype, size in facts[key].items())))
    if limited := facts["kv_cache_bytes_with_windows"]:
        pairs = ((dtype, size, limited["in_windows"][dtype]) for dtype, size in limited["per_token"].items())
        kept = (f"{bytes_text(size)} and at most {bytes_text(full)} per text in {dtype}" for dtype, size, full in pairs)
        rows.append(("with windows", ", ".join(kept)))
    if facts["flops_per_token"]:
        rows.append(("FLOPs per token", f"{facts['flops_per_token']:,} forward, at full context"))
    if facts["objectives"]:
        rows.append(("objectives", ", ".join(facts["objectives"])))
    columns(rows)
    if facts.get("weight_error"):
        echo(one_line(f"weights not usable: {facts['weight_error']}"))
    for export in facts.get("exports", ()):
        verdict = "verified" if export["verified"] else f"NOT VERIFIED ({export['reason']})"
        echo(one_line(f"export {', '.join(export['files'])}: {verdict}"))
        if export["coverage"]:
            echo(f"  {one_line(export['coverage'])}")
    for graph in facts["graphs"]:
        echo(f"\ngraph {graph['name']}")
        shown = [("in ", *item) for item in graph["inputs"].items()] + [
            ("out", *item) for item in graph["outputs"].items()
        ]
        repeated = [row for row in shown if row[1].endswith((".key", ".value")) and ".0." not in row[1]]
        columns(
            [
                (side, tensor, f"({', '.join(map(str, dims))})")
                for side, tensor, dims in shown
                if (side, tensor, dims) not in repeated
            ]
        )
        if repeated:
            echo(f"     and {len(repeated)} tensors of the other layers")
        for name, size in graph["sizes"].items():
            echo(f"     {one_line(f'{name}: {size}')}")
