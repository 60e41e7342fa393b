"""Running a model's declared graphs for the checks, and comparing what comes out. Importing it imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zoo import models
from zoo.artifact import ModelDirectory
from zoo.contract import Graph, TensorSpec
from zoo.nn import call_graph
from zoo.testing.check import fail
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from zoo_export.pipeline import Executor

__all__ = [
    "LENGTH",
    "ROWS",
    "TOLERANCE",
    "Arrays",
    "Feeds",
    "Gradients",
    "change",
    "check_equal",
    "check_finite",
    "check_shapes",
    "counting",
    "distance",
    "executor",
    "inputs_along",
    "length_of",
    "make_inputs",
    "masks",
    "outputs_of",
    "perturb",
    "run",
    "stored_model",
]

Arrays = dict[str, Any]
Feeds = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
Valid = Callable[[Graph, TensorSpec], Any]

TOLERANCE = 1e-9
"""How far apart results in float64 may be that a law makes equal, in sizes of the largest number. Rounding takes some
1e-15 of it, and more where a model magnifies it; what a law forbids takes a good part of it all."""
ROWS, LENGTH = 3, 6
"""The batch and the length that laws are looked at with, as far as the model takes so much."""


def executor(model: nn.Module) -> Executor:
    """Runs graphs of a model on arrays, in whatever dtype it has."""
    from zoo_export.reference import TorchExecutor

    return TorchExecutor(model)


def make_inputs(subject: Subject, *, rows: int = ROWS, length: int = LENGTH, other: int | None = None) -> Arrays:
    """Random inputs without padding, for every graph. Lengths other than ``sequence`` are ``other``."""
    from zoo_export.grid import Point, make_feeds

    point = Point(rows, min(length, subject.longest), 0, "none")
    return make_feeds(subject.graphs, point, 0, subject.longest, other=other)


def length_of(graph: Graph, tensor: TensorSpec) -> str:
    """The length that a mask is about."""
    return "sequence" if graph.past else str(tensor.dims[1])


def masks(graphs: Sequence[Graph]) -> list[tuple[TensorSpec, str]]:
    """Every mask, once, and the length that it is about."""
    found = {
        tensor.name: (tensor, length_of(graph, tensor))
        for graph in reversed(graphs)
        for tensor in graph.input_tensors()
        if tensor.is_mask
    }
    return list(found.values())


def inputs_along(graphs: Sequence[Graph], length: str, feeds: Feeds) -> dict[str, tuple[TensorSpec, int]]:
    """The inputs from outside that have a length, with its axis."""
    return {
        tensor.name: (tensor, axis)
        for graph in graphs
        for tensor in graph.input_tensors()
        for axis, dim in enumerate(tensor.dims)
        if tensor.name in feeds and length in [name.strip() for name in str(dim).split("+")]
    }


def outputs_of(graph: Graph) -> Sequence[TensorSpec]:
    """What a graph gives, without its present."""
    return graph.output_tensors()[: -len(graph.present_tensors()) or None]


def change(tensor: TensorSpec, values: Any, rng: np.random.Generator) -> Any:
    """Other values for an input, each different from what it was where there is a choice."""
    if tensor.dtype == "int64":
        upper = tensor.upper or 2
        return (values + rng.integers(1, max(2, upper), values.shape)) % upper
    return values + rng.standard_normal(values.shape)


def run(execute: Executor, graphs: Sequence[Graph], feeds: Feeds, cuts: Sequence[int] = ()) -> dict[str, Arrays]:
    """Every graph's outputs, each graph fed by the ones before it.

    A graph with a past is called on the tokens before the first cut, then on those before the next, and so on; what it
    gives for each token is put together again.
    """
    known: Arrays = dict(feeds)
    results = {}
    for graph in graphs:
        inputs = {tensor.name: known[tensor.name] for tensor in graph.input_tensors() if tensor.name in known}
        results[graph.name] = _in_calls(execute, graph, inputs, cuts) if graph.past else execute(graph, inputs)
        known |= results[graph.name]
    return results


def _in_calls(execute: Executor, graph: Graph, inputs: Feeds, cuts: Sequence[int]) -> Arrays:
    from zoo_export.grid import empty_past, next_past, slice_feeds

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


class Gradients:
    """Runs graphs as an :func:`executor` does, and keeps what a gradient needs: its outputs are tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.real = next(model.parameters()).dtype
        self.dtype = np.dtype(np.float64)

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        tensors = {name: torch.as_tensor(value) for name, value in feeds.items()}
        real = {name: tensor.to(self.real) for name, tensor in tensors.items() if tensor.is_floating_point()}
        return call_graph(self.model, graph, tensors | real)


