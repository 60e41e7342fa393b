"""Choice of the next token from logits: penalties, sampling, and the end of a text.

B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError
from zoo_runtime.generation.bias import Bias
from zoo_runtime.generation.options import Generation

if TYPE_CHECKING:
    from zoo_runtime.generation.constraints import Matcher
    from zoo_runtime.generation.timestamps import Timestamps

__all__ = [
    "Array", "Choices", "Continuation", "ForbiddenError", "Ranked", "draw", "log_softmax", "probabilities", "rank",
    "seed_of",
]  # fmt: skip


class ForbiddenError(ArtifactError):
    """The options of a text leave no token to choose."""


@dataclass(frozen=True)
class Ranked:
    """A token with the likeliest ones in its place, each with its log-probability."""

    token: int
    log_probability: float
    likeliest: list[tuple[int, float]]


class Continuation:
    """One text being generated.

    Args:
        number: the input's number, from 1, which is part of the random seed.
        prompt: token ids of the prompt, which penalties include.
        room: maximum number of tokens that can follow the prompt, at least 1.
        options: options of generation.
        ends: end tokens, which end the text unless the options ignore them.
        text: called with every new token, for stop strings and streaming; whether a stop string has appeared.
        matcher: the constraint of the text, if there is one.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        room: int,
        options: Generation,
        ends: frozenset[int],
        text: Callable[[int], bool] | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.number = number
        self.ids: list[int] = []
        self.finish: str | None = None
        """Why generation ended: ``length``, ``end`` (an end token), ``stop`` (a stop string or token), or ``complete``
        (the constraint allows nothing more)."""
        self.error: ArtifactError | None = None
        self.text = list(prompt)
        """Token ids of the prompt and the continuation."""
        self.seed: tuple[int, ...] = (seed_of(options.seed), number)
        """Seed of the text's random numbers."""
        self.limit = min(room, options.max_new_tokens or room)
        self._ends = frozenset() if options.ignore_eos else ends
        self._on_token = text
        self._stops = frozenset(options.stop_token_ids)
        self._forced = options.forced_bos_token_id
        self.ranks: list[Ranked] = []
        """The probabilities of each new token, if the options ask for them."""
        self.log_probability: float | None = None
        """Sum of the log-probabilities of the new tokens at temperature 1; to have it computed, set it to 0."""
        self.matcher = matcher
        """The state of the constraint."""

    def fork(self) -> Self:
        """Return a copy that goes on independently, without stop strings and streaming."""
        other = copy(self)
        other.ids = list(self.ids)
        other.text = list(self.text)
        other._on_token = None
        other.ranks = []
        other.matcher = None if self.matcher is None else self.matcher.copy()
        return other

    def uniform(self) -> float:
        """Return the random number in [0, 1) of the next token, a function of the seed and of the token's place."""
        bits = np.random.PCG64(np.random.SeedSequence(self.seed))
        bits.advance(len(self.ids))
        return float(np.random.Generator(bits).random())

    @property
    def open(self) -> bool:
        """Whether generation continues."""
        return self.finish is None and self.error is None

    def append(self, token: int) -> None:
        """Add the next token, and finish if it ends the text."""
        self.ids.append(token)
        self.text.append(token)
        if token in self._stops or token in self._ends:
            self.finish = "end" if token in self._ends else "stop"
            return
        if self.matcher is not None and not (token == self._forced and len(self.text) == 2):
            self.matcher.append(token)
            if (problem := self.matcher.problem) is not None:
                self.error = ForbiddenError(f"the constraint fails ({problem})", f"input {self.number}")
        if self._on_token is not None and self._on_token(token):
            self.finish = "stop"
        elif self.matcher is not None and self.matcher.is_complete:
            self.finish = "complete"
        elif len(self.ids) >= self.limit:
            self.finish = "length"

    def fail(self, step: int, value: float) -> None:
        """End with an error because the logits of new token ``step`` (from 1) are not finite."""
        problem = f"the logits of new token {step} are not finite (the largest is {value})"
        self.error = ArtifactError(problem, f"input {self.number}", "check the weights")

    def block(self, step: int) -> None:
        """End with an error because the options forbid every choice of new token ``step`` (from 1)."""
        problem = None if self.matcher is None else self.matcher.problem
        message = f"the options forbid every token as new token {step}"
        if problem is not None:
            message = f"the constraint fails ({problem})"
        self.error = ForbiddenError(message, f"input {self.number}", "forbid fewer tokens")


