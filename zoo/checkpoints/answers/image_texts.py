"""Comparison of prompts with an image with those that the original's processor makes."""

from __future__ import annotations

from zoo.checkpoints.image_texts import open_processor, process_prompt
from zoo.checkpoints.images import same_pixels, sample_images
from zoo.checkpoints.source import Checkpoint
from zoo.errors import ArtifactError, ParityError
from zoo.images import ImageReader
from zoo.registry import ModelSpec
from zoo.tokenizers.image_places import ImagePlaces
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["compare_prompts"]

_PROMPTS = (
    "{}", "{} ", " {}", "USER: {}\nWhat is this?  ASSISTANT:", "{}\n\nTea?", "a{}b", "The rain has stopped. {} caption",
    "🙂{}Où est-il ?",
)  # fmt: skip
"""Prompts, with braces in the place of the image."""
_REMEDY = "prompts with an image are not prepared as by the original; nothing was written"


def compare_prompts(spec: ModelSpec, checkpoint: Checkpoint, reader: ImageReader, tokenizer: Tokenizer) -> int:
    """Return the number of prompts whose token ids and pixels are those of the processor.

    Raises:
        ParityError: some differ.
        UsageError: the processor cannot be used, or makes several images of one.
    """
    places = ImagePlaces.of(spec.config, spec.graphs, checkpoint.where)
    images, processor = sample_images(), open_processor(checkpoint.path)
    for image in images:
        pixels = reader.normalize(reader.read(image))
        for text in (prompt.format(processor.image_token) for prompt in _PROMPTS):
            expected = process_prompt(processor, image, text, checkpoint.path)
            try:
                ids, _ = places.expand(tokenizer.encode(text).ids, has_image=True)
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
    return len(images) * len(_PROMPTS)
