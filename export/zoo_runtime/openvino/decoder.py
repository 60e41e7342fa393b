"""Token-by-token execution of a decoder on OpenVINO, with its past as the state of a request.

B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.probe.pipeline import Arrays
from zoo_runtime.generation.batch_decoder import BatchDecoder
from zoo_runtime.generation.stepper import check_roll_back, check_rows, check_saved
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP
from zoo_runtime.openvino.compiled import ROWS, CompiledGraph

__all__ = ["OpenVinoDecoder"]


@dataclass(frozen=True)
class _Saved:
    """The past of an :class:`OpenVinoDecoder` at some length."""

    owner: object
    length: int
    mask: Array
    origins: Array
    constants: Mapping[str, Array]
    past: Mapping[str, Array]


class OpenVinoDecoder(BatchDecoder):
    """Decoder for one batch, a :class:`zoo_runtime.Stepper`.

    Args:
        compiled: the compiled graph, which has a past.
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
        compiled: CompiledGraph,
        constants: Mapping[str, Array],
        rows: int,
        dtype: np.dtype[Any],
        *,
        positions: int | None = None,
    ) -> None:
        graph = compiled.graph
        blocks = next((tensor.name for tensor in graph.input_tensors() if tensor.is_blocks), None)
        super().__init__(graph, rows, dtype, positions, constants.get(blocks) if blocks else None)
        names = self.constant_names(compiled.inputs, {LOGITS_TO_KEEP, ROWS}, constants)
        self.constants = {name: np.ascontiguousarray(constants[name]) for name in names}
        self.cuts_logits = LOGITS_TO_KEEP in compiled.inputs
        self.request = compiled.request()
        self.request.forget()
        self.order = np.arange(rows, dtype=np.int32)
        """The row of the past that each row continues at the next step."""

    def compute(self, fed: Arrays, total: int, *, every: bool) -> Array:
        if self.cuts_logits:
            fed[LOGITS_TO_KEEP] = np.array(0 if every else 1)
        outputs = self.request.run({**self.constants, **fed, ROWS: self.order})
        self.order = np.arange(self.rows, dtype=np.int32)
        return outputs["logits"]

    def take(self, rows: Array) -> None:
        """Continue with the given rows, in the given order. Rows may repeat."""
        self.check_open()
        rows = check_rows(rows, self.rows, self.where)
        self.mask = self.mask[rows]
        origins = self.origins[rows]
        if not np.array_equal(origins, self.origins):
            self.constants = {name: np.ascontiguousarray(array[rows]) for name, array in self.constants.items()}
            self.origins = origins
        if self.length:
            self.order = self.order[rows]
        else:  # without a past, rows are those of the next step
            self.order = np.arange(len(rows), dtype=np.int32)

    def roll_back(self, count: int) -> None:
        """Forget the last positions of every row. Raises :class:`UsageError` if the past cannot be shortened."""
        self.check_open()
        count = check_roll_back(count, self, self.where)
        if not count:
            return
        self.length -= count
        axes = {past.name: past.dims.index(str(self.graph.past_length)) for past, _ in self.graph.growing_pairs()}
        self._write({name: array.take(range(self.length), axes[name]) for name, array in self._read().items()})

    def save(self) -> _Saved:
        """Return a copy of the past."""
        self.check_open()
        mask = self.mask[:, : self.length].copy()
        past = self._read() if self.length else {}
        return _Saved(self.owner, self.length, mask, self.origins, dict(self.constants), past)

    def restore(self, saved: Any) -> None:
        """Return to a saved past and its rows."""
        self.check_open()
        check_saved(saved, self.owner, self.where)
        self.length, self.mask, self.origins = saved.length, saved.mask.copy(), saved.origins
        self.constants = dict(saved.constants)
        self._write(saved.past)

    def close(self) -> None:
        """Release the past."""
        super().close()
        self.request.forget()
        self.constants = {}

    def _read(self) -> dict[str, Array]:
        """Return copies of the past of the present rows."""
        return {name: array[self.order] for name, array in self.request.read_past().items()}

    def _write(self, past: Mapping[str, Array]) -> None:
        """Replace the past; an empty one has no arrays."""
        self.order = np.arange(self.rows, dtype=np.int32)
        if self.length:
            self.request.write_past(past)
        else:
            self.request.forget()
