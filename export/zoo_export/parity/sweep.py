"""The inputs at which a subject is compared: a grid, greedily decoded text, and perturbed weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from zoo.contract import Graph, rows_of
from zoo.errors import ParityError, ZooError
from zoo.exporters import Progress
from zoo.models import create
from zoo.probe.inputs import CHEAP, ODD, PAST, Feeds, Point, at_magnitudes, is_affordable, make_feeds, make_grid
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo.system import release_memory
from zoo_export.coverage.outcomes import Conditions, Coverage, candidates, many_lengths, turning_points
from zoo_export.parity.greedy import greedy_agreement
from zoo_export.parity.laws import check_split, special_ids
from zoo_export.parity.memory import fits, longest_input
from zoo_export.parity.reference import SEED
from zoo_export.parity.rule import WIDE, Findings, Judges, Key
from zoo_export.parity.subject import FAINT, Subject

__all__ = ["Magnitude", "Sweep", "running", "smallest_points", "typical_point"]

_Allowed = tuple[Collection[str], Mapping[str, Arrays]]
"""Levels, and the outputs of each graph by their yardstick."""
_LARGE = 2**26
"""Bytes of outputs from which freed memory is returned to the system between two runs. Most of it is fragmented."""
_CANDIDATES, _CONSTANTS = 300, 12
"""Number of inputs that are tried to cover conditions, and of the graphs' constants around which they lie."""


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
        self.special = special_ids(subject.stored.spec.config)
        self.parameters = create.count_parameters(subject.models.yardstick.model)
        self.runtimes: Mapping[str, Executor] = subject.open()
        self.findings = self._new_findings()
        self.magnitudes: dict[Point, Magnitude] = {}
        """Comparisons with floating-point inputs of other magnitudes."""
        self.coverage: dict[str, Any] | None = None
        self.points: list[Point] = []
        self.added: list[Point] = []
        """Points beyond the grid, at which conditions have other outcomes."""
        self._splits: set[tuple[int, int]] = set()
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

    def run(self, full_grid: bool = False, progress: Progress | None = None) -> None:
        """Compare at every point of the grid and at magnitudes, then greedily decoded text and perturbed weights.

        Stops at a point whose error is far beyond the limit.
        """
        graphs = self.subject.graphs
        grid, self.left_out = make_grid(
            graphs, self.longest, self.parameters, whole=full_grid, fixed=self.subject.fixed
        )
        points = [point for point in grid if fits(graphs, point)]
        self.left_out += len(grid) - len(points)
        self.added = self.cover(points, full_grid)
        points += self.added
        self.visit(points, progress)
        self.left_out += len(points) - len(self.points)
        if not self.findings.hopeless:
            self.compare_magnitudes(points, self.runtimes)
            self.decode()
        self.graph_facts = {graph.name: self.subject.graph_facts(graph, self.runtimes) for graph in graphs}
        self.runtimes = {}
        release_memory()  # for perturbed weights
        if not self.findings.hopeless:
            self.perturb(points)

    def cover(self, points: Sequence[Point], full_grid: bool = False) -> list[Point]:
        """Return more points, at which conditions of the graphs have outcomes that they have at none of the points.

        Raises :class:`ParityError` if all of them together show too few outcomes.
        """
        graphs, conditions = self.subject.graphs, self.subject.conditions()
        lengths = self._lengths(conditions)
        if not conditions or self.subject.fixed:
            return lengths
        constants = sorted({number for item in conditions for number in item.constants})
        self.special = sorted({*self.special, *constants})
        coverage = Coverage(conditions, self._feeds, self.subject.models.yardstick.dtype, self.parameters)
        coverage.add(points)
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
        return [*added, *(point for point in lengths if point not in (*points, *added))]

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

    def visit(self, points: Sequence[Point], progress: Progress | None = None) -> None:
        """Compare at these points, in order of cost, up to one whose error is far beyond the limit.

        A point with several rows is the first, because it shows how large the numbers of each channel are.
        """
        first = smallest_points(points)[:1] if points else []
        for number, point in enumerate(sorted(points, key=lambda point: (point not in first, point.tokens)), 1):
            if progress is not None:
                progress(number, len(points))
            self.compare_at(point, self.runtimes)
            self.points.append(point)
            if self.findings.hopeless:
                break
        self.points.sort(key=points.index)

    def decode(self) -> None:
        """Compare greedily decoded text, if the last graph is a decoder of token ids."""
        graphs, findings = self.subject.graphs, self.findings
        for level, runtime in self.runtimes.items():
            margin = findings.margin(level, graphs[-1]) if findings.distributions else 0
            with running(f"in greedy decoding, {self.subject.labels[level]}", self.subject.stored.path):
                reference = self.subject.models.reference
                agreement = greedy_agreement(reference, runtime, graphs, margin, self.longest, self.subject.fixed)
            if agreement is not None:
                findings.greedy[level] = agreement

    def perturb(self, points: Sequence[Point]) -> None:
        """Compare on perturbed weights, at :meth:`selection`."""
        chosen = self.selection(points)
        for runtimes in self.subject.open_perturbed():
            for point in chosen:
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
                allowed = list(self._run_yardsticks(runtimes, feeds, point))
            except Exception as error:  # a model may raise any at numbers that it does not expect
                magnitude.left_out |= dict.fromkeys(runtimes, f"PyTorch fails ({error})")
                continue
            magnitude.left_out |= self._unstable(feeds, exact, allowed, point)
            stable = {level: runtimes[level] for level in runtimes if level not in magnitude.left_out}
            self._compare(magnitude.findings, point, stable, feeds, exact, allowed)

    def _longer(self, points: Sequence[Point]) -> list[Point]:
        """Return the point with the longest past, or else the longest input, among those that cost little."""
        cheap = [point for point in points if point.tokens * self.parameters <= CHEAP]
        return [max(cheap, key=lambda point: (point.past, point.length, -point.batch))] if cheap else []

    def compare_at(self, point: Point, runtimes: Mapping[str, Executor]) -> None:
        """Compare executors, by level, at one point."""
        feeds = self._feeds(point)
        with running(f"at {point}", self.subject.stored.path):
            exact = self._run_reference(feeds, point)
        allowed = self._run_yardsticks(runtimes, feeds, point)
        self._compare(self.findings, point, runtimes, feeds, exact, allowed)

    def _run_reference(self, feeds: Feeds, point: Point) -> dict[str, Arrays]:
        """Return the outputs of each graph in float64."""
        graphs, reference = self.subject.graphs, self.subject.models.reference
        exact = run_pipeline(reference, graphs, feeds, point, split=True)
        if self._is_new_split(point):
            whole = run_pipeline(reference, graphs, feeds, point, split=False)
            check_split(graphs, whole, exact, feeds, point)
        return exact

    def _run_yardsticks(self, levels: Iterable[str], feeds: Feeds, point: Point) -> Iterator[_Allowed]:
        """Yield some levels, and the outputs of each graph by the yardstick of these levels."""
        levels = list(levels)
        for executor in dict.fromkeys(self.subject.yardstick(level) for level in levels):
            some = [level for level in levels if self.subject.yardstick(level) is executor]
            yield some, run_pipeline(executor, self.subject.graphs, feeds, point, split=True)

    def _unstable(
        self, feeds: Feeds, exact: Mapping[str, Arrays], allowed: Iterable[_Allowed], point: Point
    ) -> dict[str, str]:
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

    def _compare(
        self,
        findings: Findings,
        point: Point,
        runtimes: Mapping[str, Executor],
        feeds: Feeds,
        exact: Mapping[str, Arrays],
        allowed: Iterable[_Allowed],
    ) -> None:
        """Compare executors, by level, with PyTorch at one point, and add the errors to findings.

        The outputs for a long text are large, so only those in float64 are kept.
        """
        subject = self.subject
        large = sum(values.nbytes for outputs in exact.values() for values in outputs.values()) > _LARGE
        with running(f"at {point}", subject.stored.path):
            torch: dict[Key, Any] = {}
            graphs: dict[Key, Any] = {}
            for levels, outputs in allowed:
                for level in levels:
                    torch |= findings.add_torch(level, exact, outputs, feeds, point) if level in runtimes else {}
                del outputs
                if large:
                    release_memory()
            for level, runtime in runtimes.items():
                with running(f"at {point}, {subject.labels[level]}", subject.stored.path):
                    found = run_pipeline(runtime, subject.graphs, feeds, point, split=True)
                graphs |= findings.add(level, exact, found, feeds, point)
                del found
                if large:
                    release_memory()
            self._settle(findings, findings.errors, runtimes, exact, feeds, point)
            self._settle_constants(findings, findings.errors, runtimes, exact, feeds, point)
            self._settle(findings, findings.jumping(), runtimes, exact, feeds, point, bits=WIDE)
            findings.add_distributions(exact, torch, graphs, feeds, point)
            self._settle(findings, findings.distributions, runtimes, exact, feeds, point)
            self._settle_constants(findings, findings.distributions, runtimes, exact, feeds, point)

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
        exact: Mapping[str, Arrays],
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
            results = exact, run_pipeline(other, self.subject.graphs, nudged, point, split=True)
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
        exact: Mapping[str, Arrays],
        feeds: Feeds,
        point: Point,
    ) -> None:
        """Where something is beyond its limit, add how far the rounding of the graphs' constants moves the outputs."""
        for level, runtime in runtimes.items():
            doubtful = findings.doubtful(judges, {level})
            first = None
            for executor in self.subject.moved() if doubtful else ():
                first = first or run_pipeline(runtime, self.subject.graphs, feeds, point, split=True)
                other = run_pipeline(executor, self.subject.graphs, feeds, point, split=True)
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
        facts |= {"magnitudes": self.magnitude_facts()} if self.magnitudes else {}
        return facts | ({"coverage": self.coverage} if self.coverage is not None else {})

    def magnitude_facts(self) -> list[dict[str, Any]]:
        """Evidence about floating-point inputs of other magnitudes."""
        return [{**point.to_dict(), **magnitude.to_dict()} for point, magnitude in self.magnitudes.items()]

    def _all_findings(self) -> list[Findings]:
        return [self.findings, *(magnitude.findings for magnitude in self.magnitudes.values())]

    def failures(self) -> list[str]:
        """One line per failed comparison; the first names the first module that diverges."""
        lines = [line for findings in self._all_findings() for line in findings.failures()]
        module = self.first_divergence() if lines else None
        return [f"{lines[0]}; it begins in {module}", *lines[1:]] if module else lines

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


@contextmanager
def running(where: str, path: Path) -> Iterator[None]:
    """Raise errors of the runtime as :class:`ParityError`."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:  # the runtime raises a dozen classes without a common base
        raise ParityError(f"the graph fails {where} ({_short(error)})", path) from error


def _short(error: Exception) -> str:
    """Return the message of an error without the source file and the function of ONNX Runtime that raised it."""
    return re.sub(r"/\S*onnxruntime\S*:\d+ .* was false\.\s*", "", str(error))


def typical_point(graphs: Sequence[Graph], longest: int, fixed: Mapping[str, int] = MappingProxyType({})) -> Point:
    """Return a point with two rows, several tokens, a past and padding, as far as the graphs have them."""
    past = PAST if any(graph.pasts for graph in graphs) and longest > PAST else 0
    padded = any(tensor.is_mask for graph in graphs for tensor in graph.input_tensors())
    length = fixed.get("sequence", min(ODD, longest - past))
    return Point(fixed.get(rows_of(graphs)[0], 2), length, past, "left" if padded else "none")


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
