"""Answers as spans of a context, from the logits of their first and last tokens. T tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zoo.arrays import Array

__all__ = ["Span", "best_spans"]


class Span(NamedTuple):
    """A span of tokens and its probability."""

    first: int
    last: int
    """The last token of the span, which is part of it."""
    score: float


def best_spans(
    start: Array, end: Array, context: Sequence[int], *, count: int, longest: int
) -> tuple[list[Span], float]:
    """Return the likeliest spans of a context, in order, and the probability of no answer.

    The probability of a span is that of its first token times that of its last (Devlin et al. 2019, section 4.2), each
    a softmax over the tokens of the context and the first token of the sequence, which stands for no answer (section
    4.3).

    Args:
        start: logits (T,) of the first token.
        end: logits (T,) of the last token.
        context: the places of the context's tokens, not empty.
        count: maximum number of spans.
        longest: maximum number of tokens in a span.
    """
    starts, ends = (_log_softmax(logits[[0, *context]]) for logits in (start, end))
    sums = starts[1:, None] + ends[None, 1:]  # (first, last)
    firsts, lasts = np.nonzero(np.triu(np.tril(np.ones_like(sums, dtype=bool), longest - 1)))
    scores = sums[firsts, lasts]
    best = np.argsort(-scores, kind="stable")[:count]
    spans = [Span(context[firsts[at]], context[lasts[at]], float(np.exp(scores[at]))) for at in best]
    return spans, float(np.exp(starts[0] + ends[0]))


def _log_softmax(logits: Array) -> Array:
    """Log-softmax of (T,) in float64."""
    values = logits.astype(np.float64)
    result: Array = values - np.logaddexp.reduce(values)
    return result
