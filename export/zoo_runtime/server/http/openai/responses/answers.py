"""Answers of ``/v1/responses``, whole or as typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo_runtime.server.http.openai.responses.bodies import Responses
from zoo_runtime.server.http.openai.tools.answers import CallAnswer, new_id
from zoo_runtime.server.http.responses import sent
from zoo_runtime.server.tools.reading import CallPart

__all__ = ["ResponseAnswer"]


@dataclass(kw_only=True)
class ResponseAnswer(CallAnswer):
    """The shapes of an answer whose output are messages and calls, in the order in which they are written.

    Args:
        request: what is answered.
    """

    request: Responses
    _output: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False
    """Whether the last item goes on."""
    _reason: str = "stop"
    _number: int = 0
    """Number of events so far."""

    def whole(self, results: Sequence[Mapping[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        (result,) = results
        self.chunks(0, result["generated"] or "", result["finish_reason"])
        return self._response(usage)

    def openings(self, count: int, *, with_ranks: bool = False) -> list[dict[str, Any]]:
        return [self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress")]

    def chunks(
        self, index: int, text: str, reason: str | None = None, ranks: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        self.note(index, text)
        parts: list[str | CallPart] = [text] if text else []
        if self.calling.form is not None:
            parts = self.read(index, text, is_last=reason is not None)
        events = [event for part in parts for event in self._add(part)]
        if reason is not None:
            self._reason = self.reason(index, reason)
            events += [] if self._output else list(self._begin_message())
            events += self._close()
        return events

    def closing(self, usage: Mapping[str, int], *, wants_usage: bool) -> Iterator[bytes]:
        response = self._response(usage)
        yield self.encoded(self._event(f"response.{response['status']}", response=response))

    def encoded(self, body: Mapping[str, Any]) -> bytes:
        return f"event: {body['type']}\n".encode() + sent(body)

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **content}

    def _of_item(self, kind: str, **content: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        if self._output[-1]["type"] == "message":
            place["content_index"] = 0
        return self._event(f"response.{kind}", **place, **content)

    def _add(self, part: str | CallPart) -> Iterator[dict[str, Any]]:
        """Add a part to the output, and yield its events."""
        if isinstance(part, str):
            if not self._is_open or self._output[-1]["type"] != "message":
                yield from self._close()
                yield from self._begin_message()
            self._output[-1]["content"][0]["text"] += part
            yield self._of_item("output_text.delta", delta=part, logprobs=[])
        elif part.name is not None:
            yield from self._close()
            assert self.calling.form is not None
            facts = {"call_id": new_id(self.calling.form), "name": part.name, "arguments": ""}
            yield self._begin({"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", **facts})
        else:
            self._output[-1]["arguments"] += part.arguments
            yield self._of_item("function_call_arguments.delta", delta=part.arguments)

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        message = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "content": []}
        yield self._begin(message)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output[-1]["content"].append(part)
        yield self._of_item("content_part.added", part=dict(part))

    def _begin(self, item: Mapping[str, Any]) -> dict[str, Any]:
        self._is_open = True
        self._output.append({**item, "status": "in_progress"})
        return self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=_copy(self._output[-1])
        )

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the last item, and yield its events."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[-1]
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_item("output_text.done", text=part["text"], logprobs=[])
            yield self._of_item("content_part.done", part=dict(part))
        else:
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=_copy(item))

    def _response(self, usage: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the whole answer, which has a usage once it has ended."""
        request, is_cut = self.request, self._reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        choice = request.tool_choice
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [_copy(item) for item in self._output],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}} if request.text is None else request.text.model_dump(by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in request.tools],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
        }


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it is now."""
    content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    return {**item, **content}


def _usage(usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