def perturb(model: nn.Module) -> None:
    """Put noise on every weight."""
    from zoo_export.reference import noisy

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(noisy(parameter, generator))


def counting(feeds: Feeds) -> Valid:
    """Where an output means something: what is not padding, in rows that are not."""
    from zoo_export.grid import Point
    from zoo_export.parity import valid_positions

    longest = max(value.shape[1] for value in feeds.values() if value.ndim > 1)

    def valid(graph: Graph, tensor: TensorSpec) -> Any:
        return valid_positions(graph, tensor, feeds, Point(1, longest, 0, "none"))

    return valid


def distance(wanted: Any, found: Any, valid: Any = True) -> float:
    """The largest difference where it counts, in sizes of the largest number; infinite where there is no number."""
    where = np.broadcast_to(valid, wanted.shape)
    scale = float(np.max(np.abs(wanted), where=where, initial=0.0))
    error = float(np.max(np.abs(found - wanted), where=where, initial=0.0))
    return error / (scale or 1.0) if np.isfinite(error) else float("inf")


def check_equal(
    graphs: Sequence[Graph], wanted: Results, found: Results, expected: str, situation: str, valid: Valid
) -> None:
    """Fail unless every output is the same where it counts."""
    for graph in graphs:
        for tensor in graph.output_tensors() if graph.past else outputs_of(graph):
            ours, theirs = wanted[graph.name][tensor.name], found[graph.name][tensor.name]
            if ours.shape != theirs.shape:
                fail(expected, f"{situation}, {tensor.name} has shape {theirs.shape}, not {ours.shape}")
            off = distance(ours, theirs, valid(graph, tensor))
            if not off <= TOLERANCE:
                fail(expected, f"{situation}, {tensor.name} is off by {off:.2g} of its largest number")


def check_finite(graphs: Sequence[Graph], results: Results, expected: str, situation: str) -> None:
    """Fail unless every output is a number everywhere."""
    for graph in graphs:
        for tensor in graph.output_tensors():
            if not np.isfinite(np.asarray(results[graph.name][tensor.name], np.float64)).all():
                fail(expected, f"{situation}, {tensor.name} is not finite")


def check_shapes(graph: Graph, inputs: Feeds, outputs: Feeds, expected: str, situation: str) -> None:
    """Fail unless outputs have the declared dimensions, as the inputs have them."""
    sizes = {graph.past.length: 0} if graph.past else {}
    for tensor in graph.input_tensors():
        if tensor.name in inputs:
            sizes |= {dim: inputs[tensor.name].shape[axis] for axis, dim in enumerate(tensor.dims) if type(dim) is str}
    for tensor in graph.output_tensors():
        wanted, shape = tensor.shape(sizes), tuple(outputs[tensor.name].shape)
        if shape != wanted:
            dims = ", ".join(map(str, tensor.dims))
            fail(expected, f"{situation}, {tensor.name} has shape {shape}; ({dims}) is {wanted}")


@contextmanager
def stored_model(subject: Subject, model: nn.Module) -> Iterator[tuple[ModelDirectory, dict[str, bytes]]]:
    """A model directory, and its ONNX graphs where it can be exported, pointing at its weights."""
    from zoo_export.graph_file import link

    with TemporaryDirectory() as folder:
        models.save_spec(subject.spec, model, Path(folder) / "model")
        stored = ModelDirectory.open(Path(folder) / "model")
        graphs = {} if isinstance(subject.onnx, Exception) else subject.onnx
        yield stored, {name: link(graph, stored.layout) for name, graph in graphs.items()}
