"""The task of models that declare no other: tensors in, tensors out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import TensorSpec
from zoo.errors import ArtifactError, UsageError, nearest
from zoo.probe.dtypes import dtype_of
from zoo.probe.inputs import Point, make_feeds
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.runner import Runner, finite

__all__ = ["Row", "Tensors"]

_FORMAT = 'give a JSON object such as {"NAME": [1, 2, 3]}'
_LENGTHS = (5, 3, 8)


@dataclass(frozen=True)
class Row:
    """The tensors of one input, by name, each without the dimension of rows."""

    number: int
    arrays: Mapping[str, Array]


class Tensors(Runner[Row]):
    """The outputs of the graph for one row, by name.

    An input maps the names of the graph's inputs to arrays or nested lists, without the dimension of rows, or is the
    JSON of such a mapping. A mask that is left out is 1 everywhere.
    """

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.graph = session.graphs[0]
        if len(session.graphs) > 1 or self.graph.pasts or len(self.graph.rows) > 1:
            what = "the task reads models of one graph, without a past, whose rows have one dimension"
            raise UsageError(what, session.path, "run its graphs from Python: zoo_runtime.Session.execute")

    def samples(self) -> Sequence[Any]:
        """Return random inputs of several lengths."""
        points = [Point(1, length, 0, "none") for length in _LENGTHS]
        feeds = [make_feeds([self.graph], point, 0, max(_LENGTHS)) for point in points]
        return [{name: array[0] for name, array in feed.items()} for feed in feeds]

    def read(self, value: Any, number: int) -> Row:
        where = f"input {number}"
        given = _parse(value, where) if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            raise ArtifactError("expected tensors by name", where, _FORMAT)
        tensors = {tensor.name: tensor for tensor in self.graph.input_tensors()}
        for name in given:
            if name not in tensors:
                raise ArtifactError(f"the model has no input {name!r}", where, nearest(str(name), tensors))
        arrays = {name: self._array(tensors[name], item, where) for name, item in given.items()}
        sizes = {
            dim: size
            for name, array in arrays.items()
            for dim, size in zip(tensors[name].dims[1:], array.shape, strict=True)
            if isinstance(dim, str)
        }
        for name, tensor in tensors.items():
            if name not in arrays and tensor.is_mask and tensor.dims[1] in sizes:
                arrays[name] = np.ones(sizes[str(tensor.dims[1])], dtype_of(tensor, self.session.dtype))
            elif name not in arrays:
                raise ArtifactError(f"{name} is missing", where, _FORMAT)
        return Row(number, arrays)

    def _array(self, tensor: TensorSpec, value: Any, where: str) -> Array:
        try:
            array = np.asarray(value)
        except ValueError as error:  # lists of different lengths
            raise ArtifactError(f"{tensor.name} is no tensor", where, _FORMAT) from error
        if array.dtype.kind not in ("fiub" if tensor.is_float else "iub") or array.ndim != len(tensor.dims) - 1:
            dims = ", ".join(map(str, tensor.dims[1:]))
            what = f"{tensor.name} must be {tensor.dtype} of shape ({dims}), got {array.dtype} {array.shape}"
            raise ArtifactError(what, where)
        if not tensor.is_float and tensor.upper is not None and not ((array >= 0) & (array < tensor.upper)).all():
            raise ArtifactError(f"{tensor.name} must lie in 0 to {tensor.upper - 1}", where)
        return array.astype(dtype_of(tensor, self.session.dtype))

    def feed(self, items: Sequence[Row]) -> dict[str, Array]:
        """Build the graph's inputs for rows of equal sizes."""
        return {name: np.stack([item.arrays[name] for item in items]) for name in items[0].arrays}

    def answer(self, items: Sequence[Row]) -> Sequence[Any]:
        return [self._answer(item) for item in items]

    def _answer(self, item: Row) -> Any:
        outputs = self.session.execute(self.graph, self.feed([item]))
        result = {name: array[0] for name, array in outputs.items()}
        numbers = [array.ravel() for array in outputs.values() if array.dtype.kind == "f"]
        return finite([item], np.concatenate([np.zeros(1), *numbers])[None], [result])[0]

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            for name, array in answer.result.items():
                first = " ".join(f"{value:.6g}" for value in np.ravel(array)[:4])
                size = f" ({', '.join(map(str, array.shape))}), the first" if np.ndim(array) else ""
                yield f"{label(answer)}: {name}{size} {first}"


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{text[:80]!r} is no JSON", where, _FORMAT) from error
