"""The verdicts of an audit by the conditions that points meet: one row or several, padding, a past."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.probe.inputs import Point
from zoo_export.audit.judging import Outcome

__all__ = ["QUESTIONS", "Question", "answers", "shared"]

QUESTIONS: dict[str, Callable[[Point], bool]] = {
    "one row": lambda point: point.batch == 1,
    "several rows": lambda point: point.batch > 1,
    "one token": lambda point: point.length == 1,
    "several tokens": lambda point: point.length > 1,
    "rows without padding": lambda point: point.padding == "none",
    "padding on the left": lambda point: point.padding == "left",
    "padding on the right": lambda point: point.padding == "right",
    "a row of padding only": lambda point: point.padding == "empty row",
    "no past": lambda point: point.past == 0,
    "a past": lambda point: point.past > 0,
}
"""Conditions under which a graph may be used, each with the points that meet it."""


@dataclass(frozen=True, slots=True)
class Question:
    """The answer to one question."""

    name: str
    points: int
    """Number of compared points that ask it."""
    wrong: int
    """Number of those at which an output is wrong."""

    @property
    def verdict(self) -> str:
        """``right``, ``wrong``, or ``not asked``."""
        return "wrong" if self.wrong else "right" if self.points else "not asked"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for audit.json."""
        return {"question": self.name, "verdict": self.verdict, "points": self.points, "wrong": self.wrong}


def answers(
    points: Sequence[Point], outcomes: Iterable[Outcome], *, has_lengths: bool, has_past: bool
) -> list[Question]:
    """Return the answer to each question that concerns a model.

    Args:
        points: those that were compared.
        outcomes: the verdicts.
        has_lengths: whether the model reads rows of any length.
        has_past: whether it has a past.
    """
    wrong = {item.point for item in outcomes if item.failure}
    of_lengths = {"one token", "several tokens", "rows without padding"}
    of_lengths |= {name for name in QUESTIONS if "padding" in name}
    return [
        Question(name, len(asked), len(wrong & {*asked}))
        for name, asks in QUESTIONS.items()
        if (has_lengths or name not in of_lengths) and (has_past or "past" not in name)
        for asked in [[point for point in points if asks(point)]]
    ]


_SIDES = {"padding beside tokens": lambda point: point.padding in ("left", "right")}


def shared(points: Sequence[Point], outcomes: Iterable[Outcome]) -> list[str]:
    """Return what the wrong points have in common, and not all right ones: if there is one, what no right one has."""
    wrong = {item.point for item in outcomes if item.failure}
    right = [point for point in points if point not in wrong]
    if not right:
        return []
    common = {name: asks for name, asks in (QUESTIONS | _SIDES).items() if all(map(asks, wrong))}
    decisive = [name for name, asks in common.items() if not any(map(asks, right))]
    return decisive[:1] or [name for name in common if name in QUESTIONS and not all(map(QUESTIONS[name], right))]
