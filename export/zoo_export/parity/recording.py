"""The sample of a comparison that is kept beside an export, so that it can be replayed without PyTorch.

It has a few points of the grid. At each, it has numbers of every output in float64, as the comparison has computed
them, and the error that the comparison allowed each of them in the end: the smaller one of the two limits of
:mod:`zoo.probe.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, TensorSpec
from zoo.probe.dtypes import dtype_of
from zoo.probe.errors import Errors
from zoo.probe.grid import ODD, WORK
from zoo.probe.inputs import Feeds, Point, given_inputs
from zoo.probe.pipeline import Arrays
from zoo.probe.positions import Kept, kept_positions
from zoo_export.parity.metrics import sampled_rows
from zoo_export.parity.reference import SEED
from zoo_export.parity.rule import Findings, rows_of_outputs
from zoo_runtime.recorded.sample import RecordedCall, RecordedOutput, Sample, digest_of, dump

__all__ = ["Recording", "places_of", "recorded_points"]

_NUMBERS = 2**13
"""Approximate number of the outputs' numbers that are recorded. Caches have at most a half."""
_INPUT = 2**14
"""Bytes of a floating-point input from which it is generated again instead of stored: noise cannot be compressed."""


def recorded_points(points: Sequence[Point], parameters: int) -> list[Point]:
    """Return few points, the cheapest, with each batch size and each padding at each length, with a past and without.

    Batch sizes are one and several; lengths are the shortest, an odd one and a longer one. Padding is that of a row
    with several tokens.
    """
    left = [point for point in points if point.is_standard and point.tokens * parameters <= WORK]
    # Half of a single row is padding: on the right, perhaps all of the tokens whose outputs are compared.
    left = [point for point in left if point.batch > 1 or point.padding != "right" or point.length > point.past]
    shortest = min((point.length for point in left), default=1)

    def kinds(point: Point) -> set[object]:
        lengths = {"shortest": point.length == shortest, "odd": 2 < point.length <= ODD, "longer": point.length > ODD}
        padded = {point.padding} if _has_several_tokens_beside_padding(point) else set()
        values = {min(point.batch, 2), *padded}
        corners = {(bool(point.past), name, value) for name, holds in lengths.items() if holds for value in values}
        return corners | ({(bool(point.past), "none")} if point.padding == "none" else set())

    chosen, seen = list[Point](), set[object]()
    while left:
        best = max(left, key=lambda point: (len(kinds(point) - seen), -point.tokens))
        if not kinds(best) - seen:
            break
        chosen.append(best)
        seen |= kinds(best)
    return chosen


