"""Points beyond the grid, at which conditions of the graphs have other outcomes than at its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zoo.contract import rows_of
from zoo.errors import ParityError
from zoo.probe.grid import CHEAP, at_non_finite, at_powers
from zoo.probe.inputs import Point
from zoo_export.coverage.coverage import Coverage
from zoo_export.coverage.outcomes import Conditions
from zoo_export.coverage.points import candidates, many_lengths, turning_points
from zoo_export.parity.evaluation import Evaluator
from zoo_export.parity.memory import fits
from zoo_export.parity.points import smallest_points

__all__ = ["cover"]

_CANDIDATES = 300
"""Number of inputs that are tried to cover conditions."""
_CONSTANTS = 12
"""Number of the graphs' constants around which they lie."""
_ROWS = 9
"""Batch size, above those of the grid, at which graphs are compared whose conditions are not covered."""


def cover(
    evaluator: Evaluator, points: Sequence[Point], *, full_grid: bool = False
) -> tuple[list[Point], dict[str, Any] | None]:
    """Return more points, at which conditions of the graphs have outcomes that they have at none of the points.

    The constants that conditions compare with become special token ids of the inputs.

    Returns:
        The points, and the evidence about the conditions; None if the subject has no conditions to cover.

    Raises:
        ParityError: all points together show too few outcomes.
    """
    subject = evaluator.subject
    graphs = subject.graphs
    conditions = subject.conditions()
    lengths = _lengths(evaluator, conditions)
    if subject.fixed:
        return lengths, None
    if not conditions:
        return _many_rows(evaluator, points), None
    constants = sorted({number for item in conditions for number in item.constants})
    evaluator.special = sorted({*evaluator.special, *constants})
    coverage = Coverage(conditions, evaluator.feeds, subject.models.yardstick.dtype, evaluator.parameters)
    coverage.add(points)
    coverage.add(at_non_finite(graphs, smallest_points(points)[0], subject.fixed), failures=False)
    turning = turning_points(graphs, evaluator.longest, constants)
    tried = candidates(graphs, evaluator.longest, constants[:_CONSTANTS])
    if not full_grid:
        turning, tried = (
            [point for point in some if point.tokens * evaluator.parameters <= CHEAP] for some in (turning, tried)
        )
        tried = tried[:: -(-len(tried) // _CANDIDATES) or 1]
    added = list(coverage.extend(point for point in (*turning, *tried) if point not in points))
    failure = coverage.failure()
    if failure is not None:
        remedy = "try more inputs with --grid full, or remove conditions that no input meets"
        raise ParityError(failure, subject.stored.path, remedy)
    computed = {name for item in conditions for name in item.computed}
    powers = [point for point in at_powers(graphs, computed, evaluator.longest) if fits(graphs, point)]
    others = [point for point in lengths if point not in (*points, *added)]
    return [*added, *powers, *others], coverage.facts()


def _many_rows(evaluator: Evaluator, points: Sequence[Point]) -> list[Point]:
    """Return a point of more rows than the grid has, for graphs whose conditions are not covered."""
    return [
        point
        for point in (replace(point, batch=_ROWS) for point in smallest_points(points)[:1])
        if point.tokens * evaluator.parameters <= CHEAP and fits(evaluator.subject.graphs, point)
    ]


def _lengths(evaluator: Evaluator, conditions: Sequence[Conditions]) -> list[Point]:
    """Return points of many lengths if a graph rounds numbers that it computes from sizes."""
    graphs = evaluator.subject.graphs
    fixed = evaluator.subject.fixed
    if not set(fixed) <= {*rows_of(graphs)} or not any(item.round_sizes for item in conditions):
        return []
    batch = fixed.get(rows_of(graphs)[0], 1)
    points = many_lengths(graphs, evaluator.longest, evaluator.parameters, batch=batch)
    return [point for point in points if fits(graphs, point)]
