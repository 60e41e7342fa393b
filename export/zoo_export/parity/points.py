"""Points with certain properties among those at which graphs are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from zoo.contract import Graph, rows_of
from zoo.probe.grid import CHEAP, ODD, PAST
from zoo.probe.inputs import Point

__all__ = ["in_order", "longer_points", "smallest_points", "typical_point"]


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
    unordered = list(points)
    first = smallest_points(unordered)[:1] if unordered else []
    return sorted(unordered, key=lambda point: (point not in first, point.tokens))


def smallest_points(points: Sequence[Point]) -> list[Point]:
    """Return, of the points with several rows, several tokens and a past, those with the fewest tokens.

    Points of image models have no length, and those of encoders no past, so none is required of them.
    """
    has_past = any(point.past for point in points)
    enough = min(2, max(point.length for point in points))
    rows = min(2, max(point.batch for point in points))
    several = [
        point for point in points if point.batch >= rows and point.length >= enough and bool(point.past) == has_past
    ] or points
    fewest = min(point.tokens for point in several)
    return [point for point in several if point.tokens == fewest]


def longer_points(points: Sequence[Point], parameters: int) -> list[Point]:
    """Return the point with the longest past, or else the longest input, among those that cost little."""
    cheap = [point for point in points if point.tokens * parameters <= CHEAP]
    return [max(cheap, key=lambda point: (point.past, point.length, -point.batch))] if cheap else []
