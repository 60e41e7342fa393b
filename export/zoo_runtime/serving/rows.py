"""Rows of text on the graphs of the profile ``serving``, each with a past of its own, in buffers of fixed size.

B rows, T new tokens of a row in one call, C capacity, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, TensorSpec, dim_size
from zoo.errors import ArtifactError, UsageError
from zoo.probe.pipeline import token_input
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import device_of
from zoo_runtime.serving.bound_call import BoundCall, Buffer
from zoo_runtime.serving.capture import run_options
from zoo_runtime.serving.names import CAPACITY
from zoo_runtime.serving.sizes import check_shapes, fit, possible_counts, sizes_of_session

__all__ = ["RowState", "Rows"]


@dataclass(frozen=True)
class RowState:
    """A copy of one row of :class:`Rows`."""

    length: int
    broken: bool
    contents: Sequence[Array]
    """Contents of its past, then of its other inputs."""


class Rows:
    """B independent rows, each at a length of its own, which grow in any order.

    The caches, the inputs and the outputs are allocated once and bound to both graphs, so that a provider can capture
    a step. A row's results depend neither on other rows nor on what its unused slots contain, if that is finite.

    Args:
        step: a session on the graph for one token of each row.
        prefill: a session on the graph for up to T tokens of one row.
        graph: the declaration of the decoder.
        dtype: dtype of floating-point values.
        positions: maximum length of a row, if the model declares one.
    """

    def __init__(
        self,
        step: ort.InferenceSession,
        prefill: ort.InferenceSession,
        graph: Graph,
        dtype: np.dtype[Any],
        positions: int | None = None,
    ) -> None:
        self.graph = graph
        self.device = device_of(step)
        sizes = sizes_of_session(prefill)
        self.sizes = {**sizes, str(graph.past_length): sizes[CAPACITY]}
        check_shapes(step, graph, {**self.sizes, "sequence": 1})
        check_shapes(prefill, graph, {**self.sizes, "batch": 1})
        self.count = sizes["batch"]
        """B."""
        self.counts: tuple[int, ...] = (self.count,)
        """Numbers of rows that a step may have, in ascending order, B the last: the first that suffices is taken."""
        self.capacity = sizes[CAPACITY] if graph.growing_pairs() else None
        """Tokens that the caches have room for in a row; None if its past has a fixed size."""
        self.limit = min((size for size in (self.capacity, positions) if size is not None), default=None)
        """Maximum length of a row; None without a limit."""
        self.partial = len(graph.growing_pairs()) == len(graph.past_pairs())
        """Whether a call may add fewer tokens to a row than the graph reads. States would read the padding."""
        logits = next(tensor for tensor in graph.output_tensors() if tensor.name == "logits")
        self.vocabulary = dim_size(logits.dims[-1], {})
        """V."""
        self.ids_name = ids = str(token_input(graph))
        """The input for tokens."""
        self.upper = next(tensor.upper for tensor in graph.input_tensors() if tensor.name == ids)
        """Number of token ids, if the graph declares one."""
        self._specs = {tensor.name: tensor for tensor in graph.input_tensors()}
        pasts = {tensor.name for tensor in graph.past_tensors()}
        inputs = {item.name for item in step.get_inputs()}

        def buffer(tensor: TensorSpec) -> Buffer:
            kind = np.dtype(np.int64) if tensor.dtype == "int64" else dtype
            return Buffer(tensor.name, tensor.shape(self.sizes), kind, self.device)

        self._pasts = {tensor.name: buffer(tensor) for tensor in graph.past_tensors()}
        self.constants = {
            name: buffer(tensor) for name, tensor in self._specs.items() if name in inputs - pasts and name != ids
        }
        """Inputs that stay the same while a row grows, such as the keys and values of its source."""
        self.lengths = np.zeros(self.count, np.int64)
        """Number of tokens that each row has read."""
        self._broken = np.zeros(self.count, bool)
        """Rows whose caches may contain numbers that are not finite."""
        shared = {**self._pasts, **self.constants}
        self._bind = partial(
            BoundCall,
            step,
            graph,
            ids,
            size=1,
            shared=shared,
            dtype=dtype,
            options=run_options(self.device, recorded=True),
        )
        self._steps: dict[int, BoundCall] = {}
        """The graph for one token of each row, by the number of rows."""
        self.uses: Counter[int] = Counter()
        """Number of steps so far, by their number of rows."""
        self.possible = possible_counts(self.count) if _is_free(step) else self.counts
        """Numbers of rows at which the graph can run."""
        chunk = sizes["sequence"]
        self._prefill = BoundCall(
            prefill, graph, ids, 1, chunk, shared, dtype, run_options(self.device, recorded=False)
        )
        if self.device == "cuda":
            # A first call, which may run twice while it is recorded, leaves the states as they are.
            self.step(self.count, 0, {})

    def warm(self) -> None:
        """Run both graphs without tokens, so that the first text does not wait for memory to be allocated."""
        for count in self.counts:
            self.step(count, 0, {})
        self._prefill(0, self.lengths, {})

    def count_for(self, number: int) -> int:
        """Return the number of rows of a step for the first rows."""
        return next(count for count in self.counts if count >= number)

    def step(self, count: int, first: int, tokens: Mapping[int, Array]) -> Array:
        """Read a token of each of some rows, whose lengths stay as they are.

        Args:
            count: number of rows of the call.
            first: the first of them.
            tokens: the token of each row that takes part, by the row's number.

        Returns:
            The logits, (count, 1, V), which the next call overwrites.
        """
        self.uses[count] += 1
        if count not in self._steps:
            self._steps[count] = self._bind(rows=count)
        return self._steps[count](first, self.lengths, tokens)

    # Rows.

    def start(self, row: int, constants: Mapping[str, Array] | None = None) -> None:
        """Start a new text in a row.

        Args:
            row: its number, from 0.
            constants: the row's part of the other inputs, by name, without the batch dimension.

        Raises:
            ArtifactError: a constant is longer than its buffer. The row and all others stay as they are.
            UsageError: a constant is missing or unknown, or there is no row of that number.
        """
        self._check_row(row)
        values = dict(constants or {})
        if values.keys() != self.constants.keys():
            names = ", ".join(sorted(values.keys() ^ self.constants.keys()))
            raise UsageError(f"row {row} needs the inputs {', '.join(sorted(self.constants)) or 'of no name'}", names)
        one = {**self.sizes, "batch": 1}
        fitted = {name: fit(self._specs[name], array[None], one)[0] for name, array in values.items()}
        for name, array in fitted.items():
            self.constants[name].write(row, array)
        if self._broken[row]:
            for buffer in self._pasts.values():
                buffer.write(row, np.zeros(buffer.shape[1:], buffer.dtype))
        self.lengths[row], self._broken[row] = 0, False

    def copy(self, source: int, target: int) -> None:
        """Replace a row by a copy of another.

        Raises :class:`UsageError` if there is no row of that number.
        """
        self._check_row(source)
        self._check_row(target)
        for buffer in (*self._pasts.values(), *self.constants.values()):
            buffer.copy(source, target)
        self.lengths[target], self._broken[target] = self.lengths[source], self._broken[source]

    def move(self, source: int, target: int) -> None:
        """Continue the text of a row in another one.

        Only what the text has written is copied. The source may be started again, as after any text.
        """
        if self._broken[source] or self._broken[target]:
            self.copy(source, target)
            return
        growing = {past.name for past, _ in self.graph.growing_pairs()}
        for name, array in self.arrays():
            part = (slice(None), slice(int(self.lengths[source]))) if name in growing else ...
            array[target][part] = array[source][part]
        self.lengths[target] = self.lengths[source]

    def pasts(self) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of the past on the CPU, by name, with all rows along the first axis."""
        return ((name, buffer.read()) for name, buffer in self._pasts.items())

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of the past and the other inputs on the CPU, as :meth:`pasts` does."""
        return ((name, buffer.read()) for name, buffer in (*self._pasts.items(), *self.constants.items()))

    def shorten(self, row: int, count: int) -> None:
        """Forget the last tokens of a row, whose past consists of keys and values."""
        self.lengths[row] -= count
        if self._broken[row]:  # unused slots must be finite
            for past, _ in self.graph.growing_pairs():
                buffer = self._pasts[past.name]
                content = buffer.read()[row].copy()
                content[:, self.lengths[row] :] = 0
                buffer.write(row, content)

    def save(self, row: int) -> RowState:
        """Return a copy of a row."""
        buffers = (*self._pasts.values(), *self.constants.values())
        contents = [buffer.read()[row].copy() for buffer in buffers]
        return RowState(int(self.lengths[row]), bool(self._broken[row]), contents)

    def restore(self, row: int, state: RowState) -> None:
        """Replace a row by a saved one, which may have been another."""
        for buffer, content in zip((*self._pasts.values(), *self.constants.values()), state.contents, strict=True):
            buffer.write(row, content)
        self.lengths[row], self._broken[row] = state.length, state.broken

    @property
    def chunk(self) -> int:
        """Number of tokens that one call of ``prefill`` reads, at most."""
        return self._prefill.size

    def save_part(self, row: int, start: int) -> list[Array]:
        """Return copies of the keys and values of a row's tokens from ``start`` on, and of its states."""
        growing = {past.name for past, _ in self.graph.growing_pairs()}
        end = int(self.lengths[row])
        return [
            (buffer.read()[row][:, start:end] if name in growing else buffer.read()[row]).copy()
            for name, buffer in self._pasts.items()
        ]

    def restore_parts(self, row: int, parts: Sequence[Sequence[Array]]) -> None:
        """Continue a row, which has just been started, with saved parts of one text that follow each other."""
        growing = {past.name for past, _ in self.graph.growing_pairs()}
        for place, (name, buffer) in enumerate(self._pasts.items()):
            arrays = [part[place] for part in parts]
            if name not in growing:
                buffer.write(row, arrays[-1])
                continue
            content = buffer.read()[row].copy()
            whole = np.concatenate(arrays, axis=1)
            content[:, : whole.shape[1]] = whole
            buffer.write(row, content)
        self.lengths[row] = len(parts) * self.chunk

    def is_sound(self, row: int) -> bool:
        """Whether all numbers of a row are finite."""
        return not self._broken[row]

    def room(self, row: int) -> int | None:
        """Return how many more tokens fit into a row; None if any number does."""
        return None if self.limit is None else self.limit - int(self.lengths[row])

    def portion(self, row: int, count: int) -> int:
        """Return how many of the next ``count`` tokens of a row one call reads.

        A text whose portions are given to :meth:`extend` one by one has the same logits, to the bit, as if all of it
        were given at once.
        """
        return min(count, self._prefill.size if self.reads_chunk(row, count) else 1)

    def reads_chunk(self, row: int, count: int) -> bool:
        """Return whether ``prefill`` reads the next of ``count`` tokens of a row, in a call for this row alone.

        Otherwise a step reads one, in one call for all rows. This depends on the row alone, because the last bits of
        the two graphs' results differ.
        """
        size = self._prefill.size
        fits = self.capacity is None or int(self.lengths[row]) + size <= self.capacity
        return fits and count >= (2 if self.partial else max(size, 2))

    def past(self, name: str) -> Buffer:
        """Return the buffer of a tensor of the past."""
        return self._pasts[name]

    def extend(
        self, new: Mapping[int, Sequence[int] | Array], *, every: bool = True
    ) -> dict[int, Array | ArtifactError]:
        """Read new tokens of some rows.

        Args:
            new: the tokens of each row, by the row's number. Rows without tokens are left out of the results.
            every: return the logits after each token, instead of the last one alone.

        Returns:
            For each row, the logits, (T or 1, V), or an error: it has not enough room, or a token is not in the
            vocabulary, and it stays as it was. Other rows are not affected.

        Raises:
            UsageError: there is no row of that number, or the tokens are not a list of integers.
        """
        results: dict[int, Array | ArtifactError] = {}
        waiting: dict[int, Array] = {}
        for row, new_tokens in new.items():
            self._check_row(row)
            tokens = _token_list(row, new_tokens)
            error = self._refuse(row, tokens)
            if error is not None:
                results[row] = error
            elif len(tokens):
                waiting[row] = tokens
        parts: dict[int, list[Array]] = {row: [] for row in waiting}

        def read(first: int, counts: Mapping[int, int], *, chunk: bool) -> None:
            tokens = {row: waiting[row][:count] for row, count in counts.items()}
            if chunk:
                logits = self._prefill(first, self.lengths, tokens)
            else:
                logits = self.step(self.count_for(max(tokens) + 1), first, tokens)
            for row, count in counts.items():
                row_logits = logits[row - first, :count]
                self._broken[row] |= not np.isfinite(row_logits.astype(np.float32)).all()
                if not every:
                    parts[row].clear()
                parts[row].append(row_logits[0 if every else -1 :].copy())
                self.lengths[row] += count
                waiting[row] = waiting[row][count:]

        while waiting:
            for row in waiting:
                while self.reads_chunk(row, len(waiting[row])):
                    read(row, {row: self.portion(row, len(waiting[row]))}, chunk=True)
            waiting = {row: tokens for row, tokens in waiting.items() if len(tokens)}
            if waiting:
                read(0, dict.fromkeys(waiting, 1), chunk=False)
            waiting = {row: tokens for row, tokens in waiting.items() if len(tokens)}
        return results | {row: np.concatenate(arrays) for row, arrays in parts.items()}

    def _check_row(self, row: int) -> None:
        if not isinstance(row, int | np.integer) or isinstance(row, bool):
            raise UsageError(f"the number of a row must be an integer, got {row!r}")
        if not 0 <= row < self.count:
            raise UsageError(f"there is no row {row}: the export has {self.count}", None, "count rows from 0")

    def _refuse(self, row: int, tokens: Array) -> ArtifactError | None:
        """Return why new tokens of a row cannot be read, or None."""
        room = self.room(row)
        upper = self.upper
        if room is not None and len(tokens) > room:
            held = f"the caches hold {self.lengths[row]} of {self.limit}"
            remedy = f"export with a larger --fix {CAPACITY}=N"
            if self.limit != self.capacity:
                held = f"the row has {self.lengths[row]} of the model's {self.limit} positions"
                remedy = "start the row again"
            return ArtifactError(f"{len(tokens)} new tokens do not fit: {held}", f"row {row}", remedy)
        wrong = tokens[(tokens < 0) | (tokens >= upper)] if upper is not None else tokens[:0]
        if len(wrong):
            return ArtifactError(f"token {wrong[0]} is not in the vocabulary of {upper}", f"row {row}")
        return None


def _is_free(step: ort.InferenceSession) -> bool:
    """Whether a graph takes any number of rows. On a device, steps of one number are recorded."""
    return not isinstance(step.get_outputs()[0].shape[0], int) and device_of(step) == "cpu"


def _token_list(row: int, tokens: Any) -> Array:
    """Return new tokens as an array, (T,). Raises :class:`UsageError` if they are not integers."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        array = np.zeros((0, 0))
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise UsageError("new tokens must be a list of integers", f"row {row}")
    return array if array.dtype == np.uint64 else array.astype(np.int64)
