"""The conditions of a graph: nodes that decide, such as comparisons, bounds, remainders, indices, branches and loops.

A kind of condition lists its outcomes, and has a function that computes where each of them occurs. The occurrences are
counted by nodes that are added to the graph itself, so that conditions inside loops and branches are counted, too:
counts in a loop are summed over its iterations, and counts in a branch are 0 where the other one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from zoo_export.graph.metadata import MODULE_KEY

__all__ = ["Condition", "Tap", "subgraphs", "tap"]

_MASKED = -1e4
"""Scores below this number hide a key: masks add the lowest number or infinity, and biases are small."""
_END = 2**31 - 1
"""Bounds of slices from here on stand for the end of the axis."""
_LAYOUT = {"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that rearrange or repeat elements."""

Values = Sequence[ir.Value]


class Tap:
    """Appends nodes to a graph. Numbers are compared in float64, for which the runtime has every operator."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph

    def __call__(self, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Append a node and return its output."""
        node = ir.node(operator, inputs, attributes=attributes)
        self.graph.append(node)
        return node.outputs[0]

    def number(self, value: float) -> ir.Value:
        """Append a scalar in float64."""
        return self("Constant", value=ir.tensor(np.array(value, np.float64)))

    def integers(self, *values: int) -> ir.Value:
        """Append a vector of integers."""
        return self("Constant", value=ir.tensor(np.array(values, np.int64)))

    def double(self, value: ir.Value) -> ir.Value:
        """Append a conversion to float64."""
        return self("Cast", value, to=ir.DataType.DOUBLE)

    def sizes(self, value: ir.Value, axes: ir.Value) -> ir.Value:
        """Append the sizes of axes in float64."""
        return self.double(self("Gather", self("Shape", value), axes))

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Append the size of an axis in float64, of shape (1,)."""
        return self.sizes(value, self.integers(axis))

    def output(self, *counts: ir.Value) -> None:
        """Append an output of a body or branch: a 1, followed by counts."""
        value = self("Concat", self.integers(1), *counts, axis=0)
        value.type, value.shape = ir.TensorType(ir.DataType.INT64), None
        self.graph.outputs.append(value)

    def count(self, cases: Values) -> ir.Value:
        """Append the number of true elements of each value, of shape (len(cases),)."""
        whole = self.integers(-1)
        flat = [self("Reshape", self("Cast", case, to=ir.DataType.INT64), whole) for case in cases]
        return self("Concat", *(self("ReduceSum", item, keepdims=1) for item in flat), axis=0)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A kind of condition."""

    operators: str
    """The operators of its nodes."""
    outcomes: tuple[str, ...]
    cases: Callable[[Tap, ir.Node], Values]
    """Appends booleans that are true where each outcome occurs."""
    applies: Callable[[ir.Node], bool] = lambda node: True
    part: str = ""
    """The input that a condition concerns, if a node has several conditions."""


