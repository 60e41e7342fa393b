"""Execution of a model's declared graphs for the checks, and comparison of outputs. Importing it imports torch."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zoo.contract import Graph, TensorSpec, dim_names
from zoo.nn import call_graph
from zoo.testing.check import fail

if TYPE_CHECKING:
    from zoo.probe.pipeline import Executor
    from zoo.testing.subject import Subject

__all__ = [
    "LENGTH",
    "SHIFTED_TOLERANCE",
    "TOLERANCE",
    "Arrays",
    "Feeds",
    "Gradients",
    "Recorder",
    "change",
    "check_equal",
    "check_finite",
    "check_shapes",
    "counting",
    "distance",
    "executor",
    "first_call",
    "inputs_along",
    "make_inputs",
    "masks",
    "outputs_of",
    "run",
]

Arrays = dict[str, Any]
Feeds = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
Valid = Callable[[Graph, TensorSpec], Any]

TOLERANCE = 1e-9
"""Allowed difference between float64 results that must be equal, relative to the largest value. Rounding causes about
1e-15, or more if the model amplifies it; real faults cause differences of a much larger order."""
SHIFTED_TOLERANCE = 1e-6
"""The same where a row's positions move: angles of positions, rounded to float32 as in the training of published
weights, differ by relative positions up to about 1e-7."""
ROWS, LENGTH = 3, 6
"""Batch size and length of the inputs, limited by the model's maximum length."""


def executor(model: nn.Module) -> Executor:
    """Return an executor of the model's graphs on arrays, in the model's dtype."""
    from zoo.probe.module import TorchExecutor

    return TorchExecutor(model)


def make_inputs(subject: Subject, *, rows: int = ROWS, length: int = LENGTH, other: int | None = None) -> Arrays:
    """Generate inputs without padding, of at most the longest length. Lengths other than ``sequence`` are ``other``."""
    from zoo.probe.inputs import Point, make_feeds

    point = Point(rows, min(length, subject.longest), 0, "none")
    return make_feeds(subject.graphs, point, 0, subject.longest, other=other, special=subject.special)


def length_of(graph: Graph, tensor: TensorSpec) -> str:
    """Return the name of the length that a mask applies to."""
    return "sequence" if graph.pasts else str(tensor.dims[1])


def masks(graphs: Sequence[Graph]) -> list[tuple[TensorSpec, str]]:
    """Return every mask once, with the length that it applies to."""
    masks_by_name = {
        tensor.name: (tensor, length_of(graph, tensor))
        for graph in reversed(graphs)
        for tensor in graph.input_tensors()
        if tensor.is_mask
    }
    return list(masks_by_name.values())


def inputs_along(graphs: Sequence[Graph], length: str, feeds: Feeds) -> list[tuple[TensorSpec, int]]:
    """Return the external inputs that have a length, once for each axis along which it lies, as in pairs of tokens."""
    inputs = {tensor.name: tensor for graph in graphs for tensor in graph.input_tensors() if tensor.name in feeds}
    return [
        (tensor, axis) for tensor in inputs.values() for axis, dim in enumerate(tensor.dims) if length in dim_names(dim)
    ]


def outputs_of(graph: Graph) -> Sequence[TensorSpec]:
    """Return a graph's outputs, except the present."""
    return graph.output_tensors()[: -len(graph.present_tensors()) or None]


def change(tensor: TensorSpec, values: Any, rng: np.random.Generator) -> Any:
    """Return changed values of an input; all differ from the old ones, unless only one value is possible."""
    if not tensor.is_float:
        upper = tensor.upper or 2
        return ((values + rng.integers(1, max(2, upper), values.shape)) % upper).astype(tensor.dtype)
    return values + rng.standard_normal(values.shape)


def run(execute: Executor, graphs: Sequence[Graph], feeds: Feeds, cuts: Sequence[int] = ()) -> dict[str, Arrays]:
    """Return the outputs of every graph; outputs of earlier graphs are inputs of later ones.

    A graph with a past is called on the parts between the cuts, and its outputs are concatenated.
    """
    tensors: Arrays = dict(feeds)
    results = {}
    for graph in graphs:
        inputs = {tensor.name: tensors[tensor.name] for tensor in graph.input_tensors() if tensor.name in tensors}
        results[graph.name] = _in_calls(execute, graph, inputs, cuts) if graph.pasts else execute(graph, inputs)
        tensors |= results[graph.name]
    return results


def _in_calls(execute: Executor, graph: Graph, inputs: Feeds, cuts: Sequence[int]) -> Arrays:
    from zoo.probe.inputs import empty_past, next_past, slice_feeds

    along = next(tensor for tensor in graph.input_tensors() if "sequence" in tensor.dims)
    rows, total = len(inputs[along.name]), inputs[along.name].shape[along.dims.index("sequence")]
    past = empty_past(graph, rows, execute.dtype)
    calls = []
    for start, stop in pairwise((0, *cuts, total)):
        outputs = execute(graph, dict(slice_feeds(graph, inputs, start, stop)) | past)
        past = next_past(graph, outputs)
        calls.append(outputs)
    if len(calls) == 1:
        return calls[0]
    return {
        tensor.name: np.concatenate([call[tensor.name] for call in calls], tensor.dims.index("sequence"))
        if "sequence" in tensor.dims
        else calls[-1][tensor.name]
        for tensor in graph.output_tensors()
    }