_PENALTIES = (
    "min_new_tokens", "min_length", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
"""Options that change logits before a token is chosen."""


class Choices:
    """Picks one token per row from logits, according to the options.

    Args:
        options: options of generation.
        ends: end tokens, which are suppressed until ``min_new_tokens``.
        bias: the option ``logit_bias`` in token ids.
        timestamps: the tokens of timestamps, for a text that has them.
    """

    def __init__(
        self,
        options: Generation,
        ends: frozenset[int],
        bias: Bias | None = None,
        timestamps: Timestamps | None = None,
    ) -> None:
        self.options = options
        self.bias = bias
        self.timestamps = timestamps
        self.held = sorted(ends.union(options.stop_token_ids))
        """Tokens that are suppressed until ``min_new_tokens``."""
        self.ending = sorted({*options.stop_token_ids}) if options.ignore_eos else self.held
        """Tokens that end a text."""
        default = Generation()
        self._penalises = any(getattr(options, name) != getattr(default, name) for name in _PENALTIES)
        self._penalises |= bias is not None or timestamps is not None

    def __call__(self, logits: Array, rows: Sequence[Continuation]) -> Array:
        """Pick tokens (B,) from logits (B, V). A row with non-finite logits fails, and its token is meaningless."""
        best = logits.argmax(-1)  # argmax returns the first NaN
        plain = not (self.options.temperature or self._penalises or self.options.logprobs is not None)
        for place, (row, value) in enumerate(zip(rows, logits[np.arange(len(rows)), best].tolist(), strict=True)):
            if not row.open:
                continue
            if not math.isfinite(value):
                row.fail(len(row.ids) + 1, value)
            elif not plain or row.matcher is not None or row.log_probability is not None:
                best[place] = self._pick(self.scores(logits[place], row), row)
        return best

    def scores(self, logits: Array, row: Continuation) -> Array:
        """Return the logits (V,) of a row's next token with penalties, and with its constraint."""
        scores = self.penalise(logits, row.text, len(row.ids), row.limit)
        return scores if row.matcher is None or self.forces_first(row.text) else row.matcher.forbid(scores)

    def forces_first(self, text: Sequence[int]) -> bool:
        """Return whether the next token is ``forced_bos_token_id``, such as a language, which no constraint covers."""
        return self.options.forced_bos_token_id is not None and len(text) == 1

    def penalise(self, logits: Array, text: Sequence[int], count: int, limit: int) -> Array:
        """Apply penalties to the logits (V,) of a text's next token.

        Args:
            logits: logits or log-probabilities, (V,).
            text: the tokens so far.
            count: number of new tokens so far.
            limit: maximum number of new tokens.
        """
        if not self._penalises:
            return logits
        options = self.options
        logits = logits.copy()
        tokens = np.array(text)
        if self.bias is not None:
            self.bias.add(logits, text)
        values = logits[tokens]
        size = options.no_repeat_ngram_size
        logits[tokens] = np.where(values < 0, values * options.repetition_penalty, values / options.repetition_penalty)
        if options.presence_penalty or options.frequency_penalty:
            new, counts = np.unique(tokens[len(text) - count :], return_counts=True)
            logits[new] -= options.presence_penalty + options.frequency_penalty * counts
        if 0 < size <= len(text):
            runs = np.lib.stride_tricks.sliding_window_view(tokens, size)
            alike = (runs[:, :-1] == tokens[len(text) - size + 1 :]).all(-1)
            logits[runs[alike, -1]] = -np.inf
        if count < options.min_new_tokens or len(text) < options.min_length:
            logits[self.held] = -np.inf
        logits[list(options.suppress_tokens)] = -np.inf
        if count == int(options.forced_bos_token_id is not None and len(text) - count == 1):
            logits[list(options.begin_suppress_tokens)] = -np.inf
        if self.timestamps is not None:
            self.timestamps.restrict(logits, text[len(text) - count :])
        forced = options.forced_eos_token_id if count == limit - 1 else None
        if forced is None and self.forces_first(text):
            forced = options.forced_bos_token_id
        if forced is not None:
            logits[:] = -np.inf
            logits[forced] = 0
        return logits

    def _pick(self, scores: Array, row: Continuation) -> int:
        best = int(scores.argmax())
        if scores[best] == -np.inf:
            row.block(len(row.ids) + 1)
        if row.error is not None:
            return best
        token = best
        chances = None
        if self.options.temperature:
            chances = probabilities(scores, self.options)
            token = draw(chances, row.uniform())
        if row.log_probability is not None:
            row.log_probability += float(log_softmax(scores)[token])
        if self.options.logprobs is not None:
            row.ranks.append(
                rank(log_softmax(scores) if chances is None else _log(chances), token, self.options.logprobs)
            )
        return token


def probabilities(scores: Array, options: Generation) -> Array:
    """Return the sampling distribution (V,) in float64."""
    scores = scores.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf, which is harmless
        scores = (scores - scores.max()) / options.temperature
    if options.top_k is not None and options.top_k < len(scores):
        scores[scores < np.partition(scores, -options.top_k)[-options.top_k]] = -np.inf
    chances = np.exp(scores)
    if options.top_p is not None and options.top_p < 1:
        total = chances.sum()
        # These cannot be in the nucleus; without them, fewer are sorted.
        chances[chances < (1 - options.top_p) * total / len(chances)] = 0
        left = np.flatnonzero(chances)
        order = left[np.argsort(-chances[left], kind="stable")]
        before = chances[order].cumsum() - chances[order]  # total weight of the likelier tokens
        chances[order[before >= options.top_p * total]] = 0
    if options.min_p:
        chances[chances < options.min_p * chances.max()] = 0
    result: Array = chances / chances.sum()
    return result


def rank(scores: Array, token: int, count: int) -> Ranked:
    """Rank the likeliest tokens that are possible at all, by their log-probabilities (V,)."""
    count = min(count, len(scores))
    best = np.argpartition(-scores, count - 1)[:count] if count else np.zeros(0, np.int64)
    best = best[np.lexsort((best, -scores[best]))]
    likeliest = [(int(other), float(scores[other])) for other in best if scores[other] > -np.inf]
    return Ranked(token, float(scores[token]), likeliest)


def _log(chances: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(chances)


def seed_of(seed: int) -> int:
    """Return a seed without a sign: the same 64 bits, since numpy's generators refuse negative seeds."""
    return seed % 2**64


def draw(chances: Array, uniform: float) -> int:
    """Draw a token from a distribution (V,), never one of probability 0, by a random number in [0, 1)."""
    cumulative = chances.cumsum()
    drawn = min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(cumulative.searchsorted(drawn, side="right"))


def log_softmax(logits: Array) -> Array:
    """Log-softmax along the last dimension, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
