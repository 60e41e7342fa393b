"""Answers in the shapes of OpenAI's API."""

from __future__ import annotations

import base64
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["AnswerShapes", "embeddings_answer"]

_REASONS = {"end": "stop", "stop": "stop", "complete": "stop", "length": "length"}


@dataclass
class AnswerShapes:
    """The shapes of one answer: whole, or in chunks.

    Args:
        model: name of the model.
        is_chat: whether it answers a chat.
        token_bytes: returns the bytes of a token, or None if it is no text.
    """

    model: str
    is_chat: bool
    token_bytes: Callable[[int], bytes | None]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    texts: list[str] = field(default_factory=list)
    """The texts so far."""
    _offsets: Counter[int] = field(default_factory=Counter)
    """Number of characters of the tokens so far, by choice, in a stream with log-probabilities."""

    def whole(self, results: Sequence[Mapping[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the answer from the results of the task."""
        self.texts.extend(result["generated"] or "" for result in results)
        choices = [self._choice(place, result) for place, result in enumerate(results)]
        return self._object("") | {"choices": choices, "usage": dict(usage)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice, if it has one without text."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self.is_chat else None

    def chunk(
        self, index: int, text: str, reason: str | None = None, ranks: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return a chunk of new text, which may be the last one of its choice, with the probabilities of its tokens."""
        self.texts.extend([""] * (index + 1 - len(self.texts)))
        self.texts[index] += text
        content: dict[str, Any] = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
        return self._chunk(index, content | {"logprobs": self._logprobs(index, ranks)}, reason)

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the last chunk of a stream, without choices."""
        return self._object(".chunk") | {"choices": [], "usage": dict(usage)}

    def _chunk(self, index: int, content: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": _REASONS.get(reason or "")}
        return self._object(".chunk") | {"choices": [choice]}

    def _object(self, suffix: str) -> dict[str, Any]:
        kind, prefix = (f"chat.completion{suffix}", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
        text = result["generated"] or ""
        reason = _REASONS[result["finish_reason"]]
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = self._logprobs(index, result.get("logprobs"))
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, ranks: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
        """Return the log-probabilities of the next tokens of a choice."""
        if ranks is None:
            return None
        if self.is_chat:
            return {"content": [self._token(rank) for rank in ranks], "refusal": None}
        columns = _columns(ranks, self._offsets[index])
        self._offsets[index] += sum(map(len, columns["tokens"]))
        return columns

    def _token(self, ranked: Mapping[str, Any]) -> dict[str, Any]:
        """Return a token of a chat with its log-probability, and those of the likeliest ones in its place."""
        content = self.token_bytes(ranked["token"])
        facts: dict[str, Any] = {"token": ranked["text"] or "", "logprob": ranked["log_probability"]}
        facts["bytes"] = None if content is None else list(content)
        return facts | {"top_logprobs": [self._token(top) for top in ranked["top"]]} if "top" in ranked else facts


def _columns(ranks: Sequence[Mapping[str, Any]], start: int) -> dict[str, Any]:
    """Return the tokens of a completion and their log-probabilities as columns. The first text begins at ``start``."""
    texts = [rank["text"] or "" for rank in ranks]
    offsets = np.cumsum([start, *map(len, texts)])[:-1].tolist()
    tops = [_by_text(rank["top"]) for rank in ranks]
    chances = [rank["log_probability"] for rank in ranks]
    return {"tokens": texts, "token_logprobs": chances, "top_logprobs": tops, "text_offset": offsets}


def _by_text(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return log-probabilities by the texts of tokens, or by their ids, ``token_id:N``, if tokens share a text."""
    counts = Counter(rank["text"] or "" for rank in ranks)
    names = ((rank["text"] or "", f"token_id:{rank['token']}") for rank in ranks)
    return {
        text if counts[text] == 1 else number: rank["log_probability"]
        for rank, (text, number) in zip(ranks, names, strict=True)
    }


def embeddings_answer(model: str, results: Sequence[Mapping[str, Any]], form: str) -> dict[str, Any]:
    """Return the answer of ``/v1/embeddings``, with vectors as lists or as base64 of float32."""
    vectors = [np.asarray(result["embedding"], np.float32) for result in results]
    packed = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    shown: list[Any] = packed if form == "base64" else [vector.tolist() for vector in vectors]
    data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(shown)]
    tokens = sum(result["tokens"] for result in results)
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
