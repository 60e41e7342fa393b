"""Doing away with the nodes that only compute shapes.

A traced model keeps its activations as (batch, sequence, size), makes each a matrix before a product and turns it back
after, and works out the sizes for that anew in every layer: half of the nodes of a decoder's step. Here activations
stay matrices from product to product, and sizes are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo_export.rewriting import Tape, replace, replace_value

__all__ = ["flatten"]

_ALIKE = {
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
"""Operators of one input that treat every number alike."""
_BOTH = {"Add", "Sub", "Mul", "Div"}
_LAST_AXIS = {"LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax"}
"""Operators along one axis, the last unless said otherwise."""


@dataclass(frozen=True)
class Lead:
    """One dimension before the last, of a family of values that have all of those in common."""

    family: int
    axis: int


Content = tuple[int | Lead, ...]
"""What is known of a vector of sizes."""


def flatten(model: ir.Model) -> None:
    """Rewrite a graph without functions. What it computes stays the same, module by module it can no longer be seen."""
    sizes = _Sizes(model)
    sizes.share()
    _Matrices(model, sizes).rewrite()


class _Sizes:
    """Which values have all dimensions but the last in common, and what vectors of sizes hold."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph
        self.order = {node: number for number, node in enumerate(model.graph)}
        self.shared: dict[Content, ir.Value] = {}
        """The one value that holds each vector of sizes."""
        inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True).graph
        self.shapes: dict[str, list[int | None]] = {}
        """The dimensions of each value by its name, as far as they are fixed."""
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            if value.type.tensor_type.HasField("shape"):
                dims = value.type.tensor_type.shape.dim
                self.shapes[value.name] = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
        for name, item in model.graph.initializers.items():
            self.shapes[str(name)] = [dim if isinstance(dim, int) else None for dim in item.shape or ()]
        self.families: dict[ir.Value, int] = {}
        self.leads: dict[int, Content] = {}
        """For each family, all dimensions of its values but the last."""
        self.contents: dict[ir.Value, Content] = {}
        self.vectors: dict[ir.Value, bool] = {}
        for node in model.graph:
            self._follow(node)

    def last(self, value: ir.Value) -> int | None:
        """The last dimension where it is a fixed one."""
        shape = self.shapes.get(str(value.name))
        return shape[-1] if shape else None

    def rank(self, value: ir.Value) -> int | None:
        """The number of dimensions."""
        shape = self.shapes.get(str(value.name))
        return None if shape is None else len(shape)

    def family(self, value: ir.Value) -> int:
        """The family of a value, a new one where none is known."""
        return self.families.setdefault(value, len(self.families))

    def lead(self, value: ir.Value) -> Content | None:
        """All dimensions of a value but the last; None where not even their number is known."""
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
        elif node.op_type in _ALIKE or (node.op_type in _LAST_AXIS and self.works_along_last(node)):
            self.families[out] = self.family(data[0])
        elif node.op_type in _BOTH:
            partner = self.same_lead(*data)
            if partner is not None:
                self.families[out] = self.family(partner)
        elif node.op_type == "Reshape":
            *lead, last = self.contents.get(data[1]) or (None,)
            family = next((item.family for item in lead if isinstance(item, Lead)), None)
            if family is not None and tuple(lead) == self.leads[family] and isinstance(last, int):
                self.families[out] = family

    def works_along_last(self, node: ir.Node) -> bool:
        """Whether an operator along one axis takes the last."""
        rank = self.rank(node.inputs[0]) if node.inputs[0] is not None else None
        return node.attributes.get_int("axis", -1) in (-1, (rank or 0) - 1)

    def same_lead(self, one: ir.Value, other: ir.Value) -> ir.Value | None:
        """Which of two operands has the lead of their result; None where that is not known."""
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
            found = [*lead, shape[-1]][start:end]
            return None if None in found else tuple(item for item in found if item is not None)
        known = [self.contents.get(value) for value in data]
        if kind == "Concat" and all(item is not None for item in known):
            self.vectors[out] = True
            return tuple(element for item in known if item is not None for element in item)
        if kind in ("Squeeze", "Unsqueeze", "Reshape", "Identity") and self.rank(out) in (0, 1):
            self.vectors[out] = self.rank(out) == 1
            return known[0] if known and known[0] is not None and len(known[0]) == 1 else None
        return None

    def share(self) -> None:
        """Compute each vector of sizes once, from the first value of its family."""
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
        """A vector that holds the dimensions of a value, None where the graph has none."""
        last, lead = self.last(value), self.leads.get(self.families.get(value, -1))
        return None if last is None or lead is None else self.shared.get((*lead, last))


class _Matrices:
    """The activations of a graph as matrices (rows, size) beside their usual form (..., size)."""

    def __init__(self, model: ir.Model, sizes: _Sizes) -> None:
        self.graph, self.sizes = model.graph, sizes
        self.flat: dict[ir.Value, ir.Value] = {}
        """For an activation, the matrix of the same numbers."""

    def rewrite(self) -> None:
        """Go through the nodes in order and let each that can work on matrices; then drop what nobody reads."""
        for node in tuple(self.graph):
            self._visit(node)
        for value, matrix in reversed(self.flat.items()):
            maker = value.producer()
            assert maker is not None
            if maker.op_type == "Reshape" or any(user is matrix.producer() for user, _ in value.uses()):
                continue  # it is made from the matrix as it is, or the other way round
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
        elif node.op_type in _ALIKE or (node.op_type in _LAST_AXIS and self.sizes.works_along_last(node)):
            if data[0] in self.flat:
                self._copy(node, [self.flat[data[0]], *data[1:]])
        elif node.op_type in _BOTH:
            partner = self.sizes.same_lead(*data)
            if partner is None or not any(value in self.flat for value in data):
                return
            small = [value for value in data if self.sizes.rank(value) in (0, 1)]
            if small:
                self._copy(node, [value if value in small else self.flat[value] for value in data])
            else:
                self._copy(node, [self._matrix(value, node) for value in data])

    def _usable(self, out: ir.Value) -> bool:
        """Whether a value could be made from its matrix again."""
        node = out.producer()
        return node is not None and len(node.outputs) == 1 and self.sizes.shape_of(out) is not None

    def _reshape(self, node: ir.Node, value: ir.Value, target: ir.Value, out: ir.Value) -> None:
        wanted = self.sizes.contents.get(target)
        if wanted is None or 0 in wanted:
            return
        size = self.sizes.last(value)
        if value in self.flat and wanted == (-1, size):
            replace(node, self.flat[value])
            return
        inner = value.producer()
        if value in self.flat:
            node.replace_input_with(0, self.flat[value])
        elif inner is not None and inner.op_type == "Reshape":
            node.replace_input_with(0, inner.inputs[0])
        elif self.sizes.rank(value) == 2 and out in self.sizes.families and size is not None and wanted[-1] == size:
            self.flat[out] = value

    def _copy(self, node: ir.Node, inputs: Sequence[ir.Value]) -> None:
        """The same operator on matrices."""
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
        """Give those who need an activation in its usual form that of the matrix."""
        shape = self.sizes.shape_of(value)
        assert shape is not None  # see _usable
        restored = Tape(matrix.producer(), after=True).op("Reshape", matrix, shape)
        replace_value(value, restored)
