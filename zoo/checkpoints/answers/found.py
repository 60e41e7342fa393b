"""The record of the comparisons of an import, from text to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ComparedAnswers"]


@dataclass
class ComparedAnswers:
    """What was compared from text to answer, and why the rest was not."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of inputs by kind of comparison."""
    against: list[str] = field(default_factory=list)
    """The libraries compared with, and their versions."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why something was not compared, by kind."""

    def __str__(self) -> str:
        return self._text([library.partition(" ")[0] for library in self.against], self.reasons)

    @property
    def recorded(self) -> str:
        """The same with versions, but without messages of other libraries, which may quote local paths."""
        return self._text(self.against, {kind: reason.partition(": ")[0] for kind, reason in self.reasons.items()})

    def _text(self, against: Sequence[str], reasons: Mapping[str, str]) -> str:
        counted = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        left = ", ".join(f"{kind} ({reason})" for kind, reason in reasons.items())
        said = [f"answers equal those of {' and '.join(against)}: {counted}"] if counted else []
        return "; ".join([*said, *([f"not compared: {left}"] if left else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"compared": self.counts, "against": self.against, "not_compared": self.reasons}
