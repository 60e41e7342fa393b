"""Running a graph whose caches are buffers: see :mod:`zoo_export.profiles`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from zoo.contract import Graph
from zoo_export.session import device_of
from zoo_export.values import to_array, to_value

__all__ = ["PAST_LENGTH", "Buffers", "run_in_place"]

PAST_LENGTH = "past_length"
"""The input of such a graph that says how much of its buffers is filled."""
_ROOM = 32
"""Tokens that fit into new buffers beyond those of the call they are made for."""
_UNUSED = 7.0
"""What lies there. Anything finite will do, for nobody may read it; 0 would hide one who does."""

Array = np.ndarray[Any, Any]


class Buffers:
    """The caches of one continuation.

    Args:
        past: the filled part, one array for each cache.
        total: positions that must fit.
        axis: along which positions lie.
        device: ``cpu`` or ``cuda``.
        room: positions beyond those.
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
        """Whether ``past`` is what was returned last, so that the next tokens can be written behind it."""
        same = [given is mine for given, mine in zip(past, self.returned, strict=False)]
        return bool(same) and all(same) and total <= self.capacity

    def filled(self, total: int) -> list[Array]:
        """The first ``total`` positions: views, unless the buffers are on a device."""
        arrays = [to_array(value) for value in self.values] if self.values[0].device_name() != "cpu" else self.arrays
        self.returned = [self._part(array, total) for array in arrays]
        return self.returned

    def move(self, rows: Array, total: int) -> None:
        """Let the first ``total`` positions of each row be those of the row named for it. On the CPU alone."""
        changed = np.flatnonzero(rows != np.arange(len(rows)))
        for array in self.filled(total):
            array[changed] = array[rows[changed]]

    def _part(self, array: Array, length: int) -> Array:
        return array[(*[slice(None)] * self.axis, slice(length))]


def run_in_place(
    session: ort.InferenceSession, graph: Graph, arrays: dict[str, Array], buffers: Buffers | None
) -> tuple[dict[str, Array], Buffers]:
    """Run a graph, in the buffers of the call before where this one continues it, else in new ones.

    Returns the outputs, of which the present are views of the buffers, and the buffers.
    """
    assert graph.past is not None
    specs = graph.past.tensors()
    past, present = ([tensor.name for tensor in tensors] for tensors in (specs, graph.present_tensors()))
    axis = specs[0].dims.index(graph.past.length)
    tokens = next(tensor for tensor in graph.input_tensors() if "sequence" in tensor.dims)
    start = arrays[past[0]].shape[axis]
    total = start + arrays[tokens.name].shape[tokens.dims.index("sequence")]
    given = [arrays[name] for name in past]
    if buffers is None or not buffers.hold(given, total):
        buffers = Buffers(given, total, axis, device_of(session))
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
    session.run_with_iobinding(binding)
    made = [to_array(value) for value in binding.get_outputs()[len(present) :]]
    return dict(zip((*others, *present), (*made, *buffers.filled(total)), strict=True)), buffers
