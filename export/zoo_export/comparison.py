"""How an export is compared with its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.exporters import Progress
    from zoo_runtime.onnx_runtime.providers import Provider

__all__ = ["Comparison"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How graphs are compared with the model."""

    provider: Provider = "cpu"
    """The execution provider that runs the graphs."""
    full_grid: bool = False
    """Whether to compare at all points of the grid, including those that take minutes for a large model."""
    longest: int | None = None
    """Number of tokens of the longest inputs; by default those of the longest input of the model."""
    progress: Progress | None = None
    """Called with the number of each comparison and the total."""
