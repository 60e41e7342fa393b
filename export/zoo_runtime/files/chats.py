"""Chats among the inputs of ``zoo run``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zoo.errors import ArtifactError

if TYPE_CHECKING:
    from zoo_runtime import Answer

__all__ = ["as_chat", "parse_chat"]


def parse_chat(text: str, where: str = "--chat") -> Any:
    """Parse a JSON list of messages; any other text is a message of the user."""
    if not text.lstrip().startswith("[{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "write a text that begins so as the content of a message"
        raise ArtifactError(f"not a JSON list of messages ({error})", where, remedy) from error


def as_chat(answer: Answer) -> Answer:
    """Parse the chat in a line or a row."""
    if isinstance(answer.input, str):
        try:
            answer.input = parse_chat(answer.input, f"input {answer.number}")
        except ArtifactError as error:
            answer.error = error
    return answer
