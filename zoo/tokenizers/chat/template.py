"""Chat templates: Jinja programs of a checkpoint that turn the messages of a chat into a prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zoo.artifact import CHAT_TEMPLATE, MANIFEST, TOKENIZER_CONFIG, ModelDirectory
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, MissingPackageError
from zoo.reading import read_text
from zoo.tokenizers.chat.rendering import TemplateFailure, render
from zoo.tokenizers.files.declared import read_declared

__all__ = ["ChatTemplate", "read_chat_template"]

_MAX_SOURCE = 500_000
"""Characters of a template: compiling takes seconds for a million."""


def read_chat_template(directory: str | os.PathLike[str]) -> ChatTemplate:
    """Return the chat template of a model directory or of a checkpoint.

    It is chat_template.jinja, else ``chat_template`` in tokenizer_config.json. Of several, it is the one named
    ``default``, and of these the last.

    Raises:
        ArtifactError: there is none, or it is not a valid template.
        MissingPackageError: Jinja is not installed.
    """
    folder = Path(directory)
    listed = ModelDirectory.open(folder, weights=False).files if (folder / MANIFEST).is_file() else None
    names = ("special_tokens_map.json", TOKENIZER_CONFIG, CHAT_TEMPLATE)
    present = {name for name in names if (name in listed if listed is not None else (folder / name).is_file())}
    where = folder / TOKENIZER_CONFIG
    named, said = (load_json(folder / name) if name in present else {} for name in names[:2])
    tokens = read_declared(said, named, {}, [], where).texts
    if CHAT_TEMPLATE in present:
        return ChatTemplate(_text(folder / CHAT_TEMPLATE), tokens, folder / CHAT_TEMPLATE)
    stated = said.get("chat_template")
    if isinstance(stated, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in stated):
            raise ArtifactError("chat_template must be a text, or a list of objects with name and template", where)
        stated = {str(entry["name"]): entry["template"] for entry in stated}
    if isinstance(stated, dict):
        stated = stated.get("default")
    if stated is None:
        raise ArtifactError("the model has no chat template", folder, f"import one in {TOKENIZER_CONFIG}")
    if not isinstance(stated, str):
        raise ArtifactError(f"chat_template must be a text, got {type(stated).__name__}", where)
    return ChatTemplate(stated, tokens, where)


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        raise ArtifactError(f"not UTF-8 ({error})", path) from error


class ChatTemplate:
    """A chat template, with the language and the functions that transformers gives to templates.

    It runs in Jinja's sandbox and in a process whose time and memory are limited, because it comes with a checkpoint.

    Args:
        source: the program.
        tokens: special tokens by name, such as ``bos_token``.
        where: the file, for errors.

    Raises:
        ArtifactError: the program is not valid.
        MissingPackageError: Jinja is not installed.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, where: object = None) -> None:
        if find_spec("jinja2") is None:
            raise MissingPackageError("chat templates need Jinja", where, "pip install attention-zoo[chat]")
        self.source, self.tokens, self.where = source, dict(tokens or {}), where
        if len(source) > _MAX_SOURCE:
            problem = f"not a chat template ({len(source):,} characters: at most {_MAX_SOURCE:,} are allowed)"
            raise ArtifactError(problem, where)
        try:
            render(source, None)
        except TemplateFailure as error:
            raise ArtifactError(f"not a chat template ({error})", where) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        where: object = None,
        **values: Any,
    ) -> str:
        """Return the prompt of a chat, special tokens included, as ``apply_chat_template`` of transformers does.

        Args:
            messages: the messages, oldest first, each with ``role`` and ``content``; keys that are None are left out.
            add_generation_prompt: end with the start of the assistant's answer.
            where: the input, for errors; by default the file of the template.
            values: further variables of the template, such as ``tools``.

        Raises:
            ArtifactError: the messages are not a chat, or the template refuses them.
        """
        where = where or self.where
        chat = _checked(messages, where)
        variables = {"tools": None, "documents": None, **self.tokens, **values}
        try:
            return render(self.source, variables | {"messages": chat, "add_generation_prompt": add_generation_prompt})
        except (TemplateFailure, TypeError, ValueError) as error:  # a variable may be no JSON
            raise ArtifactError(f"the chat template refuses it ({error})", where) from error


def _checked(messages: object, where: object) -> list[dict[str, Any]]:
    """Return plain copies of messages, which are all that a template sees."""
    remedy = 'give a list of {"role": "user", "content": "..."}'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ArtifactError("not a list of messages", where, remedy)
    try:
        plain = json.loads(json.dumps([dict(message) for message in messages]))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"not a list of messages ({error})", where, remedy) from error
    chat = [_named({key: value for key, value in message.items() if value is not None}) for message in plain]
    for number, message in enumerate(chat, 1):
        if not isinstance(message.get("role"), str):
            raise ArtifactError(f"message {number} has no role", where, remedy)
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise ArtifactError(f"message {number} has no content", where, remedy)
    return chat


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning the names under which templates read it, as transformers does."""
    reasoning = next(
        (message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message), None
    )
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
