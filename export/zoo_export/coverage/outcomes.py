"""The outcomes of the conditions in a graph at the inputs of a point.

The runtime evaluates the conditions without the rest of the graph, so that many inputs can be tried to find some for
every outcome. Floating-point inputs, such as a past, are random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo.arrays import Array
from zoo.contract import Graph, row_sizes
from zoo.errors import ArtifactError, StoppedError
from zoo.probe.dtypes import dtype_of
from zoo.probe.inputs import Feeds, Point, slice_feeds
from zoo_export.coverage.bounds import Bounds
from zoo_export.coverage.conditions import Condition, subgraphs, tap
from zoo_export.graph.file import dump, load
from zoo_export.graph.inline import inline
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH, Buffers
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import open_session
from zoo_runtime.onnx_runtime.values import run_session

__all__ = ["Conditions", "Outcome"]

_ROUNDING = {"Cast", "Ceil", "Floor", "Round"}
_INDEXED = {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"}
_FEW = 4
"""Largest number of elements of a small constant."""
_SILENCE = logging.NullHandler()
"""Keeps warnings of a library from stderr."""
Outcome = tuple[int, str, str]
"""The number of a condition, what happened, and in which kind of call."""


@dataclass(frozen=True)
class _CountingSession:
    """A session that counts the outcomes of some conditions."""

    conditions: Sequence[tuple[int, Condition]]
    """With their numbers, in the order of the counts."""
    session: ort.InferenceSession
    is_heavy: bool
    """Whether it computes activations, not only masks, positions and sizes."""

    def outcomes(self, inputs: Mapping[str, Array]) -> Iterator[tuple[int, str]]:
        """Yield what happens at these inputs."""
        (counts,) = run_session(self.session, [self.session.get_outputs()[0].name], inputs)
        names = [(number, word) for number, condition in self.conditions for word in condition.outcomes]
        yield from (name for name, count in zip(names, counts, strict=True) if count)


def _infer_shapes(model: ir.Model) -> None:
    """Infer the shapes of all values. Stored tensors have types, but no values: inference cannot read their files."""
    stored = [value for value in model.graph.initializers.values() if isinstance(value.const_value, ir.ExternalTensor)]
    places = [value.const_value for value in stored]
    for value in stored:
        value.const_value = None
    logging.getLogger("onnx_ir").addHandler(_SILENCE)  # what fails to be inferred is left out
    passes.ShapeInferencePass()(model)
    for value, place in zip(stored, places, strict=True):
        value.const_value = place


class Conditions:
    """The conditions of one graph.

    Args:
        graph: the declared graph.
        data: the serialised graph.
        weights: the directory of the weights.
        longest: the largest number of tokens that the model takes, if there is one.
    """

    def __init__(self, graph: Graph, data: bytes, weights: Path, longest: int | None = None) -> None:
        self.graph = graph
        model = load(data)
        inline(model)
        self._in_place = any(value.name == PAST_LENGTH for value in model.graph.inputs)
        self.constants = _small_integers(model.graph)
        _infer_shapes(model)
        integers = [tensor.name for tensor in graph.input_tensors() if not tensor.is_float and not tensor.is_mask]
        self.computed = {name for name in integers if _becomes_float(model.graph, name)}
        """Names of the integer inputs that the graph converts to floating-point numbers, to compute with them."""
        tapped = tap(model.graph)
        self.found = [condition for condition, _ in tapped]
        self._resizes = any(node.op_type == "Resize" for node in model.graph.all_nodes())
        bounds = Bounds(model.graph, graph, longest)
        self.possible = [
            (number, word)
            for number, condition in enumerate(self.found)
            for word, case in zip(condition.outcomes, condition.cases, strict=True)
            if not bounds.is_false(case)
        ]
        self.heavy = {number for number, (_, counts) in enumerate(tapped) if _computes_activations(counts)}
        self.closed: set[int] = set()
        """Numbers of the conditions that cannot be evaluated."""
        self._sessions = []
        for numbers in (set(range(len(tapped))) - self.heavy, self.heavy):
            if not numbers:
                continue
            part = _extract(model, [tapped[number][1] for number in sorted(numbers)])
            try:
                session = open_session(part, weights=weights, optimize=False, threads=1, memory="mapped")
            except ArtifactError:  # no kernel on the CPU, such as for operators of CUDA alone
                self.closed |= numbers
                continue
            conditions = [(number, self.found[number]) for number in sorted(numbers)]
            self._sessions.append(_CountingSession(conditions, session, numbers is self.heavy))

    @property
    def round_sizes(self) -> bool:
        """Whether the graph rounds floating-point numbers that it computes from sizes, masks or ids, as Resize does.

        PyTorch may compute such a number by another formula, which differs at the lengths where it is nearly whole.
        """
        return self._resizes or any(
            condition.node.op_type in _ROUNDING
            for number, condition in enumerate(self.found)
            if number not in self.heavy
        )

    def outcomes(self, feeds: Feeds, point: Point, dtype: np.dtype[Any], *, cheap: bool = True) -> set[Outcome]:
        """Return what happens in the last call at a point; a failure, which the comparison reports, counts as well.

        Conditions that depend on activations are left out unless the point is ``cheap``.
        """
        call = "" if not self.graph.pasts else _kind_of_call(point)
        seen: set[Outcome] = set()
        for counting in self._sessions:
            if counting.is_heavy and not cheap:
                continue
            names = {item.name for item in counting.session.get_inputs()}
            try:
                for inputs in self._calls(names, feeds, point, dtype):
                    seen |= {(number, word, call) for number, word in counting.outcomes(inputs)}
            except StoppedError:
                raise
            except Exception:  # the runtime raises a dozen classes without a common base
                seen.add((-1, "failure", call))
        return seen

    def _calls(
        self, names: Collection[str], feeds: Feeds, point: Point, dtype: np.dtype[Any]
    ) -> Iterator[dict[str, Array]]:
        """Yield the inputs ``names`` of the last call at a point, as an executor makes them."""
        inputs = self._inputs(names, feeds, point, dtype)
        if self._in_place:
            for tensor, _ in self.graph.growing_pairs():
                if tensor.name in names:
                    axis = tensor.dims.index(str(self.graph.past_length))
                    buffers = Buffers([inputs[tensor.name]], point.past + point.length, axis, "cpu")
                    inputs[tensor.name] = buffers.arrays[0]
        if PAST_LENGTH in names:
            inputs[PAST_LENGTH] = np.array(point.past)
        for keep in {0, 1, min(3, point.length)} if LOGITS_TO_KEEP in names else {0}:
            yield inputs | ({LOGITS_TO_KEEP: np.array(keep)} if LOGITS_TO_KEEP in names else {})

    def _inputs(self, names: Collection[str], feeds: Feeds, point: Point, dtype: np.dtype[Any]) -> dict[str, Array]:
        """Return inputs of the last call, with random numbers for a past and for the outputs of other graphs."""
        past = bool(self.graph.pasts)
        tensors = self.graph.input_tensors()
        inputs = {tensor.name: feeds[tensor.name] for tensor in tensors if tensor.name in feeds}
        last_call = dict(slice_feeds(self.graph, inputs, point.past, point.past + point.length)) if past else inputs
        sizes = dict.fromkeys(self.graph.dim_names(), point.past + point.length)
        sizes |= row_sizes([self.graph], point.batch)
        sizes["sequence"] = point.length if past else point.length + point.past
        for tensor in tensors:
            if tensor.name in last_call:
                sizes |= {
                    dim: last_call[tensor.name].shape[n] for n, dim in enumerate(tensor.dims) if isinstance(dim, str)
                }
        sizes[str(self.graph.past_length)] = point.past
        rng = np.random.default_rng(0)
        return {
            tensor.name: array.astype(dtype_of(tensor, dtype), copy=False)
            for tensor in tensors
            if tensor.name in names
            for array in [
                last_call[tensor.name] if tensor.name in last_call else rng.standard_normal(tensor.shape(sizes))
            ]
        }


def _kind_of_call(point: Point) -> str:
    if not point.past:
        return "first"
    return "step" if point.length == 1 else "later"


def _becomes_float(graph: ir.Graph, name: str) -> bool:
    """Return whether an integer input is converted to floating-point numbers. As an index, it is not."""
    stack = [value for value in graph.inputs if value.name == name]
    seen = set(stack)
    while stack:
        value = stack.pop()
        for node, place in value.uses():
            if node.op_type == "Shape" or (node.op_type in _INDEXED and place == 1):
                continue
            for output in node.outputs:
                if output.dtype is not None and output.dtype.is_floating_point():
                    return True
                if output not in seen and output.dtype != ir.DataType.BOOL:
                    seen.add(output)
                    stack.append(output)
    return False


def _computes_activations(value: ir.Value) -> bool:
    """Return whether a value depends on weights or on floating-point inputs, other than on their sizes."""
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        maker = current.producer()
        if maker is None:
            is_float = current.dtype is not None and current.dtype.is_floating_point()
            if isinstance(current.const_value, ir.ExternalTensor) or (current.is_graph_input() and is_float):
                return True
            continue
        read = {item for item in maker.inputs if item is not None}
        for inner in (node for graph in subgraphs(maker) for node in graph.all_nodes()):
            read |= {item for item in inner.inputs if item is not None}
        if maker.op_type == "Shape":
            read = {item for item in read if item.producer() is not None}
        stack += read - seen
        seen |= read
    return False


def _extract(model: ir.Model, counts: Sequence[ir.Value]) -> bytes:
    """Return a graph that computes only these values, as one vector."""
    joined = ir.node("Concat", counts, attributes={"axis": 0})
    joined.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    joined.outputs[0].shape = ir.Shape([None])
    model.graph.append(joined)
    model.graph.outputs[:] = joined.outputs
    part = model.clone()
    passes.RemoveUnusedNodesPass()(part)
    passes.CommonSubexpressionEliminationPass()(part)  # layers often share a mask
    part.graph.inputs[:] = [value for value in part.graph.inputs if value.uses()]
    for number, node in enumerate(part.graph.all_nodes()):
        for place, value in enumerate(node.outputs):
            value.name = f"{number}.{place}"  # the names of added nodes are unique within their graph only
    return dump(part)


def _small_integers(graph: ir.Graph) -> set[int]:
    """Return the integers among the small constants of a graph, at which conditions may turn."""
    values = [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]
    numbers: set[int] = set()
    for value in values:
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.size > _FEW:
            continue
        if tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32):
            numbers |= {abs(int(number)) for number in tensor.numpy().reshape(-1)}
    return numbers
