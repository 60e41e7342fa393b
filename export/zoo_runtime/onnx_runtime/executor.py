"""Running declared graphs on ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, TensorSpec, dim_names
from zoo.errors import ArtifactError, UsageError
from zoo.probe.inputs import Feeds, given_inputs
from zoo.probe.pipeline import Arrays, typed_feeds
from zoo_runtime.onnx_runtime.adapters import ADAPTER_IDS
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH, Buffers, run_in_place
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import device_of
from zoo_runtime.onnx_runtime.values import run_lean, run_session

__all__ = ["LOGITS_TO_KEEP", "OnnxExecutor", "check_feeds", "check_finite", "check_past", "check_values",
           "run_keeping"]  # fmt: skip

LOGITS_TO_KEEP = "logits_to_keep"
"""Optional graph input: the number of last positions to compute logits for; 0 means all."""


_LARGE = 2**22
"""Number of elements of a large output."""


class OnnxExecutor:
    """Runs each declared graph in its own session.

    Allocates cache buffers for graphs that need them. Their present outputs are views of the buffers; when these are
    passed back as the past, the buffers are extended in place, without a copy.

    Args:
        sessions: by graph name.
        dtype: dtype of floating-point inputs.
        twice: run graphs that have the input ``logits_to_keep`` again with 1 and with 3, and take the last positions'
            logits from these runs, so that a comparison covers them.
        lean: return the memory of every run to the system, if the sessions pool it on the CPU. Large outputs, which
            outlive a run, are not in the pool.
    """

    def __init__(
        self,
        sessions: Mapping[str, ort.InferenceSession],
        dtype: np.dtype[Any],
        *,
        twice: bool = True,
        lean: bool = False,
    ) -> None:
        self.sessions = sessions
        self.dtype = dtype
        self.twice = twice
        self.lean = lean
        self.buffers: dict[str, Buffers] = {}

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        session = self.sessions[graph.name]
        arrays = typed_feeds(graph, feeds, self.dtype)
        inputs = {item.name for item in session.get_inputs()}
        if ADAPTER_IDS in inputs:
            if ADAPTER_IDS not in feeds:
                raise UsageError(f"graph {graph.name} needs {ADAPTER_IDS}, the number of each row's adapter")
            arrays[ADAPTER_IDS] = np.asarray(feeds[ADAPTER_IDS], np.int64)
        if LOGITS_TO_KEEP not in inputs:
            return self._run(graph, session, arrays)
        return run_keeping(graph, partial(self._run, graph, session), arrays, twice=self.twice)

    def _run(self, graph: Graph, session: ort.InferenceSession, arrays: Arrays) -> Arrays:
        if all(item.name != PAST_LENGTH for item in session.get_inputs()):
            names = [output.name for output in session.get_outputs()]
            if self.lean and device_of(session) == "cpu":
                return run_lean(session, names, arrays, self._large_outputs(graph, names, arrays))
            return dict(zip(names, run_session(session, names, arrays), strict=True))
        outputs, self.buffers[graph.name] = run_in_place(session, graph, arrays, self.buffers.get(graph.name))
        return outputs

    def _large_outputs(self, graph: Graph, names: Collection[str], arrays: Arrays) -> Arrays:
        """Return empty arrays for the large outputs whose declared sizes follow from the inputs."""
        sizes = {
            dim: size
            for tensor in graph.input_tensors()
            for dim, size in zip(tensor.dims, arrays[tensor.name].shape, strict=True)
            if isinstance(dim, str)
        }
        buffers = {}
        for tensor in graph.output_tensors():
            with suppress(KeyError):  # a size that no input has
                shape = tensor.shape(sizes)
                if tensor.name in names and math.prod(shape) >= _LARGE and not arrays.get(LOGITS_TO_KEEP):
                    buffers[tensor.name] = np.empty(shape, self.dtype)
        return buffers


def run_keeping(graph: Graph, run: Callable[[Arrays], Arrays], arrays: Arrays, *, twice: bool = True) -> Arrays:
    """Run a graph that has the input ``logits_to_keep`` with 0, which keeps all logits.

    With ``twice``, it is run again with 1 and with 3, and the last positions' logits are those of these runs. A graph
    with more outputs than it declares is run once.
    """
    outputs = run(arrays | {LOGITS_TO_KEEP: np.array(0)})
    if twice and len(outputs) == len(graph.output_tensors()):
        for keep in sorted({1, min(3, outputs["logits"].shape[1])}, reverse=True):
            outputs["logits"][:, -keep:] = run(arrays | {LOGITS_TO_KEEP: np.array(keep)})["logits"]
    return outputs


def check_feeds(graph: Graph, feeds: Feeds) -> None:
    """Check inputs.

    Raises:
        UsageError: an input is missing.
        ArtifactError: an input has sizes or values that the graph excludes, such as ids outside the vocabulary.
    """
    check_past(graph, feeds)
    where = f"graph {graph.name}"
    past = graph.past_tensors()
    begins = bool(past) and past[0].name not in feeds
    sizes = {graph.past_length: 0} if begins and graph.past_length is not None else {}
    shapes: dict[TensorSpec, tuple[int, ...]] = {}
    for tensor in graph.input_tensors():
        if tensor.name not in feeds:
            if begins and tensor in past:
                continue
            raise UsageError(f"missing input {tensor.name}", where)
        shape = shapes[tensor] = np.shape(feeds[tensor.name])
        if len(shape) != len(tensor.dims):
            raise ArtifactError(f"{tensor.name} must have {len(tensor.dims)} dimensions, got {len(shape)}", where)
        for dim, size in zip(tensor.dims, shape, strict=True):
            declared = graph.sizes.get(str(dim))
            if declared is not None and not declared.allows(size):
                raise ArtifactError(f"{dim} of {tensor.name} is {size}, but must be {declared}", where)
            if dim_names(dim) == (dim,) and sizes.setdefault(str(dim), size) != size:
                problem = f"{dim} of {tensor.name} is {size}, but {sizes[str(dim)]} in another input"
                raise ArtifactError(problem, where)
        check_values(tensor, np.asarray(feeds[tensor.name]), where)
    for tensor, shape in shapes.items():
        computable = all(name in sizes for dim in tensor.dims for name in dim_names(dim))
        if computable and tensor.shape(sizes) != shape:
            raise ArtifactError(f"{tensor.name} must have the shape {tensor.shape(sizes)}, got {shape}", where)


def check_finite(graphs: Sequence[Graph], graph: Graph, feeds: Feeds, equal: Collection[str]) -> None:
    """Raise :class:`ArtifactError` for inputs with NaN or infinity, unless it is among ``equal``.

    Outputs of other graphs and pasts are not checked.
    """
    source_inputs = given_inputs(graphs)
    for tensor in graph.input_tensors():
        if not tensor.is_float or tensor.name not in source_inputs or tensor.name not in feeds:
            continue
        value = np.asarray(feeds[tensor.name])
        if np.isfinite(value).all():
            continue
        for kind, occurs in (("NaN", np.isnan(value).any()), ("infinity", np.isinf(value).any())):
            if occurs and kind not in equal:
                problem = (
                    f"{tensor.name} contains {kind}, which the comparison has not shown the graph to treat as the model"
                )
                raise ArtifactError(
                    problem, f"graph {graph.name}", "replace these numbers: see grid.non_finite in parity.json"
                )


def check_values(tensor: TensorSpec, value: Array, where: str) -> None:
    """Raise :class:`ArtifactError` for values that the runtime would convert, or count from the end."""
    kinds = "biu" if not tensor.is_float else "biufV"  # bfloat16 is V
    if value.dtype.kind not in kinds:
        expected = "numbers" if tensor.is_float else "integers"
        raise ArtifactError(f"{tensor.name} must have {expected}, got {value.dtype}", where)
    upper = 2 if tensor.is_mask else tensor.upper
    if upper is not None and value.size and not 0 <= value.min() <= value.max() < upper:
        raise ArtifactError(f"{tensor.name} must have integers from 0 to {upper - 1}", where)


def check_past(graph: Graph, feeds: Feeds) -> None:
    """Raise :class:`UsageError` for a past with int8 that is incomplete, or of another type or shape than declared."""
    tensors = graph.past_tensors()
    first = next((tensor for tensor in tensors if tensor.dtype == "int8"), None)
    if first is None or first.name not in feeds:
        return
    shape = np.shape(feeds[first.name])
    where = f"graph {graph.name}"
    sizes = {"batch": shape[0], str(graph.past_length): shape[2]} if len(shape) == len(first.dims) else {}
    for tensor in tensors:
        if tensor.name not in feeds:
            raise UsageError(f"missing input {tensor.name}", where, "give all outputs of a call as its past")
        value = np.asarray(feeds[tensor.name])
        kind = "int8" if tensor.dtype == "int8" else "floats"
        if (value.dtype == np.int8) != (kind == "int8") or not sizes or value.shape != tensor.shape(sizes):
            problem = f"{tensor.name} must be {kind} {tensor.dims}, got {value.dtype} {value.shape}"
            raise UsageError(problem, where, "give the outputs of a call with this export")
