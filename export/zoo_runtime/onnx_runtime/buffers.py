"""Running graphs with preallocated cache buffers (see :mod:`zoo_export.graph.profiles`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import device_of
from zoo_runtime.onnx_runtime.stopping import running
from zoo_runtime.onnx_runtime.values import to_array, to_value

__all__ = ["PAST_LENGTH", "Buffers", "run_in_place"]

PAST_LENGTH = "past_length"
"""Graph input: the number of filled positions in the cache buffers."""
_ROOM = 32
"""Spare positions in new buffers."""
_UNUSED = 7.0
"""Fill for unwritten positions: finite, but not 0, so that reading them changes the results."""


class Buffers:
    """Preallocated caches of one batch.

    Args:
        past: the cached values so far, one array per cache.
        total: number of positions that must fit.
        axis: the axis of positions.
        device: ``cpu`` or ``cuda``.
        room: spare positions beyond ``total``.
    """

    def __init__(self, past: Sequence[Array], total: int, axis: int, device: str, *, room: int = _ROOM) -> None:
        self.axis = axis
        self.capacity = total + room
        self.arrays = []
        for array in past:
            shape = [self.capacity if place == axis else size for place, size in enumerate(array.shape)]
            buffer = np.full(shape, _UNUSED, array.dtype)
            self._part(buffer, array.shape[axis])[...] = array
            self.arrays.append(buffer)
        self.values = [to_value(buffer, device) for buffer in self.arrays]
        self.returned: list[Array] = []

    def hold(self, past: Sequence[Array], total: int) -> bool:
        """Whether ``past`` was returned by the last call and ``total`` positions fit, so that it can be extended."""
        same = [array is mine for array, mine in zip(past, self.returned, strict=False)]
        return bool(same) and all(same) and total <= self.capacity

    def filled(self, total: int) -> list[Array]:
        """Return the first ``total`` positions: views on the CPU, copies from a device."""
        arrays = [to_array(value) for value in self.values] if self.values[0].device_name() != "cpu" else self.arrays
        self.returned = [self._part(array, total) for array in arrays]
        return self.returned

    def move(self, rows: Array, total: int) -> None:
        """Copy the first ``total`` positions of row ``rows[i]`` to row ``i``, for every i. CPU only."""
        changed = np.flatnonzero(rows != np.arange(len(rows)))
        for array in self.filled(total):
            array[changed] = array[rows[changed]]

    def _part(self, array: Array, length: int) -> Array:
        return array[(*[slice(None)] * self.axis, slice(length))]


def run_in_place(
    session: ort.InferenceSession, graph: Graph, arrays: dict[str, Array], buffers: Buffers | None
) -> tuple[dict[str, Array], Buffers]:
    """Run a graph with its keys and values in ``buffers`` if the call continues from them, else in new buffers.

    Returns:
        The outputs, whose present keys and values are views of the buffers, and the buffers.
    """
    pairs = graph.growing_pairs()
    past, present = ([tensor.name for tensor in tensors] for tensors in zip(*pairs, strict=True))
    axis = pairs[0][0].dims.index(str(graph.past_length))
    tokens = next(tensor for tensor in graph.input_tensors() if "sequence" in tensor.dims)
    start = arrays[past[0]].shape[axis]
    total = start + arrays[tokens.name].shape[tokens.dims.index("sequence")]
    past_arrays = [arrays[name] for name in past]
    if buffers is None or not buffers.hold(past_arrays, total):
        buffers = Buffers(past_arrays, total, axis, device_of(session))
    binding = session.io_binding()
    inputs = {
        name: to_value(np.ascontiguousarray(array))
        for name, array in (arrays | {PAST_LENGTH: np.array(start)}).items()
        if name not in past
    }
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for old, new, buffer in zip(past, present, buffers.values, strict=True):
        binding.bind_ortvalue_input(old, buffer)
        binding.bind_ortvalue_output(new, buffer)
    others = [item.name for item in session.get_outputs() if item.name not in present]
    for name in others:
        binding.bind_output(name)
    with running() as options:
        session.run_with_iobinding(binding, options)
    results = [to_array(value) for value in binding.get_outputs()[len(present) :]]
    return dict(zip((*others, *present), (*results, *buffers.filled(total)), strict=True)), buffers
