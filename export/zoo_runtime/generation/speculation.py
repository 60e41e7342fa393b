"""Speculative decoding: several drafted tokens are read in one call, and kept while the model itself chooses them.

The choice of a token depends on the logits, on the text before it, and on a random number that is a function of its
place. A draft is therefore accepted if it equals the model's own choice, also in sampling, and a text has the tokens of
plain decoding; no distribution is corrected, as in Leviathan et al. (2023).

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo_runtime.generation.choices import Choices, Continuation
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.generation.ties import is_settled

__all__ = ["TOLERANCES", "Counts", "Drafts", "ModelDrafts", "Reader", "look_up", "speculate"]

TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2, "int8": 2e-2, "int4": 2e-2}
"""Assumed largest effect of the number of tokens in a call on a logit, relative to the largest logit. In float32 it was
at most 3e-6 for random gpt, llama and mamba2 models."""
_LONGEST_RUN = 3
"""Number of last tokens that :func:`look_up` looks for first."""

Drafts = Callable[[Continuation], Sequence[int]]
"""Returns drafted tokens for a text, possibly none."""


@dataclass
class Counts:
    """Counts of speculation for one text."""

    calls: int = 0
    """Calls of the model."""
    drafted: int = 0
    """Drafted tokens that the model read."""
    accepted: int = 0
    """Drafted tokens that became part of the text."""
    recomputed: int = 0
    """Tokens that were too close to call, and were chosen again after reading the text one token at a time."""


class Reader:
    """Reads a text that grows and changes its end, without reading what has been read before.

    Args:
        stepper: a decoder of one row with an empty past.
        prompt: token ids of the prompt.
        ids: the first call's tokens, (1, T).
        mask: their mask, (1, T).
        undone: number of tokens that change at most; a past with states is saved this often.
    """

    def __init__(self, stepper: Stepper, prompt: Sequence[int], ids: Array, mask: Array, undone: int) -> None:
        self.stepper = stepper
        self.undone = undone
        self.calls = 1
        self._after_prompt = stepper.step(ids, mask).copy()
        self._prompt = list(prompt)
        self._seen = list(prompt)
        self._exact = len(prompt)
        """Number of tokens in the past that were read as in plain decoding: the prompt at once, then one at a time."""
        self._saved: list[tuple[int, Any]] = []
        """For a past with states: earlier pasts by length, shortest first."""

    @property
    def is_exact(self) -> bool:
        """Whether the last logits are those of plain decoding."""
        return self._exact == len(self._seen)

    def unread(self, text: Sequence[int]) -> int:
        """Return the number of tokens that have to be read for the logits after a text."""
        return 0 if self._is_prompt(text) else len(text) - self._reachable(text, 1)

    def read(self, text: Sequence[int], count: int = 1) -> Array:
        """Return the logits after each of the last ``count`` tokens of a text, (count, V)."""
        if self._is_prompt(text):
            return self._after_prompt
        self._return(self._reachable(text, count))
        return self._step(text[len(self._seen) :], every=count > 1)[-count:]

    def read_exactly(self, text: Sequence[int]) -> Array:
        """Return the logits after a text, (V,), as plain decoding computes them."""
        self._return(self._exact)
        logits = self._after_prompt
        for token in text[self._exact :]:
            logits = self._step([token])
        return logits[-1]

    def _is_prompt(self, text: Sequence[int]) -> bool:
        return len(text) == len(self._prompt) == len(self._seen)

    def _step(self, tokens: Sequence[int], *, every: bool = False) -> Array:
        """Return the logits after the last token, (1, V), or after all, (T, V)."""
        if not self.stepper.can_roll_back:
            self._save()
        exact = self.is_exact and len(tokens) == 1
        logits = self.stepper.step(np.array([tokens]), every=every).copy()
        self._seen += tokens
        self._exact += exact
        self.calls += 1
        return logits[0] if every else logits

    def _save(self) -> None:
        if not self._saved or self._saved[-1][0] < len(self._seen):
            self._saved.append((len(self._seen), self.stepper.save()))
        if len(self._saved) > self.undone + 2:
            del self._saved[self._saved[0][0] == self._exact]  # the first, unless it is the exact past

    def _reachable(self, text: Sequence[int], count: int) -> int:
        """Return the length of a past with which a text begins, before its last ``count`` tokens."""
        longest = min(len(self._seen), len(text) - count)
        differs = (place for place in range(longest) if self._seen[place] != text[place])
        common = next(differs, longest)
        if self.stepper.can_roll_back or common == len(self._seen):
            return common
        return max(length for length, _ in self._saved if length <= common)

    def _return(self, length: int) -> None:
        """Shorten the past."""
        if length < len(self._seen):
            if self.stepper.can_roll_back:
                self.stepper.roll_back(len(self._seen) - length)
            else:
                while self._saved[-1][0] > length:
                    self._saved.pop()
                self.stepper.restore(self._saved[-1][1])
            del self._seen[length:]
            self._exact = min(self._exact, length)


def speculate(
    reader: Reader, row: Continuation, choose: Choices, drafts: Drafts, tolerance: float, counts: Counts
) -> Iterator[Continuation]:
    """Generate one text; yield it after each of its tokens.

    The last bits of logits depend on the number of tokens in a call. If they could change the choice of a token, the
    text is read again one token at a time, from the last place up to which it was so read.

    Args:
        reader: has read the prompt.
        row: the text.
        choose: picks a token from logits.
        drafts: proposes tokens.
        tolerance: largest effect of the number of tokens in a call on a logit, relative to the largest logit.
        counts: is updated.
    """
    while row.open:
        drafted: list[int] = []
        if reader.unread(row.text) == 1:  # after the prompt, or an earlier state, the text itself is read first
            drafted = list(drafts(row))[: row.limit - len(row.ids) - 1]
        lines = reader.read([*row.text, *drafted], len(drafted) + 1)
        counts.drafted += len(drafted)
        for line, draft in zip(lines, [*drafted, None], strict=True):
            again = not reader.is_exact and not is_settled(line, row, choose, tolerance)
            logits = reader.read_exactly(row.text) if again else line
            counts.recomputed += again
            counts.calls = reader.calls
            (token,) = choose(logits[None], [row]).tolist()
            if row.error is not None:
                return
            counts.accepted += token == draft
            row.append(token)
            yield row
            if token != draft or again or not row.open:
                break


def look_up(text: Sequence[int], count: int) -> list[int]:
    """Return the tokens that followed the last tokens of a text where these occurred before, most recently.

    Up to three last tokens are looked for. Where the text ends, the drafts continue with themselves, so a period is
    repeated.
    """
    tokens = np.array(text)
    for size in range(min(_LONGEST_RUN, len(text) - 1), 0, -1):
        runs = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        places = np.flatnonzero((runs == tokens[-size:]).all(-1))
        if len(places):
            period = len(text) - size - int(places[-1])
            drafted = list(text[-period:])
            while len(drafted) < count:
                drafted.append(drafted[-period])
            return drafted[:count]
    return []


class ModelDrafts:
    """Drafts of a smaller model, which chooses with the same options and random numbers.

    Args:
        reader: has read the prompt.
        choose: picks a token from logits.
        count: number of tokens to draft.
        vocabulary: number of tokens that the model and the smaller one have in common.
    """

    def __init__(self, reader: Reader, choose: Choices, count: int, vocabulary: int) -> None:
        self.reader = reader
        self.choose = choose
        self.count = count
        self.vocabulary = vocabulary

    def __call__(self, row: Continuation) -> list[int]:
        """Return drafted tokens; fewer where the smaller model's positions end, or a token is not in common."""
        room = self.reader.stepper.room
        ahead = row.fork()
        last = self.count if room is None else min(self.count, self.reader.stepper.length + room - len(row.text))
        drafted: list[int] = []
        while ahead.open and len(drafted) < last and max(ahead.text) < self.vocabulary:
            (token,) = self.choose(self.reader.read(ahead.text), [ahead]).tolist()
            if ahead.error is not None or token >= self.vocabulary:
                break
            ahead.append(token)
            drafted.append(token)
        return drafted
