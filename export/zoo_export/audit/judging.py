"""The verdict on outputs of graphs: by the error rule of exports or, in smaller precisions, by divergence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, TensorSpec
from zoo.probe.errors import Errors
from zoo.probe.inputs import Feeds, Point
from zoo.probe.jumps import JumpErrors
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, run_pipeline
from zoo.probe.positions import kept_positions
from zoo_export.certificate import Bound, Divergence, Likeness
from zoo_export.parity.reference import Models
from zoo_export.parity.rule import WIDE, rows_of_outputs

__all__ = ["ByDivergence", "ByError", "Case", "Judge", "Outcome", "Place", "run_model"]

Place = tuple[str, str]
"""The declared graph and its output."""
Results = Mapping[str, Arrays]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on one output at one point and level."""

    level: str
    place: Place
    point: Point
    failure: str | None
    refused: bool = False
    """Whether the graph cannot be run."""


@dataclass(frozen=True, slots=True)
class Case:
    """One point, and the results of the model at it."""

    point: Point
    feeds: Feeds
    exact: Results
    """Results in float64."""
    allowed: Results
    """Results in float32."""


def run_model(executor: TorchExecutor, declared: tuple[Graph, ...], feeds: Feeds, point: Point) -> Results:
    """Return the outputs of the model, of which large ones are kept at some positions."""
    with executor.keeping(feeds, point):
        return run_pipeline(executor, declared, feeds, point, split=True)


class Judge(ABC):
    """Judges the results of graphs, one point after another.

    Args:
        declared: the declared graphs.
    """

    def __init__(self, declared: tuple[Graph, ...]) -> None:
        self.declared = declared
        self.last_only: set[Place] = set()
        """Outputs of which graphs return only the last position."""

    def add(self, level: str, results: Results, case: Case) -> Iterator[Outcome]:
        """Yield the verdict on each output of the graphs that can be judged at once."""
        for graph in self.declared:
            for tensor in graph.output_tensors():
                if tensor.name in results.get(graph.name, ()):
                    failure = self._judge(level, graph, tensor, results[graph.name][tensor.name], case)
                    yield Outcome(level, (graph.name, tensor.name), case.point, failure)

    @abstractmethod
    def finish(self) -> Iterator[Outcome]:
        """Yield the verdicts that need all points."""

    @abstractmethod
    def facts(self) -> dict[Place, dict[str, Any]]:
        """Return the measured errors by output."""

    def limits(self) -> Iterator[str]:
        """Yield what the rule does not show."""
        return iter(())

    @abstractmethod
    def _compare(
        self, level: str, graph: Graph, tensor: TensorSpec, results: tuple[Results, Results, Results], case: Case
    ) -> str | None:
        """Compare results of the model in float64 and float32 and of the graphs. Returns what is wrong, or None."""

    def _judge(self, level: str, graph: Graph, tensor: TensorSpec, result: Array, case: Case) -> str | None:
        exact, allowed = (results[graph.name][tensor.name] for results in (case.exact, case.allowed))
        kept = kept_positions(graph, tensor, case.feeds, case.point)
        if kept is not None and result.shape == kept.whole:
            result = result.take(kept.places, kept.axis)
        if graph.pasts and "sequence" in tensor.dims:
            axis = tensor.dims.index("sequence")
            if result.ndim == exact.ndim and result.shape[axis] == 1 < exact.shape[axis]:
                self.last_only.add((graph.name, tensor.name))
                exact, allowed = (values.take([-1], axis) for values in (exact, allowed))
                case = replace(case, point=replace(case.point, length=1, past=case.point.past + case.point.length - 1))
        if result.shape != exact.shape:
            return f"has the shape {result.shape}, where the model has {exact.shape}"
        named = [{graph.name: {tensor.name: values}} for values in (exact, allowed, result)]
        return self._compare(level, graph, tensor, (named[0], named[1], named[2]), case)


