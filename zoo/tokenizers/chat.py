"""Chat templates: Jinja programs of a checkpoint that turn the messages of a chat into a prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from zoo.artifact import CHAT_TEMPLATE, MANIFEST, TOKENIZER_CONFIG, ModelDirectory
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, MissingPackageError
from zoo.reading import read_text
from zoo.tokenizers.declared import read_declared

__all__ = ["ChatTemplate", "read_chat_template"]

_MAX_SOURCE = 500_000
"""Characters of a template: compiling takes seconds for a million."""


def read_chat_template(directory: str | os.PathLike[str]) -> ChatTemplate:
    """Return the chat template of a model directory or of a checkpoint.

    It is chat_template.jinja, else ``chat_template`` in tokenizer_config.json. Of several, it is the one named
    ``default``.

    Raises:
        ArtifactError: there is none, or it is not a valid template.
        MissingPackageError: Jinja is not installed.
    """
    folder = Path(directory)
    known = ModelDirectory.open(folder, weights=False).files if (folder / MANIFEST).is_file() else None
    names = ("special_tokens_map.json", TOKENIZER_CONFIG, CHAT_TEMPLATE)
    found = {name for name in names if (name in known if known is not None else (folder / name).is_file())}
    where = folder / TOKENIZER_CONFIG
    named, said = (load_json(folder / name) if name in found else {} for name in names[:2])
    tokens = read_declared(said, named, {}, [], where).texts
    if CHAT_TEMPLATE in found:
        return ChatTemplate(_text(folder / CHAT_TEMPLATE), tokens, folder / CHAT_TEMPLATE)
    stated = said.get("chat_template")
    if isinstance(stated, list):
        stated = next((entry.get("template") for entry in stated if entry.get("name") == "default"), None)
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
    """A compiled chat template, with the language and the functions that transformers gives to templates.

    It runs in Jinja's sandbox, because it comes with a checkpoint: it can neither reach files nor change its inputs.

    Args:
        source: the program.
        tokens: special tokens by name, such as ``bos_token``.
        where: the file, for errors.

    Raises:
        ArtifactError: the program is not valid.
        MissingPackageError: Jinja is not installed.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, where: object = None) -> None:
        try:
            from jinja2 import TemplateSyntaxError

            from zoo.tokenizers.sandbox import compile_template
        except ImportError as error:
            raise MissingPackageError("chat templates need Jinja", where, "pip install attention-zoo[chat]") from error
        self.source, self.tokens, self.where = source, dict(tokens or {}), where
        if len(source) > _MAX_SOURCE:
            what = f"not a chat template ({len(source):,} characters: at most {_MAX_SOURCE:,} are allowed)"
            raise ArtifactError(what, where)
        try:
            self._template = compile_template(source, now=lambda form: datetime.now().strftime(form))
        except TemplateSyntaxError as error:
            raise ArtifactError(f"not a chat template ({error.message} in line {error.lineno})", where) from error
        except RecursionError as error:
            raise ArtifactError("not a chat template (nested too deeply)", where) from error

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
        from zoo.tokenizers.sandbox import render

        where = where or self.where
        chat = _checked(messages, where)
        known = {"tools": None, "documents": None, **self.tokens, **values}
        try:
            return render(self._template, known | {"messages": chat, "add_generation_prompt": add_generation_prompt})
        except Exception as error:  # a template can raise any exception
            reason = str(error) or type(error).__name__
            raise ArtifactError(f"the chat template refuses it ({reason})", where) from error


def _checked(messages: object, where: object) -> list[dict[str, Any]]:
    """Return plain copies of messages, which are all that a template sees."""
    remedy = 'give a list of {"role": "user", "content": "..."}'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ArtifactError("not a list of messages", where, remedy)
    try:
        plain = json.loads(json.dumps([dict(message) for message in messages]))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"not a list of messages ({error})", where, remedy) from error
    chat = [{key: value for key, value in message.items() if value is not None} for message in plain]
    for number, message in enumerate(chat, 1):
        if not isinstance(message.get("role"), str):
            raise ArtifactError(f"message {number} has no role", where, remedy)
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise ArtifactError(f"message {number} has no content", where, remedy)
    return chat
