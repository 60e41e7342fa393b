"""Comparison of prompts with an image with those that the original's processor makes."""

from __future__ import annotations

from zoo.checkpoints.image_texts import sample_shapes
from zoo.checkpoints.images import same_pixels, sample_images
from zoo.checkpoints.processors import open_processor, place_of_image, process_prompt
from zoo.checkpoints.source import Checkpoint
from zoo.errors import ArtifactError, ParityError
from zoo.images import ImageReader
from zoo.registry import ModelSpec
from zoo.tokenizers.image_places import ImagePlaces, count_features
from zoo.tokenizers.prompt_text import PromptText
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["compare_prompts"]

_PROMPTS: tuple[str, ...] = (
    "{}", "{} ", " {}", "USER: {}\nWhat is this?  ASSISTANT:", "{}\n\nTea?", "a{}b", "The rain has stopped. {} caption",
    "🙂{}Où est-il ?",
)  # fmt: skip
"""Prompts, with braces in the place of the image."""
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