class Recorder:
    """An executor that records its inputs before and after each call."""

    def __init__(self, execute: Executor) -> None:
        self._execute = execute
        self.dtype = execute.dtype
        self.inputs: list[tuple[str, str, Any, Any]] = []
        """The graph, the name of the input, and its value before and after a call."""

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        inputs = {name: np.array(value) for name, value in feeds.items()}  # contiguous, so that tensors share memory
        before = {name: value.copy() for name, value in inputs.items()}
        outputs = self._execute(graph, inputs)
        self.inputs += [(graph.name, name, before[name], inputs[name]) for name in inputs]
        return outputs


def first_call(model: nn.Module, graph: Graph, feeds: Feeds, **past: Any) -> Arrays:
    """Call a graph that has a past on the first tokens of a text, and return its own outputs.

    ``past`` has the arguments for the past by name, or nothing.
    """
    from zoo.probe.module import as_array, as_tensor
    from zoo.probe.widened import KeptWide

    method = functools.partial(getattr(model, graph.method), **past)
    plain = replace(graph, past=None, attentions=())
    tensors = {tensor.name: as_tensor(feeds[tensor.name]) for tensor in plain.input_tensors()}
    with torch.inference_mode(), KeptWide():
        outputs = call_graph(types.SimpleNamespace(**{graph.method: method}), plain, tensors)  # type: ignore[arg-type]
        return {name: as_array(value) for name, value in outputs.items()}


class Gradients:
    """An executor that records gradients: its outputs are tensors attached to the autograd graph."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.real = next(model.parameters()).dtype
        self.dtype = np.dtype(np.float64)

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        tensors = {name: torch.as_tensor(value) for name, value in feeds.items()}
        real = {name: tensor.to(self.real) for name, tensor in tensors.items() if tensor.is_floating_point()}
        return call_graph(self.model, graph, tensors | real)


def counting(feeds: Feeds) -> Valid:
    """Return a function that gives the valid positions of an output: not padding, in rows with tokens."""
    from zoo.probe.inputs import Point
    from zoo.probe.positions import valid_positions

    longest = max((value.shape[1] for value in feeds.values() if value.ndim > 1), default=1)

    def valid(graph: Graph, tensor: TensorSpec) -> Any:
        return valid_positions(graph, tensor, feeds, Point(1, longest, 0, "none"))

    return valid


def distance(wanted: Any, found: Any, valid: Any = True) -> float:
    """Return the largest difference at valid positions, relative to the largest value; infinite if it is not finite."""
    where = np.broadcast_to(valid, wanted.shape)
    if wanted.dtype == bool:
        wanted, found = wanted.astype(np.int8), found.astype(np.int8)
    scale = float(np.max(np.abs(wanted), where=where, initial=0.0))
    error = float(np.max(np.abs(found - wanted), where=where, initial=0.0))
    return error / (scale or 1.0) if np.isfinite(error) else float("inf")


def check_equal(
    graphs: Sequence[Graph], wanted: Results, found: Results, expected: str, situation: str, valid: Valid,
    *, tolerance: float = TOLERANCE, presents: bool = True,
) -> None:  # fmt: skip
    """Fail unless all outputs, with or without presents, are equal at valid positions, up to a tolerance."""
    for graph in graphs:
        for tensor in graph.output_tensors() if presents else outputs_of(graph):
            ours, theirs = wanted[graph.name][tensor.name], found[graph.name][tensor.name]
            if ours.shape != theirs.shape:
                fail(expected, f"{situation}, {tensor.name} has shape {theirs.shape}, not {ours.shape}")
            off = distance(ours, theirs, valid(graph, tensor))
            if not off <= tolerance:
                fail(expected, f"{situation}, {tensor.name} is off by {off:.2g} of its largest value")


def check_finite(graphs: Sequence[Graph], results: Results, expected: str, situation: str) -> None:
    """Fail unless all outputs are finite."""
    for graph in graphs:
        for tensor in graph.output_tensors():
            if not np.isfinite(np.asarray(results[graph.name][tensor.name], np.float64)).all():
                fail(expected, f"{situation}, {tensor.name} is not finite")


def check_shapes(graph: Graph, inputs: Feeds, outputs: Feeds, expected: str, situation: str) -> None:
    """Fail unless all outputs have the declared dimensions, with the sizes of the inputs."""
    sizes = {graph.past_length: 0} if graph.past_length else {}
    for tensor in graph.input_tensors():
        if tensor.name in inputs:
            sizes |= {dim: inputs[tensor.name].shape[axis] for axis, dim in enumerate(tensor.dims) if type(dim) is str}
    for tensor in graph.output_tensors():
        expected_shape, shape = tensor.shape(sizes), tuple(outputs[tensor.name].shape)
        if shape != expected_shape:
            dims = ", ".join(map(str, tensor.dims))
            fail(expected, f"{situation}, {tensor.name} has shape {shape}, but ({dims}) is {expected_shape}")
