"""Whether generated tokens are correct choices from the logits of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zoo.arrays import Array
from zoo_export.variants.loop.cases import LoopCase
from zoo_runtime.generation.loop import LARGEST_NOISE

__all__ = ["ended", "judge_token"]


def ended(free: Array, end: int | Sequence[int]) -> Array:
    """Return the expected result with end tokens: rows are filled after ``end`` and cut to the longest row."""
    hit: Array = np.isin(free, end)
    past = (np.cumsum(hit, axis=1) - hit) > 0
    filled = np.where(past, np.ravel(end)[0], free)
    return filled[:, : int((~past).sum(1).max(initial=0))]


def judge_token(logits: Array, token: int, noise: float | None, case: LoopCase, reach: float) -> tuple[bool, bool]:
    """Whether a token is a correct choice, and whether it is the only one, if each logit may move by ``reach``."""
    order = np.sort(logits)[::-1]
    if noise is None:
        gap = order[0] - order[1] if len(order) > 1 else np.inf
        return bool(logits[token] >= order[0] - 2 * reach), bool(gap > 2 * reach)
    allowed = np.ones(len(logits), bool)
    settled = True
    if 0 < case.top_k < len(order):
        allowed = logits >= order[case.top_k - 1]
        settled = bool(order[case.top_k - 1] - order[case.top_k] > 2 * reach)
        if not settled:  # either token may be excluded, which changes every sum: check only that the token may be kept
            return bool(logits[token] >= order[case.top_k - 1] - 2 * reach), False
    weights = np.where(allowed, np.exp((logits - order[0]) / case.temperature), 0.0)
    upto = np.cumsum(weights) / weights.sum()
    before, upto_token = np.concatenate([[0.0], upto])[token], upto[token]
    number = min(max(noise, 0.0), LARGEST_NOISE)
    factor = np.exp(2 * reach / case.temperature)  # odds of a cumulative probability move by this much at most

    def moved(probability: float, by: float) -> float:
        return probability * by / (1 - probability + probability * by)

    right = bool(allowed[token]) and moved(before, 1 / factor) <= number < max(moved(upto_token, factor), upto_token)
    return bool(right), bool(right and moved(before, factor) <= number < moved(upto_token, 1 / factor))