@dataclass(frozen=True, eq=False)
class Condition:
    """A node that decides."""

    kind: _Kind
    node: ir.Node
    cases: Values
    """Booleans in the graph of the node that are true where each outcome occurs."""

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The names of the possible outcomes."""
        return self.kind.outcomes

    def __str__(self) -> str:
        name = " ".join(filter(None, (self.node.op_type, self.kind.part)))
        module = self.node.metadata_props.get(MODULE_KEY)
        return f"{name} in {module}" if module else name


def tap(graph: ir.Graph) -> list[tuple[Condition, ir.Value]]:
    """Find the conditions of a graph without functions, whose types are known, and of the graphs inside its nodes.

    Returns:
        Each condition with a new value of the graph: how often each of its outcomes occurs.
    """
    conditions = []
    for node in tuple(graph):
        if node.op_type == "If":
            conditions += _tap_branches(node, graph)
        elif node.op_type in ("Loop", "Scan"):
            conditions += _tap_body(node, graph)
        append = Tap(graph)
        for kind in _KINDS:
            if node.op_type in kind.operators.split() and kind.applies(node):
                condition = Condition(kind, node, kind.cases(append, node))
                conditions.append((condition, append.count(condition.cases)))
    return conditions


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs inside a node."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()


def _tap_body(node: ir.Node, graph: ir.Graph) -> list[tuple[Condition, ir.Value]]:
    """Add the counts in the body of a loop, one row per iteration, as the last output of the loop."""
    (body,) = subgraphs(node)
    inner = tap(body)
    Tap(body).output(*(counts for _, counts in inner))
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), 0])
    node.resize_outputs(len(node.outputs) + 1)
    append = Tap(graph)
    totals = append("ReduceSum", node.outputs[-1], append.integers(0), keepdims=0)
    return _parts(append, totals, inner)


def _tap_branches(node: ir.Node, graph: ir.Graph) -> list[tuple[Condition, ir.Value]]:
    """Add the counts in both branches as the last output of an If."""
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    inner = [tap(branch) for branch in branches]
    every = [*inner[0], *inner[1]]
    for number, branch in enumerate(branches):
        append = Tap(branch)
        parts = [
            counts if place == number else append.integers(*[0] * len(condition.outcomes))
            for place, found in enumerate(inner)
            for condition, counts in found
        ]
        append.output(*parts)
    node.resize_outputs(len(node.outputs) + 1)
    return _parts(Tap(graph), node.outputs[-1], every)


def _parts(
    append: Tap, counts: ir.Value, found: Sequence[tuple[Condition, ir.Value]]
) -> list[tuple[Condition, ir.Value]]:
    """Split a vector of counts, after a 1, into those of each condition."""
    parts, start = [], 1
    for condition, _ in found:
        stop = start + len(condition.outcomes)
        parts.append((condition, append("Gather", counts, append.integers(*range(start, stop)))))
        start = stop
    return parts


def _truth(value: int | None = None) -> Callable[[Tap, ir.Node], Values]:
    """Return the cases of a boolean input, or of the output."""

    def cases(append: Tap, node: ir.Node) -> Values:
        true = node.outputs[0] if value is None else _input(node, value)
        return true, append("Not", true)

    return cases


def _bounds(append: Tap, node: ir.Node) -> Values:
    first, second = (append.double(_input(node, place)) for place in (0, 1))
    return append("Less", first, second), append("Greater", first, second)


def _beyond(place: int, comparison: str) -> Callable[[Tap, ir.Node], Values]:
    """Return the cases of a value that a bound changes or not."""

    def cases(append: Tap, node: ir.Node) -> Values:
        clamped = append(comparison, append.double(_input(node, 0)), append.double(_input(node, place)))
        return clamped, append("Not", clamped)

    return cases


def _remainder(append: Tap, node: ir.Node) -> Values:
    value, divisor = (append.double(_input(node, place)) for place in (0, 1))
    none = append("Equal", append("Mod", value, divisor, fmod=1), append.number(0))
    return append("Not", none), none


def _fraction(append: Tap, node: ir.Node) -> Values:
    value = append.double(_input(node, 0))
    none = append("Equal", value, append("Floor", value))
    return append("Not", none), none


def _ends(append: Tap, index: ir.Value, size: ir.Value) -> Values:
    """Append whether an index is the first or the last; negative ones count from the end."""
    index, zero = append.double(index), append.number(0)
    place = append("Where", append("Less", index, zero), append("Add", index, size), index)
    return append("Equal", place, zero), append("Equal", place, append("Sub", size, append.number(1)))


def _given_index(append: Tap, node: ir.Node) -> Values:
    return _ends(append, _input(node, 1), append.size(_input(node, 0), node.attributes.get_int("axis", 0)))


def _found_index(append: Tap, node: ir.Node) -> Values:
    axis = node.attributes.get_int("axis", -1 if node.op_type == "TopK" else 0)
    return _ends(append, node.outputs[-1], append.size(_input(node, 0), axis))


def _several_indices(append: Tap, node: ir.Node) -> Values:
    """Compare indices of several axes, which lie along the last axis of the indices."""
    data, indices = _input(node, 0), _input(node, 1)
    sizes = append("Shape", data, start=node.attributes.get_int("batch_dims", 0))
    sizes = append("Slice", sizes, append.integers(0), append("Shape", indices, start=-1))
    return _ends(append, indices, append.double(sizes))


def _limit(place: int) -> Callable[[Tap, ir.Node], Values]:
    """Return the cases of a slice's start or end, which is clamped to the size of its axis."""

    def cases(append: Tap, node: ir.Node) -> Values:
        sizes = append.sizes(_input(node, 0), _input(node, 3))
        clamped = append("Greater", append("Abs", append.double(_input(node, place))), sizes)
        return append("Not", clamped), clamped

    return cases


def _empty(append: Tap, node: ir.Node) -> Values:
    start, limit, step = (append.double(_input(node, place)) for place in range(3))
    some = append("Greater", append("Mul", append("Sub", limit, start), step), append.number(0))
    return append("Not", some), some


def _iterations(append: Tap, node: ir.Node) -> Values:
    number, one = append.size(node.outputs[-1], 0), append.number(1)
    return append("Less", number, one), append("Equal", number, one), append("Greater", number, one)


