"""The facts of a model that ``zoo show`` prints: configuration, sizes, exports and graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo import plugins
from zoo.artifact import ADAPTER, RECORDED, coverage_summary, find_records
from zoo.cli.output import VERDICTS, echo
from zoo.cli.report import bytes_text, columns
from zoo.contract import Graph, KeyValues, States
from zoo.errors import ArtifactError
from zoo.models.count import parameter_count
from zoo.registry import ModelSpec
from zoo.terminal import one_line
from zoo.training.defaults import preset_defaults

if TYPE_CHECKING:
    from zoo.artifact import ModelDirectory

__all__ = ["describe", "print_facts"]

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def describe_model(spec: ModelSpec) -> dict[str, Any]:
    """Describe a model without allocating its weights."""
    parameters = parameter_count(spec)
    graphs, windowed = (spec.graphs, spec.windowed_graphs) if spec.config.declares_graphs else ((), ())
    pasts = [item for graph in graphs for item in graph.pasts]
    growing = sum(item.elements_per_token() for item in pasts if isinstance(item, KeyValues))
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
        "bytes": {dtype: parameters * size for dtype, size in _ITEM_BYTES.items()},
        "kv_cache_bytes_per_token": {dtype: growing * size for dtype, size in _ITEM_BYTES.items()} if growing else None,
        "kv_cache_bytes_with_windows": _with_windows(windowed),
        "state_bytes": {dtype: fixed * size for dtype, size in _ITEM_BYTES.items()} if fixed else None,
        "flops_per_token": spec.cost.flops if spec.cost else None,
        "graphs": [_graph(graph) for graph in windowed],
    }


def _with_windows(graphs: Sequence[Graph]) -> dict[str, dict[str, int]] | None:
    """Return the bytes of keys and values that grow by a token, and those that full windows hold; None without any."""
    pasts = [item for graph in graphs for item in graph.pasts if isinstance(item, KeyValues)]
    if not any(item.has_windows for item in pasts):
        return None
    growing = sum(item.elements_per_token() for item in pasts)
    longest = max(window or 0 for item in pasts for window in item.windows)
    full = sum(item.elements(longest) - item.elements_per_token() * longest for item in pasts)
    return {
        name: {dtype: elements * size for dtype, size in _ITEM_BYTES.items()}
        for name, elements in (("per_token", growing), ("in_windows", full))
    }


def describe_directory(stored: ModelDirectory) -> dict[str, Any]:
    """Describe a model directory's weights, and its exports with their evidence.

    Nothing that is altered or missing counts as verified. Large weight files are read only if they have changed.
    """
    error = _weight_error(stored)
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


def _weight_error(stored: ModelDirectory) -> str | None:
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


def describe(spec: ModelSpec, stored: ModelDirectory | None) -> dict[str, Any]:
    """Describe a preset, or a model directory with its weights and exports, as JSON data."""
    return describe_model(spec) | (describe_directory(stored) if stored is not None else {})


def print_facts(facts: Mapping[str, Any], stored: ModelDirectory | None) -> None:
    """Print what :func:`describe` returned."""
    title = facts["description"] if stored is None else f"{_kind(stored)} {stored.path}"
    echo(one_line(f"{facts['name']}: {title}"))
    echo(one_line(f"{facts['architecture']} ({facts['reference']}), from {facts['distribution']}") + "\n")
    columns((*facts["config"].items(), *((f"training.{key}", value) for key, value in facts["training"].items())))
    echo()
    columns(list(_size_rows(facts, stored)))
    if facts.get("weight_error"):
        echo(one_line(f"weights not usable: {facts['weight_error']}"))
    for export in facts.get("exports", ()):
        verdict = "verified" if export["verified"] else f"NOT VERIFIED ({export['reason']})"
        shown = (name for name in export["files"] if not name.startswith(f"{RECORDED}."))
        echo(one_line(f"export {', '.join(shown)}: {verdict}"), verdicts=VERDICTS)
        if export["coverage"]:
            echo(f"  {one_line(export['coverage'])}")
    for graph in facts["graphs"]:
        _print_graph(graph)


def _size_rows(facts: Mapping[str, Any], stored: ModelDirectory | None) -> Iterator[tuple[str, str]]:
    """Yield parameters, memory, FLOPs and objectives, each with its title."""
    yield "parameters", f"{facts['parameters']:,}"
    if facts["active_parameters"] not in (None, facts["parameters"]):
        yield "parameters per token", f"{facts['active_parameters']:,}"
    yield (
        "weights",
        _by_dtype(facts["bytes"]) if stored is None else f"{bytes_text(facts['weight_bytes'])} in {stored.dtype}",
    )
    if facts["source"]:
        yield "published weights", f"{facts['source']} (zoo get {facts['name']})"
    if facts["kv_cache_bytes_per_token"]:
        yield "KV cache per token", _by_dtype(facts["kv_cache_bytes_per_token"])
    if facts["state_bytes"]:
        yield "states per sequence", _by_dtype(facts["state_bytes"])
    if limited := facts["kv_cache_bytes_with_windows"]:
        growing = {dtype: bytes_text(size) for dtype, size in limited["per_token"].items()}
        full = {dtype: bytes_text(size) for dtype, size in limited["in_windows"].items()}
        texts = (f"{growing[dtype]} and at most {full[dtype]} per text in {dtype}" for dtype in growing)
        yield "with windows", ", ".join(texts)
    if facts["flops_per_token"]:
        yield "FLOPs per token", f"{facts['flops_per_token']:,} forward, at full context"
    if facts["objectives"]:
        yield "objectives", ", ".join(facts["objectives"])


def _by_dtype(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{bytes_text(size)} in {dtype}" for dtype, size in sizes.items())


def _print_graph(graph: Mapping[str, Any]) -> None:
    """Print the inputs and outputs of a graph, with the keys and values of its first layer only."""
    echo(f"\ngraph {graph['name']}")
    sides = {"in ": graph["inputs"], "out": graph["outputs"]}
    tensors = [(side, *item) for side, named in sides.items() for item in named.items()]
    shown = [row for row in tensors if not (row[1].endswith((".key", ".value")) and ".0." not in row[1])]
    columns([(side, name, f"({', '.join(map(str, dims))})") for side, name, dims in shown])
    if len(shown) < len(tensors):
        echo(f"     and {len(tensors) - len(shown)} tensors of the other layers")
    for name, size in graph["sizes"].items():
        echo(f"     {one_line(f'{name}: {size}')}")
