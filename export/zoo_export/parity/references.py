"""The reference at several short points, evaluated together (:mod:`zoo.probe.lockstep`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from zoo.contract import Graph
from zoo.probe.inputs import Feeds, Point
from zoo.probe.lockstep import copies, is_wide, run_together
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, run_pipeline
from zoo_export.parity.memory import output_count

__all__ = ["References"]

_TOGETHER, _BYTES = 12, 2**26
"""Number of evaluations at a time, and the bytes of outputs of the points that are evaluated ahead."""
_Results = dict[str, Arrays]


class References:
    """Results of the reference at points that are about to be compared.

    Every point is evaluated by the unmodified modules on its own inputs, as it would be alone. Only products of the
    same weight are computed in one call, in float64.

    Args:
        reference: runs the graphs in float64. One that changes what modules compute is not run for several points.
        graphs: the declared graphs.
    """

    def __init__(self, reference: TorchExecutor, graphs: Sequence[Graph]) -> None:
        self._model, self._graphs = reference.model, graphs
        self._has_wide = type(reference) is TorchExecutor and is_wide(reference.model)
        self._known: dict[Point, tuple[_Results, _Results | None]] = {}

    def evaluate(
        self, points: Sequence[Point], feeds: Callable[[Point], Feeds], is_new_split: Callable[[Point], bool]
    ) -> list[Point]:
        """Evaluate as many of the first points as fit into a little memory. Returns them; none if that gains nothing.

        Args:
            points: the points, in the order in which they will be compared.
            feeds: returns the inputs at a point.
            is_new_split: whether a point is also to be evaluated in one call.
        """
        self._known.clear()
        if not self._has_wide:
            return []
        jobs: list[tuple[Point, bool, bool]] = []
        held, taken = 0, list[Point]()
        for point in points:
            held += 8 * output_count(self._graphs, point)
            if taken and held > _BYTES:
                break
            taken.append(point)
            new = is_new_split(point)
            jobs += [(point, True, not new), *([(point, False, False)] if new else [])]
        try:
            results = dict(zip(jobs, self._evaluate(jobs, feeds), strict=True))
        except Exception:  # any: the evaluation at that point alone reports it
            return []
        for point, split, keeping in jobs:
            if split:
                self._known[point] = results[point, True, keeping], results.get((point, False, False))
        return taken

    def _evaluate(
        self, jobs: Sequence[tuple[Point, bool, bool]], feeds: Callable[[Point], Feeds]
    ) -> Iterator[_Results]:
        models = copies(self._model, min(len(jobs), _TOGETHER))
        for start in range(0, len(jobs), _TOGETHER):
            some = jobs[start : start + _TOGETHER]
            yield from run_together(
                [
                    partial(self._run, TorchExecutor(model), feeds(point), point, split, keeping)
                    for (point, split, keeping), model in zip(some, models, strict=False)
                ]
            )

    def _run(self, executor: TorchExecutor, feeds: Feeds, point: Point, split: bool, keeping: bool) -> _Results:
        with executor.keeping(feeds, point) if keeping else nullcontext():
            return run_pipeline(executor, self._graphs, feeds, point, split=split)

    def take(self, point: Point) -> tuple[_Results, _Results | None] | None:
        """Return the results at a point, once, and those in one call if they were wanted. None if there are none."""
        return self._known.pop(point, None)
