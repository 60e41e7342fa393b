"""Coverage of the conditions in a graph by the inputs at which it is compared.

A comparison shows nothing about a branch that no input takes. The conditions of a graph are the nodes that decide:
comparisons, selections, bounds, remainders, and indices into tables. The runtime evaluates them without the model, so
that many inputs can be tried to find some for every outcome. Conditions inside loops and branches are not covered, and
floating-point inputs, such as a past, are random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper, shape_inference

from zoo.contract import Graph, Size, sizes_of
from zoo.probe.inputs import Feeds, Padding, Point, slice_feeds
from zoo.probe.pipeline import typed_feeds
from zoo_export.graph.file import MODULE_KEY, inline, names_read, parse
from zoo_runtime.providers import open_session
from zoo_runtime.values import run_session

__all__ = ["Conditions", "Coverage", "candidates"]

Array = np.ndarray[Any, Any]
Outcome = tuple[int, str, str]
"""The number of a condition, what happened, and in which kind of call."""

_BOOLEAN = {"And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"}
_BOUNDS = {"Clip", "Max", "Min"}
_REMAINDERS = {"Div", "Mod"}
_OUTCOMES = {
    "truth": ("true", "false"),
    "bounds": ("first", "second"),
    "clip": ("inside", "below", "above"),
    "remainder": ("remainder", "none"),
    "index": ("first", "last"),
}


@dataclass(frozen=True)
class _Condition:
    """A node that decides, by the names of the values that show how."""

    kind: str
    node: str
    values: tuple[str, ...]
    size: int = 0
    """For an index: the size of the table."""

    def happened(self, values: Mapping[str, Array]) -> Iterator[str]:
        """Yield the outcomes among all elements of the values."""
        read = [values[name] for name in self.values]
        cases: Mapping[str, Array] = {}
        if self.kind == "truth":
            cases = {"true": read[0] != 0, "false": read[0] == 0}
        elif self.kind == "bounds":
            cases = {"first": read[0] < read[1], "second": read[0] > read[1]}
        elif self.kind == "clip":
            below, above = read[0] < read[1], read[0] > read[2]
            cases = {"below": below, "above": above, "inside": ~below & ~above}
        elif self.kind == "remainder" and read[1].all():
            rest = np.mod(read[0], read[1]) != 0
            cases = {"remainder": rest, "none": ~rest}
        elif self.kind == "index":
            index = np.where(read[0] < 0, read[0] + self.size, read[0])
            cases = {"first": index == 0, "last": index == self.size - 1}
        yield from (word for word, there in cases.items() if there.any())


class Conditions:
    """The conditions of one graph. A graph with inputs that are not declared, such as a cache's length, has none.

    Args:
        graph: the declared graph.
        data: the serialised graph.
        weights: the directory of the weights.
    """

    def __init__(self, graph: Graph, data: bytes, weights: Path) -> None:
        self.graph = graph
        model = ir.from_proto(parse(data))
        inline(model)
        proto = ir.to_proto(model)
        declared = {tensor.name for tensor in graph.input_tensors()}
        self.found = list(_find(proto)) if all(item.name in declared for item in proto.graph.input) else []
        self.constants = _small_integers(proto.graph)
        self._names = list(dict.fromkeys(name for item in self.found for name in item.values))
        self._session = None
        if self.found:
            part = _extract(proto, self._names).SerializeToString()
            self._session = open_session(part, weights=weights, optimize=False, threads=1, memory="mapped")

    def outcomes(self, feeds: Feeds, point: Point, dtype: np.dtype[Any]) -> set[Outcome]:
        """Return what happens in the last call at a point; a failure, which the comparison reports, counts as well."""
        if self._session is None:
            return set()
        call = "" if self.graph.past is None else _kind_of_call(point)
        given = typed_feeds(self.graph, self._inputs(feeds, point), dtype)
        names = {item.name for item in self._session.get_inputs()}
        outputs = [item.name for item in self._session.get_outputs()]
        try:
            results = run_session(self._session, outputs, {name: given[name] for name in given if name in names})
        except Exception:  # the runtime raises a dozen classes without a common base
            return {(-1, "failure", call)}
        values = dict(zip(self._names, results, strict=True))
        return {(number, word, call) for number, item in enumerate(self.found) for word in item.happened(values)}

    def _inputs(self, feeds: Feeds, point: Point) -> dict[str, Array]:
        """Return the inputs of the last call, with random numbers for a past and for the outputs of other graphs."""
        past = self.graph.past
        own = {tensor.name: feeds[tensor.name] for tensor in self.graph.input_tensors() if tensor.name in feeds}
        inputs = dict(slice_feeds(self.graph, own, point.past, point.past + point.length)) if past else own
        sizes = {"batch": point.batch, "sequence": point.length if past else point.length + point.past}
        for tensor in self.graph.input_tensors():
            if tensor.name in inputs:
                sizes |= {
                    dim: inputs[tensor.name].shape[n] for n, dim in enumerate(tensor.dims) if isinstance(dim, str)
                }
        if past:
            sizes[past.length] = point.past
        missing = [tensor for tensor in self.graph.input_tensors() if tensor.name not in inputs]
        lengths = dict.fromkeys(self.graph.dim_names(), point.past + point.length)
        rng = np.random.default_rng(0)
        return inputs | {
            tensor.name: rng.standard_normal(tensor.shape(lengths | sizes), np.float32) for tensor in missing
        }


def _kind_of_call(point: Point) -> str:
    if not point.past:
        return "first"
    return "step" if point.length == 1 else "later"


class Coverage:
    """The outcomes of all conditions that the compared points show.

    Args:
        conditions: the conditions of each graph.
        feeds: makes the inputs of a point.
        dtype: the dtype of floating-point inputs.
    """

    def __init__(self, conditions: Sequence[Conditions], feeds: Callable[[Point], Feeds], dtype: np.dtype[Any]) -> None:
        self._conditions, self._feeds, self._dtype = conditions, feeds, dtype
        self.seen: set[tuple[str, Outcome]] = set()

    def at(self, point: Point) -> set[tuple[str, Outcome]]:
        """Return the outcomes at a point."""
        feeds = self._feeds(point)
        return {
            (item.graph.name, outcome)
            for item in self._conditions
            for outcome in item.outcomes(feeds, point, self._dtype)
        }

    def add(self, points: Iterable[Point]) -> None:
        """Add compared points."""
        for point in points:
            self.seen |= self.at(point)

    def extend(self, more: Iterable[Point]) -> Iterator[Point]:
        """Yield those of the given points that show an outcome not seen before, and add them."""
        for point in more:
            new = self.at(point) - self.seen
            if new:
                self.seen |= new
                yield point

    def facts(self) -> dict[str, Any]:
        """The entry for parity.json: the number of conditions and outcomes, and those that no input shows."""
        known = {(graph, number, word) for graph, (number, word, _) in self.seen}
        facts: dict[str, Any] = {}
        for item in self._conditions:
            every = [(number, word) for number, found in enumerate(item.found) for word in _OUTCOMES[found.kind]]
            unseen = [(number, word) for number, word in every if (item.graph.name, number, word) not in known]
            facts[item.graph.name] = {
                "conditions": len(item.found),
                "outcomes": len(every),
                "unseen": [f"{item.found[number].node}: {word}" for number, word in unseen],
            }
        return facts


def candidates(graphs: Sequence[Graph], longest: int, constants: Iterable[int]) -> list[Point]:
    """Return points of many sizes, cheap ones first: around the constants of the graphs and up to the longest input."""
    near = {value + change for value in constants for change in (0, 1) if value < longest}
    lengths = sorted(size for size in {1, 2, 3, 17, longest // 2, longest - 1, longest, *near} if 1 <= size <= longest)
    allowed = sizes_of(graphs).get("sequence", Size())
    lengths = sorted({allowed.nearest(size) for size in lengths})
    has_mask = any(tensor.is_mask for graph in graphs for tensor in graph.input_tensors())
    pasts = sorted({0, 1, *(size for size in lengths if size < longest)}) if any(g.past for g in graphs) else [0]
    paddings: tuple[Padding, ...] = ("none", "left", "right") if has_mask else ("none",)
    found = [
        Point(batch, length, past, padding)
        for batch in (1, 2, 7)
        for length in lengths
        for past in pasts
        if length + past <= longest and (past == 0 or length <= 3)
        for padding in paddings
    ]
    return sorted(found, key=lambda point: point.tokens)


def _find(model: onnx.ModelProto) -> Iterator[_Condition]:
    """Yield the conditions of a graph without functions."""
    graph = model.graph
    types = {
        item.name: item.type.tensor_type.elem_type for item in shape_inference.infer_shapes(model).graph.value_info
    }
    tables = {item.name: tuple(item.dims) for item in graph.initializer}
    for node in graph.node:
        inputs = tuple(name for name in node.input if name)
        module = next((item.value for item in node.metadata_props if item.key == MODULE_KEY), "")
        name = f"{node.op_type} in {module}" if module else node.op_type
        if node.op_type in _BOOLEAN:
            yield _Condition("truth", name, (node.output[0],))
        elif node.op_type == "Clip" and len(inputs) == 3:
            yield _Condition("clip", name, inputs)
        elif node.op_type in _BOUNDS and len(inputs) == 2:
            yield _Condition("bounds", name, inputs)
        elif node.op_type in _REMAINDERS and types.get(node.output[0]) == TensorProto.INT64:
            yield _Condition("remainder", name, inputs)
        elif node.op_type == "Gather" and node.input[0] in tables:
            axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
            yield _Condition("index", name, (node.input[1],), tables[node.input[0]][axis])


def _extract(model: onnx.ModelProto, wanted: Sequence[str]) -> onnx.ModelProto:
    """Return a graph that computes the wanted values alone, as float64."""
    makers = {name: node for node in model.graph.node for name in node.output}
    needed: set[str] = set()
    stack = list(wanted)
    while stack:
        name = stack.pop()
        if name and name not in needed:
            needed.add(name)
            stack += names_read([makers[name]]) if name in makers else ()
    nodes = [node for node in model.graph.node if needed & set(node.output)]
    casts = [
        helper.make_node("Cast", [name], [f"condition.{number}"], to=TensorProto.DOUBLE)
        for number, name in enumerate(wanted)
    ]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.DOUBLE, None) for node in casts]
    graph = helper.make_graph(
        [*nodes, *casts], "conditions", [item for item in model.graph.input if item.name in needed], outputs,
        [item for item in model.graph.initializer if item.name in needed],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _small_integers(graph: onnx.GraphProto) -> set[int]:
    """Return the integers among the small constants of a graph, at which conditions may turn."""
    found: set[int] = set()
    constants = [item for item in graph.initializer if not item.external_data]
    constants += [
        item.t for node in graph.node if node.op_type == "Constant" for item in node.attribute if item.HasField("t")
    ]
    for item in constants:
        if item.data_type in (TensorProto.INT64, TensorProto.INT32) and int(np.prod(item.dims)) <= 4:
            found |= {abs(int(value)) for value in numpy_helper.to_array(item).reshape(-1)}
    return found
