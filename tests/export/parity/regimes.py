"""Faults that show for some inputs only: beyond a size, for one token id, at one position, in one channel.

Conditions are drawn from the whole declared range, not from the sizes at which the comparison looks: batches up to 8,
lengths and pasts up to the longest input, any row of a table. The draw depends on the graph alone, so that faults have
the same names in each run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tests.export.parity.faults import (
    CHANGED,
    EXACT,
    KINDS,
    Reach,
    Sites,
    View,
    after,
    before,
    inserted,
    kind,
    set_attributes,
    set_inputs,
    set_operator,
    set_tensor,
)
from zoo.probe.inputs import Point
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH

__all__ = ["REGIMES"]

_OTHERS = frozenset(KINDS)
LARGEST_BATCH = 8
SMALLEST, LARGEST = -3.0, -1.0
"""Logarithms of the smallest and the largest relative change."""
RELATIONS = {"from": "GreaterOrEqual", "at": "Equal", "below": "Less"}
"""Comparisons with a threshold: from it on, at it alone, below it."""
PLACES = 2
"""Number of places in a graph at which a condition is put, for each dimension and relation."""


def _change(rng: random.Random, view: View, name: str) -> float:
    """Draw a factor near 1, but beyond rounding."""
    return float(max(1 + 10 ** rng.uniform(SMALLEST, LARGEST), view.little(name)))


def _places(view: View) -> list[tuple[int, onnx.NodeProto]]:
    """Nodes whose results reach the outputs by more than a norm that undoes a factor."""
    outputs = {value.name for value in view.graph.output}
    return [
        (index, node)
        for index, node in enumerate(view.nodes)
        if (node.op_type in ("Attention", "Conv", "Gemm", "MatMul") or outputs & set(node.output))
        and view.is_real(node.output[0])
        and node.op_type != "Scan"
    ]


def _scaled(factor: np.ndarray[Any, Any], *, unsqueezed: bool = False) -> list[onnx.NodeProto]:
    """Return nodes that multiply a result by ``factor`` where ``there`` holds, which may lack the last dimension."""
    choice = helper.make_node("Where", ["there", "large", "one"], ["choice"])
    longer = [_constant([-1], "axis"), helper.make_node("Unsqueeze", ["choice", "axis"], ["factor"])]
    last = "factor" if unsqueezed else "choice"
    return [
        _constant(factor, "large"),
        _constant(np.ones_like(factor), "one"),
        choice,
        *(longer if unsqueezed else ()),
        helper.make_node("Mul", [EXACT, last], [CHANGED]),
    ]


def _constant(value: Any, name: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))


# Sizes.


def _sizes(view: View) -> Iterator[tuple[str, list[onnx.NodeProto]]]:
    """Yield the free dimensions of a graph, by name, with nodes that compute their size as ``size``, of shape (1,)."""
    known = set()
    for value in view.graph.input:
        if value.name == PAST_LENGTH:
            yield (
                "past_sequence",
                [_constant([1], "vector"), helper.make_node("Reshape", [PAST_LENGTH, "vector"], ["size"])],
            )
        for axis, dim in enumerate(view.dims(value.name)):
            if isinstance(dim, str) and dim not in known and dim != "capacity":
                known.add(dim)
                yield dim, [helper.make_node("Shape", [value.name], ["size"], start=axis, end=axis + 1)]


def _points(dim: str, size: int, view: View) -> tuple[Point, ...]:
    """Return points at which a dimension has this size, or another length next to it."""
    longest = view.longest
    if dim == "batch":
        return (Point(size, min(3, longest), 0, "none"), Point(size, 1, min(3, longest - 1), "none"))
    if dim == "past_sequence":
        return (Point(2, min(2, longest - size), size, "none"),)
    lengths = sorted({max(1, size - 1), size, min(size + 1, longest)})
    plain = [Point(2, length, 0, "none") for length in lengths]
    return (*plain, Point(2, 1, size - 1, "none")) if size > 1 else tuple(plain)


def _by_size(threshold: int, relation: str, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return nodes that compare the size of a dimension with a threshold."""
    compare = helper.make_node(RELATIONS[relation], ["size", "threshold"], ["there"])
    return [*nodes, _constant([threshold], "threshold"), compare]


def _group(dim: str) -> str:
    return {"batch": "the batch", "sequence": "the length", "past_sequence": "the past"}.get(dim, "another length")


def _size_sites(view: View, group: str) -> Sites:
    places = _places(view)
    for dim, nodes in _sizes(view):
        for relation in RELATIONS if _group(dim) == group and places else ():
            rng = view.draw(f"{dim} {relation}")
            largest = {"batch": LARGEST_BATCH, "past_sequence": view.longest - 1}.get(dim, view.longest)
            for index, node in rng.sample(places, min(PLACES, len(places))):
                # A condition that always holds, such as "from 1", would be no condition.
                first = 1 if relation == "at" or dim == "past_sequence" else 2
                threshold = rng.randint(first, largest)
                size = threshold - 1 if relation == "below" else threshold
                factor = np.array([_change(rng, view, node.output[0])], view.dtype(node.output[0]))
                edit = inserted(index, [*_by_size(threshold, relation, nodes), *_scaled(factor)])
                what = f"x {factor[0]:.4g} {relation} {dim} {threshold}"
                yield view.site(node, what), edit, Reach(_points(dim, size, view))


for _name in ("the batch", "the length", "the past", "another length"):
    kind(f"a threshold in {_name}")(partial(_size_sites, group=_name))


# Rows of tables: token ids and positions.


