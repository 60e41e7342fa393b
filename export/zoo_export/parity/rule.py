"""The errors of every output at every level, and the verdict on them.

The tolerance is relative to PyTorch in the model's own dtype: see :mod:`zoo.probe.errors`. A fixed tolerance would be
too loose for a small model and too strict for a deep one. For logits, the next-token distributions are judged as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.contract import Graph, TensorSpec
from zoo.probe.errors import FACTOR, FLOOR_ULPS, LOCAL_FACTOR, LOCAL_FLOOR_ULPS, Errors, as_rows
from zoo.probe.inputs import Feeds, Point
from zoo.probe.jumps import JumpErrors
from zoo.probe.pipeline import Arrays
from zoo.probe.positions import check_shape, kept_positions, valid_positions
from zoo_export.parity.metrics import TokenDivergence, sampled_rows

__all__ = ["RULE", "WIDE", "Findings", "Judges", "Key", "rows_of_outputs"]

RULE = (
    f"max_abs_error <= {FACTOR:g} x torch_max_abs_error + {FLOOR_ULPS:g} x epsilon x max|reference|, and likewise, in "
    f"units of the largest value of a row or channel, {LOCAL_FACTOR:g} x torch's error + {LOCAL_FLOOR_ULPS:g} x epsilon"
)


WIDE = 2
"""Number of last bits of the weights whose nudges show where a discontinuous model jumps: more than the rounding errors
of a graph, so that rows at which the graph alone jumps are rare."""
Key = tuple[str, str, str]
"""Level, graph and output."""
Judges = Mapping[Key, Errors] | Mapping[Key, TokenDivergence]


class Findings:
    """Errors of all outputs of the graphs.

    Args:
        graphs: the declared graphs.
        labels: a phrase for error messages for each level.
        epsilon: the rounding unit of the dtype in which the graphs compute, or that of each level.
        coarse: levels at which the graphs differ from PyTorch by more than rounding: only maxima are judged.
        discontinuous: whether the architecture is declared discontinuous.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        labels: Mapping[str, str],
        epsilon: float | Mapping[str, float],
        coarse: Collection[str] = (),
        *,
        discontinuous: bool = False,
    ) -> None:
        self.graphs, self.labels = graphs, labels
        units = epsilon if isinstance(epsilon, Mapping) else dict.fromkeys(labels, epsilon)
        self.errors = {
            (level, graph.name, tensor.name): (
                JumpErrors(units[level])
                if discontinuous and level not in coarse
                else Errors(units[level], level not in coarse)
            )
            for level in labels
            for graph in graphs
            for tensor in graph.output_tensors()
        }
        self.distributions = {
            key: TokenDivergence(units[key[0]], judged=key[0] not in coarse)
            for key in self.errors
            if key[2] == "logits"
        }
        self.greedy: dict[str, dict[str, Any]] = {}
        """Agreement of greedily decoded text, by level."""
        self.compared: set[str] = set()
        """Levels that were compared at one point at least."""

    def add_torch(
        self, level: str, exact: Mapping[str, Arrays], allowed: Mapping[str, Arrays], feeds: Feeds, point: Point
    ) -> None:
        """Add the errors of PyTorch at one point.

        Args:
            level: how the graphs are run.
            exact: the outputs of each graph, by the reference; as in all results, only the kept positions of large ones
                (:func:`zoo.probe.positions.kept_positions`).
            allowed: the same by the yardstick.
            feeds: the inputs.
            point: their shape.
        """
        for graph in self.graphs:
            for tensor in graph.output_tensors():
                (reference, yardstick), valid = rows_of_outputs(graph, tensor, (exact, allowed), feeds, point)
                self.errors[level, graph.name, tensor.name].add_torch(reference, yardstick, valid, point)

    def add(
        self, level: str, exact: Mapping[str, Arrays], results: Mapping[str, Arrays], feeds: Feeds, point: Point
    ) -> None:
        """Add the errors of the graphs at one point, after those of PyTorch.

        Args:
            level: how the graphs were run.
            exact: the outputs of each graph, by the reference.
            results: the same by the graphs.
            feeds: the inputs.
            point: their shape.

        Raises:
            ValueError: an output does not have its declared shape.
        """
        self.compared.add(level)
        tensors = dict(feeds)
        for graph in self.graphs:
            tensors |= results[graph.name]
            for tensor in graph.output_tensors():
                shape = results[graph.name][tensor.name].shape
                kept = kept_positions(graph, tensor, feeds, point)
                check_shape(graph, tensor, kept.whole if kept and shape == kept.shape else shape, tensors, point)
                (reference, result), valid = rows_of_outputs(graph, tensor, (exact, results), feeds, point)
                self.errors[level, graph.name, tensor.name].add_graph(reference, result, valid, point)

    def add_distributions(
        self,
        level: str,
        exact: Mapping[str, Arrays],
        allowed: Mapping[str, Arrays],
        results: Mapping[str, Arrays],
        feeds: Feeds,
        point: Point,
    ) -> None:
        """Add next-token distributions at one point, after the errors.

        The allowed errors say which rows are judged, and which are near-ties.

        Args:
            level: how the graphs were run.
            exact: the outputs of each graph, by the reference.
            allowed: the same by the yardstick.
            results: the same by the graphs.
            feeds: the inputs.
            point: their shape.
        """
        for graph in self.graphs:
            for tensor in graph.output_tensors():
                key = level, graph.name, tensor.name
                if key in self.distributions:
                    (reference, yardstick, result), valid = rows_of_outputs(
                        graph, tensor, (exact, allowed, results), feeds, point
                    )
                    rows = sampled_rows(valid)
                    rows = rows[self.errors[key].judged_rows(valid)[rows]]
                    self.distributions[key].add(reference, yardstick, result, self._margin(key), rows)

    def doubtful(self, judges: Judges, levels: Collection[str]) -> list[Key]:
        """Return the keys of errors or distributions beyond a limit that another result of PyTorch may raise."""
        return [key for key, judge in judges.items() if key[0] in levels and judge.doubtful]

    def allow(
        self,
        doubtful: Collection[Key],
        judges: Judges,
        results: Sequence[Mapping[str, Arrays]],
        feeds: Feeds,
        point: Point,
        *,
        bits: int = 1,
    ) -> None:
        """Raise limits by another result of PyTorch, computed with different rounding.

        Args:
            doubtful: the outputs, from :meth:`doubtful`.
            judges: the errors or distributions.
            results: the outputs of each graph, by the reference and by PyTorch.
            feeds: the inputs.
            point: their shape.
            bits: number of the last bits of the weights that were random, or 0 if constants of the graph were moved.
        """
        for graph in self.graphs:
            for tensor in graph.output_tensors():
                keys = [key for key in doubtful if key[1:] == (graph.name, tensor.name)]
                if keys:
                    (exact, allowed), valid = rows_of_outputs(graph, tensor, results, feeds, point)
                for key in keys:
                    judge = judges[key]
                    if isinstance(judge, TokenDivergence):
                        judge.allow(exact, allowed, self.errors[key].judged_rows(valid))
                    else:
                        judge.allow(exact, allowed, valid, bits=bits)

    def jumping(self) -> dict[Key, Errors]:
        """Return the errors of discontinuous outputs."""
        return {key: errors for key, errors in self.errors.items() if isinstance(errors, JumpErrors)}

    def margin(self, level: str, graph: Graph) -> float:
        """Largest difference of two logits of a graph that its allowed error may reverse."""
        return self._margin((level, graph.name, "logits"))

    def _margin(self, key: Key) -> float:
        return 2 * self.errors[key].limit

    @property
    def hopeless(self) -> bool:
        """Whether some error is so far beyond the limit that no further point can change the verdict."""
        return any(errors.hopeless for errors in self.errors.values())

    def failed(self) -> Iterator[tuple[str, str, Point]]:
        """Yield level, graph and worst point of each output that does not match."""
        for (level, graph, _), errors in self.errors.items():
            worst = errors.worst_local if errors.runtime <= errors.limit else errors.worst
            if worst is not None and not errors.passed:
                yield level, graph, worst

    def failures(self) -> list[str]:
        """One line per failed comparison."""
        lines = []
        for (level, graph, name), errors in self.errors.items():
            if failure := errors.failure():
                lines.append(f"{name} of {graph}, {self.labels[level]}, {failure}")
        for (level, graph, _), item in self.distributions.items():
            if failure := item.failure():
                lines.append(f"{graph}, {self.labels[level]}, {failure}")
        for level, agreement in self.greedy.items():
            if not agreement["passed"]:
                lines.append(f"greedy decoding, {self.labels[level]}, diverges after {agreement['agreed']} tokens")
        return lines

    def outputs(self, graph: Graph) -> dict[str, Any]:
        """Evidence about each output of a graph."""
        return {
            tensor.name: {
                level: self.errors[level, graph.name, tensor.name].to_dict()
                for level in self.labels
                if level in self.compared
            }
            for tensor in graph.output_tensors()
        }


def rows_of_outputs(
    graph: Graph, tensor: TensorSpec, results: Iterable[Mapping[str, Arrays]], feeds: Feeds, point: Point
) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return results for an output as (rows, channels), and whether each row is valid."""
    arrays = [outputs[graph.name][tensor.name] for outputs in results]
    channels = tuple(axis for axis, dim in enumerate(tensor.dims) if isinstance(dim, int))
    valid = valid_positions(graph, tensor, feeds, point).any(axis=channels, keepdims=True)
    kept = kept_positions(graph, tensor, feeds, point)
    if kept is not None and valid.shape[kept.axis] > 1:
        valid = valid.take(kept.places, kept.axis)
    shape = [1 if axis in channels else size for axis, size in enumerate(arrays[0].shape)]
    return [as_rows(tensor, values) for values in arrays], as_rows(tensor, np.broadcast_to(valid, shape))[:, 0]
