"""Coverage of the conditions in a graph by the inputs at which it is compared.

A comparison shows nothing about a branch that no input takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zoo.artifact import abridged
from zoo.probe.grid import CHEAP
from zoo.probe.inputs import Feeds, Point
from zoo_export.coverage.outcomes import Conditions, Outcome

__all__ = ["FLOOR", "Coverage"]

FLOOR = 2 / 3
"""Least share of the possible outcomes that must be seen, of conditions on ids, masks, positions and sizes."""
_TOLERATED = 2
"""Number of unseen outcomes that do not fail an export, however few others there are: a guard or two."""


class Coverage:
    """The outcomes of all conditions that the compared points show.

    Args:
        conditions: the conditions of each graph.
        feeds: makes the inputs of a point.
        dtype: the dtype of floating-point inputs.
        parameters: number of parameters, which tells at which points activations are cheap to compute.
    """

    def __init__(
        self,
        conditions: Sequence[Conditions],
        feeds: Callable[[Point], Feeds],
        dtype: np.dtype[Any],
        parameters: int,
    ) -> None:
        self._conditions, self._feeds, self._dtype, self._parameters = conditions, feeds, dtype, parameters
        self.seen: set[tuple[str, Outcome]] = set()

    def at(self, point: Point) -> set[tuple[str, Outcome]]:
        """Return the outcomes at a point."""
        feeds, cheap = self._feeds(point), point.tokens * self._parameters <= CHEAP
        return {
            (item.graph.name, outcome)
            for item in self._conditions
            for outcome in item.outcomes(feeds, point, self._dtype, cheap=cheap)
        }

    def add(self, points: Iterable[Point], *, failures: bool = True) -> None:
        """Add compared points, with or without failures of the graphs."""
        for point in points:
            self.seen |= {item for item in self.at(point) if failures or item[1][0] >= 0}

    def extend(self, more: Iterable[Point]) -> Iterator[Point]:
        """Yield those of the given points that show an outcome not seen before, and add them."""
        for point in more:
            new = self.at(point) - self.seen
            if new:
                self.seen |= new
                yield point

    def facts(self) -> dict[str, Any]:
        """The entry for parity.json: the numbers of conditions and outcomes, and the outcomes that no input shows."""
        facts: dict[str, Any] = {}
        for item in self._conditions:
            unseen = self._unseen(item, item.possible)
            facts[item.graph.name] = {
                "conditions": len(item.found),
                "outcomes": len(item.possible),
                "impossible": sum(len(condition.outcomes) for condition in item.found) - len(item.possible),
                "unseen": unseen,
            }
        return facts

    def failure(self) -> str | None:
        """Return why the points show too few outcomes that depend on ids, masks, positions and sizes, or None."""
        failed = {graph for graph, (number, _, _) in self.seen if number < 0}
        for item in self._conditions:
            if item.graph.name in failed:
                continue  # the comparison tells why
            steered = [(number, word) for number, word in item.possible if number not in item.heavy | item.closed]
            unseen = self._unseen(item, steered)
            if len(unseen) > max(_TOLERATED, len(steered) * (1 - FLOOR)):
                return (
                    f"the inputs of the comparison show only {len(steered) - len(unseen)} of {len(steered)} outcomes "
                    f"of conditions in the graph {item.graph.name}, not {abridged(unseen)}"
                )
        return None

    def _unseen(self, item: Conditions, outcomes: Iterable[tuple[int, str]]) -> list[str]:
        seen = {(number, word) for graph, (number, word, _) in self.seen if graph == item.graph.name}
        return [f"{item.found[number]}: {word}" for number, word in outcomes if (number, word) not in seen]
