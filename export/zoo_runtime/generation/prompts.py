"""Log-probabilities of the tokens of a prompt.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError
from zoo_runtime.generation.choices import Ranked, log_softmax, rank
from zoo_runtime.generation.stepper import Stepper

__all__ = ["rank_prompt", "read_ranks"]

_NUMBERS = 2**24
"""Logits of a call, at most, where a call for one token has fewer."""


def rank_prompt(prompt: Sequence[int], start: int, logits: Array, count: int) -> list[Ranked]:
    """Rank tokens of a prompt by the log-softmax of the logits before them, in float64.

    Args:
        prompt: the tokens of the prompt.
        start: number of tokens before those that the logits follow.
        logits: the logits after each of T tokens, (T, V). Those after the last token of the prompt are not used.
        count: number of likeliest tokens to rank in each place.

    Returns:
        The token after each of the T.

    Raises:
        ArtifactError: the logits of a token are not finite.
    """
    ranks = []
    for place, (token, line) in enumerate(zip(prompt[start + 1 :], logits, strict=False), start + 2):
        if not np.isfinite(best := float(line.max())):
            problem = f"the logits of prompt token {place} are not finite (the largest is {best})"
            raise ArtifactError(problem, None, "check the weights")
        ranks.append(rank(log_softmax(line), token, count))  # one position at a time: V numbers in float64 are many
    return ranks


def read_ranks(stepper: Stepper, ids: Array, mask: Array, vocabulary: int, count: int) -> Iterator[list[Ranked]]:
    """Read one prompt in parts, and yield the ranks of the tokens after each: see :func:`rank_prompt`.

    Args:
        stepper: a decoder of one row with an empty past.
        ids: (1, T), the prompt.
        mask: (1, T).
        vocabulary: V.
        count: number of likeliest tokens to rank in each place.
    """
    prompt = ids[0].tolist()
    size = max(1, _NUMBERS // vocabulary)
    for start in range(0, len(prompt), size):
        part = slice(start, start + size)
        yield rank_prompt(prompt, start, stepper.step(ids[:, part], mask[:, part], every=True)[0], count)
