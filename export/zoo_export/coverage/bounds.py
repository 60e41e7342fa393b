"""Bounds of the integers and booleans in a graph, from the declared ranges of its inputs."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from zoo.contract import Graph
from zoo_export.coverage.intervals import ANY, RULES, Intervals, Number
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH

__all__ = ["Bounds"]

_FEW = 16
"""Largest length of a constant vector whose elements have bounds of their own."""
_END = 2**31 - 1
"""Ends of slices from here on stand for the end of the axis."""
_EXACT = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.DOUBLE, None}
"""Data types in which sums and products are exact. The type of an added node is not known."""
_WHOLE = 2**7 - 1
"""Integers up to which every data type is exact."""
_LAYOUT = {"Expand", "ReduceMax", "ReduceMin", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that return elements of their input."""
_ROUNDING_FREE = _LAYOUT | {"Cast", "Clip", "ConstantOfShape", "Max", "Min", "Slice", "Where"}
"""Operators that are exact in every data type."""
_ELEMENTWISE = {"Add", "And", "Cast", "LayerNormalization", "Mul", "Not", "Softmax", "Sub", "Where"}
"""Operators that return the sizes of their inputs, up to broadcasting."""

_Numbers = tuple[Number, ...]
"""The elements of a vector, or one item that bounds every element of an array."""


