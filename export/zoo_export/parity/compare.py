"""Comparison of an exported graph with the unmodified module, evaluated in float64.

The tolerance is relative to PyTorch in the model's own dtype: the error of the graph may be at most twice that of
PyTorch, plus a few units in the last place. A fixed tolerance would be too loose for a small model and too strict for a
deep one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.artifact import HALVES, ModelDirectory
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError, ZooError
from zoo.exporters import Progress
from zoo.models import create, persist
from zoo.probe.dtypes import epsilon
from zoo.probe.errors import FACTOR, FLOOR_ULPS, Errors
from zoo.probe.inputs import DEFAULT_MAX, Feeds, Point, make_feeds, make_grid
from zoo.probe.module import TorchExecutor, as_array, noisy
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo.probe.positions import check_shape, valid_positions
from zoo_export.graph.file import pointers, referenced_tensors
from zoo_export.graph.widen import widen
from zoo_export.parity.evidence import versions, weights_of, without_functions
from zoo_export.parity.greedy import greedy_agreement
from zoo_export.parity.memory import check_memory
from zoo_export.parity.metrics import Distribution
from zoo_export.parity.modules import ModuleError, module_errors
from zoo_export.parity.report import Report
from zoo_runtime.executor import OnnxExecutor
from zoo_runtime.placement import placement
from zoo_runtime.providers import Provider, check_dtype, open_session

__all__ = ["Comparison", "Progress", "compare", "smallest_points"]

SEED = 0
LEVELS = {"off": False, "all": True}
"""Optimisation levels of ONNX Runtime at which graphs are compared."""
PERTURBED, FAINT = "perturbed", "faint"
"""Comparisons with noise on every weight: a graph must equal the model for any weights of the same layout."""
_FAINT = 1 / 8
"""Factor on all weights that makes activations small enough for the epsilon of a norm to matter."""
_NUDGES = 16
"""Number of perturbed evaluations of the model where a graph is further from float64 than torch is."""
_NUMBERS = 2**28
"""Largest number of attention weights compared at one point: it grows with the square of the length."""
_LABELS = {
    "off": "optimisations off",
    "all": "optimisations on",
    PERTURBED: "with perturbed weights",
    FAINT: "with faint weights",
}


def compare(
    stored: ModelDirectory,
    graphs: Mapping[str, bytes],
    *,
    declared: Sequence[Graph] | None = None,
    provider: Provider = "cpu",
    full_grid: bool = False,
    longest: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare serialised graphs, by name, with the model over the grid and at each optimisation level.

    The longest inputs of the grid have ``longest`` tokens, by default the longest input of the model.

    Raises :class:`ParityError` if the comparison cannot be made, and :class:`UsageError` if the provider does not load
    or does not support the model's dtype.
    """
    check_dtype(stored.dtype, provider, stored.path)
    check_memory(stored)
    comparison = Comparison(stored, graphs, provider, declared, longest)
    report = comparison.run(full_grid, progress)
    if not report.passed:
        return report
    wider = {name: widen(graph) for name, graph in graphs.items()} if stored.dtype in HALVES else {}
    if wider:
        report.evidence["in_float32"] = "not compared: the graph has constants that may be rounded"
    if wider and all(wider.values()):
        wide = _WideComparison(stored, {name: graph for name, graph in wider.items() if graph}, provider, declared)
        wide.perturb(comparison.points)
        report.failures += wide.failures()
        report.evidence |= {
            "verified": report.passed,
            "in_float32": {graph.name: {"outputs": wide.outputs(graph)} for graph in wide.graphs},
        }
    return report


