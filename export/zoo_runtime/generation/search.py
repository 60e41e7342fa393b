"""Decoding strategies for any decoder that returns logits: greedy, sampling and beam search.

B rows, T tokens, V vocabulary, K beams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.config import Settings
from zoo.errors import ArtifactError
from zoo_runtime.stepper import Stepper

__all__ = [
    "NEW_TOKENS",
    "Array",
    "Beam",
    "Choices",
    "Continuation",
    "Generation",
    "continue_rows",
    "draw",
    "log_softmax",
    "probabilities",
    "search_beams",
]

Array = np.ndarray[Any, Any]
NEW_TOKENS = 32
"""Default number of new tokens."""


@dataclass(frozen=True, kw_only=True)
class Generation(Settings):
    """Options of text generation, with the usual names and meanings. They apply in the order below."""

    max_new_tokens: int | None = None
    """Maximum new tokens, also limited by the model's positions. By default ``max_length`` if set, else 32."""
    max_length: int | None = None
    """Maximum length, including the prompt (or the decoder's start token)."""
    min_new_tokens: int = 0
    """Minimum new tokens before an end token."""
    min_length: int = 0
    """Minimum length before an end token, including the prompt (or the decoder's start token)."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens already in the text (Keskar et al. 2019)."""
    no_repeat_ngram_size: int = 0
    """Forbid repeating n-grams of this size (Paulus et al. 2018). 0 allows repetition."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never chosen, unless forced."""
    forced_bos_token_id: int | None = None
    """Token forced at the second position, if the text so far has one token: the first token of a target."""
    forced_eos_token_id: int | None = None
    """Token forced at the last position, when the maximum length is reached."""
    temperature: float = 0.0
    """Divides logits before sampling. 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Sample from the k likeliest tokens (Fan et al. 2018)."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability (Holtzman et al. 2020)."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the likeliest one's probability (Nguyen et al. 2024)."""
    seed: int = 0
    """Random seed for sampling. A text depends on the seed, the prompt and the input's number, never on its batch."""
    num_beams: int = 1
    """Number of beams; above 1, use beam search."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability divided by its length to this power (Wu et al. 2016)."""
    early_stopping: bool = False
    """End as soon as there are ``num_beams`` finished texts, even if better ones could follow."""
    renormalize_logits: bool = False
    """Renormalise the probabilities that score beams after applying penalties."""
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a text, in addition to the model's end tokens."""

    def __post_init__(self) -> None:
        self.default("max_new_tokens", NEW_TOKENS if self.max_length is None else self.max_length)
        self.require_positive("max_new_tokens", "max_length", "repetition_penalty", "top_k", "top_p", "num_beams")
        for name in ("temperature", "min_new_tokens", "min_length", "no_repeat_ngram_size", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if abs(self.length_penalty) > 100:
            raise ValueError(f"length_penalty must lie in [-100, 100], got {self.length_penalty}")
        for name in ("top_p", "min_p"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if not self.temperature:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} requires sampling, but temperature is 0: set a temperature")
        if self.num_beams > 1 and self.temperature:
            raise ValueError(
                f"beam search cannot sample: num_beams is {self.num_beams}, temperature is {self.temperature}"
            )
        if self.num_beams > 1 and self.stop:
            raise ValueError("beam search does not support stop strings: num_beams is above 1 and stop is set")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")


class Continuation:
    """One text being generated.

    Args:
        number: the input's number, from 1, which is part of the random seed.
        prompt: token ids of the prompt, which penalties include.
        room: maximum number of tokens that can follow the prompt, at least 1.
        options: options of generation.
        ends: end tokens.
        text: called with every new token, for stop strings and streaming; whether a stop string has appeared.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        room: int,
        options: Generation,
        ends: frozenset[int],
        text: Callable[[int], bool] | None = None,
    ) -> None:
        self.number = number
        self.ids: list[int] = []
        self.finish: str | None = None
        """Why generation ended: ``length``, ``end`` (an end token) or ``stop`` (a stop string or token)."""
        self.error: ArtifactError | None = None
        self.text = list(prompt)
        """Token ids of the prompt and the continuation."""
        self.random = np.random.default_rng((options.seed, number)) if options.temperature else None
        self.limit, self._ends, self._on_token = min(room, options.max_new_tokens or room), ends, text
        self._stops = frozenset(options.stop_token_ids)

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
        elif self._on_token is not None and self._on_token(token):
            self.finish = "stop"
        elif len(self.ids) >= self.limit:
            self.finish = "length"

    def fail(self, step: int, value: float) -> None:
        """End with an error because the logits of new token ``step`` (from 1) are not finite."""
        what = f"the logits of new token {step} are not finite (the largest is {value})"
        self.error = ArtifactError(what, f"input {self.number}", "check the weights")

    def block(self, step: int) -> None:
        """End with an error because the options forbid every choice of new token ``step`` (from 1)."""
        what = f"the options forbid every token as new token {step}"
        self.error = ArtifactError(what, f"input {self.number}", "forbid fewer tokens")


def continue_rows(
    stepper: Stepper, ids: Array, mask: Array, rows: Sequence[Continuation], choose: Choices
) -> Iterator[Continuation]:
    """Generate until all rows have ended; yield each row after each of its tokens.

    Args:
        stepper: a decoder with an empty past.
        ids: (B, T), the prompts, padded on the left.
        mask: (B, T).
        rows: B continuations; those that have already ended stay unchanged.
        choose: picks a token from logits.
    """
    live = list(rows)
    logits = stepper.step(ids, mask)
    while any(row.open for row in live):
        tokens = choose(logits, live)
        for row, token in zip(live, tokens.tolist(), strict=True):
            if row.open:
                row.append(token)
                yield row
        left = [place for place, row in enumerate(live) if row.open]
        if not left:
            return
        if 2 * len(left) <= len(live):  # finished rows cost as much as others
            stepper.take(np.array(left))
            live, tokens = [live[place] for place in left], tokens[left]
        logits = stepper.step(tokens[:, None])


_PENALTIES = (
    "min_new_tokens", "min_length", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
"""Options that change logits before a token is chosen."""


class Choices:
    """Picks one token per row from logits, according to the options.

    Args:
        options: options of generation.
        ends: end tokens, which are suppressed until ``min_new_tokens``.
    """

    def __init__(self, options: Generation, ends: frozenset[int]) -> None:
        self.options = options
        self.held = sorted(ends.union(options.stop_token_ids))
        default = Generation()
        self._penalises = any(getattr(options, name) != getattr(default, name) for name in _PENALTIES)

    def __call__(self, logits: Array, rows: Sequence[Continuation]) -> Array:
        """Pick tokens (B,) from logits (B, V). A row with non-finite logits fails, and its token is meaningless."""
        best = logits.argmax(-1)  # argmax returns the first NaN
        plain = not (self.options.temperature or self._penalises)
        for place, (row, value) in enumerate(zip(rows, logits[np.arange(len(rows)), best].tolist(), strict=True)):
            if not row.open:
                continue
            if not math.isfinite(value):
                row.fail(len(row.ids) + 1, value)
            elif not plain:
                best[place] = self._pick(self.penalise(logits[place], row.text, len(row.ids), row.limit), row)
        return best

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
        options, logits, tokens = self.options, logits.copy(), np.array(text)
        values, size = logits[tokens], options.no_repeat_ngram_size
        logits[tokens] = np.where(values < 0, values * options.repetition_penalty, values / options.repetition_penalty)
        if 0 < size <= len(text):
            runs = np.lib.stride_tricks.sliding_window_view(tokens, size)
            alike = (runs[:, :-1] == tokens[len(text) - size + 1 :]).all(-1)
            logits[runs[alike, -1]] = -np.inf
        if count < options.min_new_tokens or len(text) < options.min_length:
            logits[self.held] = -np.inf
        logits[list(options.suppress_tokens)] = -np.inf
        forced = options.forced_eos_token_id if count == limit - 1 else None
        if forced is None and len(text) == 1:
            forced = options.forced_bos_token_id
        if forced is not None:
            logits[:] = -np.inf
            logits[forced] = 0
        return logits

    def _pick(self, scores: Array, row: Continuation) -> int:
        best = int(scores.argmax())
        if scores[best] == -np.inf:
            row.block(len(row.ids) + 1)
        if row.random is None or row.error is not None:
            return best
        return draw(probabilities(scores, self.options), row.random)


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


def draw(chances: Array, random: np.random.Generator) -> int:
    """Draw a token from a distribution (V,), never one of probability 0."""
    cumulative = chances.cumsum()
    drawn = min(random.random() * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(cumulative.searchsorted(drawn, side="right"))


@dataclass(frozen=True)
class Beam:
    """A finished text of beam search."""

    ids: list[int]
    score: float
    """Log-probability divided by length to the power of ``length_penalty``."""


def search_beams(
    stepper: Stepper,
    ids: Array,
    mask: Array,
    rows: Sequence[Continuation],
    choose: Choices,
) -> Iterator[tuple[Continuation, list[Beam]]]:
    """Beam search; yield each row once it has ended, with its texts, best first.

    Each step considers the 2K likeliest extensions of a row's K beams (more if there are several end tokens). Among the
    K best extensions, those with an end token become finished texts; the K best without one are the next beams. A row
    ends when no beam's score at its current length beats the worst of K finished texts.

    Args:
        stepper: a decoder with an empty past.
        ids: (B, T), the prompts, padded on the left.
        mask: (B, T).
        rows: B continuations.
        choose: provides the options and the penalties.
    """
    beams = choose.options.num_beams
    live = [_Search(row, choose) for row in rows]
    logits = np.repeat(stepper.step(ids, mask), beams, axis=0)
    stepper.take(np.repeat(np.arange(len(rows)), beams))
    while True:
        origins = [search.step(logits[place * beams : (place + 1) * beams]) for place, search in enumerate(live)]
        yield from ((search.row, search.finished) for search in live if not search.open)
        left = [place for place, search in enumerate(live) if search.open]
        if not left:
            return
        stepper.take(np.concatenate([origins[place] + place * beams for place in left]))
        live = [live[place] for place in left]
        logits = stepper.step(np.array([token for search in live for token in search.last])[:, None])


class _Search:
    """The beams of one row."""

    def __init__(self, row: Continuation, choose: Choices) -> None:
        self.row, self.choose, self.options = row, choose, choose.options
        beams = self.options.num_beams
        self.running: list[list[int]] = [[] for _ in range(beams)]
        self.scores = np.full(beams, -np.inf)
        self.scores[0] = 0  # all beams start identical, so only one counts
        self.finished: list[Beam] = []
        self.open = True

    @property
    def last(self) -> list[int]:
        """The newest token of each beam."""
        return [ids[-1] for ids in self.running]

    def step(self, logits: Array) -> Array:
        """Extend the beams by one token; return for each new beam the index of the beam it extends.

        Args:
            logits: (K, V).
        """
        options, beams = self.options, self.options.num_beams
        best = logits.max(-1)
        if not np.isfinite(best[np.isfinite(self.scores)]).all():
            self.row.fail(len(self.running[0]) + 1, float(best[~np.isfinite(best)][0]))
            self.open = False
            return np.arange(beams)
        scores = np.stack([self._score(line, ids) for line, ids in zip(logits, self.running, strict=True)])
        totals = (scores + self.scores[:, None]).ravel()
        wanted = min(beams * max(2, 1 + len(self.choose.held)), int(np.isfinite(totals).sum()))
        order = np.argpartition(-totals, wanted - 1)[:wanted]
        order = order[np.lexsort((order, -totals[order]))]
        length = len(self.running[0]) + 1
        full = length >= self.row.limit
        going: list[tuple[float, int, list[int]]] = []
        already = len(self.finished) >= beams
        for rank, (beam, token) in enumerate(zip(*divmod(order, logits.shape[1]), strict=True)):
            ids = [*self.running[beam], int(token)]
            total = float(totals[order[rank]])
            if full or token in self.choose.held:
                if rank < beams and not (already and options.early_stopping):
                    self.finished.append(Beam(ids, total / length**options.length_penalty))
            elif len(going) < beams:
                going.append((total, int(beam), ids))
        self.finished = sorted(self.finished, key=lambda item: -item.score)[:beams]
        if full or not going or self._is_settled(going[0][0], length):
            self.open = False
            if not self.finished:
                self.row.block(length)
            return np.arange(beams)
        going += [(-math.inf, *going[0][1:])] * (beams - len(going))
        self.scores = np.array([total for total, _, _ in going])
        self.running = [ids for _, _, ids in going]
        return np.array([beam for _, beam, _ in going])

    def _score(self, logits: Array, ids: list[int]) -> Array:
        scores = log_softmax(logits)
        scores = self.choose.penalise(scores, [*self.row.text, *ids], len(ids), self.row.limit)
        return log_softmax(scores) if self.options.renormalize_logits and np.isfinite(scores).any() else scores

    def _is_settled(self, best: float, length: int) -> bool:
        if len(self.finished) < self.options.num_beams:
            return False
        return self.options.early_stopping or best / length**self.options.length_penalty <= self.finished[-1].score


def log_softmax(logits: Array) -> Array:
    """Log-softmax along the last dimension, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
