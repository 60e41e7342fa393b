"""Tensors of fixed size, and the calls of graphs that are bound to them.

B rows, T new tokens of a row in one call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, dim_size
from zoo.errors import ArtifactError
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import device_of
from zoo_runtime.onnx_runtime.stopping import running
from zoo_runtime.onnx_runtime.values import element_type, to_array, to_value
from zoo_runtime.serving.names import NEW_LENGTHS, PAST_LENGTHS

__all__ = ["Array", "BoundCall", "Buffer"]


class Buffer:
    """One tensor of fixed size, whose first dimension are the rows.

    On the CPU, ``array`` shares its memory with the value; on a device it is None.

    Raises :class:`ArtifactError` if there is no memory for it.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype[Any], device: str) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        try:
            zeros = np.zeros(self.shape, dtype)
        except (MemoryError, ValueError) as error:  # an export may name any number of rows
            problem = f"there is no memory for {name}, which has the shape {self.shape}"
            raise ArtifactError(problem, None, "export with a smaller --fix batch=N") from error
        self.value = to_value(zeros, device)
        self.array = zeros if device == "cpu" else None

    def read(self) -> Array:
        """Return the content: a view on the CPU."""
        return to_array(self.value) if self.array is None else self.array

    def replace(self, array: Array) -> None:
        """Replace the whole content."""
        if self.array is None:
            self.value.update_inplace(np.ascontiguousarray(array, self.dtype))
        else:
            self.array[...] = array

    def write(self, row: int, array: Array) -> None:
        """Replace the content of a row.

        Raises :class:`ArtifactError` for an array of another shape.
        """
        if np.shape(array) != self.shape[1:]:
            raise ArtifactError(f"{self.name} of row {row} has shape {np.shape(array)}, not {self.shape[1:]}")
        content = self.read()
        content[row] = array
        if self.array is None:
            self.replace(content)

    def copy(self, source: int, target: int) -> None:
        """Copy one row to another."""
        self.write(target, self.read()[source])

    def part(self, first: int, count: int) -> tuple[str, int, Any, tuple[int, ...], int]:
        """Return where some rows lie: the arguments of ``IOBinding.bind_input`` after the name."""
        size = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        shape = (count, *self.shape[1:])
        return self.device, 0, element_type(self.dtype), shape, self.value.data_ptr() + first * size


class BoundCall:
    """A graph for some consecutive rows, with all its inputs and outputs bound to buffers.

    Args:
        session: the graph.
        graph: the declaration of the decoder.
        ids: the input for tokens.
        rows: number of rows of one call.
        size: T.
        shared: the buffers of all rows, by the names of inputs.
        dtype: dtype of floating-point values.
        options: options of each call.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        graph: Graph,
        ids: str,
        rows: int,
        size: int,
        shared: Mapping[str, Buffer],
        dtype: np.dtype[Any],
        options: ort.RunOptions,
    ) -> None:
        self.session = session
        self.graph = graph
        self.rows = rows
        self.size = size
        self.options = options
        self.device = device = device_of(session)
        logits = next(tensor for tensor in graph.output_tensors() if tensor.name == "logits")
        whole = np.dtype(np.int64)
        self.ids = Buffer(ids, (rows, size), whole, device)
        self.past, self.new = (Buffer(name, (rows,), whole, device) for name in (PAST_LENGTHS, NEW_LENGTHS))
        self.logits = Buffer("logits", (rows, size, dim_size(logits.dims[-1], {})), dtype, device)
        self._own = {ids: self.ids, PAST_LENGTHS: self.past, NEW_LENGTHS: self.new}
        self._shared = shared
        self._inputs = [item.name for item in session.get_inputs()]
        bound = {"logits", *(tensor.name for tensor in graph.present_tensors())}
        self._extra = [item.name for item in session.get_outputs() if item.name not in bound]
        self._bindings: dict[int, ort.IOBinding] = {}
        """By the first row."""

    def __call__(self, first: int, lengths: Array, tokens: Mapping[int, Array]) -> Array:
        """Run the graph; return the logits, (rows, T, V), which the next call overwrites.

        Args:
            first: the first row.
            lengths: lengths of all rows before the call, (B,).
            tokens: new tokens by row. The others take no part.
        """
        ids = np.zeros((self.rows, self.size), np.int64)
        new = np.zeros(self.rows, np.int64)
        for row, some in tokens.items():
            ids[row - first, : len(some)], new[row - first] = some, len(some)
        if first not in self._bindings:
            self._bindings[first] = self._bind(first)
        for buffer, array in ((self.ids, ids), (self.past, lengths[first : first + self.rows]), (self.new, new)):
            buffer.replace(array)
        with running(self.options):
            self.session.run_with_iobinding(self._bindings[first], self.options)
        return self.logits.read()

    def _bind(self, first: int) -> ort.IOBinding:
        """Bind the graph to the rows from ``first`` on."""
        binding = self.session.io_binding()
        for name in self._inputs:
            if name in self._own:
                binding.bind_ortvalue_input(name, self._own[name].value)
            else:
                binding.bind_input(name, *self._shared[name].part(first, self.rows))
        binding.bind_ortvalue_output("logits", self.logits.value)
        for past, present in self.graph.past_pairs():  # read before they are written: one buffer serves as both
            binding.bind_output(present.name, *self._shared[past.name].part(first, self.rows))
        for name in self._extra:
            binding.bind_output(name, self.device)
        return binding
