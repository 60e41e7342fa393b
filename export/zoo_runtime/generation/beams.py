"""Beam search for any decoder that returns logits.

B rows, T tokens, V vocabulary, K beams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zoo.arrays import Array
from zoo_runtime.generation.choices import Choices, Continuation, Ranked, log_softmax, rank
from zoo_runtime.generation.stepper import Stepper

if TYPE_CHECKING:
    from zoo_runtime.generation.constraints import Matcher

__all__ = ["Beam", "search_beams"]


@dataclass(frozen=True)
class Beam:
    """A finished text of beam search."""

    ids: list[int]
    score: float
    """Log-probability divided by length to the power of ``length_penalty``."""
    ranks: list[Ranked] = field(default_factory=list)
    """The probabilities of each token, if the options ask for them."""
    is_complete: bool = False
    """Whether the constraint allows nothing more."""


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
    live = [_BeamSearch(row, choose) for row in rows]
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


class _BeamSearch:
    """The beams of one row."""

    def __init__(self, row: Continuation, choose: Choices) -> None:
        self.row = row
        self.choose = choose
        self.options = choose.options
        beams = self.options.num_beams
        self.running: list[list[int]] = [[] for _ in range(beams)]
        self.scores = np.full(beams, -np.inf)
        self.scores[0] = 0  # all beams start identical, so only one counts
        self.ranks: list[list[Ranked]] = [[] for _ in range(beams)]
        self.matchers = [row.matcher] * beams
        """The states of the constraint, which are not changed but replaced."""
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
        options = self.options
        beams = self.options.num_beams
        best = logits.max(-1)
        if not np.isfinite(best[np.isfinite(self.scores)]).all():
            self.row.fail(len(self.running[0]) + 1, float(best[~np.isfinite(best)][0]))
            self.open = False
            return np.arange(beams)
        scores = np.stack([self._score(line, beam) for beam, line in enumerate(logits)])
        totals = (scores + self.scores[:, None]).ravel()
        possible = int(np.isfinite(totals).sum())
        if not possible:  # only the constraint leaves nothing
            self.row.block(len(self.running[0]) + 1)
            self.open = False
            return np.arange(beams)
        width = min(beams * max(2, 1 + len(self.choose.ending)), possible)
        if self.row.matcher is not None:  # any number of extensions may complete their texts
            width = possible
        order = np.argpartition(-totals, width - 1)[:width]
        order = order[np.lexsort((order, -totals[order]))]
        length = len(self.running[0]) + 1
        full = length >= self.row.limit
        going: list[tuple[float, int, list[int], Matcher | None, list[Ranked]]] = []
        already = len(self.finished) >= beams
        for place, (beam, token) in enumerate(zip(*divmod(order, logits.shape[1]), strict=True)):
            ids = [*self.running[beam], int(token)]
            total = float(totals[order[place]])
            if len(going) == beams and place >= beams:
                break
            matcher = None if token in self.choose.ending else self._follow(beam, int(token))
            complete = matcher is not None and matcher.is_complete
            ranks = self.ranks[beam]
            if options.logprobs is not None:
                ranks = [*ranks, rank(scores[beam], int(token), options.logprobs)]
            if full or complete or token in self.choose.ending:
                if place < beams and not (already and options.early_stopping):
                    self.finished.append(Beam(ids, total / length**options.length_penalty, ranks, complete))
            elif len(going) < beams:
                going.append((total, int(beam), ids, matcher, ranks))
        self.finished = sorted(self.finished, key=lambda item: -item.score)[:beams]
        if full or not going or self._is_settled(going[0][0], length):
            self.open = False
            if not self.finished:
                self.row.block(length)
            return np.arange(beams)
        going += [(-math.inf, *going[0][1:])] * (beams - len(going))
        self.scores = np.array([total for total, *_ in going])
        self.running = [ids for _, _, ids, *_ in going]
        self.matchers = [matcher for *_, matcher, _ in going]
        self.ranks = [ranks for *_, ranks in going]
        return np.array([beam for _, beam, *_ in going])

    def _follow(self, beam: int, token: int) -> Matcher | None:
        """Return the state of a beam's constraint after a token."""
        if (before := self.matchers[beam]) is None or self.choose.forces_first([*self.row.text, *self.running[beam]]):
            return before
        after = before.copy()
        after.append(token)
        return after

    def _score(self, logits: Array, beam: int) -> Array:
        ids, matcher = self.running[beam], self.matchers[beam]
        scores = log_softmax(logits)
        scores = self.choose.penalise(scores, [*self.row.text, *ids], len(ids), self.row.limit)
        if matcher is not None and not self.choose.forces_first([*self.row.text, *ids]):
            scores = matcher.forbid(scores)
        return log_softmax(scores) if self.options.renormalize_logits and np.isfinite(scores).any() else scores

    def _is_settled(self, best: float, length: int) -> bool:
        if len(self.finished) < self.options.num_beams:
            return False
        return self.options.early_stopping or best / length**self.options.length_penalty <= self.finished[-1].score
