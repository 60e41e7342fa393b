"""Chat templates: programs of a checkpoint that turn the messages of a chat into a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.tokenizers.chat.template import ChatTemplate, read_chat_template

__all__ = ["ChatTemplate", "read_chat_template"]


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use: the process that renders templates imports this package."""
    if name in __all__:
        from zoo.tokenizers.chat import template

        return getattr(template, name)
    raise AttributeError(f"module 'zoo.tokenizers.chat' has no attribute {name!r}")
