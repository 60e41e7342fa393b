"""Answers to chats that may call functions, whole or in chunks."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo_runtime.server.http.openai.shapes import AnswerShapes
from zoo_runtime.server.http.openai.tools.calling import Calling
from zoo_runtime.server.tools.formats import ToolFormat
from zoo_runtime.server.tools.reading import CallPart, CallReader

__all__ = ["CallAnswer", "new_id"]

_DIGITS = string.ascii_letters + string.digits


def new_id(form: ToolFormat) -> str:
    """Return an id for a call, as the chat template expects it."""
    return form.id_prefix + "".join(secrets.choice(_DIGITS) for _ in range(form.id_length))


@dataclass
class CallAnswer(AnswerShapes):
    """The shapes of the answer to a chat, in which calls are told from content.

    Args:
        calling: how it may call functions.
    """

    calling: Calling = field(default_factory=Calling)
    _readers: dict[int, CallReader] = field(default_factory=dict)

    def chunks(
        self, index: int, text: str, reason: str | None = None, ranks: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        if self.calling.form is None:
            return super().chunks(index, text, reason, ranks)
        self.note(index, text)
        deltas = [self._delta(part) for part in self.read(index, text, is_last=reason is not None)]
        if not deltas and (ranks or reason is not None):
            deltas = [{}]
        chunks = [self._chunk(index, {"delta": delta}) for delta in deltas]
        if ranks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(index, ranks)
        if reason is not None:
            chunks[-1]["choices"][0]["finish_reason"] = self.reason(index, reason)
        return chunks

    def openings(self, count: int, *, with_ranks: bool = False) -> list[dict[str, Any]]:
        if self.calling.form is None:
            return super().openings(count, with_ranks=with_ranks)
        return [self._chunk(index, {"delta": {"role": "assistant", "content": None}}) for index in range(count)]

    def read(self, index: int, text: str, *, is_last: bool) -> list[str | CallPart]:
        """Return the parts of a text that have become certain."""
        assert self.calling.form is not None
        if index not in self._readers:
            self._readers[index] = CallReader(self.calling.form, self.calling.names, certain=self.calling.certain)
        reader = self._readers[index]
        parts = reader.feed(text) + (reader.end() if is_last else [])
        return [part for part in parts if isinstance(part, str) or self.calling.several or part.index == 0]

    def reason(self, index: int, reason: str) -> str:
        """Return why a text ends, in OpenAI's words."""
        plain = super().reason(index, reason)
        reader = self._readers.get(index)
        has_calls = reader is not None and reader.count > 0 and not reader.is_cut
        return "tool_calls" if plain == "stop" and has_calls and not self.calling.named else plain

    def _choice(self, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
        choice = super()._choice(index, result)
        if self.calling.form is None:
            return choice
        content, calls = "", list[dict[str, Any]]()
        for part in self.read(index, result["generated"] or "", is_last=True):
            if isinstance(part, str):
                content += part
            elif part.name is not None:
                calls.append(self._call(part.name))
            else:
                calls[part.index]["function"]["arguments"] += part.arguments
        choice["message"]["content"] = content if content or not calls else None
        if calls:
            choice["message"]["tool_calls"] = calls
        choice["finish_reason"] = self.reason(index, result["finish_reason"])
        return choice

    def _call(self, name: str) -> dict[str, Any]:
        assert self.calling.form is not None
        return {"id": new_id(self.calling.form), "type": "function", "function": {"name": name, "arguments": ""}}

    def _delta(self, part: str | CallPart) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": part}
        call = {"function": {"arguments": part.arguments}} if part.name is None else self._call(part.name)
        return {"tool_calls": [{"index": part.index, **call}]}
