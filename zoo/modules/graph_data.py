"""Declared graphs as plain data, from which equal ones are read: for configurations that hold what others declare."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.contract import Graph, KeyValues, Size, States, TensorSpec
from zoo.limits import LAYERS
from zoo.plugins.plain import read_plain

__all__ = ["graph_data", "read_graphs"]

_ITEMS = ("inputs", "outputs", "past")
_PLAIN: Mapping[str, Any] = {
    "name": str,
    "method": str,
    "causal": bool | None,
    "attentions": tuple[TensorSpec, ...],
    "rows": tuple[str, ...],
    "sizes": Mapping[str, Size],
}


def graph_data(graph: Graph) -> dict[str, Any]:
    """Return a graph as JSON data, without the fields that have their default value. :func:`read_graphs` reads it.

    >>> from zoo.contract import floats, token_ids
    >>> graph = Graph(inputs=(token_ids("input_ids", 260),), outputs=(floats("logits", "batch", 3),))
    >>> graph_data(graph)["outputs"], read_graphs([graph_data(graph)]) == (graph,)
    ([{'name': 'logits', 'dims': ['batch', 3]}], True)
    """
    data: dict[str, Any] = _data(graph)
    return data


def _data(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {field.name: (getattr(value, field.name), _default(field)) for field in dataclasses.fields(value)}
        return {name: _data(item) for name, (item, default) in fields.items() if item != default}
    if isinstance(value, Mapping):
        return {key: _data(item) for key, item in value.items()}
    return list(map(_data, value)) if isinstance(value, tuple) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def read_graphs(data: Sequence[Any]) -> tuple[Graph, ...]:
    """Return the graphs that :func:`graph_data` wrote.

    Raises ``ValueError`` for data that declares no graphs, or names of files, methods or tensors that cannot be.
    """
    graphs = tuple(map(_read, data))
    if not graphs:
        raise ValueError("no graph is declared")
    for kind in ("name", "method"):
        if len({getattr(graph, kind) for graph in graphs}) < len(graphs):
            raise ValueError(f"two graphs have the same {kind}")
    return graphs


def _read(data: Any) -> Graph:
    if not isinstance(data, Mapping) or not {"inputs", "outputs"} <= data.keys() <= {*_ITEMS, *_PLAIN}:
        raise ValueError("a graph must have inputs, outputs and other fields of zoo.Graph")
    try:
        values = {name: read_plain(kind, data[name], name) for name, kind in _PLAIN.items() if name in data}
        values |= {name: _read_items(data[name], name) for name in ("inputs", "outputs")}
        if past := data.get("past"):
            values["past"] = _read_item(past, "past") if isinstance(past, Mapping) else _read_items(past, "past")
        graph = Graph(**values)
        _check(graph)
    except RecursionError as error:  # a dimension with thousands of terms
        raise ValueError("a graph is nested too deeply") from error
    return graph


def _read_items(data: Any, where: str) -> tuple[Any, ...]:
    return tuple(_read_item(item, where) for item in read_plain(tuple[Any, ...], data, where))


def _read_item(data: Any, where: str) -> TensorSpec | KeyValues | States:
    keys = data.keys() if isinstance(data, Mapping) else ()
    kind: Any = KeyValues if "num_heads" in keys else States if "states" in keys else TensorSpec
    item: TensorSpec | KeyValues | States = read_plain(kind, data, f"an item of {where}")
    if not isinstance(item, TensorSpec) and item.num_layers > LAYERS.value():
        raise ValueError(f"num_layers must be at most {LAYERS.value()}, got {item.num_layers}")
    return item


def _check(graph: Graph) -> None:
    """Raise ``ValueError`` for names that no file, method or tensor can have, and for two tensors of one name."""
    where = f"graph {graph.name!r}"
    if not re.fullmatch(r"\w[\w-]*", graph.name):
        raise ValueError(f"bad name of {where}: use letters, digits, '-' and '_'")
    if not graph.method.isidentifier() or graph.method.startswith("_"):
        raise ValueError(f"bad method of {where}: {graph.method!r}")
    tensors = (*graph.input_tensors(), *graph.output_tensors())
    names = [tensor.name for tensor in tensors]
    for tensor in tensors:
        if not re.fullmatch(r"\w[\w.]*", tensor.name):
            raise ValueError(f"bad name {tensor.name!r} of a tensor of {where}: use letters, digits, '.' and '_'")
        if names.count(tensor.name) > 1:
            raise ValueError(f"two tensors of {where} are called {tensor.name!r}")
        if not tensor.dims or tensor.dims[0] not in graph.rows:
            raise ValueError(f"the first dimension of {tensor.name} of {where} must be {' or '.join(graph.rows)}")
    for tensor in graph.input_tensors():
        if tensor.dtype in ("int64", "int32") and not tensor.upper:
            raise ValueError(f"{tensor.name} of {where} needs an upper limit of its integers")