class ByError(Judge):
    """Judges graphs in float32 by the rule of exports: see :mod:`zoo.probe.errors`.

    Args:
        declared: the declared graphs.
        models: the model in float64 and float32.
        discontinuous: whether its architecture is declared discontinuous.
    """

    def __init__(self, declared: tuple[Graph, ...], models: Models, *, discontinuous: bool) -> None:
        super().__init__(declared)
        self._models, self._discontinuous = models, discontinuous
        self._worst: dict[Place, Errors] = {}

    def finish(self) -> Iterator[Outcome]:
        return iter(())

    def facts(self) -> dict[Place, dict[str, Any]]:
        return {place: errors.to_dict() for place, errors in self._worst.items()}

    def _compare(
        self, level: str, graph: Graph, tensor: TensorSpec, results: tuple[Results, Results, Results], case: Case
    ) -> str | None:
        (exact, allowed, result), valid = rows_of_outputs(graph, tensor, results, case.feeds, case.point)
        errors = JumpErrors(self._models.epsilon) if self._discontinuous else Errors(self._models.epsilon)
        errors.add_torch(exact, allowed, valid, case.point)
        errors.add_graph(exact, result, valid, case.point)
        if errors.doubtful and not errors.hopeless:
            bits = WIDE if self._discontinuous else 1
            for other in self._models.nudged(bits):
                nudged = run_model(other, self.declared, case.feeds, case.point)
                (_, rounded), _ = rows_of_outputs(graph, tensor, (results[0], nudged), case.feeds, case.point)
                errors.allow(exact, rounded, valid, bits=bits)
        worst = self._worst.get((graph.name, tensor.name))
        if worst is None or _excess(errors) > _excess(worst):
            self._worst[graph.name, tensor.name] = errors
        return errors.failure()


def _excess(errors: Errors) -> float:
    """Return the error in units of the limit, infinite if it is not finite."""
    if not errors.finite:
        return float("inf")
    return max(errors.runtime / errors.limit if errors.limit else 0.0, errors.local_runtime / errors.local_limit)


class ByDivergence(Judge):
    """Judges graphs of a smaller precision as certificates do, over all points with the same kind of rows.

    Args:
        declared: the declared graphs.
        bound: the largest mean divergence of logits, and the smallest mean cosine of other outputs.
    """

    def __init__(self, declared: tuple[Graph, ...], bound: Bound) -> None:
        super().__init__(declared)
        self._bound = bound
        self._kinds: dict[tuple[str, Place, object], tuple[Point, Divergence | Likeness]] = {}
        self._all: dict[Place, Divergence | Likeness] = {}

    def finish(self) -> Iterator[Outcome]:
        for (level, place, _), (point, item) in self._kinds.items():
            if isinstance(item, Divergence):
                wrong = not item.mean_kl <= self._bound.kl
                failure = f"diverges by {item.mean_kl:.3g} nats, allowed {self._bound.kl:g}"
            else:
                wrong = not item.mean_cosine >= self._bound.cosine
                failure = f"has a mean cosine of {item.mean_cosine:.4f} with the model, required {self._bound.cosine:g}"
            if wrong:
                yield Outcome(level, place, point, f"{failure}, at {point}")

    def facts(self) -> dict[Place, dict[str, Any]]:
        return {place: item.to_dict() for place, item in self._all.items()}

    def limits(self) -> Iterator[str]:
        """Yield the worst single position of each output, as the rule is one of means."""
        for (_, name), item in self._all.items():
            if isinstance(item, Divergence):
                worst = f"{item.rows} positions: one diverges by {item.kl_max:.3g} nats"
            else:
                worst = f"{item.vectors} vectors: one has a cosine of {item.cosine_min:.3g} with the model's"
            yield f"{name} is judged by the mean of {worst}"

    def _compare(
        self, level: str, graph: Graph, tensor: TensorSpec, results: tuple[Results, Results, Results], case: Case
    ) -> str | None:
        shape = results[2][graph.name][tensor.name].shape
        (exact, _, result), valid = rows_of_outputs(graph, tensor, results, case.feeds, case.point)
        if not np.isfinite(result.astype(np.float64)).all():
            return f"is not finite at {case.point}"
        if exact.shape[1] == 1:  # one number per token: the tokens of a row are a vector
            exact, result = (np.where(valid[:, None], values, 0).reshape(shape) for values in (exact, result))
        else:
            exact, result = exact[valid], result[valid]
        if exact.size:
            place = graph.name, tensor.name
            point = case.point
            kind = point.padding, point.past > 0, point.batch > 1
            measured = self._kinds.setdefault((level, place, kind), (point, _new(tensor)))[1]
            for item in (measured, self._all.setdefault(place, _new(tensor))):
                item.add(exact, result)
        return None


def _new(tensor: TensorSpec) -> Divergence | Likeness:
    return Divergence() if tensor.name == "logits" else Likeness()
