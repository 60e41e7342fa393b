"""Memory needed by a comparison, and the inputs for which it is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zoo.artifact import HALVES, ModelDirectory
from zoo.config import Config
from zoo.contract import Graph, TensorSpec, row_sizes
from zoo.errors import IncomparableError
from zoo.probe.grid import longest_length
from zoo.probe.inputs import Point
from zoo.system import free_memory

__all__ = ["check_memory", "fits", "longest_input", "output_count"]

_ATTENTIONS = 2**28
"""Largest number of attention weights compared at one point: it grows with the square of the length."""
_OUTPUTS = 2**27
"""Maximum number of other output values of one row, such as logits, at the longest inputs."""
_COPIES = 1.1
"""Memory for weights, as a multiple of them: perturbed ones, or those that ONNX Runtime repacks for its kernels."""
_OUTPUT_BYTES = 24
"""Memory for each output in the longest inputs: in float64, by PyTorch, and by the graph while it is compared."""


def longest_input(config: Config, graphs: Sequence[Graph], longest: int | None = None) -> int:
    """Return the number of tokens of the longest inputs: at most ``longest``, and as memory allows."""
    length = longest_length(config, graphs)
    if longest is not None:
        length = min(length, longest)
    while length > 1 and not (
        fits(graphs, Point(1, length, 0, "none")) and output_count(graphs, Point(1, length, 0, "none")) <= _OUTPUTS
    ):
        length //= 2
    return length


def fits(graphs: Sequence[Graph], point: Point) -> bool:
    """Return whether the attention weights at a point are few enough to compare."""
    return output_count(graphs, point, attentions=True) <= _ATTENTIONS


def output_count(graphs: Sequence[Graph], point: Point, *, attentions: bool = False) -> int:
    """Return the number of attention weights, or of all other outputs, at a point."""
    total = point.length + point.past
    shapes = (
        tensor.shape(dict.fromkeys(graph.dim_names(), total) | row_sizes(graphs, point.batch) | {"past_sequence": 0})
        for graph in graphs
        for tensor in graph.output_tensors()
        if (tensor in _attentions(graph)) == attentions
    )
    return sum(math.prod(shape) for shape in shapes)


def _attentions(graph: Graph) -> set[TensorSpec]:
    """Return the attention weights that are outputs, and what they are computed from."""
    return {*graph.recorded(), *(tensor for inputs in graph.attention_inputs for tensor in inputs.tensors())}


def check_memory(stored: ModelDirectory, graphs: Sequence[Graph] | None = None) -> None:
    """Raise :class:`IncomparableError` if there is not enough memory to compare graphs, by default those declared.

    Weights are read from their file. A comparison holds one copy that is perturbed or repacked for kernels, and the
    outputs of the longest input. Graphs in half precision are also compared in float32, on two copies.
    """
    graphs = graphs or stored.spec.windowed_graphs
    longest = Point(1, longest_input(stored.spec.config, graphs), 0, "none")
    weights = sum(tensor.length for tensor in stored.layout.values()) * (4 if stored.dtype in HALVES else 1)
    outputs = output_count(graphs, longest) + output_count(graphs, longest, attentions=True)
    needed, free = weights * _COPIES + outputs * _OUTPUT_BYTES, free_memory()
    if needed > free:
        raise IncomparableError(
            f"too large to verify here: needs {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free",
            stored.path,
            "zoo export --onnx --graph-only, then zoo verify on a larger machine",
        )
