"""The outcome of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Report"]


@dataclass
class Report:
    """The outcome of a comparison."""

    evidence: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    subject: str = "the ONNX graph"
    recorded: bytes | None = None
    """Content of the file with a sample of the comparison, if one is kept."""

    @property
    def passed(self) -> bool:
        """Whether the graphs were shown equal to the model."""
        return not self.failures

    def verdict(self) -> str:
        """Return one line that names the first failure and the number of others."""
        more = f" and {len(self.failures) - 1} more" if len(self.failures) > 1 else ""
        return f"{self.subject} is not equal to the model: {self.failures[0]}{more}"
