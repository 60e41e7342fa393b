"""Whether a small error of the logits could change the choice of a token. V vocabulary."""

from __future__ import annotations

import numpy as np

from zoo.arrays import Array
from zoo_runtime.generation.choices import Choices, Continuation, draw, probabilities
from zoo_runtime.generation.options import Generation

__all__ = ["is_settled"]


def is_settled(logits: Array, row: Continuation, choose: Choices, tolerance: float) -> bool:
    """Return whether the next token of a row is the same for all logits that differ by no more than a tolerance.

    Args:
        logits: logits of the next token, (V,).
        row: the text so far.
        choose: the choice of tokens.
        tolerance: largest difference of a logit, relative to the largest absolute logit.
    """
    if not np.isfinite(logits).all():
        return True  # the choice fails
    options = choose.options
    error = tolerance * float(np.abs(logits).max())
    error *= max(options.repetition_penalty, 1 / options.repetition_penalty)
    scores = choose.scores(logits, row).astype(np.float64)
    if not np.isfinite(scores.max()):
        return True  # every token is forbidden
    if not options.temperature:
        second, first = np.partition(scores, -2)[-2:] if len(scores) > 1 else (-np.inf, scores[0])
        return bool(first - second > 2 * error)
    return _draws_alike(scores, options, row.uniform(), error)


def _draws_alike(scores: Array, options: Generation, uniform: float, error: float) -> bool:
    """Return whether the drawn token is the same for all scores within an error.

    Cumulative probabilities change by a few errors, and by the probabilities of the tokens that may or may not be among
    those to choose from. The token is settled if the random number is further than that from both ends of its interval.
    """
    error /= options.temperature
    if error > 0.1:
        return False
    change = error  # of a share F of the total, which changes by 2 error F (1 - F) at most, to first order
    shifted = (scores - scores.max()) / options.temperature
    whole = np.exp(shifted)
    doubtful = np.zeros(len(scores), bool)
    if options.top_k is not None and options.top_k < len(scores):
        high, low = np.partition(shifted, (-options.top_k - 1, -options.top_k))[[-options.top_k - 1, -options.top_k]]
        doubtful |= _contested(shifted, low, high, error)
        whole[(shifted < low) & ~doubtful] = 0
    if options.top_p is not None and options.top_p < 1:
        order = np.argsort(-whole, kind="stable")
        before = np.empty(len(whole))
        before[order] = (whole[order].cumsum() - whole[order]) / whole.sum()
        slack = change + whole[doubtful].sum() / whole.sum()
        doubtful |= (whole > 0) & (np.abs(before - options.top_p) <= slack)
        inside = before < options.top_p
        low, high = shifted[inside].min(), shifted[~inside].max(initial=-np.inf)
        doubtful |= (whole > 0) & _contested(shifted, low, high, error)
    if options.min_p:
        doubtful |= np.abs(shifted - np.log(options.min_p)) <= 2 * error
    chances = probabilities(scores, options)
    slack = change + whole[doubtful].sum() / whole[chances > 0].sum()
    ends = chances.cumsum()
    token = draw(chances, uniform)
    start = ends[token] - chances[token]
    first = not (chances[:token].any() or doubtful[:token].any())
    return bool(not doubtful[token] and (first or uniform - start > slack) and ends[token] - uniform > slack)


def _contested(scores: Array, low: float, high: float, error: float) -> Array:
    """Return the tokens that may change sides, between the lowest score inside and the highest outside."""
    near: Array = (scores >= low - 2 * error) & (scores <= high + 2 * error)
    return near
