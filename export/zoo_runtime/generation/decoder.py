"""Token-by-token execution of a decoder graph, with its past kept in ONNX Runtime's memory.

There are two kinds of graphs: with preallocated buffers for keys and values (``zoo export --profile``), which are
extended in place, and without, which return longer ones each time, to be passed to the next call. States of fixed size,
and the keys and values of layers with windows, are passed on in both. Nothing is copied between tokens.

B rows, T new tokens, V vocabulary, H width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph
from zoo.probe.inputs import empty_past
from zoo.probe.pipeline import Arrays
from zoo_runtime.generation.batch_decoder import ROOM, BatchDecoder
from zoo_runtime.generation.stepper import check_roll_back, check_rows, check_saved
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH, Buffers
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import device_of
from zoo_runtime.onnx_runtime.stopping import running
from zoo_runtime.onnx_runtime.values import to_array, to_value

__all__ = ["Array", "Decoder", "Saved", "take_rows"]


@dataclass(frozen=True)
class Saved:
    """The past of a :class:`Decoder` at some length."""

    owner: object
    """Identifies the decoder."""
    length: int
    mask: Array
    origins: Array
    constants: Mapping[str, ort.OrtValue]
    values: Sequence[ort.OrtValue]
    filled: Sequence[Array]
    """Copies of the keys and values that the graph extends in place."""


class Decoder(BatchDecoder):
    """Decoder for one batch, a :class:`zoo_runtime.Stepper`.

    Args:
        session: a session on the graph.
        graph: the graph's declaration, with a past.
        constants: inputs that do not change between steps, by name, one row per continuation; and the numbers of the
            blocks of the tokens of the first step, (B, T), by default 0.
        rows: B.
        dtype: dtype of the past.
        positions: maximum length of the past, if there is one.

    Raises:
        UsageError: the graph has an unsupported input, or reads neither token ids nor embeddings.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        graph: Graph,
        constants: Mapping[str, ort.OrtValue],
        rows: int,
        dtype: np.dtype[Any],
        *,
        positions: int | None = None,
    ) -> None:
        blocks = next((constants[tensor.name] for tensor in graph.input_tensors()
                       if tensor.is_blocks and tensor.name in constants), None)  # fmt: skip
        super().__init__(graph, rows, dtype, positions, None if blocks is None else to_array(blocks).copy())
        self.session = session
        self.device = device_of(session)
        inputs = {item.name for item in session.get_inputs()}
        empty = empty_past(graph, rows, dtype)
        names = self.constant_names(inputs, {PAST_LENGTH, LOGITS_TO_KEEP, *empty}, constants)
        self.constants = {name: constants[name] for name in names}
        self.in_place = PAST_LENGTH in inputs
        self.cuts_logits = LOGITS_TO_KEEP in inputs
        self.binding = session.io_binding()
        self.buffers: Buffers | None = None
        """Keys and values that the graph extends in place."""
        self.extended: list[tuple[str, str]] = []
        """Names of the past and the present of each buffer."""
        if self.in_place:
            growing = graph.growing_pairs()
            self.extended = [(past.name, present.name) for past, present in growing]
            axis = growing[0][0].dims.index(str(graph.past_length))
            self.buffers = Buffers([empty[past] for past, _ in self.extended], 1, axis, self.device)
        pairs = [(past.name, present.name) for past, present in graph.past_pairs()]
        self.passed = [pair for pair in pairs if pair not in self.extended]
        """Names of the past and the present of each of ``values``."""
        self.values = [to_value(empty[past], self.device) for past, _ in self.passed]
        """The rest of the past: outputs of the last call."""
        self._bind_rows(rows)

    def compute(self, fed: Arrays, total: int, *, every: bool) -> Array:
        binding = self.binding
        if self.in_place:
            fed[PAST_LENGTH] = np.array(self.length)
            self._make_room(total)
        for name, array in fed.items():
            binding.bind_cpu_input(name, array)
        for (past, present), value in zip(self.passed, self.values, strict=True):
            binding.bind_ortvalue_input(past, value)
            binding.bind_output(present, self.device)
        one = total == self.length + 1 or (self.cuts_logits and not every)
        if self.cuts_logits:
            binding.bind_cpu_input(LOGITS_TO_KEEP, np.array(0 if every else 1))
        if one:
            binding.bind_ortvalue_output("logits", self.logits_value)
        else:
            binding.bind_output("logits")
        with running() as options:
            self.session.run_with_iobinding(binding, options)
        if self.passed or not one:
            outputs = dict(zip(self.outputs, binding.get_outputs(), strict=True))
            self.values = [outputs[present] for _, present in self.passed]
        return self.logits if one else to_array(outputs["logits"])

    def take(self, rows: Array) -> None:
        """Continue with the given rows, in the given order. Rows may repeat."""
        self.check_open()
        rows = check_rows(rows, self.rows, self.where)
        if np.array_equal(rows, np.arange(len(self.mask))):
            return
        as_many = len(rows) == len(self.mask)
        self.mask = self.mask[rows]
        origins = self.origins[rows]
        if not np.array_equal(origins, self.origins):
            self.constants = {name: take_rows(value, rows, self.device) for name, value in self.constants.items()}
            self.origins = origins
        self.values = [take_rows(value, rows, self.device) for value in self.values]
        if self.buffers is not None:
            if as_many and self.device == "cpu":
                self.buffers.move(rows, self.length)
            else:
                filled = [array[rows] for array in self.buffers.filled(self.length)]
                self.buffers = Buffers(filled, self.buffers.capacity, self.buffers.axis, self.device, room=0)
                as_many = False
        if as_many:
            self._bind_constants()
        else:
            self._bind_rows(len(rows))

    def roll_back(self, count: int) -> None:
        """Forget the last positions of every row. Raises :class:`UsageError` if the past cannot be shortened."""
        self.check_open()
        count = check_roll_back(count, self, self.where)
        self.length -= count
        if count and self.buffers is None:
            axis = self.graph.growing_pairs()[0][0].dims.index(str(self.graph.past_length))
            window = (*[slice(None)] * axis, slice(self.length))
            arrays = [np.ascontiguousarray(to_array(value)[window]) for value in self.values]
            self.values = [to_value(array, self.device) for array in arrays]

    def save(self) -> Saved:
        """Return the past. Buffers are copied; values that the graph returns anew each time are not."""
        self.check_open()
        filled = [] if self.buffers is None else [array.copy() for array in self.buffers.filled(self.length)]
        mask = self.mask[:, : self.length].copy()
        return Saved(self.owner, self.length, mask, self.origins, dict(self.constants), list(self.values), filled)

    def restore(self, saved: Saved) -> None:
        """Return to a saved past and its rows."""
        self.check_open()
        check_saved(saved, self.owner, self.where)
        self.length = saved.length
        self.mask = saved.mask.copy()
        self.origins = saved.origins
        self.constants = dict(saved.constants)
        self.values = list(saved.values)
        if self.buffers is not None:
            room = max(ROOM, self.length // 8)
            self.buffers = Buffers(saved.filled, self.length, self.buffers.axis, self.device, room=room)
        self._bind_rows(len(self.mask))

    def close(self) -> None:
        """Release the past."""
        super().close()
        self.binding.clear_binding_inputs()
        self.binding.clear_binding_outputs()
        self.buffers = None
        self.values = []
        self.constants = {}

    def _bind_constants(self) -> None:
        for name, value in self.constants.items():
            self.binding.bind_ortvalue_input(name, value)

    def _bind_rows(self, rows: int) -> None:
        """Bind the inputs and outputs that depend on the number of rows."""
        self.binding.clear_binding_inputs()
        self.binding.clear_binding_outputs()
        self._bind_constants()
        self.logits = np.empty((rows, 1, self.vocabulary), self.dtype)
        self.logits_value = to_value(self.logits)
        self.outputs = ["logits", *(present for _, present in (*self.extended, *self.passed))]
        self.binding.bind_ortvalue_output("logits", self.logits_value)
        if self.buffers is not None:
            self._bind_buffers(self.buffers)
        for _, present in self.passed:
            self.binding.bind_output(present, self.device)

    def _bind_buffers(self, buffers: Buffers) -> None:
        for (past, present), value in zip(self.extended, buffers.values, strict=True):
            self.binding.bind_ortvalue_input(past, value)
            self.binding.bind_ortvalue_output(present, value)

    def _make_room(self, total: int) -> None:
        """Copy the past to larger buffers if new tokens do not fit. Buffers grow by an eighth to make this rare."""
        if self.buffers is not None and total > self.buffers.capacity:
            filled = self.buffers.filled(self.length)
            self.buffers = Buffers(filled, total, self.buffers.axis, self.device, room=max(ROOM, total // 8))
            self._bind_buffers(self.buffers)


def take_rows(value: ort.OrtValue, rows: Array, device: str) -> ort.OrtValue:
    """Select rows of a tensor, along its first dimension."""
    return to_value(np.ascontiguousarray(to_array(value)[rows]), device)
