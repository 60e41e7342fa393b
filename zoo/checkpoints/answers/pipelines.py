"""Answers of the original's pipelines, and scores of zoo's model to hold against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.checkpoints.answers.tokens import ask
from zoo.checkpoints.exact import Exact
from zoo.checkpoints.source import Checkpoint
from zoo.classes import ClassifierConfig, default_names
from zoo.config import Config
from zoo.contract import standard_fields
from zoo.errors import ParityError

__all__ = ["FUNCTIONS", "REMEDY", "Answers", "ask_exactly", "close", "scores_of", "shown"]

REMEDY = "the model does not answer as the original; nothing was written"
FUNCTIONS: Mapping[str, nn.Module] = {
    "single_label_classification": nn.Softmax(-1), "multi_label_classification": nn.Sigmoid(),
    "regression": nn.Identity(),
}  # fmt: skip
"""How logits become scores, by problem type."""
_THEIRS = {"single_label_classification": "softmax", "multi_label_classification": "sigmoid", "regression": "none"}
_CLOSE = 1e-5
"""Maximum difference of answers, relative to the largest; pipelines round to float32."""


@dataclass(frozen=True)
class Answers:
    """The classes of a model and their scores, as a pipeline of transformers names them."""

    config: Config
    checkpoint: Checkpoint
    dtype: str

    def scored(self, logits: Tensor) -> list[tuple[str, float]]:
        """Return the names of classes, sorted, and their scores."""
        return sorted(zip(self.class_names, scores_of(self.config, logits).tolist(), strict=True))

    @property
    def class_names(self) -> Sequence[str]:
        """The labels of a classifier, or the names that transformers gives classes without labels."""
        assert isinstance(self.config, ClassifierConfig)
        return self.config.labels or default_names(self.config.num_classes)

    @property
    def function(self) -> dict[str, str]:
        """The option of a pipeline that says how logits become scores, where it would guess what the user stated."""
        stated = self.checkpoint.config.get("problem_type") is not None
        return {} if stated else {"function_to_apply": _THEIRS[str(standard_fields(self.config).problem_type)]}

    def compare(
        self, inputs: Mapping[str, Any], logits_of: Callable[[Any], Tensor], theirs: nn.Module, pipeline: Any
    ) -> int:
        """Return the number of inputs whose classes are those of the original's pipeline.

        Args:
            inputs: images or sounds, by the name that an error gives them.
            logits_of: returns the logits (classes,) of zoo's model for one, in float64.
            theirs: the original, in float64.
            pipeline: its pipeline.

        Raises :class:`ParityError` for a difference.
        """
        for name, value in inputs.items():
            logits = logits_of(value)
            rows = ask_exactly(theirs, pipeline, value, top_k=len(logits), **self.function)
            self.require([name], self.scored(logits), sorted((str(row["label"]), row["score"]) for row in rows))
        return len(inputs)

    def require(self, case: Sequence[str], classes: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
        """Raise :class:`ParityError` unless classes and scores are those of the original.

        Args:
            case: the text, or the pair of texts, or the name of another input.
            classes: zoo's.
            expected: the original's, in the same order.
        """
        names, others = ([name for name, _ in rows] for rows in (classes, expected))
        mine, its = (torch.tensor([score for _, score in rows], dtype=torch.float64) for rows in (classes, expected))
        if names != others or not close(mine, its, self.dtype):
            said, theirs = (
                ", ".join(f"{name}: {score:.6f}" for name, score in rows[:8]) for rows in (classes, expected)
            )
            problem = f"the classes of {' and '.join(map(repr, case))} are {said}, those of the original {theirs}"
            raise ParityError(problem, self.checkpoint.where, REMEDY)


def ask_exactly(module: nn.Module, answer: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the answer of an original in float64, which does not round to float32 in between."""
    with torch.no_grad(), Exact(module):
        return ask(answer, *args, **options)


def scores_of(config: Config, logits: Tensor) -> Tensor:
    """Return the scores of classes, as the problem type says."""
    result: Tensor = FUNCTIONS[str(standard_fields(config).problem_type)](logits)
    return result


def close(values: Tensor, expected: Tensor, dtype: str) -> bool:
    """Whether answers are equal up to rounding; weights may have been converted to another dtype."""
    limit = max(_CLOSE, 8 * torch.finfo(getattr(torch, dtype)).eps)
    return bool((values - expected).abs().max() <= limit * max(1.0, float(expected.abs().max())))


def shown(values: Tensor) -> str:
    """Return the first numbers of a vector, for an error."""
    listed = [f"{value:.6f}" for value in values[:4].tolist()] + (["..."] if len(values) > 4 else [])
    return f"({len(values)}) [{', '.join(listed)}]"
