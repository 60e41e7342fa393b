"""Removal of nodes that only compute shapes or reshape.

A traced model reshapes its activations (batch, sequence, size) to a matrix before each product and back after it, and
recomputes the sizes in every layer. This makes up half the nodes of a decoder step. After the rewrite, activations stay
matrices between products, and each size is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo_export.graph.inference import inferred
from zoo_export.graph.rewriting import Tape, replace, replace_value

__all__ = ["flatten"]

_ELEMENTWISE = {
    "Gelu",
    "Relu",
    "Tanh",
    "Sigmoid",
    "Softplus",
    "Elu",
    "LeakyRelu",
    "Neg",
    "Identity",
    "Cast",
    "Erf",
    "Sqrt",
    "Exp",
}
"""Elementwise operators with one input."""
_BINARY = {"Add", "Sub", "Mul", "Div"}
_LAST_AXIS = {"LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax"}
"""Operators along one axis, by default the last."""


@dataclass(frozen=True)
class Lead:
    """A leading dimension (any but the last) of a family: values that have all leading dimensions in common."""

    family: int
    axis: int


Content = tuple[int | Lead, ...]
"""The known elements of a vector of sizes."""


def flatten(model: ir.Model) -> ir.Model:
    """Rewrite a graph without functions, in place. The results stay the same, but module boundaries are lost."""
    sizes = _Sizes(model)
    sizes.share()
    _Matrices(model, sizes).rewrite()
    return model


class _Sizes:
    """Analysis of sizes: families of values with the same leading dimensions, and contents of size vectors."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.order = {node: number for number, node in enumerate(model.graph)}
        self.shared: dict[Content, ir.Value] = {}
        """The shared value of each vector of sizes."""
        typed = inferred(model).graph
        self.shapes: dict[str, list[int | None]] = {}
        """Shapes by value name, with None for dynamic dimensions."""
        for value in (*typed.value_info, *typed.input, *typed.output):
            if value.type.tensor_type.HasField("shape"):
                dims = value.type.tensor_type.shape.dim
                self.shapes[value.name] = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
        for name, item in model.graph.initializers.items():
            self.shapes[str(name)] = [dim if isinstance(dim, int) else None for dim in item.shape or ()]
        self.families: dict[ir.Value, int] = {}
        self.leads: dict[int, Content] = {}
        """Leading dimensions of each family."""
        self.contents: dict[ir.Value, Content] = {}
        self.vectors: dict[ir.Value, bool] = {}
        for node in model.graph:
            self._follow(node)

    def last(self, value: ir.Value) -> int | None:
        """Return the last dimension, or None if it is dynamic or unknown."""
        shape = self.shapes.get(str(value.name))
        return shape[-1] if shape else None

    def rank(self, value: ir.Value) -> int | None:
        """Return the number of dimensions, or None if unknown."""
        shape = self.shapes.get(str(value.name))
        return None if shape is None else len(shape)

    def family(self, value: ir.Value) -> int:
        """Return the family of a value, a new one if unknown."""
        return self.families.setdefault(value, len(self.families))

    def lead(self, value: ir.Value) -> Content | None:
        """Return the leading dimensions of a value, or None if its rank is unknown."""
        family, shape = self.family(value), self.shapes.get(str(value.name))
        if family not in self.leads and shape:
            self.leads[family] = tuple(
                Lead(family, axis) if size is None else size for axis, size in enumerate(shape[:-1])
            )
        return self.leads.get(family)

    def _follow(self, node: ir.Node) -> None:
        out = node.outputs[0]
        data = [value for value in node.inputs if value is not None]
        content = self._content(node, data)
        if content is not None:
            self.contents[out] = content
        elif node.op_type in _ELEMENTWISE or (node.op_type in _LAST_AXIS and self.works_along_last(node)):
            self.families[out] = self.family(data[0])
        elif node.op_type in _BINARY:
            partner = self.same_lead(*data)
            if partner is not None:
                self.families[out] = self.family(partner)
        elif node.op_type == "Reshape":
            *lead, last = self.contents.get(data[1]) or (None,)
            family = next((item.family for item in lead if isinstance(item, Lead)), None)
            if family is not None and tuple(lead) == self.leads[family] and isinstance(last, int):
                self.families[out] = family

    def works_along_last(self, node: ir.Node) -> bool:
        """Whether an operator along one axis uses the last axis."""
        rank = self.rank(node.inputs[0]) if node.inputs[0] is not None else None
        return node.attributes.get_int("axis", -1) in (-1, (rank or 0) - 1)

    def same_lead(self, one: ir.Value, other: ir.Value) -> ir.Value | None:
        """Return the operand with the leading dimensions of the result, or None if unknown."""
        if self.rank(other) is not None and self.rank(other) in (0, 1) and (self.rank(one) or 0) > 1:
            return one
        if self.rank(one) is not None and self.rank(one) in (0, 1) and (self.rank(other) or 0) > 1:
            return other
        same = one in self.families and self.families.get(one) == self.families.get(other)
        return one if same and self.last(one) == self.last(other) is not None else None

    def _content(self, node: ir.Node, data: Sequence[ir.Value]) -> Content | None:
        kind, out = node.op_type, node.outputs[0]
        if kind == "Constant":
            item = out.const_value or ir.convenience.get_const_tensor(out)
            array = None if item is None else item.numpy()
            if array is None or array.dtype != np.int64 or array.ndim > 1:
                return None
            self.vectors[out] = array.ndim == 1
            return tuple(int(item) for item in array.reshape(-1))
        if kind == "Shape":
            shape, lead = self.shapes.get(str(data[0].name)), self.lead(data[0])
            if shape is None or lead is None or len(shape) < 2:
                return None
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(shape))
            start, end = (place + len(shape) if place < 0 else place for place in (start, end))
            self.vectors[out] = True
            sizes = [*lead, shape[-1]][start:end]
            return None if None in sizes else tuple(item for item in sizes if item is not None)
        contents = [self.contents.get(value) for value in data]
        if kind == "Concat" and all(item is not None for item in contents):
            self.vectors[out] = True
            return tuple(element for item in contents if item is not None for element in item)
        if kind in ("Squeeze", "Unsqueeze", "Reshape", "Identity") and self.rank(out) in (0, 1):
            self.vectors[out] = self.rank(out) == 1
            return contents[0] if contents and contents[0] is not None and len(contents[0]) == 1 else None
        return None

    def share(self) -> None:
        """Compute each vector of sizes only once, from the first value of its family."""
        roots = {number: value for value, number in reversed(self.families.items())}
        for value, content in tuple(self.contents.items()):
            if self.vectors[value] and any(isinstance(item, Lead) for item in content) and not value.is_graph_output():
                value.replace_all_uses_with(self._vector(content, roots))
        passes.RemoveUnusedNodesPass()(self.model)

    def _vector(self, content: Content, roots: Mapping[int, ir.Value]) -> ir.Value:
        if content not in self.shared:
            families = {item.family for item in content if isinstance(item, Lead)}
            last = max((roots[number] for number in families), key=self._place)
            maker = last.producer()
            tape = Tape(self.graph[0], after=False) if maker is None else Tape(maker, after=True)
            parts = [
                tape.integers(item)
                if isinstance(item, int)
                else tape.op("Shape", roots[item.family], start=item.axis, end=item.axis + 1)
                for item in content
            ]
            value = tape.op("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]
            self.shared[content], self.contents[value] = value, content
        return self.shared[content]

    def _place(self, value: ir.Value) -> int:
        maker = value.producer()
        return -1 if maker is None else self.order[maker]

    def shape_of(self, value: ir.Value) -> ir.Value | None:
        """Return a vector with the shape of a value, or None if the graph has none."""
        last, lead = self.last(value), self.leads.get(self.families.get(value, -1))
        return None if last is None or lead is None else self.shared.get((*lead, last))


class _Matrices:
    """Rewriting of activations (..., size) as matrices (rows, size)."""

    def __init__(self, model: ir.Model, sizes: _Sizes) -> None:
        self.graph = model.graph
        self.sizes = sizes
        self.flat: dict[ir.Value, ir.Value] = {}
        """Matrix with the same elements, by activation."""

    def rewrite(self) -> None:
        """Convert all suitable nodes, in order, to work on matrices; then remove unused nodes."""
        for node in tuple(self.graph):
            self._visit(node)
        for value, matrix in reversed(self.flat.items()):
            maker = value.producer()
            assert maker is not None
            if maker.op_type == "Reshape" or any(user is matrix.producer() for user, _ in value.uses()):
                continue  # already a reshape of the matrix, or its source
            if value.uses() or value.is_graph_output():
                self._restore(value, matrix)
            self.graph.remove(maker, safe=True)

    def _visit(self, node: ir.Node) -> None:
        out = node.outputs[0]
        data = [value for value in node.inputs if value is not None]
        if node.op_type == "Reshape":
            self._reshape(node, data[0], data[1], out)
        elif not self._usable(out):
            return
        elif node.op_type in _ELEMENTWISE or (node.op_type in _LAST_AXIS and self.sizes.works_along_last(node)):
            if data[0] in self.flat:
                self._copy(node, [self.flat[data[0]], *data[1:]])
        elif node.op_type in _BINARY:
            partner = self.sizes.same_lead(*data)
            if partner is None or not any(value in self.flat for value in data):
                return
            small = [value for value in data if self.sizes.rank(value) in (0, 1)]
            if small:
                self._copy(node, [value if value in small else self.flat[value] for value in data])
            else:
                self._copy(node, [self._matrix(value, node) for value in data])

    def _usable(self, out: ir.Value) -> bool:
        """Whether a value can be restored from its matrix."""
        node = out.producer()
        return node is not None and len(node.outputs) == 1 and self.sizes.shape_of(out) is not None

    def _reshape(self, node: ir.Node, value: ir.Value, target: ir.Value, out: ir.Value) -> None:
        sizes = self.sizes.contents.get(target)
        if sizes is None or 0 in sizes:
            return
        size = self.sizes.last(value)
        if value in self.flat and sizes == (-1, size):
            replace(node, self.flat[value])
            return
        inner = value.producer()
        if value in self.flat:
            node.replace_input_with(0, self.flat[value])
        elif inner is not None and inner.op_type == "Reshape":
            node.replace_input_with(0, inner.inputs[0])
        elif self.sizes.rank(value) == 2 and out in self.sizes.families and size is not None and sizes[-1] == size:
            self.flat[out] = value

    def _copy(self, node: ir.Node, inputs: Sequence[ir.Value]) -> None:
        """Add a copy of the node that works on matrices."""
        matrix = Tape(node, after=True).like(node, inputs)
        maker = matrix.producer()
        if node.op_type in _LAST_AXIS and maker is not None:
            maker.attributes["axis"] = ir.AttrInt64("axis", -1)
        self.flat[node.outputs[0]] = matrix

    def _matrix(self, value: ir.Value, reader: ir.Node) -> ir.Value:
        if value not in self.flat:
            size = self.sizes.last(value)
            assert size is not None
            tape = Tape(reader, after=False)
            self.flat[value] = tape.op("Reshape", value, tape.integers(-1, size))
        return self.flat[value]

    def _restore(self, value: ir.Value, matrix: ir.Value) -> None:
        """Reshape the matrix back for nodes that need the activation in its original form."""
        shape = self.sizes.shape_of(value)
        assert shape is not None  # see _usable
        restored = Tape(matrix.producer(), after=True).op("Reshape", matrix, shape)
        replace_value(value, restored)
