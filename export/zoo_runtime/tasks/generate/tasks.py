"""Generation tasks: continuing a prompt, and generating the target of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.errors import UsageError, argument, task_option
from zoo.probe.pipeline import decoder_inputs
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.running.context import Context, internals
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.sources import Languages, TranslateOptions, task_prefix

__all__ = ["Continue", "Translate"]


class Continue(Generate):
    """Continues a prompt, or answers a chat."""

    padding = "left"
    chats = True

    def read(self, value: Any, number: int) -> Tokens:
        """In a session with ``chat``, an input is a list of messages, or a text of the user."""
        template = internals(self.session).chat
        if template is not None:
            chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
            value = template.render(chat, where=f"input {number}")
        return super().read(value, number)

    def fits(self, longest: int, size: int) -> bool:
        """Padding uses up positions, so a shorter prompt joins a longer one only if enough remain for new tokens."""
        positions = self.session.option("max_seq_len")
        room = size == longest or positions is None or longest + self.chosen.max_new_tokens <= positions
        return room and super().fits(longest, size)

    def text_limit(self) -> int | None:
        """Room is left for the new tokens, so that the prompt loses its first tokens, as in transformers' pipeline."""
        limit = super().text_limit()
        if limit is None:
            return None
        bounds = [bound for bound in (limit, self.chosen.max_length) if bound is not None]
        if (room := min(bounds) - self.chosen.max_new_tokens) < 1:
            problem = f"{self.chosen.max_new_tokens} new tokens leave no room for a prompt in {min(bounds)}"
            raise UsageError(problem, self.session.path, argument("max_new_tokens", text="lower {}"))
        return room

    def prompt(self, item: Tokens) -> list[int]:
        return item.ids

    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]:
        feeds = self.feed(items, left=True)
        ids_name, mask_name = decoder_inputs(self.graph)
        ids = feeds[ids_name]
        return items, self.session.stepper(feeds), ids, feeds[mask_name] if mask_name else np.ones_like(ids)

    def lead(self, text: str) -> str:
        return text if internals(self.session).chat is None else ""


class Translate(Generate):
    """Generates the target of a source: the encoder runs once, the decoder token by token."""

    options = TranslateOptions
    causal = False

    def __init__(self, session: Context, chosen: TranslateOptions) -> None:
        self.first = session.option("decoder_start_token_id")
        self.prefix = task_prefix(session, chosen)
        self.languages = Languages(session, chosen, last=self.first is None)
        target = self.languages.target
        if target is not None and self.first is not None:
            chosen = replace(chosen, forced_bos_token_id=target)
        elif target is not None:
            self.first = target
        super().__init__(session, chosen)
        if target is not None and self.in_one_graph:
            raise UsageError("this variant writes no language", session.path, "choose another variant to set a target")
        if self.first is None:
            problem = "the model has no decoder_start_token_id"
            remedy = task_option("target=CODE", "set it when building the model, or a language with {}")
            raise UsageError(problem, session.path, remedy)

    def read(self, value: Any, number: int) -> Tokens:
        """Put the prefix of the task before a text, and the token of its language where the model expects it."""
        item = super().read(self.prefix + value if isinstance(value, str) else value, number)
        if item.encoding is None or self.languages.source is None:
            return item
        item = self.languages.put(item)
        self._check(item)
        return item

    def text_limit(self) -> int | None:
        """Room is left for the token of the language."""
        limit = super().text_limit()
        return None if limit is None else limit - self.languages.added(self.tokenizer)

    def prompt(self, item: Tokens) -> list[int]:
        return [self.first]

    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]:
        ids = np.array([self.prompt(item) for item in items], np.int64)
        return items, self.session.stepper(self.feed(items)), ids, np.ones_like(ids)