def _row_sites(view: View, relations: Sequence[str], number: int) -> Sites:
    for index, node in view.find("Gather"):
        place = view.places.get(node.input[0])
        if place is None or len(place.dims) != 2 or place.dims[0] < 2:
            continue
        for relation in relations:
            rng = view.draw(f"{node.output[0]} {relation}")
            for _ in range(number):
                row = rng.randrange(0 if relation == "at" else 1, place.dims[0])
                factor = np.array(_change(rng, view, node.output[0]), view.dtype(node.output[0]))
                there = helper.make_node(RELATIONS[relation], [node.input[1], "row"], ["there"])
                edit = inserted(index, [_constant(row, "row"), there, *_scaled(factor, unsqueezed=True)])
                what = f"x {factor:.4g} {relation} row {row} of {place.dims[0]}"
                reach = Reach(_everywhere(view), (row - 1 if relation == "below" else row,))
                yield view.site(node, what), edit, reach


def _everywhere(view: View) -> tuple[Point, ...]:
    """Return points that reach the longest input and past."""
    longest, half = view.longest, view.longest // 2
    return (
        Point(3, longest, 0, "none"),
        Point(2, longest, 0, "right"),
        Point(2, 1, longest - 1, "none"),
        Point(2, max(1, longest - half), half, "left"),
    )


@kind("a threshold in an id or position")
def _(view: View) -> Sites:
    return _row_sites(view, ("from", "below"), 2)


@kind("a rare id or position")
def _(view: View) -> Sites:
    return _row_sites(view, ("at",), 4)


# Integers.


@kind("an integer wrong beyond a threshold")
def _(view: View) -> Sites:
    for index, node in view.find("Add", "Clip", "CumSum", "Div", "Max", "Min", "Mod", "Mul", "Range", "Sub"):
        known = view.types.get(node.output[0])
        if known is not None and known.elem_type == TensorProto.INT64:
            rng = view.draw(node.output[0])
            first, second = (rng.randint(1, view.longest) for _ in range(2))
            least = after(index, ("Min", (np.array(first),), {}))
            yield view.site(node, f"at most {first}"), least, Reach(_everywhere(view))
            lower = [
                _constant(second, "threshold"),
                helper.make_node("GreaterOrEqual", [EXACT, "threshold"], ["there"]),
                helper.make_node("Cast", ["there"], ["one"], to=TensorProto.INT64),
                helper.make_node("Sub", [EXACT, "one"], [CHANGED]),
            ]
            yield view.site(node, f"-1 from {second}"), inserted(index, lower), Reach(_everywhere(view))


@kind("an integer attribute off by one")
def _(view: View) -> Sites:
    for index, node in enumerate(view.nodes):
        for item in node.attribute:
            if item.name in ("perm", "to") or item.type not in (AttributeProto.INT, AttributeProto.INTS):
                continue
            many = item.type == AttributeProto.INTS
            place = view.draw(f"{index} {item.name}").randrange(len(item.ints)) if many else 0
            for step in (1, -1):
                value: int | list[int] = item.i + step
                if many:
                    value = [number + step * (at == place) for at, number in enumerate(item.ints)]
                yield view.site(node, f"{item.name} {step:+d}"), set_attributes(index, **{item.name: value})


@kind("a quotient rounded the other way")
def _(view: View) -> Sites:
    for index, node in view.find("Div"):
        divisor = view.constants.get(node.input[1])
        if divisor is not None and divisor.dtype == np.int64 and divisor.size == 1 and abs(divisor.item()) > 1:
            for step in (1, -1):
                change = np.full_like(divisor, step * (abs(divisor.item()) - 1))
                yield view.site(node, f"{change.item():+d}"), before(index, 0, ("Add", (change,), {}))
    for old, new in {"Floor": "Ceil", "Ceil": "Floor", "Round": "Floor"}.items():
        for index, node in view.find(old):
            yield view.site(node, new), set_operator(index, new)


# Layout and weights.


@kind("two dimensions swapped")
def _(view: View) -> Sites:
    for index, node in view.find("Transpose"):
        perm = next((list(item.ints) for item in node.attribute if item.name == "perm"), [])
        for place in range(len(perm) - 1):
            other = [*perm[:place], perm[place + 1], perm[place], *perm[place + 2 :]]
            yield view.site(node, f"{other} for {perm}"), set_attributes(index, perm=other)
    for index, node in view.find("Concat"):
        known = view.types.get(node.output[0])
        for place in range(len(node.input) - 1) if known is not None and known.elem_type == TensorProto.INT64 else ():
            names = list(node.input)
            names[place : place + 2] = reversed(names[place : place + 2])
            if names != list(node.input):
                yield view.site(node, f"{place} and {place + 1}"), set_inputs(index, names)


@kind("a weight or buffer stored as a constant")
def _(view: View) -> Sites:
    for name in view.stored_names():
        yield name, partial(set_tensor, name=name, value=view.stored[name])


@kind("one channel scaled")
def _(view: View) -> Sites:
    for index, node in view.find("Conv", "Gemm", "LayerNormalization", "RMSNormalization"):
        width = view.width(node)
        if width is None:
            continue
        rng = view.draw(node.output[0])
        channel = rng.randrange(width)
        vector = np.ones(width, view.dtype(node.output[0]))
        vector[channel] = _change(rng, view, node.output[0])
        edit = after(index, ("Mul", (vector[:, None] if node.op_type == "Conv" else vector,), {}))
        yield view.site(node, f"channel {channel} x {vector[channel]:.4g}"), edit


REGIMES = frozenset(KINDS) - _OTHERS
"""The kinds of faults in this module."""
