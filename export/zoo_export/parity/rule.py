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
from zoo.probe.pipeline import Arrays
from zoo.probe.positions import check_shape, valid_positions
from zoo_export.parity.metrics import Distribution, sampled

__all__ = ["RULE", "Findings", "Key"]

RULE = (
    f"max_abs_error <= {FACTOR:g} x torch_max_abs_error + {FLOOR_ULPS:g} x epsilon x max|reference|, and likewise, in "
    f"units of the largest value of a row or channel, {LOCAL_FACTOR:g} x torch's error + {LOCAL_FLOOR_ULPS:g} x epsilon"
)


Key = tuple[str, str, str]
"""Level, graph and output."""
Logits = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]
"""By the reference, the yardstick and the graph, (rows, vocabulary)."""
Doubtful = tuple[Graph, TensorSpec, Errors | Distribution]


class Findings:
    """Errors of all outputs of the graphs.

    Args:
        graphs: the declared graphs.
        labels: a phrase for error messages for each level.
        epsilon: the rounding unit of the dtype in which the graphs compute.
        coarse: levels at which the graphs differ from PyTorch by more than rounding: only maxima are judged.
    """

    def __init__(
        self, graphs: Sequence[Graph], labels: Mapping[str, str], epsilon: float, coarse: Collection[str] = ()
    ) -> None:
        self.graphs, self.labels = graphs, labels
        self.errors = {
            (level, graph.name, tensor.name): Errors(epsilon, local=level not in coarse)
            for level in labels
            for graph in graphs
            for tensor in graph.output_tensors()
        }
        self.distributions = {
            key: Distribution(epsilon, judged=key[0] not in coarse) for key in self.errors if key[2] == "logits"
        }
        self.greedy: dict[str, dict[str, Any]] = {}
        """Agreement of greedily decoded text, by level."""
        self.compared: set[str] = set()
        """Levels that were compared at one point at least."""

    def add(
        self,
        level: str,
        results: tuple[Mapping[str, Arrays], Mapping[str, Arrays], Mapping[str, Arrays]],
        feeds: Feeds,
        point: Point,
    ) -> dict[Key, Logits]:
        """Add the errors at one point. Returns a sample of the logits, for :meth:`add_distributions`.

        Args:
            level: how the graphs were run.
            results: the outputs of each graph, by the reference, the yardstick and the graphs.
            feeds: the inputs.
            point: their shape.

        Raises:
            ValueError: an output does not have its declared shape.
        """
        self.compared.add(level)
        known, logits = dict(feeds), {}
        for graph in self.graphs:
            known |= results[2][graph.name]
            for tensor in graph.output_tensors():
                key = level, graph.name, tensor.name
                check_shape(graph, tensor, results[2][graph.name][tensor.name].shape, known, point)
                (exact, allowed, found), valid = _rows(graph, tensor, results, feeds, point)
                self.errors[key].add(exact, allowed, found, valid, point)
                if key in self.distributions:
                    logits[key] = sampled(exact, valid), sampled(allowed, valid), sampled(found, valid)
        return logits

    def add_distributions(self, logits: Mapping[Key, Logits]) -> None:
        """Add next-token distributions. The errors allowed so far say which logits are nearly equal."""
        for (level, name, output), (exact, allowed, found) in logits.items():
            graph = next(graph for graph in self.graphs if graph.name == name)
            self.distributions[level, name, output].add(exact, allowed, found, self.margin(level, graph))

    def allow(
        self, doubtful: Iterable[Doubtful], results: Sequence[Mapping[str, Arrays]], feeds: Feeds, point: Point
    ) -> None:
        """Raise limits by another result of PyTorch, computed with different rounding.

        Args:
            doubtful: outputs and what judges them, from :meth:`doubtful`.
            results: the outputs of each graph, by the reference and by PyTorch.
            feeds: the inputs.
            point: their shape.
        """
        for graph, tensor, judge in doubtful:
            (exact, allowed), valid = _rows(graph, tensor, results, feeds, point)
            judge.allow(exact, allowed, valid)

    def doubtful(
        self, judges: Mapping[Key, Errors] | Mapping[Key, Distribution], levels: Collection[str]
    ) -> list[Doubtful]:
        """Return what is beyond a limit that another result of PyTorch may raise, among errors or distributions."""
        found: list[Doubtful] = []
        for graph in self.graphs:
            for tensor in graph.output_tensors():
                keys = ((level, graph.name, tensor.name) for level in levels)
                found += [(graph, tensor, judges[key]) for key in keys if key in judges and judges[key].doubtful]
        return found

    def margin(self, level: str, graph: Graph) -> float:
        """Largest difference of two logits of a graph that its allowed error may reverse."""
        return 2 * self.errors[level, graph.name, "logits"].limit

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


def _rows(
    graph: Graph, tensor: TensorSpec, results: Iterable[Mapping[str, Arrays]], feeds: Feeds, point: Point
) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return results for an output as (rows, channels), and whether each row is valid."""
    arrays = [outputs[graph.name][tensor.name] for outputs in results]
    valid = np.broadcast_to(valid_positions(graph, tensor, feeds, point), arrays[0].shape)
    return [as_rows(tensor, values) for values in arrays], np.asarray(as_rows(tensor, valid).any(axis=1))
