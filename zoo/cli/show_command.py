"""``zoo show``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zoo.cli.output import bytes_text, columns, emit_json, json_option
from zoo.contract import Graph
from zoo.errors import UsageError
from zoo.figure import write_figure
from zoo.registry import ModelSpec, registry

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def describe(spec: ModelSpec) -> dict[str, Any]:
    """All that is known of a model without allocating a weight."""
    parameters = spec.parameters()
    kept = sum(graph.past.elements_per_token() for graph in spec.graphs if graph.past)
    return {
        "name": spec.name,
        "description": spec.description,
        "architecture": spec.architecture.name,
        "reference": spec.architecture.reference,
        "plugin": spec.plugin.name,
        "distribution": spec.plugin.distribution,
        "task": spec.task,
        "tokenizer": spec.tokenizer,
        "config": spec.config.to_dict(),
        "parameters": parameters,
        "bytes": {dtype: parameters * size for dtype, size in ITEM_BYTES.items()},
        "kv_cache_bytes_per_token": {dtype: kept * size for dtype, size in ITEM_BYTES.items()} if kept else None,
        "flops_per_token": spec.cost.flops if spec.cost else None,
        "graphs": [_graph(graph) for graph in spec.graphs],
    }


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "inputs": {tensor.name: list(tensor.dims) for tensor in graph.input_tensors()},
        "outputs": {tensor.name: list(tensor.dims) for tensor in graph.output_tensors()},
        "attentions": {tensor.name: list(tensor.dims) for tensor in graph.attentions},
    }


def _draw(spec: ModelSpec, target: Path, force: bool, as_json: bool) -> None:
    write_figure(spec, target, force=force)
    if as_json:
        emit_json("show", {**describe(spec), "figure": str(target)})
    else:
        click.echo(f"{target}: the parts of {spec.name}, {spec.parameters():,} parameters")


@click.command("show")
@click.argument("name")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a configuration value.")
@click.option(
    "--figure", "target", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw its parts, as SVG, instead."
)
@click.option("--force", is_flag=True, help="Replace an existing figure.")
@json_option
def command(name: str, settings: tuple[str, ...], target: Path | None, force: bool, as_json: bool) -> None:
    """Show the preset NAME: configuration, exact parameter count, memory and FLOPs. No weight is allocated."""
    spec = registry().resolve(name, settings)
    if target is not None:
        _draw(spec, target, force, as_json)
        return
    if force:
        raise UsageError("--force has nothing to replace", None, "name a file with --figure")
    facts = describe(spec)
    if as_json:
        emit_json("show", facts)
        return
    click.echo(f"{facts['name']}: {facts['description']}")
    click.echo(f"{facts['architecture']} ({facts['reference']}), from {facts['distribution']}\n")
    columns(facts["config"].items())
    click.echo()
    sizes = ", ".join(f"{bytes_text(size)} in {dtype}" for dtype, size in facts["bytes"].items())
    rows = [("parameters", f"{facts['parameters']:,}"), ("weights", sizes)]
    if facts["kv_cache_bytes_per_token"]:
        kept = facts["kv_cache_bytes_per_token"]
        rows.append(
            (
                "KV cache per token",
                ", ".join(f"{bytes_text(size)} in {dtype}" for dtype, size in kept.items()),
            )
        )
    if facts["flops_per_token"]:
        rows.append(("FLOPs per token", f"{facts['flops_per_token']:,} forward, at full context"))
    columns(rows)
    for graph in facts["graphs"]:
        click.echo(f"\ngraph {graph['name']}")
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
            click.echo(f"     and the same for the other layers, {len(repeated)} tensors")
