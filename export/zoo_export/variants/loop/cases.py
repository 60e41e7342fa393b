"""The calls at which a graph with the decoding loop is compared, and their results."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.arrays import Array
from zoo.probe.inputs import Padding

__all__ = ["CASES", "GeneratedRow", "LoopCase", "ModelRow"]


@dataclass(frozen=True)
class LoopCase:
    """One call of the loop."""

    batch: int
    length: int
    padding: Padding
    temperature: float = 0.0
    top_k: int = 0
    shared_noise: bool = False
    """Whether all rows share one row of noise."""

    def __str__(self) -> str:
        choice = f"temperature {self.temperature}, top_k {self.top_k}" if self.temperature else "greedy"
        return f"batch {self.batch}, length {self.length}, padding {self.padding}, {choice}"


CASES = (
    LoopCase(1, 7, "none"),
    LoopCase(2, 1, "none"),
    LoopCase(3, 7, "left"),
    LoopCase(3, 7, "right"),
    LoopCase(1, 5, "left", 1.0),
    LoopCase(3, 7, "left", 0.8),
    LoopCase(3, 7, "right", 1.5, 5),
    LoopCase(2, 4, "none", 1.0, 20, shared_noise=True),
)


@dataclass
class ModelRow:
    """The module's logits (tokens, vocabulary) for each token of one generated row."""

    exact: Array
    own: Array
    """In the model's own dtype."""


@dataclass
class GeneratedRow:
    """One row that the loop generated."""

    where: str
    tokens: Array
    row: ModelRow
    case: LoopCase
    noise: Array | None
    python: Array | None
    """Tokens of the Python loop, where it was run."""
