"""Comparisons with floating-point inputs of other magnitudes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zoo_export.parity.rule import Findings

__all__ = ["Magnitude"]


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
