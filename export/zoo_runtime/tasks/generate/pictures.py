"""Text for images: captions, recognised lines of text, the content of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import GENERATION
from zoo.artifact.weights import load_json
from zoo.errors import UsageError, task_option
from zoo.tokenizers.tokenizer import Tokenizer
from zoo_runtime.generation.choices import Ranked
from zoo_runtime.generation.options import Generation
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.generation.text import GrowingText
from zoo_runtime.running.context import Context
from zoo_runtime.running.text_runner import Tokens, chosen_adapters
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.generate.vocabulary import vocabulary_of
from zoo_runtime.tasks.images import image_input, sample_images

__all__ = ["ImageToText", "ImageToTextOptions", "Picture"]


@dataclass(frozen=True, kw_only=True)
class ImageToTextOptions(Generation):
    """Options of text for images."""

    prompt: str | None = None
    """Text that the decoder reads first, special tokens included, such as ``<s_cord-v2>`` of Donut."""


@dataclass(frozen=True)
class Picture(Tokens):
    """An image and the prompt of its text, ``ids``."""

    pixels: Array = field(kw_only=True, repr=False, compare=False)
    """(channels, height, width)"""


class ImageToText(Generate):
    """``generated``, a text for an image, and its ``generated_ids``.

    An input is an image file, its bytes, a Pillow image, or an array: see :class:`zoo.images.ImageReader`. The decoder
    begins with ``decoder_start_token_id``, or else ``bos_token_id``, and then reads the prompt, if there is one. Unset
    options come from the model's generation_config.json.
    """

    options = ImageToTextOptions
    causal = False

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of generation_config.json, whose ``max_length`` counts the whole prompt."""
        options = super().defaults(session, given)
        if "max_new_tokens" in options and GENERATION in session.stored.files:
            stored = load_json(session.path / GENERATION)
            if stored.get("max_new_tokens") is None and stored.get("max_length") is not None:
                return {**options, "max_length": stored["max_length"]}
        return options

    def __init__(self, session: Context, chosen: ImageToTextOptions) -> None:
        super().__init__(session, chosen)
        image, self.images = image_input(session)
        if image is not self.graph:
            raise UsageError("the model's first graph does not read images alone", session.path)
        self.start_ids = self._prompt_ids(chosen.prompt)
        if self.in_one_graph and len(self.start_ids) > 1:
            raise UsageError("this variant writes no prompt", session.path, "choose another variant")
        drafter = None if self.drafting is None else self.drafting.drafter
        if isinstance(drafter, ImageToText) and drafter.graph.input_tensors() != self.graph.input_tensors():
            problem = "the model that drafts reads images of another size"
            raise UsageError(problem, drafter.session.path, "choose one of the same size")

    def _prompt_ids(self, prompt: str | None) -> list[int]:
        """Return the tokens with which every text begins, as the ``generate`` of transformers chooses them."""
        session, ids = self.session, list[int]()
        start = session.option("decoder_start_token_id")
        start = session.option("bos_token_id") if start is None else start
        if prompt is not None:
            ids = Tokenizer(self.tokenizer.backend, special_tokens=False).encode(prompt, where="prompt").ids
        if any(token >= vocabulary_of(session) for token in ids):
            raise UsageError(f"the prompt {prompt!r} has tokens outside the vocabulary", session.path)
        replaces = bool(ids) and (session.option("prompt_replaces_start") or ids[0] == start)
        if not replaces and start is None:
            raise UsageError(
                "the model has no decoder_start_token_id", session.path, task_option("prompt=TEXT", "set {}")
            )
        return ids if replaces else [start, *ids]

    def samples(self) -> Sequence[Any]:
        return sample_images(self.images)

    def read(self, value: Any, number: int) -> Picture:
        pixels = self.images.normalize(self.images.read(value, f"input {number}"))
        return Picture(number, self.start_ids, pixels=pixels)

    def size(self, item: Tokens) -> int:
        return 1  # all images are of one size

    def fits(self, longest: int, size: int) -> bool:
        return True

    def prompt(self, item: Tokens) -> list[int]:
        return item.ids

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> dict[str, Array]:
        """Return the input of the encoder."""
        pixels = np.stack([item.pixels for item in items if isinstance(item, Picture)])
        name = self.graph.input_tensors()[0].name
        return {name: pixels.astype(self.session.dtype)} | chosen_adapters(self.session, items)

    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]:
        ids = np.array([item.ids for item in items], np.int64)
        return items, self.session.stepper(self.feed(items)), ids, np.ones_like(ids)

    def result(
        self,
        item: Tokens,
        ids: list[int],
        reason: str | None,
        text: GrowingText | None = None,
        ranks: Sequence[Ranked] = (),
    ) -> dict[str, Any]:
        result = super().result(item, ids, reason, text, ranks)
        return {key: value for key, value in result.items() if key != "tokens"}
