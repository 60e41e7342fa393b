"""The errors of every output at every level, and the verdict on them.

The tolerance is relative to PyTorch in the model's own dtype: the error of the graph may be at most twice that of
PyTorch, plus a few units in the last place. A fixed tolerance would be too loose for a small model and too strict for a
deep one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.contract import Graph
from zoo.probe.errors import FACTOR, FLOOR_ULPS, Errors
from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Arrays
from zoo.probe.positions import check_shape, valid_positions
from zoo_export.parity.metrics import Distribution

__all__ = ["RULE", "Findings"]

RULE = f"max_abs_error <= {FACTOR:g} x torch_max_abs_error + {FLOOR_ULPS:g} x epsilon x max|reference|"


class Findings:
    """Errors of all outputs of the graphs.

    Args:
        graphs: the declared graphs.
        labels: a phrase for error messages for each level.
        epsilon: the rounding unit of the dtype in which the graphs compute.
    """

    def __init__(self, graphs: Sequence[Graph], labels: Mapping[str, str], epsilon: float) -> None:
        self.graphs, self.labels, self.epsilon = graphs, labels, epsilon
        self.errors = {
            (level, graph.name, tensor.name): Errors()
            for level in labels
            for graph in graphs
            for tensor in graph.output_tensors()
        }
        self.distributions = {key: Distribution() for key in self.errors if key[2] == "logits"}
        self.greedy: dict[str, dict[str, Any]] = {}
        """Agreement of greedily decoded text, by level."""
        self.compared: set[str] = set()
        """Levels that were compared at one point at least."""

    def add(
        self,
        level: str,
        results: tuple[Mapping[str, Arrays], Mapping[str, Arrays], Mapping[str, Arrays]],
        nudged: Callable[[], Sequence[Mapping[str, Arrays]]],
        feeds: Feeds,
        point: Point,
    ) -> None:
        """Add one point.

        Args:
            level: how the graphs were run.
            results: the outputs of each graph, by the reference, the yardstick and the graphs.
            nudged: returns outputs of the yardstick with different rounding. Called if an error is beyond the limit.
            feeds: the inputs.
            point: their shape.

        Raises:
            ValueError: an output does not have its declared shape.
        """
        self.compared.add(level)
        for graph in self.graphs:
            for tensor in graph.output_tensors():
                exact, allowed, found = (outputs[graph.name][tensor.name] for outputs in results)
                check_shape(graph, tensor, found.shape, feeds, point)
                valid = valid_positions(graph, tensor, feeds, point)
                errors = self.errors[level, graph.name, tensor.name]
                errors.add(exact, allowed, found, valid, point)
                if errors.finite and not errors.passed(self.epsilon):
                    for other in nudged():
                        errors.allow(exact, other[graph.name][tensor.name], valid)
                if tensor.name == "logits":
                    rows = np.broadcast_to(valid, exact.shape)[..., 0]
                    distribution = self.distributions[level, graph.name, tensor.name]
                    distribution.add(exact[rows], found[rows], self.margin(level, graph))

    def margin(self, level: str, graph: Graph) -> float:
        """Largest difference of two logits of a graph that its allowed error may reverse."""
        return 2 * self.errors[level, graph.name, "logits"].limit(self.epsilon)

    @property
    def hopeless(self) -> bool:
        """Whether some error is so far beyond the limit that no further point can change the verdict."""
        return any(errors.hopeless(self.epsilon) for errors in self.errors.values())

    def failed(self) -> Iterator[tuple[str, str, Point]]:
        """Yield level, graph and worst point of each output that does not match."""
        for (level, graph, _), errors in self.errors.items():
            if errors.worst is not None and not errors.passed(self.epsilon):
                yield level, graph, errors.worst

    def failures(self) -> list[str]:
        """One line per failed comparison."""
        lines = []
        for (level, graph, name), errors in self.errors.items():
            where = f"{name} of {graph}, {self.labels[level]}"
            if not errors.finite:
                lines.append(f"{where}, is not finite")
            elif not errors.passed(self.epsilon):
                limit = errors.limit(self.epsilon)
                lines.append(f"{where}, is off by {errors.runtime:.3g}, allowed {limit:.3g}, at {errors.worst}")
        for (level, graph, _), item in self.distributions.items():
            if item.disagreements:
                where = f"{graph}, {self.labels[level]}"
                lines.append(f"{where}, chooses another token in {item.disagreements} of {item.rows} rows")
        for level, agreement in self.greedy.items():
            if not agreement["passed"]:
                lines.append(f"greedy decoding, {self.labels[level]}, diverges after {agreement['agreed']} tokens")
        return lines

    def outputs(self, graph: Graph) -> dict[str, Any]:
        """Evidence about each output of a graph."""
        return {
            tensor.name: {
                level: self.errors[level, graph.name, tensor.name].to_dict(self.epsilon)
                for level in self.labels
                if level in self.compared
            }
            for tensor in graph.output_tensors()
        }
