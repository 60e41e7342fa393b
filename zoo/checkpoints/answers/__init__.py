"""Comparison of an import with the original from text, image or sound to answer."""

from zoo.checkpoints.answers.comparison import AnswerComparison
from zoo.checkpoints.answers.found import ComparedAnswers

__all__ = ["AnswerComparison", "ComparedAnswers"]
