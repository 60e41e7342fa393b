"""Detection of nodes without a CUDA kernel in ONNX Runtime, without CUDA or a session.

The runtime runs such nodes on the CPU, copying activations to it and back. It also keeps arithmetic on sizes and masks
on the CPU, on purpose and at no cost. The graph is examined as written, because the runtime fuses operators only after
it has assigned providers. A kernel may still reject an attribute; only a CUDA session shows that.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import onnx

from zoo.errors import UsageError
from zoo_export.graph.file import parse

__all__ = ["TypedNode", "nodes_without_kernel", "on_sizes"]

_ABSENT, _UNKNOWN = "", "?"
_WHOLE = {"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
_TELLS_SIZES = {"Shape", "Size"}
"""Operators that only read the shape of their input."""
_LOADED = {"Constant"}
"""Operators that the runtime removes when it loads a graph."""


@dataclass(frozen=True)
class TypedNode:
    """A node with the element types of its inputs and outputs: "" if omitted, "?" if unknown."""

    name: str
    domain: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def on_sizes(self) -> bool:
        """Whether the node only reads and writes integers and booleans, that is, sizes, positions and masks."""
        read = () if self.operator in _TELLS_SIZES else self.inputs
        return all(kind in _WHOLE or kind == _ABSENT for kind in (*read, *self.outputs))


@dataclass(frozen=True)
class _Kernel:
    first: int
    last: int | None
    """Last supported version of the operator; None if only the first."""
    types: Mapping[str, frozenset[str]]
    """Allowed element types by type parameter of the operator."""

    def runs(self, version: int, kinds: Mapping[str, set[str]]) -> bool:
        """Whether the kernel supports an operator version with the given element types by type parameter."""
        if self.first != version and not (self.last is not None and self.first < version <= self.last):
            return False
        return all(kinds.get(parameter, set()) <= allowed for parameter, allowed in self.types.items())


@dataclass(frozen=True)
class _Table:
    first_opset: int
    decomposed: frozenset[str]
    kernels: Mapping[str, Sequence[_Kernel]]


def nodes_without_kernel(graph: bytes) -> list[TypedNode]:
    """Return the nodes of a serialised graph that will run on the CPU, shape arithmetic excepted.

    Functions are inlined and subgraphs included. Non-standard operators count as having no kernel.

    Raises:
        UsageError: the graph's opset is older than the table of kernels.
        ArtifactError: ``graph`` is not an ONNX graph.
    """
    table, model = _read_table(), _typed(graph)
    opset = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), table.first_opset)
    if opset < table.first_opset:
        problem = f"the CUDA kernels of opset {opset} are not known"
        raise UsageError(problem, "the graph", f"export it with opset {table.first_opset} or later")
    return [node for node in _walk(model.graph, {}) if not node.on_sizes and not _has_kernel(node, opset, table)]


def on_sizes(graph: bytes) -> dict[str, bool]:
    """Return whether each node of a serialised graph is shape arithmetic, by node name."""
    return {node.name: node.on_sizes for node in _walk(_typed(graph).graph, {}) if node.name}


def _has_kernel(node: TypedNode, opset: int, table: _Table) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.operator in _LOADED | table.decomposed:
        return True
    try:
        schema = onnx.defs.get_schema(node.operator, opset)
    except onnx.defs.SchemaError:  # no operator of that opset
        return False
    types = _by_parameter(schema, node)
    return any(kernel.runs(schema.since_version, types) for kernel in table.kernels.get(node.operator, ()))


def _by_parameter(schema: onnx.defs.OpSchema, node: TypedNode) -> dict[str, set[str]]:
    """Return the element types of a node's values, by type parameter and by formal parameter of its operator."""
    types: dict[str, set[str]] = {}
    for formals, kinds in ((schema.inputs, node.inputs), (schema.outputs, node.outputs)):
        for place, kind in enumerate(kinds):
            formal = formals[min(place, len(formals) - 1)]  # the last may be variadic
            if kind not in (_ABSENT, _UNKNOWN):
                for parameter in (formal.type_str, formal.name):
                    types.setdefault(parameter, set()).add(kind)
    return types


def _typed(graph: bytes) -> onnx.ModelProto:
    """Parse a graph, inline its functions and infer types."""
    model = parse(graph)
    if model.functions:
        import onnx_ir as ir

        from zoo_export.graph.inline import inline

        plain = ir.from_proto(model)
        inline(plain)
        model = ir.to_proto(plain)
    return onnx.shape_inference.infer_shapes(model)


def _walk(graph: onnx.GraphProto, outer: Mapping[str, str]) -> Iterator[TypedNode]:
    """Yield the nodes of a graph and of its subgraphs, which can read ``outer`` values."""
    kinds = {**outer, **{tensor.name: _name(tensor.data_type) for tensor in graph.initializer}}
    for value in (*graph.value_info, *graph.input, *graph.output):
        kinds[value.name] = _name(value.type.tensor_type.elem_type)
    kinds[""] = _ABSENT
    for node in graph.node:
        inputs, outputs = (tuple(kinds.get(name, _UNKNOWN) for name in names) for names in (node.input, node.output))
        yield TypedNode(node.name, node.domain, node.op_type, inputs, outputs)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _walk(inner, kinds)


def _name(element: int) -> str:
    """Return the name of an element type; 0 means not a tensor, or not inferred."""
    return onnx.TensorProto.DataType.Name(element).lower() if element else _UNKNOWN


@functools.cache
def _read_table() -> _Table:
    data = tomllib.loads(files("zoo_export.graph").joinpath("cuda_kernels.toml").read_text(encoding="utf-8"))
    kernels = {operator: [_kernel(row, data["any"]) for row in rows] for operator, rows in data["kernels"].items()}
    return _Table(data["first_opset"], frozenset(data["decomposed"].split()), kernels)


def _kernel(row: Mapping[str, Any], whatever: str) -> _Kernel:
    types = {key: value for key, value in row.items() if key not in ("first", "last")}
    allowed = {key: frozenset((whatever if value == "any" else value).split()) for key, value in types.items()}
    return _Kernel(row["first"], row.get("last"), allowed)
