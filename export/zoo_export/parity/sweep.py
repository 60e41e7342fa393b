"""The inputs at which a subject is compared: a grid, greedily decoded text, and perturbed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from zoo.exporters import Progress
from zoo.models import create
from zoo.probe.grid import CHEAP, at_magnitudes, at_non_finite, is_long, make_grid
from zoo.probe.inputs import Point
from zoo.probe.module import fixed_values
from zoo.probe.pipeline import Executor
from zoo.probe.positions import kept_positions
from zoo.system import release_large_blocks, release_memory
from zoo_export.comparison import Comparison
from zoo_export.parity.covering import cover
from zoo_export.parity.evaluation import Evaluator
from zoo_export.parity.greedy import greedy_agreement, greedy_tokens
from zoo_export.parity.judging import Judging
from zoo_export.parity.laws import special_ids
from zoo_export.parity.magnitudes import Magnitude
from zoo_export.parity.memory import fits, longest_input
from zoo_export.parity.nonfinite import NonFinite
from zoo_export.parity.points import in_order, longer_points, smallest_points, typical_point
from zoo_export.parity.recording import Recording, recorded_points
from zoo_export.parity.reference import SEED
from zoo_export.parity.rule import Findings
from zoo_export.parity.running import running
from zoo_export.parity.subject import FAINT, Subject

__all__ = ["Sweep"]


class Sweep:
    """The comparison of a subject with its model at one point after another.

    Args:
        subject: the graphs and their model.
        longest: number of tokens of the longest inputs; by default those of the longest input of the model.

    Raises:
        ParityError: a graph cannot be opened.
    """

    def __init__(self, subject: Subject, longest: int | None = None) -> None:
        self.subject = subject
        self.longest = longest_input(subject.stored.spec.config, subject.graphs, longest)
        self.parameters = create.count_parameters(subject.models.yardstick.model)
        special = special_ids(subject.stored.spec, fixed_values(subject.models.yardstick.model))
        self.evaluator = Evaluator(subject, self.longest, self.parameters, special)
        self._judging = Judging(self.evaluator)
        self.runtimes: Mapping[str, Executor] = subject.open()
        self._all_levels = list(self.runtimes)
        self.findings = self._judging.new_findings()
        self.magnitudes: dict[Point, Magnitude] = {}
        """Comparisons with floating-point inputs of other magnitudes."""
        self.non_finite: dict[Point, NonFinite] = {}
        """Comparisons with inputs that are NaN or infinite."""
        self.coverage: dict[str, Any] | None = None
        self.points: list[Point] = []
        self.added: list[Point] = []
        """Points beyond the grid, at which conditions have other outcomes."""
        self.levels: dict[Point, list[str]] = {}
        """Levels that were compared at each point, on the stored weights."""
        self._decoded: dict[str, Any] = {}
        """Greedily decoded tokens of levels that ran ahead."""
        self._planned: list[Point] | None = None
        self.recording: Recording | None = None
        """The sample that is kept of the comparison, once its points are chosen."""
        self.graph_facts: dict[str, dict[str, Any]] = {}
        """Evidence about each graph, apart from its errors."""
        self.left_out = 0
        """Number of points of the grid that were not compared."""

    def run(self, comparison: Comparison = Comparison()) -> None:
        """Compare at every point of the grid and at magnitudes, then greedily decoded text and perturbed weights.

        Stops at a point whose error is far beyond the limit.
        """
        if self._planned is None:
            self.prepare(comparison.full_grid)
        assert self._planned is not None
        points = self._planned
        # Inputs that take long come last, on sessions that leave them memory.
        long = self._long(points, comparison.full_grid)
        self.visit([point for point in points if point not in long], comparison.progress, len(points))
        if not self.findings.hopeless:
            self.compare_magnitudes(points, self.runtimes)
            self.compare_non_finite(points)
            self.decode()
        if long and not self.findings.hopeless:
            self.runtimes = self.subject.long_runtimes(self.runtimes)
            release_large_blocks()
            release_memory()  # of those that are left out
            self.visit(long, comparison.progress, len(points))
        self.points.sort(key=points.index)
        self.left_out += len(points) - len(self.points)
        self.runtimes = {}
        release_memory()  # for perturbed weights
        if not self.findings.hopeless:
            self.perturb(points)

    def prepare(self, full_grid: bool = False) -> None:
        """Choose the points to compare, and run graphs ahead whose sessions have weights of their own."""
        graphs = self.subject.graphs
        grid, self.left_out = make_grid(
            graphs, self.longest, self.parameters, whole=full_grid, fixed=self.subject.fixed
        )
        points = [point for point in grid if fits(graphs, point) and self.subject.compares(point)]
        self.left_out += len(grid) - len(points)
        self.added, self.coverage = cover(self.evaluator, points, full_grid=full_grid)
        points += self.added
        self._planned = points
        self.recording = self._new_recording(points)
        self.graph_facts = {graph.name: self.subject.graph_facts(graph, self.runtimes) for graph in graphs}
        long = self._long(points, full_grid)
        short = in_order(point for point in points if point not in long)
        apart = self.evaluator.ahead.apart(self.runtimes)
        smallest = smallest_points(points)[0]
        others = [*at_magnitudes(graphs, smallest), *at_non_finite(graphs, smallest, self.subject.fixed)]
        with suppress(Exception):  # they are compared again, and fail there
            self._decoded = {
                level: tokens
                for level, runtime in apart.items()
                if (tokens := greedy_tokens(runtime, graphs, self.longest, self.subject.fixed)) is not None
            }
        self.evaluator.run_ahead(self.runtimes, [*(others if apart else ()), *short])

    def _new_recording(self, points: Sequence[Point]) -> Recording | None:
        """Return an empty sample, unless only PyTorch could judge a replay, as where a discontinuous model jumps."""
        subject = self.subject
        if subject.recorded is None or subject.stored.spec.architecture.discontinuous:
            return None
        return Recording(
            graphs=subject.graphs,
            points=recorded_points(points, self.parameters),
            level=subject.recorded,
            dtype=subject.models.yardstick.dtype,
            longest=self.longest,
            special=self.evaluator.special,
            fixed=subject.fixed,
        )

    def _long(self, points: Sequence[Point], full_grid: bool) -> list[Point]:
        return [] if full_grid else [point for point in points if is_long(point, self.parameters)]

    def visit(self, points: Sequence[Point], progress: Progress | None = None, total: int | None = None) -> None:
        """Compare at these points, :func:`in_order`, up to one whose error is far beyond the limit.

        ``progress`` is told ``total`` as the number of all points, by default that of these.
        """
        waiting = in_order(points)
        while waiting:
            number = self.evaluator.run_ahead(self.runtimes, waiting)
            for point in self.evaluator.refer(waiting[:number]):
                if progress is not None:
                    progress(len(self.points) + 1, total or len(points))
                self._judging.compare(self.findings, point, self.runtimes, self.recording)
                self.points.append(point)
                self.levels[point] = list(self.runtimes)
                if self.findings.hopeless:
                    return
            waiting = waiting[number:]

    def decode(self) -> None:
        """Compare greedily decoded text, if the last graph is a decoder of token ids."""
        graphs = self.subject.graphs
        findings = self.findings
        reference = self.subject.models.reference
        levels = list(self.runtimes)
        margins = {level: findings.margin(level, graphs[-1]) if findings.distributions else 0 for level in levels}
        path = self.subject.stored.path
        for level in levels:
            if level not in self._decoded:
                with running(f"in greedy decoding, {self.subject.labels[level]}", path):
                    tokens = greedy_tokens(self.runtimes[level], graphs, self.longest, self.subject.fixed)
                self._decoded |= {} if tokens is None else {level: tokens}
        with running("in greedy decoding", path):
            decoded = {level: self._decoded[level] for level in levels if level in self._decoded}
            findings.greedy |= greedy_agreement(reference, decoded, graphs, margins, self.longest, self.subject.fixed)

    def perturb(self, points: Sequence[Point]) -> None:
        """Compare on perturbed weights, at :meth:`selection`; faint ones of a large model with one kind of padding."""
        selected = self.selection(points)
        large = [point for point in smallest_points(points)[1:] if point.tokens * self.parameters > CHEAP]
        others = [point for point in large if point not in self.added]
        for runtimes in self.subject.open_perturbed():
            for point in self.evaluator.refer(
                [point for point in selected if FAINT not in runtimes or point not in others]
            ):
                self.compare_at(point, runtimes)
            if FAINT not in runtimes:
                self.compare_magnitudes(points, runtimes)

    def selection(self, points: Sequence[Point]) -> list[Point]:
        """Return the smallest points with several rows and tokens, a longer one, and those added for a condition.

        The effect of a condition may be invisible on the stored weights.
        """
        return list(dict.fromkeys([*smallest_points(points), *longer_points(points, self.parameters), *self.added]))

    def compare_magnitudes(self, points: Sequence[Point], runtimes: Mapping[str, Executor]) -> None:
        """Compare floating-point inputs of other magnitudes at the smallest point, each with a limit of its own.

        Levels at which PyTorch itself fails or is inaccurate are left out.
        """
        for point in at_magnitudes(self.subject.graphs, smallest_points(points)[0]):
            magnitude = self.magnitudes.setdefault(point, Magnitude(self._judging.new_findings()))
            self._judging.compare_magnitude(magnitude, point, runtimes)

    def compare_non_finite(self, points: Sequence[Point]) -> None:
        """Compare inputs that are NaN and inputs that are infinite at the smallest point, on the stored weights."""
        for point in at_non_finite(self.subject.graphs, smallest_points(points)[0], self.subject.fixed):
            if fits(self.subject.graphs, point):
                self.non_finite[point] = self._judging.compare_non_finite(point, self.runtimes)

    def compare_at(self, point: Point, runtimes: Mapping[str, Executor]) -> None:
        """Compare executors, by level, at one point."""
        self._judging.compare(self.findings, point, runtimes)

    def facts(self) -> dict[str, Any]:
        """Evidence about the points that were compared."""
        facts = {"seed": SEED, "left_out": self.left_out, "points": [point.to_dict() for point in self.points]}
        facts |= {"reduced": reduced} if (reduced := self._reduced()) else {}
        facts |= {"magnitudes": self.magnitude_facts()} if self.magnitudes else {}
        facts |= {"non_finite": self.non_finite_facts()} if self.non_finite else {}
        return facts | ({"coverage": self.coverage} if self.coverage is not None else {})

    def _reduced(self) -> list[dict[str, Any]]:
        """Evidence about the points at which levels, or positions of large outputs, were left out."""
        entries = []
        for point in self.points:
            feeds = self.evaluator.feeds(point)
            facts: dict[str, Any] = {}
            if self.levels[point] != self._all_levels:
                facts["levels"] = self.levels[point]
            counts = {
                tensor.name: len(item.places)
                for graph in self.subject.graphs
                for tensor in graph.output_tensors()
                if (item := kept_positions(graph, tensor, feeds, point)) is not None
            }
            facts |= {"positions": counts} if counts else {}
            entries += [{**point.to_dict(), **facts}] if facts else []
        return entries

    def magnitude_facts(self) -> list[dict[str, Any]]:
        """Evidence about floating-point inputs of other magnitudes."""
        return [{**point.to_dict(), **magnitude.to_dict()} for point, magnitude in self.magnitudes.items()]

    def non_finite_facts(self) -> dict[str, Any]:
        """Evidence about inputs that are NaN or infinite."""
        return {point.values: item.to_dict() for point, item in self.non_finite.items()}

    def _all_findings(self) -> list[Findings]:
        return [self.findings, *(magnitude.findings for magnitude in self.magnitudes.values())]

    def failures(self) -> list[str]:
        """One line per failed comparison; the first names the first module that diverges."""
        lines = [line for findings in self._all_findings() for line in findings.failures()]
        module = self.first_divergence() if lines else None
        lines = [f"{lines[0]}; it begins in {module}", *lines[1:]] if module else lines
        return lines + [item.reason for item in self.non_finite.values() if item.is_expected and item.reason]

    def first_divergence(self) -> str | None:
        """The first module whose output differs, with its source and plugin; None if it cannot be told."""
        typical = typical_point(self.subject.graphs, self.longest, self.subject.fixed)
        for level, graph, worst in (failed for findings in self._all_findings() for failed in findings.failed()):
            # A small point may hide where an error begins: with one token, only what reads the past is wrong.
            for point in (replace(typical, mean=worst.mean, deviation=worst.deviation), worst):
                try:
                    feeds = self.evaluator.feeds(point)
                    modules = self.subject.module_errors(level, graph, feeds, point)
                except Exception as problem:  # the comparison has failed in any case
                    return f"a module that cannot be named ({problem})"
                for item in modules or ():
                    if item.diverges:
                        return f"{item}, of {self.subject.stored.spec.plugin}"
            if modules is not None:
                return None
        return None
