"""Answers in the shapes of OpenAI's API."""

from __future__ import annotations

import base64
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zoo_runtime.server.http.openai.completions import Echo
from zoo_runtime.server.http.responses import sent

__all__ = ["LOWEST", "AnswerShapes", "embeddings_answer"]

LOWEST = -9999.0
"""Log-probability of an impossible token in completions, as in vLLM's server."""

_REASONS = {"end": "stop", "stop": "stop", "complete": "stop", "length": "length"}


@dataclass
class AnswerShapes:
    """The shapes of one answer: whole, or in chunks.

    Args:
        model: name of the model.
        is_chat: whether it answers a chat.
        token_bytes: returns the bytes of a token, or None if it is no text.
        echoes: the prompts with which texts begin, by choice; empty if they do not.
    """

    model: str
    is_chat: bool
    token_bytes: Callable[[int], bytes | None]
    echoes: Sequence[Echo] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    texts: list[str] = field(default_factory=list)
    """The texts so far."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task that the answer needs."""
    _offsets: Counter[int] = field(default_factory=Counter)
    """Number of characters of the tokens so far, by choice, in a stream with log-probabilities."""

    def whole(self, results: Sequence[Mapping[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the answer from the results of the task."""
        self.texts.extend(self._prompt(place) + (result["generated"] or "") for place, result in enumerate(results))
        choices = [self._choice(place, result) for place, result in enumerate(results)]
        return self._object("") | {"choices": choices, "usage": dict(usage)}

    def chunks(
        self, index: int, text: str, reason: str | None = None, ranks: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Return the chunks for new text: see :meth:`chunk`."""
        return [self.chunk(index, text, reason, ranks)]

    def openings(self, count: int, *, with_ranks: bool = False) -> list[dict[str, Any]]:
        """Return the chunks before those of texts, for so many choices: of a prompt, unless it has ranks."""
        if self.is_chat:
            opening = {"delta": {"role": "assistant", "content": ""}}
            return [self._chunk(index, opening) for index in range(count)]
        echoed = self.echoes and not with_ranks
        return [self.chunk(index, self._prompt(index)) for index in range(count)] if echoed else []

    def prompt_chunk(self, index: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the chunk of the prompt with which a text begins, with the probabilities of its tokens."""
        text = self._prompt(index)
        self.note(index, text)
        return self._chunk(index, {"text": text, "logprobs": self._echoed(index, ranks)})

    def closing(self, usage: Mapping[str, int], *, wants_usage: bool) -> Iterator[bytes]:
        """Yield the end of a stream."""
        if wants_usage:
            yield self.encoded(self._object(".chunk") | {"choices": [], "usage": dict(usage)})
        yield b"data: [DONE]\n\n"

    def encoded(self, body: Mapping[str, Any]) -> bytes:
        """Return a chunk as a server-sent event."""
        return sent(body)

    def chunk(
        self, index: int, text: str, reason: str | None = None, ranks: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return a chunk of new text, which may be the last one of its choice, with the probabilities of its tokens."""
        self.note(index, text)
        content: dict[str, Any] = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
        return self._chunk(index, content | {"logprobs": self._logprobs(index, ranks)}, reason)

    def note(self, index: int, text: str) -> None:
        """Add new text of a choice to the texts so far."""
        self.texts.extend([""] * (index + 1 - len(self.texts)))
        self.texts[index] += text

    def reason(self, index: int, reason: str) -> str:
        """Return why a text ends, in OpenAI's words."""
        return _REASONS[reason]

    def _chunk(self, index: int, content: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": _REASONS.get(reason or "")}
        return self._object(".chunk") | {"choices": [choice]}

    def _object(self, suffix: str) -> dict[str, Any]:
        kind, prefix = (f"chat.completion{suffix}", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
        text = result["generated"] or ""
        reason = _REASONS[result["finish_reason"]]
        content: dict[str, Any] = {"text": self._prompt(index) + text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        before = self._echoed(index, result["prompt_logprobs"]) if "prompt_logprobs" in result else None
        logprobs = self._logprobs(index, result.get("logprobs"))
        if before is not None and logprobs is not None:
            logprobs = {name: values + logprobs[name] for name, values in before.items()}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _prompt(self, index: int) -> str:
        """Return the text of the prompt with which a choice begins; empty if it does not."""
        return self.echoes[index].text if self.echoes else ""

    def _echoed(self, index: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the tokens of the prompt of a choice as columns. The next ones begin after its text."""
        echo = self.echoes[index]
        self._offsets[index] = len(echo.text)
        return _columns(ranks, 0) | {"text_offset": list(echo.offsets)}

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
    tops = [None if rank["top"] is None else _by_text(_with_own(rank)) for rank in ranks]
    chances = [_finite(rank["log_probability"]) for rank in ranks]
    return {"tokens": texts, "token_logprobs": chances, "top_logprobs": tops, "text_offset": offsets}


def _with_own(rank: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the likeliest tokens in the place of a token, and the token itself if it is none of them."""
    is_top = any(top["token"] == rank["token"] for top in rank["top"])
    return [*rank["top"], *([] if is_top else [rank])]


def _finite(log_probability: float | None) -> float | None:
    """Return a log-probability for JSON, which has no infinity. A token of a prompt may have the probability 0."""
    return None if log_probability is None else max(log_probability, LOWEST)


def _by_text(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return log-probabilities by the texts of tokens, or by their ids, ``token_id:N``, if tokens share a text."""
    counts = Counter(rank["text"] or "" for rank in ranks)
    names = ((rank["text"] or "", f"token_id:{rank['token']}") for rank in ranks)
    return {
        text if counts[text] == 1 else number: max(rank["log_probability"], LOWEST)
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
