"""Incremental decoding of tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zoo.tokenizers.stream import TextStream
from zoo_runtime.generation.choices import Ranked

if TYPE_CHECKING:
    from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["GrowingText", "described"]


def described(ranked: Ranked, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a token and the likeliest ones in its place as a part of a result."""

    def token(number: int, log_probability: float) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.target.decode([number], special_tokens=True)
        return {"token": number, "text": text, "log_probability": log_probability}

    return {**token(ranked.token, ranked.log_probability), "top": [token(*pair) for pair in ranked.likeliest]}


class GrowingText:
    """Text decoded token by token, up to a stop string.

    Incomplete characters and possible beginnings of a stop string are held back until they are resolved. Text that was
    returned never changes: the pieces add up to :meth:`text`.

    Args:
        tokenizer: a tokenizer of the ``tokenizers`` library.
        prompt: preceding token ids, which determine whether the text begins with a space.
        stop: stop strings; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._pieces = TextStream(tokenizer, prompt)
        self._stop = tuple(stop)
        self._text = ""
        self._shown = 0
        self._cut: int | None = None

    def append(self, token: int) -> bool:
        """Add the next token; return whether a stop string has appeared."""
        if piece := self._pieces.step(token):
            self._take(piece)
        return self.stopped

    def new(self) -> str:
        """Return the text that has become final since the last call."""
        end = len(self._text) - self._open_end() if self._cut is None else self._cut
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def rest(self) -> str:
        """Return the remaining text, after the last token."""
        piece = self.text()[self._shown :]
        self._shown += len(piece)
        return piece

    def text(self) -> str:
        """Return the whole text, after the last token."""
        if not self.stopped and (piece := self._pieces.rest()):
            self._take(piece)
        return self._text[: self._cut]

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared. Only :meth:`text` also searches tokens that are held back."""
        return self._cut is not None

    def _take(self, piece: str) -> None:
        """Append text, and search it for stop strings."""
        longest = max(map(len, self._stop), default=0)
        start = max(0, len(self._text) - longest + 1)
        self._text += piece
        ends = [place for place in (self._text.find(stop, start) for stop in self._stop) if place >= 0]
        self._cut = min(ends, default=None)

    def _open_end(self) -> int:
        """Length of the longest suffix that could begin a stop string."""
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])),
            default=0,
        )