def _has_several_tokens_beside_padding(point: Point) -> bool:
    """Whether some row of a point is padded on a side, and has more than one token: see :func:`make_feeds`."""
    total = point.length + point.past
    return point.padding in ("left", "right") and (total > 3 if point.batch == 1 else point.batch > 2 and total > 2)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Numbers of one output at one point, whose limits may still grow."""

    output: RecordedOutput
    errors: Errors
    scales: Array
    """(N,) the largest value in the row or channel of each number, of which its error is judged as a part."""
    gaps: Array
    """(M,) how far the largest logit of each row exceeds the next."""

    def settled(self) -> RecordedOutput:
        """Return the output with the limits in force, without the rows in which they allow another token."""
        allowed = np.full(len(self.scales), self.errors.limit)
        if self.errors.local:
            allowed = np.minimum(allowed, self.errors.local_limit * self.scales)
        return replace(self.output, allowed=allowed, best=self.output.best[self.gaps > 2 * self.errors.limit])


@dataclass
class Recording:
    """Collects the sample while the comparison runs.

    Args:
        graphs: the graphs that are compared.
        points: from :func:`recorded_points`.
        level: how the graphs are run in a replay.
        dtype: dtype of their floating-point inputs.
        longest: number of tokens of the longest inputs, which generated inputs depend on.
        special: token ids that generated inputs contain.
        fixed: sizes of the dimensions that have only one.
    """

    graphs: Sequence[Graph]
    points: Sequence[Point]
    level: str
    dtype: np.dtype[np.generic]
    longest: int
    special: Sequence[int]
    fixed: Mapping[str, int]
    _calls: dict[Point, tuple[RecordedCall, list[_Seen]]] = field(default_factory=dict)

    def add(self, findings: Findings, exact: Mapping[str, Arrays], feeds: Feeds, point: Point) -> None:
        """Add a point that was just compared, if it is one of the sample.

        Args:
            findings: the errors so far.
            exact: the outputs of each graph, by the reference.
            feeds: the inputs.
            point: their shape.
        """
        if point not in self.points:
            return
        inputs, generated = dict[str, Array](), dict[str, str]()
        for name, tensor in given_inputs(self.graphs).items():
            value = feeds[name].astype(dtype_of(tensor, self.dtype))
            if tensor.is_float and value.nbytes > _INPUT:
                generated[name] = digest_of(value)
            else:  # safetensors in numpy have no bfloat16
                inputs[name] = value.astype(np.float32) if tensor.is_float else value
        call = RecordedCall(point=point, inputs=inputs, generated=generated, outputs=())
        seen = [
            self._seen(findings, graph, tensor, exact, feeds, point)
            for graph in self.graphs
            for tensor in graph.output_tensors()
        ]
        self._calls[point] = call, seen

    def _seen(
        self,
        findings: Findings,
        graph: Graph,
        tensor: TensorSpec,
        exact: Mapping[str, Arrays],
        feeds: Feeds,
        point: Point,
    ) -> _Seen:
        (values,), valid = rows_of_outputs(graph, tensor, [exact], feeds, point)
        errors = findings.errors[self.level, graph.name, tensor.name]
        kept = kept_positions(graph, tensor, feeds, point)
        shape = exact[graph.name][tensor.name].shape
        rows, width = np.flatnonzero(valid), values.shape[1]
        count = min(rows.size * width, self._share(graph, tensor))
        rng = np.random.default_rng([SEED, self.points.index(point), len(tensor.name)])
        row, channel = np.divmod(np.sort(rng.choice(rows.size * width, count, replace=False)), max(width, 1))
        row = rows[row]
        some, place = np.unique(row, return_inverse=True)
        scales = errors.local_scale(values[some].astype(np.float64))[place, channel] if errors.local else np.ones(count)
        judged = sampled_rows(valid) if tensor.name == "logits" and _in_rows(tensor) and width > 1 else rows[:0]
        best = values[judged].argmax(-1) if judged.size else judged
        highest = np.partition(values[judged], -2, axis=-1)[:, -2:] if judged.size else np.zeros((0, 2))
        output = RecordedOutput(
            graph=graph.name,
            name=tensor.name,
            shape=shape if kept is None else kept.whole,
            places=places_of(tensor, shape, kept, row, channel),
            values=values[row, channel].astype(np.float64),
            allowed=np.zeros(0),
            best=places_of(tensor, shape, kept, judged, best),
        )
        return _Seen(output=output, errors=errors, scales=scales, gaps=highest[:, 1] - highest[:, 0])

    def _share(self, graph: Graph, tensor: TensorSpec) -> int:
        """Return the largest number of numbers that are recorded of an output at a point."""
        caches = sum(len(graph.present_tensors()) for graph in self.graphs)
        others = sum(len(graph.output_tensors()) for graph in self.graphs) - caches
        alike = caches if tensor in graph.present_tensors() else others
        return max(2, _NUMBERS // 2 // len(self.points) // alike)

    def content(self) -> bytes | None:
        """Return the content of the file, with the limits in force; None if no point was compared."""
        calls = [
            replace(call, outputs=[seen.settled() for seen in outputs])
            for call, outputs in (self._calls[point] for point in self.points if point in self._calls)
        ]
        if not calls:
            return None
        sample = Sample(calls=calls, seed=SEED, longest=self.longest, special=self.special, fixed=self.fixed)
        return dump(sample)


def _in_rows(tensor: TensorSpec) -> bool:
    """Whether the last dimension of an output, and no other, is fixed, such as that of a vocabulary."""
    return [isinstance(dim, int) for dim in tensor.dims] == [False] * (len(tensor.dims) - 1) + [True]


def places_of(tensor: TensorSpec, shape: Sequence[int], kept: Kept | None, rows: Array, channels: Array) -> Array:
    """Return the places in the complete output, in C order, of numbers that :func:`zoo.probe.errors.as_rows` gives.

    Args:
        tensor: the output.
        shape: its shape, if ``kept`` is given that of the kept positions.
        kept: these positions, if it is large.
        rows: (N,) the row of each number.
        channels: (N,) its channel.
    """
    index: list[Array] = [np.zeros(0, np.int64)] * len(shape)
    for numbers, is_fixed in ((rows, False), (channels, True)):
        axes = [axis for axis, dim in enumerate(tensor.dims) if isinstance(dim, int) == is_fixed]
        parts = np.unravel_index(numbers, [shape[axis] for axis in axes]) if axes else ()
        for axis, part in zip(axes, parts, strict=True):
            index[axis] = part
    if kept is not None:
        index[kept.axis] = kept.places[index[kept.axis]]
        shape = kept.whole
    return np.ravel_multi_index(index, shape).astype(np.int64) if shape else np.zeros(len(rows), np.int64)
