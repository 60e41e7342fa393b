"""Graphs with fixed dimensions."""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx_ir as ir

from zoo.contract import Dim, dim_names, dim_size
from zoo_export.graph.inference import infer_shapes
from zoo_export.graph.metadata import contract, metadata
from zoo_export.graph.rewriting import simplify
from zoo_runtime.serving.names import read_sizes

__all__ = ["fix", "fixed_sizes"]

_KEY = "zoo.fixed"
"""Graph metadata: the sizes of fixed dimensions, by name, as JSON."""


def fix(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """Give dimensions of a graph without functions a fixed size, by name, and fold what depends on it."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(dim if isinstance(dim, int) else _fixed(dim.value, sizes) for dim in value.shape or ())
    count = 0
    while count != len(model.graph):  # a folded size lets more shapes be inferred
        count = len(model.graph)
        model = simplify(infer_shapes(model))
    model.metadata_props.update({"zoo.contract": contract(model), _KEY: json.dumps(dict(sizes))})
    return model


def _fixed(dim: str | None, sizes: Mapping[str, int]) -> Dim | None:
    return dim_size(dim, sizes) if dim and {*dim_names(dim)} <= sizes.keys() else dim


def fixed_sizes(graph: bytes) -> dict[str, int]:
    """Return the sizes of the dimensions that a serialised graph fixes, by name."""
    return read_sizes(metadata(graph).get(_KEY, "{}"))
