"""Text augmentation by a language model that continues a prompt with the text and its class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any

from zoo.errors import ArtifactError, ZooError
from zoo_runtime.generation.choices import Continuation, seed_of
from zoo_runtime.generation.options import Generation
from zoo_runtime.generation.text import GrowingText
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.generate.tasks import Continue

__all__ = ["AugmentByPrompt", "PromptOptions"]


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Generation):
    """Options of augmentation by a prompt, beside those of text generation."""

    prompt: str = "{text}"
    """The text to continue. ``{NAME}`` stands for a column of the input, ``{text}`` for the input itself; ``{{`` and
    ``}}`` are braces."""
    num_variants: int = 4
    """Number of variants per text."""
    temperature: float = 1.0
    """Divides logits before sampling. 0 takes the likeliest token each time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("num_variants")
        if not self.temperature and self.num_variants > 1:
            raise ValueError(f"num_variants is {self.num_variants}, but at temperature 0 all variants are the same")
        for name in self.columns():
            if not name.isidentifier():
                raise ValueError(f"prompt {self.prompt!r} has the placeholder {{{name}}}: write the name of a column")

    def columns(self) -> list[str]:
        """Return the names in the prompt. Raises :class:`ValueError` if it is malformed."""
        try:
            return [name for _, name, _, _ in Formatter().parse(self.prompt) if name is not None]
        except ValueError as error:
            raise ValueError(f"prompt {self.prompt!r} is malformed ({error})") from error


@dataclass(frozen=True)
class Prompt(Tokens):
    """A prompt as token ids."""

    variant: int = field(default=0, kw_only=True)
    """The number of the variant, which is part of its random seed."""


class AugmentByPrompt(Continue):
    """``variants`` of a text, each with its ``text``, its ``ids`` and the ``finish_reason`` of :class:`Generation`.

    A language model continues a prompt that holds the text and its class, as GPT-2 in Kumar et al. (2020, Data
    Augmentation using Pre-trained Transformer Models, section 3.2); a variant is the continuation, without spaces
    around it. The model should have been trained on texts in the form of the prompt.

    An input is a text, or a mapping of columns with a ``text``. A variant depends on the seed, the prompt, the input's
    number and its own, never on its batch.
    """

    options = PromptOptions
    makes_variants = True
    chats = False
    streams = False

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return super().defaults(session, {"temperature": PromptOptions.temperature, **given})

    def read_all(self, answers: Sequence[Answer]) -> list[tuple[int, Tokens]]:
        """Read the columns of the inputs, too."""
        rows = [
            replace(answer, input={**answer.columns, "text": answer.input})
            if answer.columns and isinstance(answer.input, str)
            else answer
            for answer in answers
        ]
        items = super().read_all(rows)
        for answer, row in zip(answers, rows, strict=True):
            answer.error = row.error
        return items

    def read(self, value: Any, number: int) -> Tokens:
        """Write the columns of an input into the prompt, and encode it."""
        if isinstance(value, str):
            value = {"text": value}
        if isinstance(value, Mapping):
            lacks = next((name for name in self.chosen.columns() if value.get(name) is None), None)
            if lacks is not None:
                raise ArtifactError(f"has no {lacks!r} for the prompt", f"input {number}", "give a file with columns")
            value = self.chosen.prompt.format_map(value)
        item = super().read(value, number)
        return Prompt(item.number, item.ids, types=item.types, encoding=item.encoding)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        answers: list[Any] = [{"tokens": len(item.ids), "variants": []} for item in items]
        for variant in range(self.chosen.num_variants):  # one at a time, to keep to the batch size
            prompts = [replace(item, variant=variant) if isinstance(item, Prompt) else item for item in items]
            for place, result in enumerate(super().answer(prompts)):
                if isinstance(result, ZooError):
                    answers[place] = result
                elif isinstance(answers[place], dict):
                    answers[place]["variants"].append(_variant(result))
        return answers

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            for variant in answer.result["variants"]:
                text = variant["ids"] if variant["text"] is None else repr(variant["text"])
                yield f"{label(answer)}: {text}"

    def open_row(self, item: Tokens, text: GrowingText | None = None) -> Continuation:
        row = super().open_row(item, text)
        if isinstance(item, Prompt):
            row.seed = (seed_of(self.chosen.seed), item.number, item.variant)
        return row


def _variant(result: Mapping[str, Any]) -> dict[str, Any]:
    text = result["generated"]
    return {
        "text": None if text is None else text.strip(),
        "ids": result["generated_ids"],
        "finish_reason": result["finish_reason"],
    }
