"""The task of models that read sequences of vectors. N vectors, E hidden size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import TensorSpec, dim_size
from zoo.errors import ArtifactError
from zoo.tokenizers.inputs import padded
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, Pair, label
from zoo_runtime.running.runner import Runner, finite, require_outputs
from zoo_runtime.running.text_runner import chosen_adapters

__all__ = ["Sequences", "VectorFeatures"]


_FORMATS = "give an .npy file or a JSON list of lists of numbers"
_LENGTHS = (5, 3, 8)


@dataclass(frozen=True)
class Sequences:
    """The sequences of one input: one for each input of the graph."""

    number: int
    arrays: tuple[Array, ...]
    """(N, E) each."""
    adapter: int = 0
    """The number of its adapter, in the variant ``adapters``; set by the session."""


class VectorFeatures(Runner[Sequences]):
    """``last_hidden_state``, (N, E): the states of a sequence of vectors; of the target, for a model with a decoder.

    An input is a path of an .npy file, a list of lists of numbers or its JSON, or an array, (N, E). For a model with a
    decoder, it is a :class:`Pair` of a source and a target.
    """

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.graph = session.graphs[0]
        require_outputs(self.graph, ("last_hidden_state",), session.path)
        tensors = self.graph.input_tensors()
        self.inputs = [tensor for tensor in tensors if not tensor.is_mask]
        self.masks = [next((mask for mask in tensors if mask.is_mask and mask.dims[1] == tensor.dims[1]), None)
                      for tensor in self.inputs]  # fmt: skip

    def samples(self) -> Sequence[Any]:
        """Return random sequences of several lengths."""
        random = np.random.default_rng(0)
        samples = []
        for length in _LENGTHS:
            arrays = [random.standard_normal((length + place, _width(tensor)))
                      for place, tensor in enumerate(self.inputs)]  # fmt: skip
            samples.append(Pair(*arrays) if len(arrays) > 1 else arrays[0])  # type: ignore[arg-type]
        return samples

    def read(self, value: Any, number: int) -> Sequences:
        parts = tuple(value) if isinstance(value, Pair) else (value,)
        where = f"input {number}"
        if len(parts) != len(self.inputs):
            expected = "a single sequence" if len(self.inputs) == 1 else "a pair: a source and a target"
            raise ArtifactError(f"expected {expected}", where)
        arrays = [_vectors(part, _width(tensor), where) for part, tensor in zip(parts, self.inputs, strict=True)]
        return Sequences(number, tuple(array.astype(self.session.dtype) for array in arrays))

    def size(self, item: Sequences) -> int:
        """Length of the longest sequence."""
        return max(map(len, item.arrays))

    def feed(self, items: Sequence[Sequences]) -> dict[str, Array]:
        """Build the graph's inputs for a batch, padded on the right."""
        feeds: dict[str, Array] = {}
        for place, (tensor, mask) in enumerate(zip(self.inputs, self.masks, strict=True)):
            rows = [item.arrays[place] for item in items]
            longest = max(map(len, rows))
            feeds[tensor.name] = np.stack([np.pad(row, ((0, longest - len(row)), (0, 0))) for row in rows])
            if mask is not None:
                feeds[mask.name] = padded([[1] * len(row) for row in rows], "right")
        return feeds | chosen_adapters(self.session, items)

    def answer(self, items: Sequence[Sequences]) -> Sequence[Any]:
        states = self.session.execute(self.graph, self.feed(items))["last_hidden_state"]
        results = [{"last_hidden_state": row[: len(item.arrays[-1])]} for item, row in zip(items, states, strict=True)]
        return finite(items, states, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            states = answer.result["last_hidden_state"]
            first = " ".join(f"{value:.5f}" for value in states[0][:4])
            yield f"{label(answer)}: {len(states)} vectors x {len(states[0])}, the first [{first} ...]"


def _width(tensor: TensorSpec) -> int:
    return dim_size(tensor.dims[-1], {})


def _vectors(value: Any, width: int, where: str) -> Array:
    """Return vectors, (N, ``width``), or raise :class:`ArtifactError`."""
    if isinstance(value, str):
        value = _parse(value, where)
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ArtifactError("the vectors have different lengths", where) from error
    if array.dtype.kind not in "fiu" or array.ndim != 2:
        raise ArtifactError("expected vectors", where, _FORMATS)
    if array.shape[1] != width or not len(array):
        raise ArtifactError(f"expected vectors of {width} numbers, got shape {array.shape}", where)
    if not np.isfinite(array).all():
        raise ArtifactError("has values that are not finite", where)
    return array


def _parse(text: str, where: str) -> Any:
    """Read the file of a path, or the JSON of a text that begins with a bracket."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else np.load(text, allow_pickle=False)
    except OSError as error:
        raise ArtifactError(f"cannot read {text!r} ({error.strerror})", where, _FORMATS) from error
    except (ValueError, EOFError, RecursionError) as error:
        raise ArtifactError(f"{text[:80]!r} holds no numbers", where, _FORMATS) from error
    return value
