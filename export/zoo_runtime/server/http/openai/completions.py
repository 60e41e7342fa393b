"""Bodies of requests for completions, and prompts that are returned with their texts."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import model_validator

from zoo.tokenizers.tokenizer import Tokenizer
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.server.http.openai.bodies import GenerationBody, Natural, Prompt, Texts, Tops, inputs_of

__all__ = ["Completion", "Echo", "best"]

_NEW_TOKENS = 16
"""Default number of new tokens, as in OpenAI's API."""


class Completion(GenerationBody):
    """Body of ``/v1/completions``."""

    prompt: Prompt
    """A text, several, token ids, or several lists of them; for encoder-decoders, the source."""
    max_tokens: Natural | None = None
    """Maximum number of new tokens; 0, which requires ``echo``, for none."""
    logprobs: Tops | None = None
    """Number of likeliest tokens whose log-probabilities are reported in each place, besides the token there."""
    echo: bool = False
    """Put the prompt before the text, and its tokens before the others in ``logprobs``."""
    best_of: Texts | None = None
    """Generate this many texts for each prompt, and return the ``n`` with the highest mean log-probability of their
    tokens. Not for streams."""
    suffix: Literal[""] = ""
    """Not supported."""

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n, got {self.best_of} and {self.n}")
        if self.selects and self.stream:
            raise ValueError(f"best_of must equal n in a stream, got {self.best_of} and {self.n}")
        return self

    @property
    def most_tokens(self) -> int:
        return _NEW_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def ranks(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def drawn(self) -> int:
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        return inputs_of(self.prompt)


@dataclass(frozen=True)
class Echo:
    """A prompt that is returned with its text."""

    text: str
    offsets: Sequence[int]
    """The character of the text at which each token begins, or of which it is a part."""

    @classmethod
    def of(cls, prompt: str | Sequence[int], item: Tokens, tokenizer: Tokenizer | None) -> Self:
        """Return a prompt, a text or token ids, that has been read as an item.

        The tokens that the tokenizer adds to a text are not part of it. Without a tokenizer, token ids have no text.
        """
        if tokenizer is None:
            return cls("", [0] * len(item.ids))
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, special_tokens=True)
        added = item.encoding.special_tokens_mask if item.encoding is not None else [0] * len(item.ids)
        contents = [
            b"" if is_added else _content(tokenizer, token) for token, is_added in zip(item.ids, added, strict=True)
        ]
        decoder = getincrementaldecoder("utf-8")("replace")
        offsets, length = [], 0
        for content in contents:
            is_new = bool(decoder.getstate()[0]) and not _continues(content[:1])
            begun = length + is_new  # the bytes before it were no character
            offsets.append(min(begun, len(text)))
            if content[:1] == b" " and text[begun : begun + 1] != " ":
                content = content[1:]
            length += len(decoder.decode(content))
        return cls(text, offsets)


def _content(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token, or the text of a special token as bytes."""
    content = tokenizer.token_bytes(token)
    return tokenizer.decode([token], special_tokens=True).encode() if content is None else content


def _continues(byte: bytes) -> bool:
    """Return whether a byte of UTF-8 continues a character."""
    return bool(byte) and byte[0] & 0xC0 == 0x80


def best(results: Sequence[dict[str, Any]], drawn: int, count: int) -> list[dict[str, Any]]:
    """Return the ``count`` results of each ``drawn`` with the highest mean log-probability of their tokens."""

    def mean(result: dict[str, Any]) -> float:
        ranks = result["logprobs"]
        return sum(rank["log_probability"] for rank in ranks) / max(1, len(ranks))

    groups = (results[start : start + drawn] for start in range(0, len(results), drawn))
    return [result for group in groups for result in sorted(group, key=mean, reverse=True)[:count]]