class Bounds:
    """Bounds of the values of a graph without functions, whose shapes are inferred.

    Args:
        graph: the graph.
        declared: the same graph as declared.
        longest: the largest number of tokens, past included, if there is one.
    """

    def __init__(self, graph: ir.Graph, declared: Graph, longest: int | None) -> None:
        most = math.inf if longest is None else longest
        sizes = dict.fromkeys(declared.dim_names(), (1.0, math.inf))
        self._inputs = {tensor.name: tensor for tensor in declared.input_tensors()}
        for tensor in self._inputs.values():
            if not tensor.is_float:
                sizes |= {name: (1.0, most) for name in tensor.dims[1:] if isinstance(name, str) and name in sizes}
        self._multiples = {name: size.multiple_of for name, size in declared.sizes.items()}
        for name, size in declared.sizes.items():  # in units of the number that it is a multiple of
            high = min(sizes[name][1], math.inf if size.max is None else size.max)
            most_units = high if math.isinf(high) else high // size.multiple_of
            sizes[name] = (size.nearest(size.min) / size.multiple_of, most_units)
        self._past = declared.past_length or ""
        sizes[self._past] = (0.0, most - 1)
        self._intervals = Intervals(sizes)
        self._known: dict[ir.Value, _Numbers] = {}
        for node in graph:
            for value in node.outputs:
                self._of(value)

    def is_false(self, value: ir.Value) -> bool:
        """Return whether every element of a boolean is false at all inputs. Values inside nodes are not known."""
        return all(self._intervals.ends(number)[1] <= 0 for number in self._known.get(value, (ANY,)))

    def _of(self, value: ir.Value | None) -> _Numbers:
        if value is None:
            return (ANY,)
        if value not in self._known:
            bounds, node = self._compute(value), value.producer()
            if value.shape is not None and not len(value.shape) and value.dtype in _EXACT:
                bounds = (self._intervals.named(f"value {value.name}", bounds[0]),)
            is_vector = value.shape is not None and len(value.shape) == 1 and value.shape[0] == len(bounds)
            is_shape = node is not None and node.op_type == "Shape"
            self._known[value] = bounds if is_vector or is_shape else (self._intervals.join(bounds),)
        return self._known[value]

    def _compute(self, value: ir.Value) -> _Numbers:
        tensor, node = ir.convenience.get_const_tensor(value), value.producer()
        if tensor is not None:
            return _elements(tensor)
        if node is None:
            return (self._input(value),)
        if value.dtype not in _EXACT and node.op_type not in _ROUNDING_FREE:
            return (ANY,)
        inputs = [self._of(item) for item in node.inputs]
        if node.op_type == "Shape":
            return self._shape(node)
        if not all(inputs) and node.op_type != "Concat":  # a vector without elements
            return (ANY,)
        if node.op_type in _LAYOUT:
            return inputs[0]
        if node.op_type == "Slice":  # it may reverse a vector
            return (self._intervals.join(inputs[0]),)
        if node.op_type == "ConstantOfShape":
            filled = node.attributes.get_tensor("value")
            return (Number.of(0),) if filled is None else _elements(filled)
        if node.op_type == "Concat":
            return tuple(number for item in inputs for number in item)
        if node.op_type == "Gather":
            places = self._constants(node.inputs[1])
            count = len(inputs[0])
            if count == 1 or not all(-count <= place < count for place in places):  # nor if it is not a number
                return (self._intervals.join(inputs[0]),)
            return tuple(inputs[0][int(place)] for place in places)
        if node.op_type in ("ArgMax", "ArgMin", "TopK") and value is node.outputs[-1]:
            return (Number(0, math.inf),)
        if node.op_type not in RULES or (node.op_type == "Div" and value.dtype == ir.DataType.DOUBLE):
            return (ANY,)
        count = max(map(len, inputs))
        rows = [tuple(item[place % len(item)] for item in inputs) for place in range(count)]
        results = [RULES[node.op_type](self._intervals, *row) for row in rows]
        if node.op_type == "Cast":
            results = [self._converted(number, value.dtype) for number in results]
        return tuple(results)

    def _converted(self, number: Number, dtype: ir.DataType | None) -> Number:
        """Return a number in another data type."""
        if dtype == ir.DataType.BOOL:
            return self._intervals.truth(number)
        if dtype in (ir.DataType.INT32, ir.DataType.INT64):
            return number.rounded()
        if dtype in _EXACT:
            return number
        low, high = self._intervals.ends(number)
        return Number(low, high) if max(-low, high) <= _WHOLE else ANY

    def _input(self, value: ir.Value) -> Number:
        if value.name == PAST_LENGTH:
            return Number(0, 0, {self._past: 1})
        tensor = self._inputs.get(value.name or "")
        return Number(0, tensor.upper - 1) if tensor is not None and tensor.upper else ANY

    def _shape(self, node: ir.Node) -> _Numbers:
        value = node.inputs[0]
        if value is None or value.shape is None:
            return (Number(0, math.inf),)
        sizes = [self._size(value, axis) for axis in range(len(value.shape))]
        return tuple(sizes[slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", len(sizes)))])

    def _size(self, value: ir.Value, axis: int) -> Number:
        """Return the size of an axis."""
        added = Number.of(0)
        while True:
            assert value.shape is not None
            size, rank, node = value.shape[axis], len(value.shape), value.producer()
            if isinstance(size, int):
                return added.plus(Number.of(size))
            if node is not None and node.op_type == "Reshape":
                sizes = self._of(node.inputs[1])
                if len(sizes) == rank and self._intervals.ends(sizes[axis])[0] > 0:  # 0 and -1 have a meaning
                    return added.plus(sizes[axis])
            if node is not None and node.op_type == "Concat" and node.attributes["axis"].as_int() % rank == axis:
                for other in node.inputs:
                    if other is None or other.shape is None:
                        return Number(0, math.inf)
                    added = added.plus(self._size(other, axis))
                return added
            origin = None if node is None else self._origin(node, axis, rank)
            if origin is None:
                return added.plus(self._declared(size.value))
            if node is not None and node.op_type == "Pad":
                added = added.plus(self._padding(node, axis, rank))
            value, axis = origin

    def _origin(self, node: ir.Node, axis: int, rank: int) -> tuple[ir.Value, int] | None:
        """Return the input of a node, and its axis, from which an axis of the output has its size."""
        inputs = [value for value in node.inputs if value is not None]
        if inputs[0].shape is None:
            return None
        if node.op_type == "Transpose":
            return inputs[0], node.attributes["perm"].as_ints()[axis]
        if node.op_type == "Unsqueeze":
            axes = {int(place) % rank for place in self._constants(inputs[1])}
            return inputs[0], axis - sum(place < axis for place in axes)
        if node.op_type == "Pad":
            return inputs[0], axis
        if node.op_type == "Slice" and len(inputs) > 3:
            (cut, *others), ends = self._constants(inputs[3]), self._constants(inputs[2])
            whole = self._constants(inputs[1]) == [0] and len(ends) == 1 and ends[0] >= _END
            return (inputs[0], axis) if not others and (whole or cut % rank != axis) else None
        if node.op_type in _ELEMENTWISE:
            shapes = [other.shape for other in inputs if other.shape is not None]
            places = [axis - rank + len(shape) for shape in shapes]
            wide = [n for n, place in enumerate(places) if place >= 0 and shapes[n][place] != 1]
            return (inputs[wide[0]], places[wide[0]]) if len(wide) == 1 and len(shapes) == len(inputs) else None
        return None

    def _constants(self, value: ir.Value | None) -> list[float]:
        """Return the elements of a vector; those that are not known are NaN."""
        constants = [number.constant for number in self._of(value)]
        return [math.nan if constant is None else constant for constant in constants]

    def _padding(self, node: ir.Node, axis: int, rank: int) -> Number:
        """Return the number of elements that a Pad adds to an axis."""
        pads = self._of(node.inputs[1])
        axes = range(rank) if len(node.inputs) < 4 else [place % rank for place in self._constants(node.inputs[3])]
        if len(pads) != 2 * len(axes):
            return ANY
        places = [place for place, other in enumerate(axes) if other == axis]
        return pads[places[0]].plus(pads[places[0] + len(axes)]) if places else Number.of(0)

    def _declared(self, size: str | None) -> Number:
        """Return a size by the name that the graph gives it, such as ``past_sequence + sequence``."""
        if size is None:
            return Number(0, math.inf)
        sizes = self._intervals.sizes
        parts = [part.strip() for part in size.split("+")]
        if not all(part.isdecimal() or part in sizes for part in parts):
            sizes[size], parts = (0.0, math.inf), [size]
        total = Number.of(0)
        for part in parts:
            total = total.plus(
                Number.of(int(part)) if part.isdecimal() else Number(0, 0, {part: self._multiples.get(part, 1)})
            )
        return total


def _elements(tensor: ir.TensorProtocol) -> _Numbers:
    """Return the elements of a constant, or one item that bounds them."""
    if isinstance(tensor, ir.ExternalTensor) or not tensor.size:
        return (ANY,)
    array = tensor.numpy().astype(float)
    if not np.isfinite(array).all():
        return (ANY,)
    if array.ndim == 1 and array.size <= _FEW:
        return tuple(map(Number.of, array.tolist()))
    return (Number(float(array.min()), float(array.max())),)
