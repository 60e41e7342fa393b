"""The results of executors, of the reference and of its yardsticks at the points of a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np

from zoo.probe.grid import is_affordable
from zoo.probe.inputs import Feeds, Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo.probe.positions import kept_positions
from zoo.system import release_memory
from zoo_export.parity.ahead import Ahead, Results, size_of
from zoo_export.parity.laws import check_split
from zoo_export.parity.nonfinite import Agreed, without
from zoo_export.parity.reference import SEED
from zoo_export.parity.references import References
from zoo_export.parity.running import running
from zoo_export.parity.subject import Subject

__all__ = ["Allowed", "Evaluator"]

Allowed = tuple[Sequence[str], Results]
"""Levels, and the outputs by their yardstick."""
_LARGE = 2**26
"""Bytes of outputs from which freed memory, most of which is fragmented, is returned to the system between two runs."""


class Evaluator:
    """Runs a subject's graphs and its models at points.

    Args:
        subject: the graphs and their model.
        longest: number of tokens of the longest inputs.
        parameters: number of parameters of the model.
        special: token ids that the model may treat in a special way.
    """

    def __init__(self, subject: Subject, longest: int, parameters: int, special: Sequence[int]) -> None:
        self.subject = subject
        self.longest = longest
        self.parameters = parameters
        self.special = special
        self.ahead = Ahead()
        self.agreed: Agreed | None = None
        """While inputs that are not finite are compared, the numbers that are judged."""
        self._splits: set[tuple[int, int]] = set()
        self._references = References(subject.models.reference, subject.graphs)

    def feeds(self, point: Point) -> Feeds:
        subject = self.subject
        return make_feeds(subject.graphs, point, SEED, self.longest, special=self.special, fixed=subject.fixed)

    def run_ahead(self, runtimes: Mapping[str, Executor], points: Sequence[Point]) -> int:
        """Run sessions with weights of their own at the first points, and close them. Returns the number of points."""

        def run(runtime: Executor, point: Point) -> Results:
            return self.run_one(runtime, self.feeds(point), point, complete=True)

        number = self.ahead.run(runtimes, points, run)
        self.ahead.close(runtimes)
        return number

    def run(self, runtimes: Mapping[str, Executor], feeds: Feeds, point: Point) -> dict[str, Results]:
        """Return the results of executors, by level. If a number that is dropped is not finite, one that is kept is."""
        results = {}
        for level, runtime in runtimes.items():
            with running(f"at {point}, {self.subject.labels[level]}", self.subject.stored.path):
                ahead = self.ahead.take(level, point)
                results[level] = ahead or self.run_one(runtime, feeds, point, complete=True)
        return results

    def run_yardsticks(self, levels: Iterable[str], feeds: Feeds, point: Point) -> list[Allowed]:
        """Return some levels, and the results of the yardstick of these levels."""
        levels_by_yardstick: dict[TorchExecutor, list[str]] = {}
        for level in levels:
            levels_by_yardstick.setdefault(self.subject.yardstick(level), []).append(level)
        return [(some, self.run_one(executor, feeds, point)) for executor, some in levels_by_yardstick.items()]

    def run_reference(self, feeds: Feeds, point: Point) -> Results:
        """Return the results in float64, after a check that they do not depend on where a text is cut."""
        graphs, reference = self.subject.graphs, self.subject.models.reference
        evaluated = self._references.take(point)
        if evaluated is None and not self._is_new_split(point):
            return self.run_one(reference, feeds, point)
        exact, whole = evaluated or (
            run_pipeline(reference, graphs, feeds, point, split=True),
            run_pipeline(reference, graphs, feeds, point, split=False),
        )
        if whole is not None:
            check_split(graphs, whole, exact, feeds, point)
        return self._kept(exact, feeds, point)

    def refer(self, points: Sequence[Point]) -> Iterator[Point]:
        """Yield points in order, and evaluate the reference at several short ones together before they are compared."""
        ahead = 0
        for number, point in enumerate(points):
            if number == ahead:
                short = list(itertools.takewhile(partial(is_affordable, parameters=self.parameters), points[number:]))
                before = set(self._splits)
                taken = self._references.evaluate(short, self.feeds, self._is_new_split) if len(short) > 1 else []
                if not taken:
                    self._splits = before
                ahead = number + max(1, len(taken) or len(short))
            yield point

    def run_one(self, executor: Executor, feeds: Feeds, point: Point, *, complete: bool = False) -> Results:
        with executor.keeping(feeds, point) if isinstance(executor, TorchExecutor) else nullcontext():
            outputs = run_pipeline(executor, self.subject.graphs, feeds, point, split=True)
        results = self._kept(outputs, feeds, point, complete=complete)
        return results if self.agreed is None else without(results, self.agreed)

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

    def _is_new_split(self, point: Point) -> bool:
        """Whether the law ``cache`` is to be checked at a point: of points of the same lengths, at the first."""
        lengths = point.length, point.past
        if not point.past or lengths in self._splits or not is_affordable(point, self.parameters):
            return False
        self._splits.add(lengths)
        return True
