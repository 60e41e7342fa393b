"""Prompts with an image whose text the original's processor changes before it is encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from zoo.errors import ArtifactError
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["PromptText"]


@dataclass(frozen=True)
class PromptText:
    """How the text of a prompt with an image is written before it is encoded.

    The tokens of an image may merge with those of the text around it, such as newlines, so they are put there as text.
    """

    place: str
    """The text that stands for the image in a prompt."""
    image: str
    """The text in its place, in which one token stands for all features of the image."""
    end: str = ""
    """The text after the prompt."""
    special_tokens: bool = True
    """Whether the tokenizer's special tokens are put around the prompt."""

    @classmethod
    def of(cls, config: Any) -> Self | None:
        """Return that of a model; None if the tokens of an image are put among those of the prompt."""
        place = getattr(config, "image_place", None)
        return None if place is None else cls(place, config.image_text, config.prompt_end, config.prompt_special_tokens)

    def write(self, prompt: str, where: object = None) -> str:
        """Return the text that is encoded. Raises :class:`ArtifactError` unless the prompt has one place."""
        if (count := prompt.count(self.place)) != 1:
            what = f"the prompt has {count} places for its image"
            raise ArtifactError(what, where, f"write {self.place} once, as the model's examples do")
        return prompt.replace(self.place, self.image) + self.end

    def encode(self, prompt: str, tokenizer: Tokenizer, where: object = None) -> list[int]:
        """Return the token ids of a prompt, with one for the image. Raises as :meth:`write`."""
        plain = (
            tokenizer
            if self.special_tokens or not tokenizer.special_tokens
            else Tokenizer(tokenizer.backend, special_tokens=False)
        )
        return list(plain.encode(self.write(prompt, where), where=where, offsets=False).ids)
