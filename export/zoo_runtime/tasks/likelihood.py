"""Probabilities of tokens by a causal language model: those of a text, and those of the token after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError
from zoo.plots import Distribution
from zoo_runtime.running.context import Context, internals
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.runner import finite
from zoo_runtime.running.text_runner import TextRunner, Tokens
from zoo_runtime.tasks.classification import softmax
from zoo_runtime.tasks.encoders import shown_token, token_name

__all__ = ["NextToken", "NextTokenOptions", "Score"]

_HIGHEST = 700.0
"""A mean of this many nats is the largest whose perplexity is a float64."""


class _Likelihood(TextRunner):
    """Base class: a language model that gives logits for every token of a text."""

    needs = ("logits",)
    batch_size = 4  # logits of all positions are in memory

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        logits = next(tensor for tensor in self.graph.output_tensors() if tensor.name == "logits")
        if logits.dims[:2] != self.ids_input.dims:
            raise UsageError("the model does not give logits for every token", session.path, "choose another task")
        if internals(session).export.traits.interface == "loop":
            raise UsageError("this variant only generates", session.path, "choose another variant")


class Score(_Likelihood):
    """``perplexity`` of a text, and the log-probability of each token given those before it.

    Logarithms are natural. The first token is not scored, since nothing is before it: a tokenizer that puts a start
    token there gives the first word a score. ``log_probability`` is the sum of ``scores``, and ``perplexity`` the
    exponential of its negative mean, that is, of the loss with which such models are trained.
    """

    def read(self, value: Any, number: int) -> Tokens:
        item = super().read(value, number)
        if len(item.ids) < 2:
            raise ArtifactError("has only one token, and none before it", f"input {number}", "give at least two")
        return item

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return [self._score(item, row) for item, row in zip(items, logits, strict=True)]

    def _score(self, item: Tokens, logits: Array) -> Any:
        scores = []
        for row, token in zip(logits, item.ids[1:], strict=False):
            values = row.astype(np.float64)  # one position at a time: a vocabulary in float64 is large
            scores.append(float(values[token] - np.logaddexp.reduce(values)))
        total = sum(scores)
        if not -total / len(scores) < _HIGHEST:  # also for NaN
            return ArtifactError("has no finite perplexity", f"input {item.number}", "check the weights")
        return {
            "tokens": len(item.ids),
            "perplexity": float(np.exp(-total / len(scores))),
            "log_probability": total,
            "scores": [
                {"token": token, "text": self.decode([token]), "log_probability": value}
                for token, value in zip(item.ids[1:], scores, strict=True)
            ],
        }

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            scores = answer.result["scores"]
            parts = (f"{shown_token(part)!r} {part['log_probability']:.4f}" for part in scores)
            yield f"{label(answer)}: perplexity {answer.result['perplexity']:.4f}: " + "  ".join(parts)


@dataclass(frozen=True, kw_only=True)
class NextTokenOptions(Settings):
    """Options of the next token."""

    top_k: int = 5
    """Number of tokens, likeliest first."""

    def __post_init__(self) -> None:
        self.require_positive("top_k")


class NextToken(_Likelihood):
    """``next``: the likeliest tokens after a text, with their probabilities."""

    options = NextTokenOptions

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        last = np.stack([row[len(item.ids) - 1] for item, row in zip(items, logits, strict=True)])
        return finite(items, last, [self._next(item, row) for item, row in zip(items, softmax(last), strict=True)])

    def _next(self, item: Tokens, chances: Array) -> dict[str, Any]:
        best = np.argsort(-chances, kind="stable")[: self.chosen.top_k].tolist()
        likeliest = [
            {"token": token, "text": self.decode([token]), "probability": float(chances[token])} for token in best
        ]
        return {"tokens": len(item.ids), "next": likeliest}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            parts = (f"{shown_token(part)!r} {part['probability']:.4f}" for part in answer.result["next"])
            yield f"{label(answer)}: " + "  ".join(parts)

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        items = [(token_name(part), part["probability"]) for part in answer.result["next"]]
        return [Distribution(title=label(answer), items=items)]
