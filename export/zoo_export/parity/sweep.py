"""The inputs at which a subject is compared: a grid, greedily decoded text, and perturbed weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import numpy as np

from zoo.contract import Graph, rows_of
from zoo.errors import IncomparableError, ParityError, ZooError
from zoo.exporters import Progress
from zoo.models import create
from zoo.probe.grid import CHEAP, ODD, PAST, at_magnitudes, at_non_finite, at_powers, is_affordable, is_long, make_grid
from zoo.probe.inputs import Feeds, Point, make_feeds
from zoo.probe.module import TorchExecutor, fixed_values
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo.probe.positions import kept_positions
from zoo.system import release_large_blocks, release_memory
from zoo_export.comparison import Comparison
from zoo_export.coverage.outcomes import Conditions, Coverage, candidates, many_lengths, turning_points
from zoo_export.parity.ahead import Ahead, Results, size_of
from zoo_export.parity.greedy import greedy_agreement, greedy_tokens
from zoo_export.parity.laws import check_split, special_ids
from zoo_export.parity.memory import fits, longest_input
from zoo_export.parity.nonfinite import Agreed, Asking, NonFinite, masks, other_kind, without
from zoo_export.parity.reference import SEED
from zoo_export.parity.references import References
from zoo_export.parity.rule import WIDE, Findings, Judges
from zoo_export.parity.subject import FAINT, Subject
from zoo_runtime.onnx_runtime.errors import OutOfMemoryError, RunError

__all__ = ["Magnitude", "Sweep", "in_order", "running", "smallest_points", "typical_point"]

_Allowed = tuple[Collection[str], Results]
"""Levels, and the outputs by their yardstick."""
_LARGE, _FRAGMENTS = 2**26, 2**22
"""Bytes of outputs from which freed memory is returned to the system between two runs, and between two points. Most of
it is fragmented."""
_CANDIDATES, _CONSTANTS = 300, 12
"""Number of inputs that are tried to cover conditions, and of the graphs' constants around which they lie."""
_ROWS = 9
"""Batch size, above those of the grid, at which graphs are compared whose conditions are not covered."""


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
        self.special = special_ids(subject.stored.spec, fixed_values(subject.models.yardstick.model))
        self.parameters = create.count_parameters(subject.models.yardstick.model)
        self.runtimes: Mapping[str, Executor] = subject.open()
        self._all_levels = list(self.runtimes)
        self.findings = self._new_findings()
        self.magnitudes: dict[Point, Magnitude] = {}
        """Comparisons with floating-point inputs of other magnitudes."""
        self.non_finite: dict[Point, NonFinite] = {}
        """Comparisons with inputs that are NaN or infinite."""
        self._agreed: Agreed | None = None
        """While they are compared, the numbers that are judged."""
        self.coverage: dict[str, Any] | None = None
        self.points: list[Point] = []
        self.added: list[Point] = []
        """Points beyond the grid, at which conditions have other outcomes."""
        self.levels: dict[Point, list[str]] = {}
        """Levels that were compared at each point, on the stored weights."""
        self._splits: set[tuple[int, int]] = set()
        self._ahead, self._decoded = Ahead(), dict[str, Any]()
        self._planned: list[Point] | None = None
        self._references = References(subject.models.reference, subject.graphs)
        self.graph_facts: dict[str, dict[str, Any]] = {}
        """Evidence about each graph, apart from its errors."""
        self.left_out = 0
        """Number of points of the grid that were not compared."""

    def _new_findings(self) -> Findings:
        subject = self.subject
        return Findings(
            subject.graphs,
            subject.labels,
            subject.models.epsilon,
            subject.coarse,
            discontinuous=bool(subject.stored.spec.architecture.discontinuous),
        )

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
        self.added = self.cover(points, full_grid)
        points += self.added
        self._planned = points
        self.graph_facts = {graph.name: self.subject.graph_facts(graph, self.runtimes) for graph in graphs}
        long = self._long(points, full_grid)
        short = in_order(point for point in points if point not in long)
        apart = self._ahead.apart(self.runtimes)
        smallest = smallest_points(points)[0]
        others = [*at_magnitudes(graphs, smallest), *at_non_finite(graphs, smallest, self.subject.fixed)]
        with suppress(Exception):  # they are compared again, and fail there
            self._decoded = {
                level: tokens
                for level, runtime in apart.items()
                if (tokens := greedy_tokens(runtime, graphs, self.longest, self.subject.fixed)) is not None
            }
        self._run_ahead([*(others if apart else ()), *short])

    def _long(self, points: Sequence[Point], full_grid: bool) -> list[Point]:
        return [] if full_grid else [point for point in points if is_long(point, self.parameters)]

    def _run_ahead(self, points: Sequence[Point]) -> int:
        """Run sessions with weights of their own at the first points, and close them. Returns the number of points."""

        def run(runtime: Executor, point: Point) -> Results:
            return self._run_one(runtime, self._feeds(point), point, complete=True)

        number = self._ahead.run(self.runtimes, points, run)
        self._ahead.close(self.runtimes)
        return number

    def cover(self, points: Sequence[Point], full_grid: bool = False) -> list[Point]:
        """Return more points, at which conditions of the graphs have outcomes that they have at none of the points.

        Raises :class:`ParityError` if all of them together show too few outcomes.
        """
        graphs, conditions = self.subject.graphs, self.subject.conditions()
        computed = {name for item in conditions for name in item.computed}
        lengths = self._lengths(conditions)
        if self.subject.fixed:
            return lengths
        if not conditions:
            return self._many_rows(points)
        constants = sorted({number for item in conditions for number in item.constants})
        self.special = sorted({*self.special, *constants})
        coverage = Coverage(conditions, self._feeds, self.subject.models.yardstick.dtype, self.parameters)
        coverage.add(points)
        coverage.add(at_non_finite(graphs, smallest_points(points)[0], self.subject.fixed), failures=False)
        turning = turning_points(graphs, self.longest, constants)
        tried = candidates(graphs, self.longest, constants[:_CONSTANTS])
        if not full_grid:
            turning, tried = ([p for p in some if p.tokens * self.parameters <= CHEAP] for some in (turning, tried))
            tried = tried[:: -(-len(tried) // _CANDIDATES) or 1]
        added = list(coverage.extend(point for point in (*turning, *tried) if point not in points))
        self.coverage = coverage.facts()
        failure = coverage.failure()
        if failure is not None:
            remedy = "try more inputs with --grid full, or remove conditions that no input meets"
            raise ParityError(failure, self.subject.stored.path, remedy)
        powers = [point for point in at_powers(graphs, computed, self.longest) if fits(graphs, point)]
        return [*added, *powers, *(point for point in lengths if point not in (*points, *added))]

    def _many_rows(self, points: Sequence[Point]) -> list[Point]:
        """Return a point of more rows than the grid has, for graphs whose conditions are not covered."""
        found = [replace(point, batch=_ROWS) for point in smallest_points(points)[:1]]
        return [p for p in found if p.tokens * self.parameters <= CHEAP and fits(self.subject.graphs, p)]

    def _lengths(self, conditions: Sequence[Conditions]) -> list[Point]:
        """Return points of many lengths if a graph rounds numbers that it computes from sizes."""
        graphs, fixed = self.subject.graphs, self.subject.fixed
        if not set(fixed) <= {*rows_of(graphs)} or not any(item.round_sizes for item in conditions):
            return []
        found = many_lengths(graphs, self.longest, self.parameters, batch=fixed.get(rows_of(graphs)[0], 1))
        return [point for point in found if fits(graphs, point)]

    def _feeds(self, point: Point) -> Feeds:
        subject = self.subject
        return make_feeds(subject.graphs, point, SEED, self.longest, special=self.special, fixed=subject.fixed)

    def visit(self, points: Sequence[Point], progress: Progress | None = None, total: int | None = None) -> None:
        """Compare at these points, :func:`in_order`, up to one whose error is far beyond the limit.

        ``progress`` is told ``total`` as the number of all points, by default that of these.
        """
        waiting = in_order(points)
        while waiting:
            number = self._run_ahead(waiting)
            for point in self._refer(waiting[:number]):
                if progress is not None:
                    progress(len(self.points) + 1, total or len(points))
                self.compare_at(point, self.runtimes)
                self.points.append(point)
                self.levels[point] = list(self.runtimes)
                if self.findings.hopeless:
                    return
            waiting = waiting[number:]

    def decode(self) -> None:
        """Compare greedily decoded text, if the last graph is a decoder of token ids."""
        graphs, findings, reference = self.subject.graphs, self.findings, self.subject.models.reference
        levels = list(self.runtimes)
        margins = {level: findings.margin(level, graphs[-1]) if findings.distributions else 0 for level in levels}
        with running("in greedy decoding", self.subject.stored.path):
            findings.greedy |= greedy_agreement(
                reference, self.runtimes, graphs, margins, self.longest, self.subject.fixed, self._decoded
            )

    def perturb(self, points: Sequence[Point]) -> None:
        """Compare on perturbed weights, at :meth:`selection`; faint ones of a large model with one kind of padding."""
        chosen = self.selection(points)
        large = [point for point in smallest_points(points)[1:] if point.tokens * self.parameters > CHEAP]
        others = [point for point in large if point not in self.added]
        for runtimes in self.subject.open_perturbed():
            for point in self._refer([point for point in chosen if FAINT not in runtimes or point not in others]):
                self.compare_at(point, runtimes)
            if FAINT not in runtimes:
                self.compare_magnitudes(points, runtimes)

    def selection(self, points: Sequence[Point]) -> list[Point]:
        """Return the smallest points with several rows and tokens, a longer one, and those added for a condition.

        The effect of a condition may be invisible on the stored weights.
        """
        return list(dict.fromkeys([*smallest_points(points), *self._longer(points), *self.added]))

    def compare_magnitudes(self, points: Sequence[Point], runtimes: Mapping[str, Executor]) -> None:
        """Compare floating-point inputs of other magnitudes at the smallest point, each with a limit of its own.

        Levels at which PyTorch itself fails or is inaccurate are left out.
        """
        for point in at_magnitudes(self.subject.graphs, smallest_points(points)[0]):
            magnitude = self.magnitudes.setdefault(point, Magnitude(self._new_findings()))
            feeds = self._feeds(point)
            try:
                exact = self._run_reference(feeds, point)
                allowed = self._run_yardsticks(runtimes, feeds, point)
            except Exception as error:  # a model may raise any at numbers that it does not expect
                magnitude.left_out |= dict.fromkeys(runtimes, f"PyTorch fails ({error})")
                continue
            magnitude.left_out |= self._unstable(feeds, exact, allowed, point)
            stable = {level: runtimes[level] for level in runtimes if level not in magnitude.left_out}
            self._judge(magnitude.findings, point, stable, feeds, self._run(stable, feeds, point), exact, allowed)

    def compare_non_finite(self, points: Sequence[Point]) -> None:
        """Compare inputs that are NaN and inputs that are infinite at the smallest point, on the stored weights."""
        for point in at_non_finite(self.subject.graphs, smallest_points(points)[0], self.subject.fixed):
            if fits(self.subject.graphs, point):
                self.non_finite[point] = self._compare_non_finite(point)
                self._agreed = None

    def _compare_non_finite(self, point: Point) -> NonFinite:
        feeds, finite, findings = self._feeds(point), replace(point, values="finite"), self._new_findings()
        reference = self.subject.models.reference
        try:
            with Asking() as usual:
                self._run_one(reference, self._feeds(finite), finite)
            with Asking() as asking:
                exact = self._run_one(reference, feeds, point)
            allowed = self._run_yardsticks(self.runtimes, feeds, point)
        except Exception as error:  # a model may raise any at numbers that it does not expect
            return NonFinite(f"PyTorch fails ({error})")
        is_expected = asking.count > usual.count
        agreed = masks(exact, {level: outputs for levels, outputs in allowed for level in levels})
        known = without(exact, agreed)
        own = [(levels, without(outputs, agreed)) for levels, outputs in allowed]
        if unstable := self._unstable(feeds, known, own, point):
            return NonFinite(next(iter(unstable.values())))
        try:
            found = self._run(self.runtimes, feeds, point)
            if difference := self._other_kind(exact, found, agreed, finite=True):
                return NonFinite(f"{difference}, at {point}", is_expected)
            self._agreed = agreed  # from here on, results have no others
            rest = {level: without(results, agreed) for level, results in found.items()}
            self._judge(findings, point, self.runtimes, feeds, rest, known, own)
        except IncomparableError:
            raise
        except ParityError as error:
            return NonFinite(str(error), is_expected)
        if failures := findings.failures():
            return NonFinite(failures[0], is_expected)
        difference = self._other_kind(exact, found, agreed, finite=False)
        return NonFinite(difference and f"{difference}, at {point}")

    def _other_kind(self, exact: Results, found: Mapping[str, Results], agreed: Agreed, *, finite: bool) -> str | None:
        """Describe the first difference of kind, with its level, or return None."""
        for level, results in found.items():
            if (difference := other_kind(exact, results, agreed, finite=finite)) is not None:
                return f"{difference}, {self.subject.labels[level]}"
        return None

    def _longer(self, points: Sequence[Point]) -> list[Point]:
        """Return the point with the longest past, or else the longest input, among those that cost little."""
        cheap = [point for point in points if point.tokens * self.parameters <= CHEAP]
        return [max(cheap, key=lambda point: (point.past, point.length, -point.batch))] if cheap else []

    def compare_at(self, point: Point, runtimes: Mapping[str, Executor]) -> None:
        """Compare executors, by level, at one point.

        The graphs are first, because their sessions need most memory, and the yardstick last, because its outputs are
        smaller than those of the reference. An error of PyTorch is reported all the same: it is the model's.
        """
        feeds, where, failure = self._feeds(point), self.subject.stored.path, None
        try:
            found = self._run(runtimes, feeds, point)
        except ParityError as error:
            failure = error
        with running(f"at {point}", where):
            exact = self._run_reference(feeds, point)
            allowed = self._run_yardsticks(runtimes, feeds, point)
        if failure is not None:
            raise failure
        self._judge(self.findings, point, runtimes, feeds, found, exact, allowed)

    def _run(self, runtimes: Mapping[str, Executor], feeds: Feeds, point: Point) -> dict[str, Results]:
        """Return the results of executors, by level. If a number that is dropped is not finite, one that is kept is."""
        found = {}
        for level, runtime in runtimes.items():
            with running(f"at {point}, {self.subject.labels[level]}", self.subject.stored.path):
                ahead = self._ahead.take(level, point)
                found[level] = ahead or self._run_one(runtime, feeds, point, complete=True)
        return found

    def _run_yardsticks(self, levels: Iterable[str], feeds: Feeds, point: Point) -> list[_Allowed]:
        """Return some levels, and the results of the yardstick of these levels."""
        found: dict[TorchExecutor, list[str]] = {}
        for level in levels:
            found.setdefault(self.subject.yardstick(level), []).append(level)
        return [(some, self._run_one(executor, feeds, point)) for executor, some in found.items()]

    def _run_reference(self, feeds: Feeds, point: Point) -> Results:
        """Return the results in float64, after a check that they do not depend on where a text is cut."""
        graphs, reference = self.subject.graphs, self.subject.models.reference
        known = self._references.take(point)
        if known is None and not self._is_new_split(point):
            return self._run_one(reference, feeds, point)
        exact, whole = known or (
            run_pipeline(reference, graphs, feeds, point, split=True),
            run_pipeline(reference, graphs, feeds, point, split=False),
        )
        if whole is not None:
            check_split(graphs, whole, exact, feeds, point)
        return self._kept(exact, feeds, point)

    def _refer(self, points: Sequence[Point]) -> Iterator[Point]:
        """Yield points in order, and evaluate the reference at several short ones together before they are compared."""
        ahead = 0
        for number, point in enumerate(points):
            if number == ahead:
                short = list(itertools.takewhile(partial(is_affordable, parameters=self.parameters), points[number:]))
                before = set(self._splits)
                taken = self._references.evaluate(short, self._feeds, self._is_new_split) if len(short) > 1 else []
                if not taken:
                    self._splits = before
                ahead = number + max(1, len(taken) or len(short))
            yield point

    def _run_one(self, executor: Executor, feeds: Feeds, point: Point, *, complete: bool = False) -> Results:
        with executor.keeping(feeds, point) if isinstance(executor, TorchExecutor) else nullcontext():
            outputs = run_pipeline(executor, self.subject.graphs, feeds, point, split=True)
        kept = self._kept(outputs, feeds, point, complete=complete)
        return kept if self._agreed is None else without(kept, self._agreed)

    def _kept(
        self, outputs: dict[str, Arrays], feeds: Feeds, point: Point, *, complete: bool = False
    ) -> dict[str, Arrays]:
        """Drop the other positions of large outputs.

        If ``complete`` and a number that is dropped is not finite, one that is kept becomes NaN.
        """
        dropped = False
        for graph in self.subject.graphs:
            for tensor in graph.output_tensors():
                values = outputs[graph.name].get(tensor.name)
                kept = kept_positions(graph, tensor, feeds, point)
                if values is None or kept is None or values.shape != kept.whole:
                    continue  # other shapes are judged elsewhere
                some = values.take(kept.places, kept.axis)
                if complete and not all(np.isfinite(part).all() for part in np.moveaxis(values, kept.axis, 0)):
                    some.flat[0] = np.nan
                outputs[graph.name][tensor.name] = some
                dropped = True
        del values
        if dropped or size_of(outputs) > _LARGE:
            release_memory()
        return outputs

    def _unstable(self, feeds: Feeds, exact: Results, allowed: Iterable[_Allowed], point: Point) -> dict[str, str]:
        """Return the levels at which PyTorch itself breaks the rule, and how."""
        findings = self._new_findings()
        for levels, outputs in allowed:
            for level in levels:
                findings.add_torch(level, exact, outputs, feeds, point)
                findings.add(level, exact, outputs, feeds, point)
        return {
            level: f"{name} of {graph} {failure}"
            for (level, graph, name), errors in findings.errors.items()
            if (failure := errors.failure())
        }

    def _judge(
        self,
        findings: Findings,
        point: Point,
        runtimes: Mapping[str, Executor],
        feeds: Feeds,
        found: Mapping[str, Results],
        exact: Results,
        allowed: Iterable[_Allowed],
    ) -> None:
        """Compare the results of executors, by level, with those of PyTorch at one point, and add the errors."""
        with running(f"at {point}", self.subject.stored.path):
            torch = {level: outputs for levels, outputs in allowed for level in levels if level in runtimes}
            for level, outputs in torch.items():
                findings.add_torch(level, exact, outputs, feeds, point)
            for level, results in found.items():
                findings.add(level, exact, results, feeds, point)
            self._settle(findings, findings.errors, runtimes, exact, feeds, point)
            self._settle_constants(findings, findings.errors, runtimes, exact, feeds, point)
            self._settle(findings, findings.jumping(), runtimes, exact, feeds, point, bits=WIDE)
            for level, results in found.items():
                findings.add_distributions(level, exact, torch[level], results, feeds, point)
            self._settle(findings, findings.distributions, runtimes, exact, feeds, point)
            self._settle_constants(findings, findings.distributions, runtimes, exact, feeds, point)
        if size_of(exact) > _FRAGMENTS:
            release_memory()

    def _is_new_split(self, point: Point) -> bool:
        """Whether the law ``cache`` is to be checked at a point: of points of the same lengths, at the first."""
        lengths = point.length, point.past
        if not point.past or lengths in self._splits or not is_affordable(point, self.parameters):
            return False
        self._splits.add(lengths)
        return True

    def _settle(
        self,
        findings: Findings,
        judges: Judges,
        levels: Collection[str],
        exact: Results,
        feeds: Feeds,
        point: Point,
        *,
        bits: int = 1,
    ) -> None:
        """Where something is beyond its limit, run PyTorch with different rounding, which may raise the limit."""
        doubtful = findings.doubtful(judges, levels)
        generator = np.random.default_rng(SEED)
        for other in self.subject.nudged(bits) if doubtful else ():
            nudged = self._nudged(feeds, bits, generator)
            results = exact, self._run_one(other, nudged, point)
            findings.allow(doubtful, judges, results, feeds, point, bits=bits)

    def _nudged(self, feeds: Feeds, bits: int, generator: np.random.Generator) -> Feeds:
        """Return inputs of which the floating-point ones are changed in their last bits."""
        size = (2**bits - 1) * self.subject.models.epsilon
        return {
            name: values * (1 + generator.uniform(-size, size, values.shape)) if values.dtype.kind == "f" else values
            for name, values in feeds.items()
        }

    def _settle_constants(
        self,
        findings: Findings,
        judges: Judges,
        runtimes: Mapping[str, Executor],
        exact: Results,
        feeds: Feeds,
        point: Point,
    ) -> None:
        """Where something is beyond its limit, add how far the rounding of the graphs' constants moves the outputs."""
        for level, runtime in runtimes.items():
            doubtful = findings.doubtful(judges, {level})
            first = None
            for executor in self.subject.moved() if doubtful else ():
                first = first or self._run_one(runtime, feeds, point)
                other = self._run_one(executor, feeds, point)
                shifted = {
                    graph: {
                        name: values + (other[graph][name] - first[graph][name]) for name, values in outputs.items()
                    }
                    for graph, outputs in exact.items()
                }
                findings.allow(doubtful, judges, (exact, shifted), feeds, point, bits=0)

    def facts(self) -> dict[str, Any]:
        """Evidence about the points that were compared."""
        facts = {"seed": SEED, "left_out": self.left_out, "points": [point.to_dict() for point in self.points]}
        facts |= {"reduced": reduced} if (reduced := self._reduced()) else {}
        facts |= {"magnitudes": self.magnitude_facts()} if self.magnitudes else {}
        facts |= {"non_finite": self.non_finite_facts()} if self.non_finite else {}
        return facts | ({"coverage": self.coverage} if self.coverage is not None else {})

    def _reduced(self) -> list[dict[str, Any]]:
        """Evidence about the points at which levels, or positions of large outputs, were left out."""
        found = []
        for point in self.points:
            feeds, facts = self._feeds(point), dict[str, Any]()
            if self.levels[point] != self._all_levels:
                facts["levels"] = self.levels[point]
            kept = {
                tensor.name: len(item.places)
                for graph in self.subject.graphs
                for tensor in graph.output_tensors()
                if (item := kept_positions(graph, tensor, feeds, point)) is not None
            }
            facts |= {"positions": kept} if kept else {}
            found += [{**point.to_dict(), **facts}] if facts else []
        return found

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
                    feeds = self._feeds(point)
                    modules = self.subject.module_errors(level, graph, feeds, point)
                except Exception as problem:  # the comparison has failed in any case
                    return f"a module that cannot be named ({problem})"
                for item in modules or ():
                    if item.diverges:
                        return f"{item}, of {self.subject.stored.spec.plugin}"
            if modules is not None:
                return None
        return None


@dataclass
class Magnitude:
    """The comparison with floating-point inputs of another mean and deviation."""

    findings: Findings
    left_out: dict[str, str] = field(default_factory=dict)
    """Why levels were not compared: what PyTorch itself does at these inputs."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for parity.json: the error of each level, in multiples of its limit."""
        errors: dict[str, float] = {}
        for (level, _, _), item in self.findings.errors.items():
            if level in self.findings.compared:
                errors[level] = max(errors.get(level, 0.0), item.runtime / item.limit if item.limit else 0.0)
        return {"error_of_limit": errors, "left_out": self.left_out}


_SIZES_REMEDY = "correct it, or declare the sizes that it accepts, such as zoo.Size(min=2)"
_DTYPE_REMEDY = "register a tensor that is kept as a buffer, so that it has the dtype of the model"


@contextmanager
def running(where: str, path: Path) -> Iterator[None]:
    """Raise errors of the runtime, and of the model in PyTorch, as :class:`ParityError`."""
    try:
        yield
    except OutOfMemoryError as error:
        raise IncomparableError(f"too little memory {where} ({error.what})", path) from error
    except RunError as error:
        raise ParityError(f"the graph fails {where} ({_short(error.__cause__)})", path) from error
    except ZooError:
        raise
    except MemoryError as error:
        raise IncomparableError(f"too little memory {where} ({error})", path) from error
    except Exception as error:  # the runtime raises a dozen classes without a common base
        if any(frame.f_globals.get("__name__") == "zoo.probe.module" for frame, _ in walk_tb(error.__traceback__)):
            remedy = _DTYPE_REMEDY if re.search(r"got: \w+ != \w+|expected scalar type", str(error)) else _SIZES_REMEDY
            raise ParityError(f"the model fails in PyTorch {where} ({_short(error)})", path, remedy) from error
        raise ParityError(f"the graph fails {where} ({_short(error)})", path) from error


def _short(error: BaseException | None) -> str:
    """Return the message of an error without the source file and the function of ONNX Runtime that raised it."""
    return re.sub(r"/\S*onnxruntime\S*:\d+ .* was false\.\s*", "", str(error))


def typical_point(graphs: Sequence[Graph], longest: int, fixed: Mapping[str, int] = MappingProxyType({})) -> Point:
    """Return a point with two rows, several tokens, a past and padding, as far as the graphs have them."""
    past = PAST if any(graph.pasts for graph in graphs) and longest > PAST else 0
    padded = any(tensor.is_mask for graph in graphs for tensor in graph.input_tensors())
    length = fixed.get("sequence", min(ODD, longest - past))
    return Point(fixed.get(rows_of(graphs)[0], 2), length, past, "left" if padded else "none")


def in_order(points: Iterable[Point]) -> list[Point]:
    """Return points in the order in which they are compared, by cost.

    A point with several rows is the first, because it shows how large the numbers of each channel are.
    """
    found = list(points)
    first = smallest_points(found)[:1] if found else []
    return sorted(found, key=lambda point: (point not in first, point.tokens))


def smallest_points(points: Sequence[Point]) -> list[Point]:
    """Return, of the points with several rows, several tokens and a past, those with the fewest tokens.

    Points of image models have no length, and those of encoders no past, so none is required of them.
    """
    has_past, longest = any(point.past for point in points), max(point.length for point in points)
    enough, rows = min(2, longest), min(2, max(point.batch for point in points))
    several = [
        point for point in points if point.batch >= rows and point.length >= enough and bool(point.past) == has_past
    ] or points
    fewest = min(point.tokens for point in several)
    return [point for point in several if point.tokens == fewest]