def _visible_keys(append: Tap, node: ir.Node) -> Values:
    """Count the keys that an attention's mask leaves to each query."""
    mask = _input(node, 3)
    seen = mask if mask.dtype == ir.DataType.BOOL else append("Greater", append.double(mask), append.number(_MASKED))
    keys = append.double(append("ReduceSum", append("Cast", seen, to=ir.DataType.INT64), append.integers(-1)))
    none, every = append("Equal", keys, append.number(0)), append("Equal", keys, append.size(mask, -1))
    return none, append("Not", append("Or", none, every)), every


def _input(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None
    return value


def _has(place: int) -> Callable[[ir.Node], bool]:
    """Return whether a node has this input."""
    return lambda node: len(node.inputs) > place and node.inputs[place] is not None


def _is_integer(node: ir.Node) -> bool:
    value = node.outputs[0]
    return value.dtype is not None and value.dtype.is_integer()


def _truncates(node: ir.Node) -> bool:
    """Return whether a conversion drops fractions that an operator before it has not dropped."""
    value = _input(node, 0)
    maker = value.producer()
    rounded = maker is not None and maker.op_type in ("Ceil", "Floor", "Round")
    return value.dtype is not None and value.dtype.is_floating_point() and _is_integer(node) and not rounded


def _selects(node: ir.Node) -> bool:
    """Return whether the condition of a Where is not itself one of the other conditions."""
    maker = _input(node, 0).producer()
    while maker is not None and maker.op_type in _LAYOUT:
        maker = _input(maker, 0).producer()
    return maker is None or maker.op_type not in _LOGIC.split()


def _varies(place: int) -> Callable[[ir.Node], bool]:
    """Return whether an input is computed."""
    return lambda node: _has(place)(node) and ir.convenience.get_const_tensor(_input(node, place)) is None


def _bounds_slice(place: int) -> Callable[[ir.Node], bool]:
    """Return whether a start or end of a slice may lie beyond its axis: not if it is 0 or stands for the end.

    Nor if it is a maximum or minimum, which is a condition of its own.
    """

    def applies(node: ir.Node) -> bool:
        if not (_has(place)(node) and _has(3)(node)):
            return False
        maker = _input(node, place).producer()
        while maker is not None and maker.op_type in _LAYOUT:
            maker = _input(maker, 0).producer()
        if maker is not None and maker.op_type in ("Max", "Min"):
            return False
        constant = ir.convenience.get_const_tensor(_input(node, place))
        return constant is None or bool(((numbers := abs(constant.numpy())) > 0).all() and (numbers < _END).all())

    return applies


_LOGIC = "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor"
_KINDS = (
    _Kind(operators=_LOGIC, outcomes=("true", "false"), cases=_truth()),
    _Kind(operators="Where", outcomes=("true", "false"), cases=_truth(0), applies=_selects),
    _Kind(operators="If", outcomes=("then", "else"), cases=_truth(0)),
    _Kind(operators="Loop", outcomes=("no iteration", "one", "several"), cases=_iterations),
    _Kind(operators="Scan", outcomes=("one", "several"), cases=lambda append, node: _iterations(append, node)[1:]),
    _Kind(operators="Max Min", outcomes=("first", "second"), cases=_bounds, applies=lambda node: len(node.inputs) == 2),
    _Kind(operators="Clip", part="minimum", outcomes=("clamped", "not"), cases=_beyond(1, "Less"), applies=_has(1)),
    _Kind(operators="Clip", part="maximum", outcomes=("clamped", "not"), cases=_beyond(2, "Greater"), applies=_has(2)),
    _Kind(operators="Div Mod", outcomes=("remainder", "none"), cases=_remainder, applies=_is_integer),
    _Kind(operators="Ceil Floor Round", outcomes=("fraction", "none"), cases=_fraction),
    _Kind(operators="Cast", outcomes=("fraction", "none"), cases=_fraction, applies=_truncates),
    _Kind(operators="Gather GatherElements ScatterElements", outcomes=("first", "last"), cases=_given_index,
          applies=_varies(1)),
    _Kind(operators="GatherND ScatterND", outcomes=("first", "last"), cases=_several_indices, applies=_varies(1)),
    _Kind(operators="ArgMax ArgMin TopK", outcomes=("first", "last"), cases=_found_index),
    _Kind(operators="Slice", part="start", outcomes=("inside", "clamped"), cases=_limit(1), applies=_bounds_slice(1)),
    _Kind(operators="Slice", part="end", outcomes=("inside", "clamped"), cases=_limit(2), applies=_bounds_slice(2)),
    _Kind(operators="Range", outcomes=("empty", "not empty"), cases=_empty),
    _Kind(operators="Attention", part="mask", outcomes=("no key", "some keys", "all keys"), cases=_visible_keys,
          applies=lambda node: _has(3)(node) and _input(node, 3).dtype is not None),
)  # fmt: skip
