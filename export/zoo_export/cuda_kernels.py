"""Which nodes of a graph have no kernel of ONNX Runtime's CUDA provider. Neither CUDA nor a session is needed.

The runtime runs such nodes on the CPU and copies activations there and back. Arithmetic on sizes and masks it leaves on
the CPU on purpose, which costs nothing. Judged is the graph as it is written: the runtime puts fused operators in place
of these after it has chosen providers. A kernel may still refuse an attribute; only a session on CUDA tells.
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
from zoo_export.graph_file import inline, parse

__all__ = ["TypedNode", "nodes_without_kernel", "on_sizes"]

_ABSENT, _UNKNOWN = "", "?"
_WHOLE = {"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
_TELLS_SIZES = {"Shape", "Size"}
"""Operators that read no number of their input."""
_LOADED = {"Constant"}
"""Operators that are gone once a graph is loaded."""


@dataclass(frozen=True)
class TypedNode:
    """A node and the element types of what it reads and writes: "" where there is nothing, "?" where nobody knows."""

    name: str
    domain: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def on_sizes(self) -> bool:
        """Whether the node reads and writes no real number: what is left are sizes, positions and masks."""
        read = () if self.operator in _TELLS_SIZES else self.inputs
        return all(kind in _WHOLE or kind == _ABSENT for kind in (*read, *self.outputs))


@dataclass(frozen=True)
class _Kernel:
    first: int
    last: int | None
    """None: for the first version alone."""
    types: Mapping[str, frozenset[str]]
    """What each type parameter of the operator may be."""

    def runs(self, version: int, found: Mapping[str, set[str]]) -> bool:
        """Whether this is a kernel of an operator of that version, with these types of its parameters."""
        if self.first != version and not (self.last is not None and self.first < version <= self.last):
            return False
        return all(found.get(parameter, set()) <= allowed for parameter, allowed in self.types.items())


@dataclass(frozen=True)
class _Table:
    first_opset: int
    decomposed: frozenset[str]
    kernels: Mapping[str, Sequence[_Kernel]]


def nodes_without_kernel(graph: bytes) -> list[TypedNode]:
    """The nodes of a serialised graph that will run on the CPU and are no arithmetic on sizes.

    The bodies of its functions stand for their calls, and the graphs inside nodes are looked into. Operators other than
    the standard ones are not known to have a kernel.

    Raises :class:`UsageError` for standard operators of a version that the table does not reach back to, and
    :class:`ArtifactError` for what is not a graph.
    """
    table, model = _read_table(), _typed(graph)
    opset = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), table.first_opset)
    if opset < table.first_opset:
        what = f"opset {opset} is older than what is known of CUDA's kernels"
        raise UsageError(what, "the graph", f"export it in opset {table.first_opset} or later")
    return [node for node in _walk(model.graph, {}) if not node.on_sizes and not _has_kernel(node, opset, table)]


def on_sizes(graph: bytes) -> dict[str, bool]:
    """By the name of each node of a serialised graph without functions, whether it is arithmetic on sizes."""
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
    found = _by_parameter(schema, node)
    return any(kernel.runs(schema.since_version, found) for kernel in table.kernels.get(node.operator, ()))


def _by_parameter(schema: onnx.defs.OpSchema, node: TypedNode) -> dict[str, set[str]]:
    """The types of a node's values under the names of the operator's type parameters, and of its formal parameters."""
    found: dict[str, set[str]] = {}
    for formals, kinds in ((schema.inputs, node.inputs), (schema.outputs, node.outputs)):
        for place, kind in enumerate(kinds):
            formal = formals[min(place, len(formals) - 1)]  # the last one may stand for many
            if kind not in (_ABSENT, _UNKNOWN):
                for parameter in (formal.type_str, formal.name):
                    found.setdefault(parameter, set()).add(kind)
    return found


def _typed(graph: bytes) -> onnx.ModelProto:
    """A graph without functions, with the types of its values as far as ONNX infers them."""
    model = parse(graph)
    if model.functions:
        import onnx_ir as ir

        plain = ir.from_proto(model)
        inline(plain)
        model = ir.to_proto(plain)
    return onnx.shape_inference.infer_shapes(model)


def _walk(graph: onnx.GraphProto, outer: Mapping[str, str]) -> Iterator[TypedNode]:
    """The nodes of a graph and of the graphs inside them, which see the values around them."""
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
    """The name of an element type; 0 is of what is no tensor, or not inferred."""
    return onnx.TensorProto.DataType.Name(element).lower() if element else _UNKNOWN


@functools.cache
def _read_table() -> _Table:
    data = tomllib.loads(files("zoo_export").joinpath("cuda_kernels.toml").read_text(encoding="utf-8"))
    kernels = {operator: [_kernel(row, data["any"]) for row in rows] for operator, rows in data["kernels"].items()}
    return _Table(data["first_opset"], frozenset(data["decomposed"].split()), kernels)


def _kernel(row: Mapping[str, Any], whatever: str) -> _Kernel:
    types = {key: value for key, value in row.items() if key not in ("first", "last")}
    allowed = {key: frozenset((whatever if value == "any" else value).split()) for key, value in types.items()}
    return _Kernel(row["first"], row.get("last"), allowed)
