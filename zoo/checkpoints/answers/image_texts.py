"""Comparison of prompts with an image with those that the original's processor makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.checkpoints.answers.original_chats import render_original
from zoo.checkpoints.image_texts import sample_shapes
from zoo.checkpoints.images import same_pixels, sample_images
from zoo.checkpoints.processors import open_processor, place_of_image, process_prompt
from zoo.checkpoints.source import Checkpoint
from zoo.errors import ArtifactError, MissingPackageError, ParityError
from zoo.images import ImageReader
from zoo.registry import ModelSpec
from zoo.tokenizers.chat import read_chat_template
from zoo.tokenizers.chat.rendering import TemplateLimit
from zoo.tokenizers.image_chats import chat_ids
from zoo.tokenizers.image_places import ImagePlaces, count_features
from zoo.tokenizers.prompt_text import PromptText
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["compare_chats", "compare_prompts"]

_PROMPTS: tuple[str, ...] = (
    "{}", "{} ", " {}", "USER: {}\nWhat is this?  ASSISTANT:", "{}\n\nTea?", "a{}b", "The rain has stopped. {} caption",
    "🙂{}Où est-il ?",
)  # fmt: skip
"""Prompts, with braces in the place of the image."""
_ASKED = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}]}
_CHATS: tuple[tuple[dict[str, Any], ...], ...] = (
    (_ASKED,),
    (
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Tea?"}]},
    ),
    (
        _ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "A cup."}]},
        {"role": "user", "content": [{"type": "text", "text": "Of what?\n"}]},
    ),
)  # fmt: skip
"""Chats with an image; a template may refuse some, such as those with a message of the system."""
_FILE = "image.png"
"""The image that a template sees in a message: published templates only check that there is one."""
_REMEDY = "prompts with an image are not prepared as by the original; nothing was written"


def compare_prompts(spec: ModelSpec, checkpoint: Checkpoint, reader: ImageReader, tokenizer: Tokenizer) -> int:
    """Return the number of prompts whose token ids and pixels are those of the processor.

    Raises:
        ParityError: some differ.
        UsageError: the processor cannot be used.
    """
    places = ImagePlaces.of(spec.config, count_features(spec.graphs), checkpoint.where)
    processor, written = open_processor(checkpoint.path), PromptText.of(spec.config)
    cases = [(image, _PROMPTS) for image in sample_images()]
    if reader.tiling is not None or reader.is_free:
        cases += [(image, _PROMPTS[3:4]) for image in sample_shapes()]
    for image, prompts in cases:
        tiles, columns = reader.read_grid(image)
        pixels = reader.normalize(tiles)
        for text in (prompt.format(place_of_image(processor)) for prompt in prompts):
            expected = process_prompt(processor, image, text, checkpoint.path)
            try:
                ids = tokenizer.encode(text).ids if written is None else written.encode(text, tokenizer)
                ids, _ = places.expand(ids, tiles=reader.count_parts(pixels), columns=columns)
            except ArtifactError as error:
                raise ParityError(
                    f"zoo refuses the prompt {text!r} ({error.what})", checkpoint.where, _REMEDY
                ) from error
            if ids != expected.ids:
                counts = f"{len(ids)}, by the original {len(expected.ids)}"
                raise ParityError(f"the prompt {text!r} becomes other tokens ({counts})", checkpoint.where, _REMEDY)
            if not same_pixels(pixels, expected.pixels):
                what = f"an image of {image.width} x {image.height} pixels becomes other pixels than by the original"
                raise ParityError(what, checkpoint.where, _REMEDY)
    return sum(len(prompts) for _, prompts in cases)


def compare_chats(
    spec: ModelSpec, checkpoint: Checkpoint, folder: Path, reader: ImageReader, tokenizer: Tokenizer
) -> int | str:
    """Return the number of chats with an image whose token ids are those of the processor, or why there are none.

    Args:
        spec: the model.
        checkpoint: the original.
        folder: the folder with the template that the import wrote.
        reader: of the model's images.
        tokenizer: of the model.

    Raises:
        ParityError: some differ.
        UsageError: the processor cannot be used.
    """
    places = ImagePlaces.of(spec.config, count_features(spec.graphs), checkpoint.where)
    processor, written = open_processor(checkpoint.path), PromptText.of(spec.config)
    if not getattr(processor, "chat_template", None):
        return "the processor has no chat template"
    try:
        template = read_chat_template(folder)
    except (ArtifactError, MissingPackageError) as error:
        return str(error)
    image, count = sample_images()[0], 0
    tiles, columns = reader.read_grid(image)
    parts = reader.count_parts(reader.normalize(tiles))
    for messages in _CHATS:
        try:
            expected = _processed_chat(processor, messages, image)
        except TemplateLimit as error:
            return f"the processor's chat template cannot be rendered ({error})"
        try:
            prompt = template.render(messages)
            ids, _ = places.expand(chat_ids(prompt, template, tokenizer, written, "chat"), tiles=parts, columns=columns)
        except ArtifactError as error:
            if expected is not None:
                what = f"zoo refuses a chat with an image ({error.what})"
                raise ParityError(what, checkpoint.where, _REMEDY) from error
            continue
        if expected is not None and ids != expected:
            counts = f"{len(ids)}, by the original {len(expected)}"
            raise ParityError(f"a chat with an image becomes other tokens ({counts})", checkpoint.where, _REMEDY)
        count += expected is not None
    return count or "the processor refuses chats with an image"


def _processed_chat(processor: Any, messages: Sequence[Mapping[str, Any]], image: Any) -> list[int] | None:
    """Return the token ids of a chat, of whose parts one is an image without content; None if it is refused.

    Raises:
        TemplateLimit: the template takes too much time or memory.
    """
    try:
        template = processor.chat_template
        source = template["default"] if isinstance(template, dict) else template
        prompt = render_original(source, _with_image(messages, _FILE), processor.tokenizer.special_tokens_map)
        found = processor.apply_chat_template(  # which would render the checkpoint's template without limits
            _with_image(messages, image), chat_template="{{ prompt }}", prompt=prompt, tokenize=True, return_dict=True
        )
        (ids,) = found["input_ids"]
    except TemplateLimit:
        raise
    except Exception:  # a processor can raise any exception
        return None
    return [int(token) for token in ids]


def _with_image(messages: Sequence[Mapping[str, Any]], image: Any) -> list[dict[str, Any]]:
    """Return messages with the image in the part that has its place."""
    return [
        {
            **message,
            "content": [part | ({"image": image} if part["type"] == "image" else {}) for part in message["content"]],
        }
        for message in messages
    ]
