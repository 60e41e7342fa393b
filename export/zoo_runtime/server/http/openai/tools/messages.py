"""Messages about calls, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zoo_runtime.server.request_error import RequestError

__all__ = ["for_template", "without_calls", "without_results"]


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of calls as objects, and results with the names of their functions.

    That is how transformers and vLLM hand them to templates.

    Raises :class:`RequestError` if arguments are not a JSON object, or a result belongs to no call.
    """
    known: dict[Any, str] = {}
    found = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls")
        if message.get("role") == "tool" and message.get("tool_call_id") not in known:
            problem = f"tool_call_id {str(message.get('tool_call_id'))[:100]!r} is none of the calls before it"
            raise RequestError(400, problem, "invalid_value", f"messages[{place}]")
        if not calls:
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            if message.get("role") == "tool":
                plain.setdefault("name", known[message.get("tool_call_id")])
            found.append(plain)
            continue
        read = []
        for call in calls:
            function = call["function"]
            known[call.get("id")] = function["name"]
            arguments = _arguments(function["arguments"], place)
            read.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
        found.append({**message, "tool_calls": read})
    return found


def without_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with other names of functions in their calls."""
    changed = []
    for message in messages:
        calls = message.get("tool_calls", ())
        others = [{**call, "function": {**call["function"], "name": call["function"]["name"] + "_"}} for call in calls]
        changed.append({**message, "tool_calls": others} if calls else dict(message))
    return changed


def without_results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with other results of calls."""
    return [
        {**message, "content": f"{message.get('content') or ''}_"} if message.get("role") == "tool" else dict(message)
        for message in messages
    ]


def _arguments(text: str, place: int) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        problem = f"the arguments of a call must be a JSON object, got {text!r:.100}"
        raise RequestError(400, problem, "invalid_value", f"messages[{place}]")
    return arguments
