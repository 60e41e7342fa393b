"""Chat templates as transformers renders them, in a process whose time and memory are limited.

transformers limits neither, and a template comes with the checkpoint: one that loops would stop the import for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.tokenizers.chat.rendering import render

__all__ = ["render_original", "serve"]


def render_original(
    source: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, Any], *, add_generation_prompt: bool = True
) -> str:
    """Return the prompt of a chat by the function of transformers that renders it in ``apply_chat_template``.

    Args:
        source: the template.
        messages: the chat, which can be written as JSON.
        tokens: special tokens by name.
        add_generation_prompt: end with the start of the assistant's answer.

    Raises:
        TemplateLimit: it takes too much time or memory.
        TemplateFailure: the template or transformers refuses it.
    """
    values = {**tokens, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
    return render(source, values, __name__)


def serve() -> None:
    """Run :func:`zoo.tokenizers.chat.sandbox.serve` with the function of transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from zoo.tokenizers.chat import sandbox

    def rendered(source: str, values: Mapping[str, Any] | None) -> str:
        variables = dict(values or {})
        texts: Any = render_jinja_template([variables.pop("messages", [])], chat_template=source, **variables)
        text: str = texts[0][0]
        return text

    sandbox.serve(rendered)