class Comparison:
    """The model in float64, in its own dtype, and as graphs at each optimisation level, side by side."""

    levels: Mapping[str, bool] = LEVELS
    labels: Mapping[str, str] = _LABELS

    def __init__(
        self,
        stored: ModelDirectory,
        graphs: Mapping[str, bytes],
        provider: Provider,
        declared: Sequence[Graph] | None = None,
        longest: int | None = None,
    ) -> None:
        self.stored, self.files, self.provider = stored, graphs, provider
        self.graphs = tuple(declared or stored.spec.graphs)
        self.epsilon = epsilon(stored.dtype)
        self.longest = int(getattr(stored.spec.config, "max_seq_len", DEFAULT_MAX))
        if longest is not None:
            self.longest = min(self.longest, longest)
        while self._numbers(Point(1, self.longest, 0, "none")) > _NUMBERS:
            self.longest //= 2
        self.yardstick = TorchExecutor(self._model())
        self.runtimes = self._runtimes()
        self.reference = TorchExecutor(self._model().double())
        self.errors = {
            (level, graph.name, tensor.name): Errors()
            for level in self.labels
            for graph in self.graphs
            for tensor in graph.output_tensors()
        }
        self.distributions = {key: Distribution() for key in self.errors if key[2] == "logits"}
        self.greedy: dict[str, dict[str, Any]] = {}
        self.points: list[Point] = []
        self.compared: set[str] = set()
        """Levels that were compared at one point at least."""

    def _numbers(self, point: Point) -> int:
        """Number of attention weights that the graphs return at ``point``."""
        total = point.length + point.past
        shapes = (
            tensor.shape(dict.fromkeys(graph.dim_names(), total) | {"batch": point.batch, "past_sequence": 0})
            for graph in self.graphs
            for tensor in graph.recorded()
        )
        return sum(math.prod(shape) for shape in shapes)

    def _model(self) -> nn.Module:
        """A new instance of the model."""
        return persist.load_directory(self.stored)

    def _runtimes(self) -> dict[str, Executor]:
        """The executors to compare at every point, by level."""
        return {level: self._runtime(optimize) for level, optimize in self.levels.items()}

    def _runtime(
        self,
        optimize: bool,
        weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Executor:
        """Open sessions for all graphs, with the stored weights or with others of the same layout."""
        sessions = {}
        try:
            for graph in self.graphs:
                file = (files or self.files)[graph.name]
                sessions[graph.name] = open_session(
                    file,
                    weights=self.stored.path,
                    provider=self.provider,
                    optimize=optimize,
                    placements=True,
                    spin=False,  # torch and the sessions take turns; idle threads of one would slow down the other
                    replace=self._by_place(file, weights) if weights else None,
                )
        except ArtifactError as error:
            raise ParityError(f"cannot be verified: {error}", self.stored.path) from error
        return OnnxExecutor(sessions, self.yardstick.dtype)

    def _by_place(self, file: bytes, weights: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Look up the weight for each initialiser by the place it points at, as their names may differ."""
        names = {(tensor.file, tensor.offset): name for name, tensor in self.stored.layout.items()}
        places = pointers(file)
        astray = [name for name, place in places.items() if place not in names]
        if astray:
            raise ParityError(f"initialiser {astray[0]} points at no tensor", self.stored.path)
        return {name: weights[names[place]] for name, place in places.items()}

    def run(self, full_grid: bool, progress: Progress | None) -> Report:
        """Compare everything and return the report."""
        left_out = self.sweep(full_grid, progress)
        failures = self.failures()
        return Report(self.evidence(left_out, verified=not failures), failures)

    def sweep(self, full_grid: bool, progress: Progress | None) -> int:
        """Compare at every point of the grid, then greedily decoded text, then with perturbed weights.

        Stops at a point whose error is far beyond the limit. Returns the number of points left out.
        """
        parameters = create.count_parameters(self.yardstick.model)
        points, left_out = make_grid(self.graphs, self.longest, parameters, whole=full_grid)
        everything = len(points)
        points = [point for point in points if self._numbers(point) <= _NUMBERS]
        left_out += everything - len(points)
        self.visit(points, progress)
        if self._is_hopeless():
            return left_out + len(points) - len(self.points)
        for level, runtime in self.runtimes.items():
            margin = (
                2 * self.errors[level, self.graphs[-1].name, "logits"].limit(self.epsilon) if self.distributions else 0
            )
            with self._running(f"in greedy decoding, {self.labels[level]}"):
                agreement = greedy_agreement(self.reference, runtime, self.graphs, margin, self.longest)
            if agreement is not None:
                self.greedy[level] = agreement
        self.perturb(points)
        return left_out

    def visit(self, points: Sequence[Point], progress: Progress | None = None) -> None:
        """Compare at these points, in order of cost, up to one whose error is far beyond the limit."""
        for number, point in enumerate(sorted(points, key=lambda point: point.tokens), 1):
            if progress is not None:
                progress(number, len(points))
            self._compare_at(point, self.runtimes)
            self.points.append(point)
            if self._is_hopeless():
                break
        self.points.sort(key=points.index)

    def _is_hopeless(self) -> bool:
        """Whether some error is so far beyond the limit that no further point can change the verdict."""
        return any(error.hopeless(self.epsilon) for error in self.errors.values())

    @contextmanager
    def _running(self, where: object) -> Iterator[None]:
        """Raise errors of the runtime as :class:`ParityError`."""
        try:
            yield
        except ZooError:
            raise
        except Exception as error:  # the runtime raises a dozen classes without a common base
            raise ParityError(f"the graph fails {where} ({error})", self.stored.path) from error

    def perturb(self, points: list[Point]) -> None:
        """Compare twice with noise on every weight, at the smallest points that have several rows and tokens.

        Initial biases are 0 and initial norm weights are 1: without noise, a graph that ignores them would pass.
        Initial projections are so small that attention is almost uniform: a wrong score would vanish in rounding.
        """
        generator = torch.Generator().manual_seed(SEED)
        smallest = smallest_points(points)

        self._change_weights(lambda weight: noisy(weight, generator) * _FAINT)
        for level in (FAINT, PERTURBED):
            runtime = {level: self._runtime(optimize=True, weights=self._weights())}
            for point in smallest:
                self._compare_at(point, runtime)
            if level == FAINT:
                self._change_weights(lambda weight: weight / _FAINT)

    def _change_weights(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.no_grad():
            pairs = zip(self.yardstick.model.parameters(), self.reference.model.parameters(), strict=True)
            for own, exact in pairs:
                own.copy_(change(own))
                exact.copy_(own)

    def _recall(self, level: str) -> None:
        """Restore the weights with which ``level`` was compared. :meth:`perturb` leaves perturbed ones."""
        if level == FAINT:
            self._change_weights(lambda weight: weight * _FAINT)
        elif level != PERTURBED:
            stored = iter(persist.load_directory(self.stored).parameters())
            self._change_weights(lambda _: next(stored))

    def _weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """The current weights of the models, by every name in the state dict."""
        return {name: as_array(tensor) for name, tensor in self.yardstick.model.state_dict().items()}

    def _compare_at(self, point: Point, runtimes: Mapping[str, Executor]) -> None:
        with self._running(f"at {point}"):
            self._add_errors(point, runtimes)

    def _add_errors(self, point: Point, runtimes: Mapping[str, Executor]) -> None:
        feeds = make_feeds(self.graphs, point, SEED, self.longest)
        wanted = run_pipeline(self.reference, self.graphs, feeds, point, split=False)
        yardsticks = {
            executor: run_pipeline(executor, self.graphs, feeds, point, split=True)
            for executor in {self._yardstick(level) for level in runtimes}
        }
        nudged: list[dict[str, Arrays]] | None = None
        for level, runtime in runtimes.items():
            allowed = yardsticks[self._yardstick(level)]
            self.compared.add(level)
            with self._running(f"at {point}, {self.labels[level]}"):
                found = run_pipeline(runtime, self.graphs, feeds, point, split=True)
            for graph in self.graphs:
                for tensor in graph.output_tensors():
                    key = level, graph.name, tensor.name
                    valid = valid_positions(graph, tensor, feeds, point)
                    exact, made = wanted[graph.name][tensor.name], found[graph.name][tensor.name]
                    check_shape(graph, tensor, made.shape, feeds, point)
                    self.errors[key].add(exact, allowed[graph.name][tensor.name], made, valid, point)
                    if self.errors[key].finite and not self.errors[key].passed(self.epsilon):
                        nudged = nudged or list(self._nudged(feeds, point))
                        for other in nudged:
                            self.errors[key].allow(exact, other[graph.name][tensor.name], valid)
                    if key in self.distributions:
                        rows = np.broadcast_to(valid, exact.shape)[..., 0]
                        margin = 2 * self.errors[key].limit(self.epsilon)
                        self.distributions[key].add(exact[rows], made[rows], margin)

    def _yardstick(self, level: str) -> TorchExecutor:
        """The torch model whose error bounds this level."""
        return self.yardstick

    def _nudged(self, feeds: Feeds, point: Point) -> Iterator[dict[str, Arrays]]:
        """Evaluate torch on weights perturbed by less than one unit in the last place.

        Where the model amplifies rounding errors, as a norm of two nearly equal numbers does, a single evaluation may
        be close to float64 by chance. The perturbed evaluations show how far rounding moves the outputs.
        """
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(_NUDGES):
            self._move_yardstick(lambda exact: exact * (1 + self.epsilon * (_uniform(exact, generator) - 0.5)))
            yield run_pipeline(self.yardstick, self.graphs, feeds, point, split=True)
        self._move_yardstick(lambda exact: exact)

    def _move_yardstick(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set the yardstick's weights to a function of the reference's."""
        with torch.no_grad():
            pairs = zip(self.yardstick.model.parameters(), self.reference.model.parameters(), strict=True)
            for own, exact in pairs:
                own.copy_(change(exact))

    def failures(self) -> list[str]:
        """One line per failed comparison; the first names the first module that diverges."""
        lines = []
        for (level, graph, name), error in self.errors.items():
            where = f"{name} of {graph}, {self.labels[level]}"
            if not error.finite:
                lines.append(f"{where}, is not finite")
            elif not error.passed(self.epsilon):
                limit = error.limit(self.epsilon)
                lines.append(f"{where}, is off by {error.runtime:.3g}, allowed {limit:.3g}, at {error.worst}")
        for (level, graph, _), item in self.distributions.items():
            if item.disagreements:
                where = f"{graph}, {self.labels[level]}"
                lines.append(f"{where}, chooses another token in {item.disagreements} of {item.rows} rows")
        for level, agreement in self.greedy.items():
            if not agreement["passed"]:
                lines.append(f"greedy decoding, {self.labels[level]}, diverges after {agreement['agreed']} tokens")
        module = self._first_divergence() if lines else None
        return [f"{lines[0]}; it begins in {module}", *lines[1:]] if module else lines

    def _first_divergence(self) -> str | None:
        for (level, name, _), error in self.errors.items():
            if error.worst is not None and not error.passed(self.epsilon):
                self._recall(level)
                try:
                    modules = self.module_errors(name, error.worst)
                except Exception as problem:  # the comparison has failed in any case
                    return f"a module that cannot be named ({problem})"
                return next((f"{item}, of {self.stored.spec.plugin}" for item in modules if item.diverges), None)
        return None

    def module_errors(self, name: str, point: Point) -> list[ModuleError]:
        """Compare the output of each module of a graph at one point of the grid, without optimisations."""
        graph = next(graph for graph in self.graphs if graph.name == name)
        feeds = make_feeds(self.graphs, point, SEED, self.longest)
        run = partial(self._run_tapped, name)
        references = self.reference, self.yardstick
        return module_errors(graph, self.files[name], self.graphs, run, references, feeds, point)

    def _run_tapped(self, name: str, data: bytes) -> Executor:
        """Open all graphs on the current weights, without optimisations, with ``data`` in place of one."""
        return self._runtime(optimize=False, weights=self._weights(), files={**self.files, name: data})

    def _about(self, graph: Graph) -> dict[str, Any]:
        """Evidence about a graph as a whole."""
        runtime = self.runtimes["all"]
        assert isinstance(runtime, OnnxExecutor)
        nodes = placement(runtime.sessions[graph.name])
        return {"placement": dict(nodes), **without_functions(self.files[graph.name])}

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

    def evidence(self, left_out: int, *, verified: bool) -> dict[str, Any]:
        """The content of parity.json."""
        rule = f"max_abs_error <= {FACTOR:g} x torch_max_abs_error + {FLOOR_ULPS:g} x epsilon x max|reference|"
        return {
            "schema": 1,
            "verified": verified,
            "model": self.stored.description["name"],
            "provider": self.provider,
            "dtype": self.stored.dtype,
            "rule": rule,
            "reference": "the module in float64, without a cache",
            "graphs": {
                graph.name: {
                    **self._about(graph),
                    "outputs": self.outputs(graph),
                }
                for graph in self.graphs
            },
            "logits": {level: item.to_dict() for (level, _, _), item in self.distributions.items()},
            "greedy_decoding": self.greedy,
            "grid": {"seed": SEED, "left_out": left_out, "points": [point.to_dict() for point in self.points]},
            "unused_tensors": sorted(
                set(self.stored.layout) - referenced_tensors(self.files.values(), self.stored.layout)
            ),
            "weights": weights_of(self.stored),
            "versions": versions(),
        }


class _WideComparison(Comparison):
    """Comparison of graphs in float16 or bfloat16 and their model, both evaluated in float32.

    Rounding to two or three digits can hide a wrong result; in float32 it cannot.
    """

    levels: Mapping[str, bool] = MappingProxyType({})
    labels: Mapping[str, str] = MappingProxyType(
        {level: f"{_LABELS[level]}, in float32" for level in (PERTURBED, FAINT)}
    )

    def __init__(
        self,
        stored: ModelDirectory,
        graphs: Mapping[str, bytes],
        provider: Provider,
        declared: Sequence[Graph] | None = None,
    ) -> None:
        super().__init__(stored, graphs, provider, declared)
        self.epsilon = epsilon("float32")
        self.yardstick = TorchExecutor(self.yardstick.model.float())


def smallest_points(points: Sequence[Point]) -> list[Point]:
    """Return, of the points with several rows, several tokens and the longest past, those with the fewest tokens.

    Points of image models have no length, so none is required of them.
    """
    past, longest = max(point.past for point in points), max(point.length for point in points)
    enough = min(2, longest)
    several = [point for point in points if point.batch > 1 and point.length >= enough and point.past == past] or points
    fewest = min(point.tokens for point in several)
    return [point for point in several if point.tokens == fewest]


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw numbers in [0, 1), with the shape and dtype of ``like``."""
    return torch.rand(like.shape, generator=generator, dtype=like.dtype)
