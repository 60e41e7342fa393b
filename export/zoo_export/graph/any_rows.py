"""Serving graphs for any number of rows, made from two graphs whose numbers of rows are fixed.

Where all sizes are fixed, what depends on sizes alone is folded into constants. The graphs for B and for B + 1 rows
then differ in these constants only, and what differs is written for any number of rows. No other size becomes free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from zoo.arrays import Array
from zoo_export.graph.inference import Type, infer_types
from zoo_export.graph.metadata import contract
from zoo_export.graph.rewriting import MisfitError, Tape, replace_value
from zoo_runtime.serving.names import NEW_LENGTHS

__all__ = ["free_rows"]

_BATCH = "batch"
_COPIED = 0
"""In the target of a Reshape: the size of the input at that place."""
_REMAINDER = -1
"""In the target of a Reshape: what the other sizes leave."""


def free_rows(model: ir.Model, make: Callable[[ir.Model, int], ir.Model], rows: int) -> ir.Model:
    """Return a graph for any number of rows, or for a fixed one if it depends on the number in another way.

    The metadata of a fixed one says in which.

    Args:
        model: the graph to start from.
        make: makes the graph for a number of rows. It may change its argument.
        rows: the fixed number of rows.
    """
    other = make(model.clone(), rows + 1)
    fixed = make(model, rows)
    try:
        return _Freed(fixed.clone(), other, rows).build()
    except MisfitError as misfit:
        fixed.metadata_props["zoo.rows"] = f"fixed: {misfit}"
        return fixed


class _Freed:
    """The rewriting of one graph, beside that for one row more."""

    def __init__(self, model: ir.Model, other: ir.Model, rows: int) -> None:
        self.model, self.rows = model, rows
        self.types, self.other_types = infer_types(model), infer_types(other)
        self.pairs = self._pairs(other)

    def build(self) -> ir.Model:
        """Return the graph with a free number of rows."""
        for node, other in self.pairs:
            found, wanted = _content(node), _content(other)
            if found is None or wanted is None:
                continue
            differ = not np.array_equal(found, wanted)
            for reader, place in tuple(node.outputs[0].uses()):
                if place == 1 and reader.op_type == "Reshape" and not differ:
                    value = self._copied(reader, found)
                elif not differ:
                    continue
                elif place == 1 and reader.op_type in ("Reshape", "Expand"):
                    value = self._sizes(reader, found, wanted)
                else:
                    value = self._repeated(node, found, wanted)
                reader.replace_input_with(place, value)
            if differ and node.outputs[0].is_graph_output():
                replace_value(node.outputs[0], self._repeated(node, found, wanted))
        for value in (*self.model.graph.inputs, *self.model.graph.outputs):
            axis = self._axis(value)
            if axis is not None:
                value.shape = ir.Shape(
                    _BATCH if place == axis else size for place, size in enumerate(value.shape or ())
                )
        ir.passes.common.RemoveUnusedNodesPass()(self.model)
        self.model.metadata_props["zoo.contract"] = contract(self.model)
        return self.model

    def _pairs(self, other: ir.Model) -> list[tuple[ir.Node, ir.Node]]:
        """Return the nodes of both graphs, which must differ in constants only."""
        pairs = list(zip(self.model.graph, other.graph, strict=False))
        if len(self.model.graph) != len(other.graph):
            raise MisfitError("the numbers of nodes differ")
        values = dict(zip(self.model.graph.inputs, other.graph.inputs, strict=True))
        for one, two in pairs:
            same = one.op_identifier() == two.op_identifier() and len(one.inputs) == len(two.inputs)
            if not same or len(one.outputs) != len(two.outputs) or not _attributes_equal(one, two):
                raise MisfitError(f"{one.op_type} differs")
            for given, wanted in zip(one.inputs, two.inputs, strict=True):
                is_weight = given is not None and given.name in self.model.graph.initializers
                equal = is_weight and wanted is not None and wanted.name == given.name  # type: ignore[union-attr]
                if not equal and (None if given is None else values.get(given)) is not wanted:
                    raise MisfitError(f"an input of {one.op_type} differs")
            values.update(zip(one.outputs, two.outputs, strict=True))
        self.names = {one.name: two.name for one, two in values.items()}
        return pairs

    def _sizes(self, reader: ir.Node, found: Array, wanted: Array) -> ir.Value:
        """Return the target of a Reshape or an Expand for any number of rows."""
        tape = Tape(reader, after=False)
        places = np.flatnonzero(found != wanted).tolist() if found.shape == wanted.shape else []
        if len(places) != 1:
            raise MisfitError(f"{len(places)} sizes of {reader.op_type} depend on the number of rows")
        (place,) = places
        sizes = found.tolist()
        if reader.op_type == "Reshape":
            data = reader.inputs[0]
            assert data is not None
            copied = self._axis(data) == place and sizes[place] == self.rows
            if 0 in sizes or (_REMAINDER in sizes and not copied):
                raise MisfitError("Reshape has two sizes to determine, or an empty one")
            reader.attributes.pop("allowzero", None)
            sizes[place] = _COPIED if copied else _REMAINDER
            return tape.integers(*sizes)
        if sizes[place] != self.rows:
            raise MisfitError("Expand has a multiple of the rows")
        parts = [self._count(tape) if number == place else tape.integers(size) for number, size in enumerate(sizes)]
        return tape.op("Concat", *parts, axis=0)

    def _copied(self, reader: ir.Node, sizes: Array) -> ir.Value:
        """Return the target of a Reshape in which a number of rows that was inferred from the others is copied.

        So it is known to be the number of rows wherever shapes are inferred.
        """
        target = reader.inputs[1]
        data = reader.inputs[0]
        assert target is not None
        assert data is not None
        places = np.flatnonzero(sizes == _REMAINDER)
        if len(places) != 1 or 0 in sizes or not self._axis(data) == self._axis(reader.outputs[0]) == places[0]:
            return target
        reader.attributes.pop("allowzero", None)
        return Tape(reader, after=False).integers(*np.where(sizes == _REMAINDER, _COPIED, sizes).tolist())

    def _repeated(self, node: ir.Node, found: Array, wanted: Array) -> ir.Value:
        """Return a constant that is the same for each row, for any number of rows."""
        axes = [axis for axis, pair in enumerate(zip(found.shape, wanted.shape, strict=False)) if pair[0] != pair[1]]
        if found.ndim != wanted.ndim or len(axes) != 1 or found.shape[axes[0]] != self.rows:
            raise MisfitError("a constant depends on the number of rows")
        one = np.take(found, [0], axes[0])
        if not np.array_equal(np.broadcast_to(one, found.shape), found):
            raise MisfitError("a constant depends on the row")
        tape = Tape(node, after=True)
        ones = [tape.integers(1) for _ in found.shape]
        ones[axes[0]] = self._count(tape)
        return tape.op("Expand", tape.constant(one), tape.op("Concat", *ones, axis=0))

    def _count(self, tape: Tape) -> ir.Value:
        """Return the number of rows, (1,)."""
        lengths = next(value for value in self.model.graph.inputs if value.name == NEW_LENGTHS)
        return tape.op("Shape", lengths, start=0, end=1)

    def _axis(self, value: ir.Value) -> int | None:
        """Return the only axis along which a value has as many entries as there are rows, or None."""
        one = self._shape(self.types, value.name)
        two = self._shape(self.other_types, self.names.get(value.name))
        axes = [axis for axis, sizes in enumerate(zip(one, two, strict=False)) if sizes == (self.rows, self.rows + 1)]
        return axes[0] if len(axes) == 1 else None

    def _shape(self, types: Mapping[str, Type], name: str | None) -> tuple[int | str | None, ...]:
        return types[str(name)][1] if name in types else ()


def _content(node: ir.Node) -> Array | None:
    if node.op_type != "Constant":
        return None
    tensor = ir.convenience.get_const_tensor(node.outputs[0])
    return None if tensor is None else tensor.numpy()


def _attributes_equal(one: ir.Node, two: ir.Node) -> bool:
    """Whether two nodes have the same attributes, the contents of constants excepted."""
    if one.attributes.keys() != two.attributes.keys():
        return False
    return all(
        attribute.value == two.attributes[name].value
        for name, attribute in one.attributes.items()
        if one.op_type != "Constant"
    )
